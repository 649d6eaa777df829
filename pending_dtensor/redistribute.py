"""The redistribution engine: from a local tensor and its spec to another spec's local tensor.

Torch plans the hops (one mesh axis each); every hop that communicates is started in `collectives`.
A hop waits for the one before it; the last stays in flight. No DTensor class is needed here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DeviceMesh, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from pending_dtensor import collectives
from pending_dtensor.collectives import chunk_sizes, mesh_axis
from pending_dtensor.errors import PlacementError
from pending_dtensor.fused_rules import find_rule
from pending_dtensor.pending import PendingState
from pending_dtensor.pending_local import PendingLocal, materialized
from pending_dtensor.torch_compat import (
    DTensorSpec,
    TensorMeta,
    TransformInfo,
    assert_no_mixed_partial_types,
    is_mask_partial,
    is_strided_shard,
    plan_redistribution,
    transform_avg_scale,
    transform_mesh,
)


def as_tuple(placements: Any) -> tuple[Placement, ...] | None:
    """Placements as a tuple, which can be hashed; None as it is.

    Raises:
        TypeError: it is something else, or something in it is not a `Placement`.
    """
    if placements is None:
        return None
    if isinstance(placements, Iterable) and not isinstance(
        placements, (str, Mapping, torch.Tensor)
    ):
        found = tuple(placements)
        if all(isinstance(placement, Placement) for placement in found):
            return found
    raise TypeError(
        f"Expected a sequence of Placement, got {placements!r}. Pass one of Shard, Replicate or "
        f"Partial for each mesh axis."
    )


def checked_dtype(dtype: Any, name: str) -> torch.dtype | None:
    """``dtype`` itself, for the argument ``name``.

    Raises:
        TypeError: it is neither a dtype nor None.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    raise TypeError(
        f"Expected a torch.dtype or None as {name}, got {dtype!r}. Pass torch.bfloat16 or another."
    )


@functools.lru_cache(maxsize=4096)
def fitting_placements(
    placements: tuple[Placement, ...], mesh: DeviceMesh, ndim: int, where: str
) -> tuple[Placement, ...]:
    """The placements with shard dims made positive, checked against a mesh and a tensor.

    Args:
        placements: one for each mesh axis.
        mesh: the mesh.
        ndim: number of tensor dims.
        where: what is being done, for the error message.

    Raises:
        PlacementError: wrong length, a shard dim out of range, or kinds of `Partial` that cannot
            be reduced in any order.
    """
    if len(placements) != mesh.ndim:
        raise PlacementError(
            f"Expected {mesh.ndim} placements, one for each mesh axis, got {len(placements)}: "
            f"{placements} ({where}). Pass one for each of the mesh's axes."
        )
    fitting = []
    for placement in placements:
        if type(placement) is Shard:
            if not -ndim <= placement.dim < ndim:
                raise PlacementError(
                    f"Expected a shard dim from {-ndim} to {ndim - 1}, got {placement} ({where}). "
                    f"Shard a dim that the tensor has."
                )
            placement = Shard(placement.dim % ndim)
        fitting.append(placement)
    try:
        assert_no_mixed_partial_types(fitting)
    except ValueError:
        raise PlacementError(
            f"Expected reductions that may be done in any order, got {placements} ({where}). "
            f"Use one kind of Partial; sum and avg go together."
        ) from None
    return tuple(fitting)


@functools.lru_cache(maxsize=4096)
def checked_placements(
    placements: tuple[Placement, ...] | None, source: DTensorSpec, mesh: DeviceMesh | None
) -> tuple[Placement, ...]:
    """Validates the target of a redistribution from global facts, so that every rank agrees.

    Args:
        placements: one for each mesh axis; negative shard dims are counted from the end.
        source: spec of the tensor to redistribute.
        mesh: mesh asked for, or None for the tensor's own.

    Returns:
        The placements with shard dims made positive.

    Raises:
        PlacementError: None, wrong length, a shard dim out of range, or a change to `Partial`.
        NotImplementedError: another mesh.
    """
    where = f"redistribute of a tensor of shape {tuple(source.shape)} from {source.placements}"
    if mesh is not None and mesh != source.mesh:
        raise NotImplementedError(
            f"Expected the mesh that the tensor lives on, {source.mesh}, got {mesh} ({where}). "
            f"Call full_tensor() and distribute it on the other mesh."
        )
    if placements is None:
        raise PlacementError(
            f"Expected a placement for each mesh axis, got None ({where}). Pass placements=[...]."
        )
    fitting = fitting_placements(placements, source.mesh, len(source.shape), where)
    for current, placement in zip(source.placements, fitting, strict=True):
        if placement.is_partial() and placement != current:
            raise PlacementError(
                f"Expected Shard or Replicate as a target, got {placement} ({where}). Partial "
                f"values come from operations or from_local only."
            )
    return fitting


