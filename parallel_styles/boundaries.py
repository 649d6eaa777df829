"""What happens at the boundary of a parallelized module: hooks, and inputs turned into DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from pending_dtensor import HyperDTensor
from pending_dtensor.consistency import checking
from pending_dtensor.hyper_dtensor import as_hyper, local_to_hyper, take_local
from pending_dtensor.torch_compat import is_tracing

Layouts = Sequence[Placement]


def check_layout(style: ParallelStyle, name: str, layout: Any) -> None:
    """Raises TypeError unless ``layout`` is a placement or None."""
    if layout is not None and not isinstance(layout, Placement):
        raise TypeError(
            f"Expected a Placement or None as {name}, got {layout!r} ({type(style).__name__}). "
            f"Pass one of Shard, Replicate or Partial."
        )


def attach_style(
    style: ParallelStyle,
    module: nn.Module,
    mesh: DeviceMesh,
    partition: Callable[..., None],
    prepare_input: Callable[..., Any],
    prepare_output: Callable[..., Any],
) -> nn.Module:
    """Distributes a module's parameters by ``partition`` and hooks its boundaries."""

    def partition_all(name: str, submodule: nn.Module, mesh: DeviceMesh) -> None:
        distributed = {
            name: parameter
            for name, parameter in submodule._parameters.items()
            if isinstance(parameter, DTensor)
        }
        partition(name, submodule, mesh)
        # Distributed already, by the style of a module it is shared with: stays that parameter.
        submodule._parameters.update(distributed)
        _replicate_rest(submodule, mesh, style.src_data_rank)

    distribute_module(module, mesh, partition_all)
    module.register_forward_pre_hook(prepare_input, with_kwargs=True)
    module.register_forward_hook(prepare_output)
    return module


def _replicate_rest(module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Replicates what the style left alone, as `distribute_module` does, from src_data_rank."""
    placements = [Replicate()] * mesh.ndim
    for name, parameter in module._parameters.items():
        if parameter is not None and not isinstance(parameter, DTensor):
            replicated = distribute_tensor(
                parameter.detach(), mesh, placements, src_data_rank=src_data_rank
            )
            module.register_parameter(
                name, nn.Parameter(replicated, requires_grad=parameter.requires_grad)
            )
    for name, buffer in module._buffers.items():
        if buffer is not None and not isinstance(buffer, DTensor):
            module._buffers[name] = distribute_tensor(
                buffer, mesh, placements, src_data_rank=src_data_rank
            )


def first_input(
    style: ParallelStyle, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """The first argument of a call, positional or by name.

    Raises:
        TypeError: it is no tensor.
    """
    tensor = args[0] if args else next(iter(kwargs.values()), None)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"Expected a torch.Tensor or DTensor as first input, got {type(tensor).__name__} "
            f"({type(style).__name__} on {type(module).__name__})."
        )
    return tensor


def as_layout(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    layouts: Layouts,
    desired: Layouts | None = None,
    *,
    async_op: bool,
    module: nn.Module | None = None,
    side: Literal["input", "output"] = "input",
) -> HyperDTensor:
    """``tensor`` as a HyperDTensor in ``desired``; ``layouts`` is what a plain tensor is in.

    ``module``, whose ``side`` it is, is named if `debug_consistency` finds that ranks have
    different tensors there.
    """
    if isinstance(tensor, DTensor):
        hyper = as_hyper(tensor)
        desired = desired or layouts
    else:
        named = module is not None and checking()
        where = f"{side} of {module_name(module)}" if named else "from_local"
        hyper = local_to_hyper(tensor, mesh, layouts, async_backward=async_op, where=where)
    if desired is None or (hyper.device_mesh == mesh and _same_placements(hyper, desired)):
        return hyper
    return hyper.redistribute(mesh, desired, async_op=async_op)


def module_name(module: nn.Module | None) -> str:
    """A module's path in the model, as far as `parallelize_module` told, and its class."""
    path = getattr(module, "_parallelized_as", "")
    return f"module {path!r} ({type(module).__name__})" if path else type(module).__name__


def _same_placements(tensor: DTensor, placements: Layouts) -> bool:
    normal = tuple(
        Shard(p.dim % tensor.ndim) if type(p) is Shard and p.dim < 0 else p for p in placements
    )
    return tensor.placements == normal


def prepare_layer_output(style: Any, mesh: DeviceMesh) -> Callable[..., Any]:
    """Forward hook that puts a layer's one output in the style's ``output_layouts``."""

    def prepare_output(mod: nn.Module, args: Any, output: Any) -> Any:
        if is_tracing():
            return style._prepare_output_fn(
                style.output_layouts, style.use_local_output, mod, output, mesh
            )
        moved = as_layout(
            output, mesh, style.output_layouts, style.output_layouts, async_op=style.async_op
        )
        return take_local(moved) if style.use_local_output else moved

    return prepare_output
