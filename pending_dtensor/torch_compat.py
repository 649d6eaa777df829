"""Every private torch name this package uses, in one file, as read in torch 2.13.

Anything imported from here may move with a torch release; nothing else in the package may.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor,
    _are_we_tracing,
    _resolve_group,
)
from torch.distributed._local_tensor import local_tensor_mode
from torch.distributed.device_mesh import _mesh_resources
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._collective_utils import check_tensor_meta
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OutputSharding
from torch.distributed.tensor._redistribute import (
    _FlattenedTransformInfo,
    _gen_transform_infos,
    _optimize_transform_infos,
    _TransformInfo,
)
from torch.distributed.tensor._utils import (
    assert_no_mixed_partial_types,
    compute_global_tensor_info,
)
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.utils._mode_utils import no_dispatch

__all__ = [
    "AsyncCollectiveTensor",
    "DTensorSpec",
    "OutputSharding",
    "ProcessGroupGloo",
    "TensorMeta",
    "TransformInfo",
    "accumulating_gradient",
    "assert_no_mixed_partial_types",
    "below_autograd",
    "check_tensor_meta",
    "compute_global_tensor_info",
    "current_mesh",
    "describe_group",
    "forbid_raw_access",
    "group_is_alive",
    "is_mask_partial",
    "is_strided_shard",
    "is_tracing",
    "keep_compile_context",
    "mesh_axis_group",
    "no_dispatch",
    "one_worker_options",
    "plan_redistribution",
    "profiler_is_on",
    "reserve_sequence_nr",
    "resolve_group",
    "transform_avg_scale",
    "transform_mesh",
    "work_registry_size",
]

TransformInfo: TypeAlias = _TransformInfo


def is_tracing() -> bool:
    """Whether ops are recorded, or run for many simulated ranks: then torch's own code must run."""
    return _are_we_tracing() or local_tensor_mode() is not None


def is_mask_partial(placement: object) -> bool:
    """Whether ``placement`` is the masked partial of a row-sharded embedding."""
    return isinstance(placement, _MaskPartial)


def is_strided_shard(placement: object) -> bool:
    """Whether ``placement`` is torch's right-to-left sharding, made by flattening a sharded dim."""
    return isinstance(placement, _StridedShard)


def forbid_raw_access(wrapper: torch.Tensor) -> None:
    """Makes C code that takes the address of a wrapper's data raise, not read from address 0."""
    torch._C._set_throw_on_mutable_data_ptr(wrapper)


def keep_compile_context(tensor: torch.Tensor, inner: torch.Tensor) -> None:
    """Tells torch.compile that ``inner`` is the inner tensor of ``tensor``, a graph's input.

    Else it would take the sizes of ``inner`` for new unknowns that no input determines.
    """
    context = torch._guards.TracingContext.try_get()
    if context is not None and tensor in context.tensor_to_context:
        of_tensor = context.tensor_to_context[tensor]
        context.tensor_to_context[inner] = of_tensor.inner_contexts["elem"]


def mesh_axis_group(mesh: torch.distributed.DeviceMesh, axis: int) -> str:
    """Name of the process group of one mesh axis."""
    group = _resolve_group((mesh, axis))
    return group if isinstance(group, str) else group.group_name


def resolve_group(group_name: str) -> torch.distributed.ProcessGroup:
    """The process group registered under ``group_name``; RuntimeError if there is none."""
    return torch._C._distributed_c10d._resolve_process_group(group_name)


def current_mesh() -> torch.distributed.DeviceMesh:
    """The mesh of the innermost ``with mesh:`` block."""
    return _mesh_resources.get_current_mesh()


def group_is_alive(group_name: str) -> bool:
    """Whether the process group registered under ``group_name`` still exists."""
    try:
        resolve_group(group_name)
    except (RuntimeError, ValueError):
        return False
    return torch.distributed.is_initialized()


def describe_group(group_name: str) -> str:
    """Name of a process group, what it was called when it was made, and its ranks, for errors."""
    try:
        group = resolve_group(group_name)
        ranks = torch.distributed.get_process_group_ranks(group)
    except (RuntimeError, ValueError, KeyError):
        return f"group {group_name!r} (destroyed)"
    called = f"{group.group_desc}, " if group.group_desc != "undefined" else ""
    return f"group {group_name!r} ({called}ranks {', '.join(map(str, ranks))})"


def plan_redistribution(source: DTensorSpec, target: DTensorSpec) -> list[TransformInfo]:
    """The hops, one mesh axis each, by which torch goes from ``source`` to ``target``.

    Torch merges hops of one kind into one over a flattened mesh where that mesh already exists.
    """
    hops = _gen_transform_infos(source, target, None)
    return _optimize_transform_infos(hops, source.mesh, source.placements, target.placements)


def transform_mesh(
    hop: TransformInfo, mesh: torch.distributed.DeviceMesh
) -> torch.distributed.DeviceMesh:
    """The mesh that a hop's ``mesh_dim`` counts in: a flattened one if hops were merged."""
    return hop.mesh if isinstance(hop, _FlattenedTransformInfo) else mesh


def transform_avg_scale(hop: TransformInfo) -> int | None:
    """Divisor owed after a merged sum and avg reduction, or None."""
    return hop.avg_scale if isinstance(hop, _FlattenedTransformInfo) else None


def plain_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A `DTensor` that requires no gradient, past its ``__init__``: that does nothing, in 5 us."""
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def accumulating_gradient() -> bool:
    """Whether what runs now is a leaf taking its gradient over, or a hook of that."""
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def in_backward() -> bool:
    """Whether autograd's engine runs on this thread."""
    return torch._C._current_graph_task_id() != -1


def reserve_sequence_nr() -> None:
    """Uses up one autograd sequence number, leaving a free place in the order of backward.

    The constructor of any autograd node takes the thread's next number.
    """
    torch._C._functions.UndefinedGrad()


# Whether torch.profiler records on this thread.
profiler_is_on = torch.autograd._profiler_enabled


# Inside it ops skip autograd's kernels, which the functional collectives have in Python (20 us).
below_autograd = torch._C._AutoDispatchBelowAutograd


def work_registry_size() -> int:
    """Number of collectives launched through functional collectives and not waited for yet."""
    return torch._C._distributed_c10d._get_work_registry_size()


# None in a build of torch without gloo.
ProcessGroupGloo: Any = getattr(torch.distributed, "ProcessGroupGloo", None)


def one_worker_options(timeout: timedelta) -> Any:
    """Options of a gloo group with one worker, else as torch makes them when it is given none."""
    options = ProcessGroupGloo._Options()
    options._threads = 1
    options._timeout = timeout
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if len(names) > 1:
        options._devices = [ProcessGroupGloo.create_device(interface=n) for n in names.split(",")]
    else:
        options._devices = [ProcessGroupGloo.create_default_device()]
    return options