def redistribute_local(
    local: torch.Tensor,
    source: DTensorSpec,
    target: DTensorSpec,
    *,
    async_op: bool,
    defer: bool = False,
) -> torch.Tensor:
    """Moves this rank's part of a tensor from one spec to another, below autograd.

    Args:
        local: the local tensor under ``source``; may be pending.
        source: spec of ``local``.
        target: spec wanted; same mesh.
        async_op: whether the last hop may still be in flight on return.
        defer: whether the last hop, if it is an all-gather, is left to a fused rule.

    Returns:
        The local tensor under ``target``: a `PendingLocal` in flight if ``async_op`` and the last
        hop communicates (local steps after it are done at the read), else a plain tensor.
    """
    if source.mesh._is_current_rank_part_of_mesh():
        hops = _hops(source, target)
        for hop in hops:
            local = _run_hop(local, hop, source.mesh, target, defer and hop is hops[-1])
    return local if async_op else materialized(local, "redistribute with async_op=False")


def _hops(source: DTensorSpec, target: DTensorSpec) -> list[TransformInfo]:
    # On more axes the plan depends on which flattened meshes exist by now.
    return _cached_plan(source, target) if source.mesh.ndim == 1 else _plan(source, target)


def _plan(source: DTensorSpec, target: DTensorSpec) -> list[TransformInfo]:
    if source.placements == target.placements and source.shard_order == target.shard_order:
        return []
    assert_no_mixed_partial_types(source.placements)
    assert_no_mixed_partial_types(target.placements)
    return plan_redistribution(source, target)


_cached_plan = functools.lru_cache(maxsize=4096)(_plan)


def _run_hop(
    local: torch.Tensor,
    hop: TransformInfo,
    mesh: DeviceMesh,
    target_spec: DTensorSpec,
    defer: bool,
) -> torch.Tensor:
    current, target = hop.src_dst_placements
    hop_mesh, mesh_dim = transform_mesh(hop, mesh), hop.mesh_dim
    ranks = hop_mesh.size(mesh_dim)
    if current == target:
        return local
    strided = is_strided_shard(current) or is_strided_shard(target)
    if not strided:
        fused = _fused_hop(local, hop, hop_mesh, defer)
        if fused is not None:
            return fused
    if ranks == 1:
        return local
    if strided:
        return _strided_hop(materialized(local, "redistribute"), hop, hop_mesh)
    axis = mesh_axis(hop_mesh, mesh_dim)
    # What is gathered counts in the sizes the planner tells; what is scattered, in those of the
    # local tensor, which an earlier hop may have made smaller.
    logical = hop.logical_shape
    if current.is_replicate():
        return _split_locally(local, target, hop_mesh, mesh_dim)
    local = materialized(local, "redistribute")

    if current.is_shard():
        gather_sizes = chunk_sizes(logical[current.dim], ranks)
        if target.is_replicate():
            return collectives.all_gather(local, current.dim, axis, gather_sizes)
        if target.is_shard():
            scatter_sizes = chunk_sizes(local.shape[target.dim], ranks)
            return collectives.all_to_all(
                local, current.dim, target.dim, axis, gather_sizes, scatter_sizes
            )
    if current.is_partial():
        if is_mask_partial(current):
            current.mask_buffer.apply_mask(local)
            current.mask_buffer.release_mask()
        if target.is_replicate():
            reduced = collectives.all_reduce(local, axis, current.reduce_op)
            return _rescaled(reduced, transform_avg_scale(hop))
        if target.is_shard():
            scatter_sizes = chunk_sizes(local.shape[target.dim], ranks)
            reduced = collectives.reduce_scatter(
                local, target.dim, axis, scatter_sizes, current.reduce_op
            )
            return _rescaled(reduced, transform_avg_scale(hop))
    raise NotImplementedError(
        f"Expected a change of placement that torch supports, got {current} to {target} "
        f"(redistribute to {target_spec}). Go through Replicate()."
    )


