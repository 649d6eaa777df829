"""A drawn case gives on the ranks what it gives on one device, or is refused on every rank."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext
from tests.properties.layer_cases import Case, Layout
from tests.properties.layer_refusals import refusals

if IN_RANK_PROCESS:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

    from mc2 import MC2ConstraintError
    from parallel_styles import parallelize_module
    from pending_dtensor import (
        OverlapLog,
        debug_consistency,
        distribute_tensor,
        record_overlap,
    )
    from pending_dtensor.errors import DeferredReadError, InconsistentRanksError
    from tests.common.mc2_models import calls
    from tests.common.sharded_models import equal, full
    from tests.properties.layer_models import placement, plan_of
    from tests.properties.layer_numbers import given_to, numbers_of, step

    ERRORS = {
        error.__name__: error
        for error in (DeferredReadError, InconsistentRanksError, MC2ConstraintError)
    }


def check_case(ctx: RankContext, case: Case) -> OverlapLog | None:
    """Returns the log of what was launched, or None if the case was refused."""
    names = refusals(case, ctx.world_size)
    if names:
        check_is_refused(ctx, case, names)
        return None
    with debug_consistency() if case.checked else contextlib.nullcontext():
        return check_runs(ctx, case)


def check_runs(ctx: RankContext, case: Case) -> OverlapLog:
    """A case gives on the ranks what it gives on one device: equal in every bit."""
    model, (first, second), grad, everything_expected = numbers_of(case)
    model = parallelized(ctx, case, model)
    last = case.blocks[-1]
    leaf = source_of(ctx, case, first)
    if last.out_local:
        grad = shard(ctx, grad, last.out)
    else:
        grad = distribute_tensor(grad, ctx.mesh(), [placement(last.out)], src_data_rank=None)
    with record_overlap() as log:
        if case.evaluated:
            with torch.no_grad():
                model(leaf)
        for number, expected in enumerate(everything_expected):
            if number == 1 and case.refilled:
                with torch.no_grad():
                    leaf.copy_(source_of(ctx, case, second))
            elif number == 1:
                leaf = source_of(ctx, case, second)
            got = step(model, leaf, grad)
            equal_on_this_rank(ctx, got, expected, {"out": last.out, "x": case.source})
    if not any(block.told for block in case.blocks):
        assert log.fallbacks == []
    equal_on_all_ranks(ctx, calls(log))
    return log


def check_is_refused(ctx: RankContext, case: Case, names: set[str]) -> None:
    """A case raises one of the errors on every rank, and nobody is left in a collective."""
    errors = tuple(ERRORS[name] for name in sorted(names))
    dtype = getattr(torch, case.dtype)
    model, (x, _), _ = given_to(case)
    model, x = model.to(dtype), source_of(ctx, case, x.to(dtype))
    with (
        debug_consistency() if "InconsistentRanksError" in names else contextlib.nullcontext(),
        pytest.raises(errors, match=r"Expected .*, got\s") as raised,
    ):
        parallelized(ctx, case, model)(x)
    equal_on_all_ranks(ctx, type(raised.value).__name__)


def equal_on_all_ranks(ctx: RankContext, value: Any) -> None:
    everyones: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(everyones, value)
    assert everyones == [value] * ctx.world_size, f"not the same on every rank: {everyones}"


def equal_on_this_rank(
    ctx: RankContext, got: dict[str, Any], expected: dict[str, Any], layouts: dict[str, Layout]
) -> None:
    """Asserts that local tensors, and those of DTensors, are their part of what is expected."""
    parts: dict[str, Any] = {}
    for name, found in got.items():
        if found is None or expected[name] is None:
            parts[name] = expected[name]
            continue
        layout = layouts.get(name)
        if isinstance(found, DTensor):
            (placed,) = found.placements
            if placed.is_partial():
                got[name], layout = found.full_tensor(), None
            else:
                got[name], layout = full(found.to_local()), getattr(placed, "dim", None)
        parts[name] = shard(ctx, expected[name], layout)
    equal(got, parts)


def parallelized(ctx: RankContext, case: Case, model: Any) -> Any:
    """``model`` itself, sharded."""
    model.mesh = ctx.mesh()
    return parallelize_module(model, ctx.mesh(), plan_of(case), src_data_rank=None)


def shard(ctx: RankContext, whole: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This rank's part as a DTensor would have it: the last ones may be shorter, or empty."""
    if layout is None:
        return whole.clone()
    parts = whole.chunk(ctx.world_size, layout)
    part = parts[ctx.rank] if ctx.rank < len(parts) else whole.narrow(layout, 0, 0)
    return part.clone()


def source_of(ctx: RankContext, case: Case, whole: torch.Tensor) -> Any:
    """The leaf that is handed in, holding this rank's part of ``whole``."""
    if case.kind == "local":
        leaf = shard(ctx, whole, case.source)
    else:
        distribute = distribute_tensor if case.kind == "hyper" else torch_distribute_tensor
        leaf = distribute(whole, ctx.mesh(), [placement(case.source)], src_data_rank=None)
    return leaf.detach().requires_grad_(case.input_grad)
