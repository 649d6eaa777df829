"""The four collectives, started here and nowhere else. Each gives a `PendingLocal` in flight.

They work below autograd on the local tensors of one mesh axis, with any tensor dim, even, uneven
and empty parts, and use torch's functional collectives, so that ``CommDebugMode``, the profiler and
tracing see them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from pending_dtensor.consistency import check_consistent, checking, holds
from pending_dtensor.errors import InFlightInputModifiedError, ProcessGroupGoneError
from pending_dtensor.events import named_in_profile, record_event
from pending_dtensor.pending import Launch, PendingState
from pending_dtensor.pending_local import PendingLocal, materialized, register_deferred_op
from pending_dtensor.torch_compat import (
    below_autograd,
    group_is_alive,
    in_backward,
    mesh_axis_group,
)

_functional = torch.ops._c10d_functional


class Axis(NamedTuple):
    """One mesh axis as a collective sees it."""

    group: str  # name of the process group
    size: int  # ranks R
    rank: int  # this rank's coordinate


def mesh_axis(mesh: DeviceMesh, axis: int) -> Axis:
    """The process group of one mesh axis and this rank's place in it."""
    # Kept by object, not by value: after a new init_process_group an equal mesh has other groups.
    axes = _axes.get(id(mesh))
    if axes is None:
        axes = _axes[id(mesh)] = {}
        weakref.finalize(mesh, _axes.pop, id(mesh), None)
    found = axes.get(axis)
    if found is None:
        try:
            group = mesh_axis_group(mesh, axis)
            found = axes[axis] = Axis(group, mesh.size(axis), mesh.get_local_rank(axis))
        except (RuntimeError, ValueError) as error:
            raise _group_gone(f"that of axis {axis}", mesh) from error
    return found


_axes: dict[int, dict[int, Axis]] = {}


