"""The MC2 styles: Colwise and Rowwise whose matmul runs in one kernel with its collective."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from mc2.errors import MC2ConstraintError
from mc2.linear import MC2Linear, Mode, checked_options
from mc2.options import ColumnBackward, FusionOptions
from mc2.shared_gather import deferred_gather
from parallel_styles.boundaries import as_layout, attach_style, first_input, prepare_layer_output
from parallel_styles.styles import ColwiseParallel, RowwiseParallel, check_applicable
from pending_dtensor import HyperDTensor


class MC2ColwiseParallel(ColwiseParallel):
    """Colwise whose input gather runs inside the matmul kernel; the Linear becomes an `MC2Linear`.

    Boundary      placements                          collective
    input         Shard(sequence) -> Replicate        all_gather, in the kernel
    output        Shard(-1) -> output_layouts         all_to_all, or all_gather, asynchronous

    Layers that are handed the same tensor object, or a gather deferred by
    ``PrepareModuleInput(defer=True)``, make one gather, and one reduction in backward.

    Args:
        input_layouts: Shard of the sequence dim.
        output_layouts: placement of the output; Shard(-1) by default.
        use_local_output: give a local tensor, not a HyperDTensor. A layer that is handed one takes
            all ranks' to be of its size: uneven shards need False.
        kernel: ``ascend``, ``pipelined``, ``decomposed``, or ``auto``: ascend on npu, an error
            elsewhere.
        regather: save the sharded input for backward, not the gathered one, and gather it again.
        column_backward: ``fused`` reduces grad_input inside its matmul kernel; ``overlap`` reduces
            it while grad_weight is computed.
        chunks: pieces each rank's rows are cut into by the pipelined kernel.

    Raises:
        MC2ConstraintError: at construction, application or call, for what cannot be fused.
        TypeError: applied to something other than an nn.Linear.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        kernel: str = "auto",
        regather: bool = False,
        column_backward: ColumnBackward = "fused",
        chunks: int | Literal["auto"] = "auto",
    ) -> None:
        _check_sequence_layout("input_layouts", input_layouts, type(self).__name__)
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
        )
        self.options = FusionOptions(kernel, chunks, regather, column_backward).checked()

    def check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Raises what applying the style would, and changes nothing."""
        _check_linear(self, module, device_mesh, "all_gather")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(module, device_mesh)

        def prepare_input(
            mod: MC2Linear, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[Any, Any]:
            source = first_input(self, mod, args, kwargs)
            if isinstance(source, DTensor):
                return (source, *args[1:]), {}

            def gather() -> HyperDTensor:
                shard = as_layout(
                    source, device_mesh, self.input_layouts, async_op=True, module=mod
                )
                return deferred_gather(shard, (Replicate(),))

            boundary = (device_mesh, self.input_layouts)
            return (mod.shared_gather(source, boundary, gather), *args[1:]), {}

        return _apply_mc2(self, module, device_mesh, "all_gather", prepare_input)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {_describe(self.options)})"


class MC2RowwiseParallel(RowwiseParallel):
    """Rowwise whose output is reduced inside the matmul kernel; the Linear becomes an `MC2Linear`.

    Boundary      placements                          collective
    input         input_layouts -> Shard(-1)          local slice, or all_to_all
    output        Partial -> Shard(sequence)          reduce_scatter, in the kernel

    Args:
        input_layouts: placement of the input if it is a plain tensor; Shard(-1) by default.
        output_layouts: Shard of the sequence dim.
        use_local_output: give a local tensor, not a HyperDTensor. A layer that is handed one takes
            all ranks' to be of its size: uneven shards need False.
        kernel: ``ascend``, ``pipelined``, ``decomposed``, or ``auto``: ascend on npu, an error
            elsewhere.
        chunks: pieces each rank's rows are cut into by the pipelined kernel.

    Raises:
        MC2ConstraintError: at construction, application or call, for what cannot be fused.
        TypeError: applied to something other than an nn.Linear.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None,
        use_local_output: bool = True,
        kernel: str = "auto",
        chunks: int | Literal["auto"] = "auto",
    ) -> None:
        _check_sequence_layout("output_layouts", output_layouts, type(self).__name__)
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
        )
        self.options = FusionOptions(kernel, chunks).checked()

    def check(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Raises what applying the style would, and changes nothing."""
        _check_linear(self, module, device_mesh, "reduce_scatter")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(module, device_mesh)
        self.desired_input_layouts = (Shard(-1),)

        def prepare_input(
            mod: MC2Linear, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[Any, Any]:
            tensor = first_input(self, mod, args, kwargs)
            if not isinstance(tensor, DTensor):
                tensor = as_layout(
                    tensor, device_mesh, self.input_layouts, async_op=True, module=mod
                )
            mod.require_row(tensor)
            hyper = as_layout(tensor, device_mesh, self.desired_input_layouts, async_op=True)
            return (hyper, *args[1:]), {}

        return _apply_mc2(self, module, device_mesh, "reduce_scatter", prepare_input)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {_describe(self.options)})"


def _apply_mc2(
    style: Any, module: nn.Module, mesh: DeviceMesh, mode: Mode, prepare_input: Any
) -> nn.Module:
    layouts = style.input_layouts if mode == "all_gather" else style.output_layouts
    options = style.options
    attach_style(
        style,
        module,
        mesh,
        style._partition_linear_fn,
        prepare_input,
        prepare_layer_output(style, mesh),
    )
    return MC2Linear.from_linear(module).configure_mc2(
        mode,
        mesh,
        sequence_dim=layouts[0].dim,
        kernel=options.kernel,
        chunks=options.chunks,
        regather=options.regather,
        column_backward=options.column_backward,
    )


def _check_linear(style: Any, module: nn.Module, mesh: DeviceMesh, mode: Mode) -> None:
    if type(module) is not nn.Linear:
        raise TypeError(
            f"Expected an nn.Linear, got {type(module).__name__} ({type(style).__name__}). A fused "
            f"kernel computes input @ weight.T + bias and nothing else; name the Linear in it."
        )
    check_applicable(style, module)
    if mesh.ndim != 1:
        raise MC2ConstraintError(
            f"Expected a 1-D mesh, got {mesh} ({type(style).__name__}). Pass the TP axis, such as "
            f'mesh["tp"].'
        )
    checked_options(module, mode, mesh.device_type, mesh.get_group(), style.options)


def _check_sequence_layout(argument: str, layout: Any, style: str) -> None:
    if type(layout) is Shard and layout.dim != -1:
        return
    raise MC2ConstraintError(
        f"Expected {argument} to be Shard of the sequence dim, got {layout} ({style}). Without "
        f"sequence parallelism there is no all-gather or reduce-scatter to fuse: use "
        f"{style.removeprefix('MC2')}."
    )


def _describe(options: FusionOptions) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options._asdict().items())
