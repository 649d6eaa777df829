"""The styles that prepare a module's inputs and outputs, and shard nothing of the module itself.

Names, arguments, defaults and semantics are torch's. Under ``torch.compile`` the boundaries are
torch's own, as in `parallel_styles.styles`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed.tensor.parallel as torch_parallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from mc2.shared_gather import deferred_gather
from parallel_styles.boundaries import as_layout, check_layout
from pending_dtensor.hyper_dtensor import as_hyper
from pending_dtensor.torch_compat import is_tracing


class PrepareModuleInput(torch_parallel.PrepareModuleInput):
    """Turns a module's inputs into DTensors and redistributes them, synchronously.

    Arguments are torch's. A DTensor input is redistributed by the placement it has, whatever
    ``input_layouts`` says of plain tensors.

    With ``defer=True`` a gather to Replicate is not started: the MC2 layers inside the module fuse
    it with their matmul, and share it. Nothing else may read the input then.

    Raises:
        AssertionError: layouts of different lengths, as in torch.
        ValueError: ``defer`` with ``use_local_output``; at call, another number of inputs than of
            layouts.
        TypeError: layouts that are no placements; at call, for an input with a layout that is no
            tensor.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
        defer: bool = False,
    ) -> None:
        if defer and use_local_output:
            raise ValueError(
                "Expected use_local_output=False with defer=True, got True (PrepareModuleInput). A "
                "deferred gather can be read by an MC2 layer only, which wants the DTensor."
            )
        _check_layouts(self, "input_layouts", input_layouts)
        _check_layouts(self, "desired_input_layouts", desired_input_layouts)
        _check_named_layouts(self, "input_kwarg_layouts", input_kwarg_layouts)
        _check_named_layouts(self, "desired_input_kwarg_layouts", desired_input_kwarg_layouts)
        super().__init__(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_output,
        )
        self.defer = defer

    def _prepare_input_arg(
        self,
        input: Any,
        mesh: DeviceMesh,
        input_layout: Placement | None,
        desired_layout: Placement | None,
        module: nn.Module | None = None,
    ) -> Any:
        if is_tracing():
            if self.defer and desired_layout == Replicate():
                # No graph can hold a deferred value. MC2 layers, which are left out of the graph,
                # defer and share the gather of a tensor that is still sharded.
                desired_layout = input_layout
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        if input_layout is None:
            return input
        if self.defer and desired_layout == Replicate() and isinstance(input, torch.Tensor):
            sharded = as_layout(input, mesh, (input_layout,), async_op=True, module=module)
            return deferred_gather(sharded, (desired_layout,))
        return _converted(self, input, mesh, input_layout, desired_layout, module, "input")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def prepare(mod: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if is_tracing():
                return self._prepare_input_kwarg_fn(args, kwargs, device_mesh)
            if self.input_layouts is not None:
                assert self.desired_input_layouts is not None
                _check_count(self, "inputs", args, self.input_layouts)
                layouts = zip(args, self.input_layouts, self.desired_input_layouts, strict=True)
                args = tuple(
                    self._prepare_input_arg(value, device_mesh, layout, desired, mod)
                    for value, layout, desired in layouts
                )
            of, to = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
            kwargs = {
                name: self._prepare_input_arg(value, device_mesh, of.get(name), to.get(name), mod)
                for name, value in kwargs.items()
            }
            return args, kwargs

        module.register_forward_pre_hook(prepare, with_kwargs=True)
        return module

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, defer={self.defer})"


class PrepareModuleOutput(torch_parallel.PrepareModuleOutput):
    """Turns a module's outputs into DTensors and redistributes them, synchronously.

    Arguments are torch's. A DTensor output is redistributed by the placement it has, whatever
    ``output_layouts`` says of plain tensors.

    Raises:
        AssertionError: layouts of different lengths, as in torch.
        ValueError: at call, for another number of outputs than of layouts.
        TypeError: layouts that are no placements; at call, for an output with a layout that is no
            tensor.
    """

    def __init__(
        self,
        *,
        output_layouts: Placement | tuple[Placement | None, ...],
        desired_output_layouts: Placement | tuple[Placement, ...],
        use_local_output: bool = True,
    ) -> None:
        _check_layouts(self, "output_layouts", output_layouts, optional=False)
        _check_layouts(self, "desired_output_layouts", desired_output_layouts, optional=False)
        super().__init__(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def prepare(mod: nn.Module, args: Any, outputs: Any) -> Any:
            if is_tracing():
                return self._prepare_out_fn(outputs, device_mesh)
            listed = outputs if isinstance(outputs, tuple) else (outputs,)
            _check_count(self, "outputs", listed, self.output_layouts)
            layouts = zip(listed, self.output_layouts, self.desired_output_layouts, strict=True)
            prepared = tuple(
                out
                if layout is None
                else _converted(self, out, device_mesh, layout, desired, mod, "output")
                for out, layout, desired in layouts
            )
            return prepared[0] if len(prepared) == 1 else prepared

        module.register_forward_hook(prepare)
        return module


class PrepareModuleInputOutput(torch_parallel.PrepareModuleInputOutput):
    """`PrepareModuleInput` and `PrepareModuleOutput` in one; arguments are torch's."""

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Placement | tuple[Placement | None, ...],
        desired_output_layouts: Placement | tuple[Placement, ...],
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )


def _check_layouts(style: ParallelStyle, name: str, layouts: Any, *, optional: bool = True) -> None:
    """Raises TypeError unless it is a placement, or a sequence of them and of None; or None."""
    if isinstance(layouts, Placement) or (optional and layouts is None):
        return
    if not isinstance(layouts, (tuple, list)):
        raise TypeError(
            f"Expected a Placement, or a tuple of them, as {name}, got {layouts!r} "
            f"({type(style).__name__}). Pass one for each input or output."
        )
    for layout in layouts:
        check_layout(style, name, layout)


def _check_named_layouts(style: ParallelStyle, name: str, layouts: Any) -> None:
    if layouts is None:
        return
    if not isinstance(layouts, dict):
        raise TypeError(
            f"Expected a dict of placements by argument as {name}, got {layouts!r} "
            f"({type(style).__name__})."
        )
    for layout in layouts.values():
        check_layout(style, name, layout)


def _check_count(
    style: ParallelStyle, side: str, values: Sequence[Any], layouts: Sequence[Any]
) -> None:
    if len(values) != len(layouts):
        # Torch's sentence first: programs, and torch's own tests, look for it.
        raise ValueError(
            f"module {side} and {side[:-1]}_layouts should have same length! Expected "
            f"{len(layouts)} {side}, one for each layout, got {len(values)} "
            f"({type(style).__name__}). Give None for {side} to leave alone."
        )


def _converted(
    style: PrepareModuleInput | PrepareModuleOutput,
    value: Any,
    mesh: DeviceMesh,
    layout: Placement,
    desired: Placement | None,
    module: nn.Module | None,
    side: Literal["input", "output"],
) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"Expected a torch.Tensor or DTensor where a layout is given, got "
            f"{type(value).__name__} ({type(style).__name__}, layout {layout}). Give None as the "
            f"layout of what shall be left alone."
        )
    wanted = None if desired is None else (desired,)
    if isinstance(value, DTensor) and wanted is None:
        hyper = as_hyper(value)
    else:
        hyper = as_layout(value, mesh, (layout,), wanted, async_op=False, module=module, side=side)
    return hyper.to_local() if style.use_local_output else hyper