def chunk_sizes(size: int, ranks: int) -> list[int]:
    """How torch's ``Shard`` splits ``size``: ceil(size / ranks) each until they run out."""
    full = -(-size // ranks)
    return [max(0, min(full, size - full * rank)) for rank in range(ranks)]


def all_gather(local: torch.Tensor, dim: int, axis: Axis, sizes: Sequence[int]) -> PendingLocal:
    """Starts gathering the parts of all ranks along ``dim``.

    Equal to ``torch.cat([part of rank 0, part of rank 1, ...], dim)``.

    Args:
        local: this rank's part.
        dim: tensor dim to gather along, not negative.
        axis: the ranks.
        sizes: size along ``dim`` of each rank's part, as `chunk_sizes` gives them.

    Returns:
        A contiguous value of the gathered shape. Sends and receives (R - 1) padded parts.
    """
    full = max(sizes)
    shape = _with_size(local.shape, dim, sum(sizes))
    if checking():
        held = holds(local.size(dim), sizes[axis.rank])
        _check("all_gather", local, axis, shape=shape, dim=dim, sizes=tuple(sizes), holds=held)
    if math.prod(shape) == 0:
        return PendingLocal.ready(local.new_empty(shape))
    part = _pad(local.detach(), dim, full).contiguous()
    event = record_event(
        "all_gather",
        shape=shape,
        dtype=local.dtype,
        message_elements=part.numel() * axis.size,
        group=axis.group,
        device=local.device.type,
    )
    buffer = _start(_functional.all_gather_into_tensor, part, axis.size, axis.group)
    even = min(sizes) == full
    if even and dim == 0:
        finish = None
    elif even and math.prod(shape[:dim]) == 1:

        def finish(buffer: torch.Tensor) -> torch.Tensor:
            return buffer.view(shape)

    else:

        def finish(buffer: torch.Tensor) -> torch.Tensor:
            parts = buffer.chunk(axis.size)
            if not even:
                parts = [p.narrow(dim, 0, size) for p, size in zip(parts, sizes, strict=True)]
            return torch.cat(parts, dim)

    source = local if part.data_ptr() == local.data_ptr() else None
    launch = Launch("all_gather", axis.group, buffer, finish, source, event)
    return PendingLocal.in_flight(launch, shape)


class DeferredAllGather:
    """Recipe of an `all_gather` that nothing has started, for a fused rule to take up.

    Fields: ``part`` (may be pending itself), ``dim``, ``axis`` and ``sizes`` are the arguments of
    `all_gather`.
    """

    kind = "all_gather"
    is_local = False

    def __init__(self, part: torch.Tensor, dim: int, axis: Axis, sizes: Sequence[int]) -> None:
        self.part = part
        self.dim = dim
        self.axis = axis
        self.sizes = sizes

    @property
    def part(self) -> torch.Tensor:
        """This rank's part as it is now."""
        return self._part

    @part.setter
    def part(self, part: torch.Tensor) -> None:
        self._part = part
        self._version = None if part.is_inference() else part._version

    def source(self, consumer: object = "a gather") -> torch.Tensor:
        """The finished part, to be sent.

        Raises:
            InFlightInputModifiedError: it was written to since the gather was deferred.
        """
        if self._version is not None and self._part._version != self._version:
            raise InFlightInputModifiedError(
                f"Expected the input of a deferred {self.kind} to stay as it was, got an in-place "
                f"write to it before {consumer} (shape {tuple(self._part.shape)}, group "
                f"{self.axis.group!r}). Write to a copy, or redistribute with async_op=True."
            )
        return materialized(self._part, consumer)

    def compute(self) -> torch.Tensor:
        """Never: no rank may gather alone."""
        raise NotImplementedError("a collective is started on all ranks, not computed by one")

    def start(self) -> PendingLocal:
        """Starts the gather as it is, unfused."""
        return all_gather(self.source(), self.dim, self.axis, self.sizes)


def defer_all_gather(
    local: torch.Tensor, dim: int, axis: Axis, sizes: Sequence[int]
) -> PendingLocal:
    """As `all_gather`, but nothing is started: a fused rule will do it with its consumer."""
    shape = _with_size(local.shape, dim, sum(sizes))
    recipe = DeferredAllGather(local, dim, axis, sizes)
    return PendingLocal.deferred(recipe, shape, local.dtype, local.device, group=axis.group)


def _add(first: PendingLocal, second: torch.Tensor, *, alpha: object = 1) -> object:
    """In backward the sum of two like gathers is the gather of a sum, and stays deferred.

    So autograd adds up the gradients of one value that was reduced twice. Anywhere else to add is
    to read.
    """
    if not in_backward() or alpha != 1 or not isinstance(second, PendingLocal):
        return NotImplemented
    whole = not first.is_view and not second.is_view
    a, b = first.recipe, second.recipe
    if not whole or second.state is not PendingState.DEFERRED:
        return NotImplemented
    if not isinstance(a, DeferredAllGather) or not isinstance(b, DeferredAllGather):
        return NotImplemented
    if (a.dim, a.axis, a.sizes) != (b.dim, b.axis, b.sizes):
        return NotImplemented
    part = a.source("a sum of gradients") + b.source("a sum of gradients")
    return defer_all_gather(part, a.dim, a.axis, a.sizes)


register_deferred_op(DeferredAllGather.kind, torch.ops.aten.add.Tensor, _add)


def reduce_scatter(
    local: torch.Tensor, dim: int, axis: Axis, sizes: Sequence[int], reduce_op: str
) -> PendingLocal:
    """Starts reducing over ranks, each keeping its part along ``dim``.

    Equal to ``reduce_op over ranks of local, then split(sizes, dim)[rank]``.

    Args:
        local: this rank's summand, whole along ``dim``.
        dim: tensor dim to scatter along, not negative.
        axis: the ranks.
        sizes: size along ``dim`` of the part that each rank keeps.
        reduce_op: ``sum``, ``avg``, ``max``, ``min`` or another that the process group has.

    Returns:
        A contiguous value of this rank's part. Sends and receives (R - 1) padded parts.
    """
    full = max(sizes)
    shape = _with_size(local.shape, dim, sizes[axis.rank])
    if checking():
        _check("reduce_scatter", local, axis, shape=tuple(local.shape), dim=dim, op=reduce_op)
    if local.numel() == 0:
        return PendingLocal.ready(local.new_empty(shape))
    local_ = local.detach()
    even = min(sizes) == full
    if even and math.prod(local.shape[:dim]) == 1:
        # Rank-major already, so no copy; where it is not dim 0, a leading dim of 1 takes the ranks.
        ranks_first = local.shape if dim == 0 else (axis.size, *shape[1:])
        summand = local_.contiguous().view(ranks_first)
    else:
        parts = local_.split(list(sizes), dim)
        summand = torch.cat([_pad(part, dim, full) for part in parts])
    event = record_event(
        "reduce_scatter",
        shape=shape,
        dtype=local.dtype,
        message_elements=summand.numel(),
        group=axis.group,
        device=local.device.type,
    )
    buffer = _start(_functional.reduce_scatter_tensor, summand, reduce_op, axis.size, axis.group)
    if sizes[axis.rank] == full:
        finish = None
    else:

        def finish(buffer: torch.Tensor) -> torch.Tensor:
            # The view gives sizes of 1 the strides that the wrapper tells.
            return buffer.narrow(dim, 0, sizes[axis.rank]).contiguous().view(shape)

    source = local if summand.data_ptr() == local.data_ptr() else None
    launch = Launch("reduce_scatter", axis.group, buffer, finish, source, event)
    return PendingLocal.in_flight(launch, shape)


def all_reduce(local: torch.Tensor, axis: Axis, reduce_op: str) -> PendingLocal:
    """Starts reducing over ranks, each keeping all of it.

    Args:
        local: this rank's summand.
        axis: the ranks.
        reduce_op: ``sum``, ``avg``, ``max``, ``min`` or another that the process group has.

    Returns:
        A contiguous value of the same shape. Sends and receives 2 (R - 1) / R of it.
    """
    if checking():
        _check("all_reduce", local, axis, shape=tuple(local.shape), op=reduce_op)
    if local.numel() == 0:
        return PendingLocal.ready(local.new_empty(local.shape))
    event = record_event(
        "all_reduce",
        shape=local.shape,
        dtype=local.dtype,
        message_elements=local.numel(),
        group=axis.group,
        device=local.device.type,
    )
    # The functional collective copies its input first, so a later write to it does no harm.
    buffer = _start(_functional.all_reduce, local.detach().contiguous(), reduce_op, axis.group)
    launch = Launch("all_reduce", axis.group, buffer, event=event)
    return PendingLocal.in_flight(launch, local.shape)


def all_to_all(
    local: torch.Tensor,
    gather_dim: int,
    scatter_dim: int,
    axis: Axis,
    gather_sizes: Sequence[int],
    scatter_sizes: Sequence[int],
) -> PendingLocal:
    """Starts moving the sharding from ``gather_dim`` to ``scatter_dim``.

    Equal to gathering along ``gather_dim``, then ``split(scatter_sizes, scatter_dim)[rank]``.

    Args:
        local: this rank's part along ``gather_dim``, whole along ``scatter_dim``.
        gather_dim: tensor dim that is sharded now.
        scatter_dim: tensor dim that will be sharded.
        axis: the ranks.
        gather_sizes: size along ``gather_dim`` that each rank holds now.
        scatter_sizes: size along ``scatter_dim`` that each rank will hold.

    Returns:
        A contiguous value of this rank's new part. Sends and receives (R - 1) / R of a part.
    """
    shape = _with_size(local.shape, gather_dim, sum(gather_sizes))
    if checking():
        held = holds(local.size(gather_dim), gather_sizes[axis.rank])
        dims = (gather_dim, scatter_dim)
        _check("all_to_all", local, axis, shape=shape, dims=dims, holds=held)
    shape = _with_size(shape, scatter_dim, scatter_sizes[axis.rank])
    if sum(gather_sizes) * sum(scatter_sizes) == 0 or _rest(local, gather_dim, scatter_dim) == 0:
        return PendingLocal.ready(local.new_empty(shape))
    parts = local.detach().split(list(scatter_sizes), scatter_dim)
    outgoing = torch.cat([part.reshape(-1) for part in parts])
    incoming_shapes = [_with_size(shape, gather_dim, size) for size in gather_sizes]
    incoming_elements = [math.prod(incoming) for incoming in incoming_shapes]
    event = record_event(
        "all_to_all",
        shape=shape,
        dtype=local.dtype,
        message_elements=outgoing.numel(),
        group=axis.group,
        device=local.device.type,
    )
    buffer = _start(
        _functional.all_to_all_single,
        outgoing,
        incoming_elements,
        [part.numel() for part in parts],
        axis.group,
    )

    def finish(buffer: torch.Tensor) -> torch.Tensor:
        pieces = buffer.split(incoming_elements)
        return torch.cat(
            [p.view(incoming) for p, incoming in zip(pieces, incoming_shapes, strict=True)],
            gather_dim,
        )

    launch = Launch("all_to_all", axis.group, buffer, finish, event=event)
    return PendingLocal.in_flight(launch, shape)


def _start(op: Any, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    """Calls a functional collective whose last argument is the group's name."""
    try:
        with below_autograd(), named_in_profile("start", op.__name__):
            return op(tensor, *args)
    except (RuntimeError, ValueError) as error:
        group = args[-1]
        if group_is_alive(group):
            raise
        raise _group_gone(repr(group), f"{op} of shape {tuple(tensor.shape)}") from error


def _group_gone(group: str, where: object) -> ProcessGroupGoneError:
    return ProcessGroupGoneError(
        f"Expected a process group to be alive, got {group}, which was destroyed or never "
        f"made ({where}). Make a new DeviceMesh after init_process_group and distribute the tensor "
        f"again."
    )


def _check(what: str, local: torch.Tensor, axis: Axis, **facts: Any) -> None:
    check_consistent(what, axis.group, **facts, dtype=local.dtype)


def _with_size(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _rest(tensor: torch.Tensor, *dims: int) -> int:
    return math.prod(size for dim, size in enumerate(tensor.shape) if dim not in dims)


def _pad(part: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """``part`` filled up with zeros along ``dim`` to ``size``: collectives want equal parts."""
    missing = size - part.size(dim)
    if missing == 0:
        return part
    return torch.cat([part, part.new_zeros(_with_size(part.shape, dim, missing))], dim)
