"""Calls of a kernel from deferred values: each that ran is one event in the overlap log."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor.placement_types import Placement

from mc2.deferred_matmul import DeferredMatmul
from mc2.errors import MC2ConstraintError
from mc2.kernels import get_kernel
from mc2.options import FusionOptions
from mc2.row_layout import RowLayout
from mc2.torch_compat import resolve_group
from pending_dtensor.collectives import Axis, DeferredAllGather, chunk_sizes
from pending_dtensor.consistency import check_consistent, checking, holds
from pending_dtensor.events import computing, record_event
from pending_dtensor.pending import Launch, PendingState
from pending_dtensor.pending_local import PendingLocal


def gather_matmul(
    gathered: PendingLocal,
    weight_t: torch.Tensor,
    options: FusionOptions,
    product_with: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Out = gathered @ weight_t, gathering in the same kernel if nobody has yet.

    Args:
        gathered: (*, K) a deferred gather, or one that a fused kernel has completed.
        weight_t: (K, N).
        options: the kernel to use.
        product_with: (*, F) for ``product = gathered.T @ product_with``, made in the same kernel.

    Returns:
        out (*, N), and product (K, F); None if it was not asked for, or the gather was complete.
        ``gathered`` is complete afterwards, so that a sibling only multiplies.

    Raises:
        MC2ConstraintError: the kernel cannot do it, or ``gathered`` is neither; nothing was sent.
        InFlightInputModifiedError: the shard was written to since its gather was deferred.
    """
    recipe = gathered.recipe
    if not isinstance(recipe, DeferredAllGather) or gathered.is_view:
        raise MC2ConstraintError(
            f"Expected a whole deferred all_gather as input of a fused layer, got {gathered!r}. "
            f"Redistribute for it with defer=True, or hand it the sequence shard."
        )
    lead = tuple(gathered.shape[:-1])
    if gathered.state is PendingState.READY:
        with computing("matmul"):
            return gathered.materialize() @ weight_t, None
    if gathered.state is not PendingState.DEFERRED:
        raise MC2ConstraintError(
            f"Expected a gather that was not started, got {gathered!r}: it runs unfused already. "
            f"Do not call start() on what a fused layer shall read."
        )
    axis = recipe.axis
    layout = RowLayout.from_shape(gathered.shape, recipe.dim, recipe.sizes, axis.rank)
    part = recipe.source("all_gather_matmul")
    if checking():
        check_consistent(
            f"{options.kernel} all_gather_matmul",
            axis.group,
            shape=tuple(gathered.shape),
            dim=recipe.dim,
            dtype=part.dtype,
            chunks=options.chunks,
            holds=holds(part.size(recipe.dim), recipe.sizes[axis.rank]),
        )
    with computing("all_gather_matmul"):
        result = get_kernel(options.kernel).all_gather_matmul(
            part.flatten(0, -2),
            [weight_t],
            layout,
            resolve_group(axis.group),
            product_with=None if product_with is None else product_with.flatten(0, -2),
            chunks=options.chunks,
            width=options.width,
            matmuls=options.matmuls,
        )
    report = result.report
    event = record_event(
        "all_gather",
        kernel=options.kernel,
        shape=tuple(gathered.shape),
        dtype=part.dtype,
        message_elements=layout.max_rows * layout.ranks * part.shape[-1],
        group=axis.group,
        device=part.device.type,
        started=report.began,
    )
    if event is not None:
        event.ran_in_kernel(report.launched, report.waits, str(report), readable=True)
    assert result.gathered is not None
    gathered.complete(result.gathered.view(gathered.shape))
    return result.outs[0].view(*lead, weight_t.shape[1]), result.product


def linear_reduce_scatter(
    local: PendingLocal,
    current: Placement,
    target: Placement,
    axis: Axis,
    logical_shape: Sequence[int],
) -> torch.Tensor:
    """Rule B: Partial -> Shard of a deferred matmul.

    Args:
        local: the deferred matmul, (*, N) on every rank.
        current: Partial("sum").
        target: Shard of a sequence dim.
        axis: the ranks to reduce over.
        logical_shape: shape before the reduce-scatter.

    Returns:
        This rank's part of the reduced sum, bias added once: in flight, as far as the kernel can.

    Raises:
        MC2ConstraintError: the kernel cannot do it; nothing was sent.
    """
    recipe = local.recipe
    reasons = []
    if not isinstance(recipe, DeferredMatmul) or local.is_view:
        raise MC2ConstraintError(f"Expected a whole deferred matmul, got {local!r}.")
    if current.reduce_op != "sum":
        reasons.append(f"Expected a sum over ranks, got {current}.")
    dim = target.dim
    if dim >= len(logical_shape) - 1:
        reasons.append(
            f"Expected the output sharded on a sequence dim, got {target}, the features, of shape "
            f"{tuple(logical_shape)}."
        )
    if reasons:
        raise MC2ConstraintError(" ".join(reasons))
    sizes = chunk_sizes(logical_shape[dim], axis.size)
    layout = RowLayout.from_shape(local.shape, dim, sizes, axis.rank)
    terms = [(term.rows(), term.weight_t) for term in recipe.terms]
    options = recipe.options
    if checking():
        check_consistent(
            f"{options.kernel} matmul_reduce_scatter",
            axis.group,
            shape=tuple(local.shape),
            dim=dim,
            dtype=local.dtype,
            chunks=options.chunks,
        )
    kernel = get_kernel(options.kernel)
    # A copy, for the output may be read after the optimizer has written to the bias. Made first:
    # nothing may fail between the launch and the value that owns it.
    bias = None if recipe.bias is None else recipe.bias.clone()
    with computing("matmul_reduce_scatter"):
        started = kernel.start_matmul_reduce_scatter(
            terms,
            layout,
            resolve_group(axis.group),
            chunks=options.chunks,
            width=options.width,
            matmuls=options.matmuls,
        )
    report = started.report
    shape = (*local.shape[:dim], sizes[axis.rank], *local.shape[dim + 1 :])
    event = record_event(
        "reduce_scatter",
        kernel=options.kernel,
        shape=shape,
        dtype=local.dtype,
        message_elements=layout.max_rows * layout.ranks * local.shape[-1],
        group=axis.group,
        device=local.device.type,
        started=report.began,
    )
    if event is not None:
        finished = kernel.start_op is None
        event.ran_in_kernel(report.launched, report.waits, str(report), readable=finished)
        if finished:
            event = None  # a later read waits for nothing

    def finish(*buffers: torch.Tensor) -> torch.Tensor:
        out = started.finish(*buffers).view(shape)
        return out if bias is None else out.add_(bias)

    first, *more = started.buffers
    launch = Launch("reduce_scatter", axis.group, first, finish, event=event, more=tuple(more))
    return PendingLocal.in_flight(launch, shape)