def _fused_hop(
    local: torch.Tensor, hop: TransformInfo, mesh: DeviceMesh, defer: bool
) -> torch.Tensor | None:
    """What a fused rule makes of a hop, or a gather left to one; None if it is a plain hop.

    On one rank too, where nothing is sent: a fused layer runs its kernel there all the same.
    """
    current, target = hop.src_dst_placements
    if current.is_partial() and isinstance(local, PendingLocal):
        if local.state is not PendingState.DEFERRED:
            return None
        rule = find_rule(local.kind, "reduce_scatter" if target.is_shard() else "all_reduce")
        if rule is None:
            return None
        return rule(local, current, target, mesh_axis(mesh, hop.mesh_dim), local.shape)
    if defer and current.is_shard() and target.is_replicate():
        axis = mesh_axis(mesh, hop.mesh_dim)
        sizes = chunk_sizes(hop.logical_shape[current.dim], axis.size)
        return collectives.defer_all_gather(local, current.dim, axis, sizes)
    return None


def _split_locally(
    local: torch.Tensor, target: Placement, mesh: DeviceMesh, mesh_dim: int
) -> torch.Tensor:
    """Replicate to Shard or Partial: no communication, done after the finish of one in flight."""
    rank = mesh.get_local_rank(mesh_dim)
    if target.is_partial():
        return _after(
            local, lambda value: target._partition_value(value, mesh, mesh_dim), local.shape
        )
    sizes = chunk_sizes(local.shape[target.dim], mesh.size(mesh_dim))
    shape = (*local.shape[: target.dim], sizes[rank], *local.shape[target.dim + 1 :])
    return _after(
        local, lambda value: target._replicate_to_shard(value, mesh, mesh_dim, rank), shape
    )


def _rescaled(reduced: PendingLocal, divisor: int | None) -> torch.Tensor:
    return reduced if divisor is None else _after(reduced, lambda v: v / divisor, reduced.shape)


def _after(
    local: torch.Tensor,
    step: Callable[[torch.Tensor], torch.Tensor],
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    if isinstance(local, PendingLocal) and local.state is PendingState.IN_FLIGHT:
        return local.after(step, tuple(shape), dtype)
    return step(materialized(local))


def cast_local(local: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``local.to(dtype)``; of a value in flight, at the read."""
    return (
        local if local.dtype == dtype else _after(local, lambda v: v.to(dtype), local.shape, dtype)
    )


def _strided_hop(local: torch.Tensor, hop: TransformInfo, mesh: DeviceMesh) -> torch.Tensor:
    """Hops from or to torch's strided sharding, by torch's own placement methods, waited for."""
    current, target = hop.src_dst_placements
    mesh_dim = hop.mesh_dim
    if current.is_partial():
        whole = current._reduce_value(local, mesh, mesh_dim)
    elif current.is_replicate():
        whole = local
    else:
        whole = current._to_replicate_tensor(local, mesh, mesh_dim, hop.logical_shape)
    whole = whole.wait() if hasattr(whole, "wait") else whole
    if target.is_replicate():
        return whole
    rank = mesh.get_local_rank(mesh_dim)
    if is_strided_shard(target):
        return target._replicate_to_strided_shard(whole, mesh, mesh_dim, rank)
    return target._replicate_to_shard(whole, mesh, mesh_dim, rank)


@functools.lru_cache(maxsize=4096)
def with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """``spec`` of a tensor with another dtype."""
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype == dtype:
        return spec
    return with_placements(spec, spec.placements, TensorMeta(meta.shape, meta.stride, dtype))


@functools.lru_cache(maxsize=4096)
def with_placements(
    spec: DTensorSpec, placements: tuple[Placement, ...], meta: TensorMeta | None = None
) -> DTensorSpec:
    """``spec`` with other placements on the same mesh."""
    return DTensorSpec(spec.mesh, placements, tensor_meta=meta or spec.tensor_meta)


def gradient_placements(
    current: Sequence[Placement], source: Sequence[Placement]
) -> tuple[Placement, ...]:
    """Where the gradient of a redistributed tensor goes: to its source, Partial standing for whole.

    The gradient of a sum over ranks is the same on each rank; turning it back into a Partial would
    only owe another reduction. A gradient that is Partial already stays so.
    """
    return tuple(
        Replicate() if to.is_partial() and now != to else to
        for now, to in zip(current, source, strict=True)
    )


def whole_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The placements with Partial replaced by Replicate."""
    return tuple(Replicate() if isinstance(p, Partial) else p for p in placements)
