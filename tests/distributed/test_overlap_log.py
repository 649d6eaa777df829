"""`record_overlap` over real collectives, and fused rules over values that wait for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks
from tests.common.exact import same
from tests.common.late_ranks import READ_HEAD_START_S, ahead

if IN_RANK_PROCESS:
    import torch
    import torch.nn.functional as F
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    from mc2 import MC2ConstraintError
    from mc2.deferred_matmul import DeferredMatmul, Term, defer_matmul
    from mc2.fused_calls import gather_matmul
    from mc2.options import FusionOptions
    from pending_dtensor import (
        HyperDTensor,
        PendingLocal,
        PendingState,
        record_overlap,
        register_fused_rule,
    )
    from pending_dtensor import events as events_module
    from pending_dtensor.collectives import all_reduce, mesh_axis
    from pending_dtensor.errors import DeferredReadError, InFlightInputModifiedError
    from pending_dtensor.fused_rules import find_rule, unregister_fused_rule
    from pending_dtensor.hyper_dtensor import redistribute_deferred


@on_ranks(2)
def test_times_tell_launch_wait_and_read(ctx: RankContext) -> None:
    axis = mesh_axis(ctx.mesh(), 0)
    with record_overlap() as log:
        read_late, read_at_once, unread = ahead(
            ctx, lambda: [all_reduce(torch.ones(4), axis, "sum") for _ in range(3)]
        )
        assert read_at_once.tolist() == [2.0] * 4
        assert read_late.tolist() == [2.0] * 4
        first, second, third = log.events
    assert first.started < second.started < third.started
    for event in first, second:
        assert event.wait_began is not None
        assert event.readable is not None
        assert event.started < event.wait_began <= event.readable
        assert event.exposed_s == event.readable - event.wait_began
    assert second.readable <= first.wait_began  # type: ignore[operator]
    if ctx.rank == 0:  # it waited for the others, who began that much later
        assert second.exposed_s > READ_HEAD_START_S / 2 > first.exposed_s
    assert (third.wait_began, third.readable, third.exposed_s) == (None, None, 0.0)
    summary = log.summary()
    assert (summary["collectives"], summary["unread"]) == (3, 1)
    assert summary["exposed_s"] == pytest.approx(first.exposed_s + second.exposed_s)
    del unread


@on_ranks(2)
def test_a_read_after_the_block_is_still_marked(ctx: RankContext) -> None:
    axis = mesh_axis(ctx.mesh(), 0)
    with record_overlap() as log:
        value = all_reduce(torch.ones(4), axis, "sum")
    assert log.summary()["unread"] == 1
    view = value.view(2, 2)
    assert view.sum() == 8
    assert value.sum() == 8  # a second read is none
    assert log.summary()["unread"] == 0
    assert len(log.events) == 1


@on_ranks(2)
def test_forward_and_backward_and_nested_blocks(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    leaf = torch.ones(2, 3, requires_grad=True)
    with record_overlap() as both:
        with record_overlap() as forward:
            tensor = HyperDTensor.from_local(leaf, mesh, [Shard(0)])
            out = tensor.redistribute(placements=[Replicate()], async_op=True)
            loss = F.linear(out, DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])).sum()
        with record_overlap() as backward:
            loss.backward()
    kinds = ([event.kind for event in log.events] for log in (forward, backward, both))
    assert list(kinds) == [
        ["all_gather"],
        ["reduce_scatter"],
        ["all_gather", "reduce_scatter"],
    ]
    assert all(event.wait_began is not None for event in both.events)
    assert both.summary()["by_kernel"] == {"unfused": 2}


@on_ranks(2)
def test_it_costs_nothing_while_it_is_off(ctx: RankContext) -> None:
    """No event is made, and no clock is read, from the launch to the read."""
    axis = mesh_axis(ctx.mesh(), 0)

    def no_clock() -> float:
        raise AssertionError("the clock was read")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events_module.time, "perf_counter", no_clock)
        value = all_reduce(torch.ones(4), axis, "sum")
        assert value.pending._event is None
        assert value.tolist() == [2.0] * 4
        dropped = all_reduce(torch.ones(4), axis, "sum")
        del dropped


@on_ranks(2)
def test_a_log_keeps_no_tensor_alive(ctx: RankContext) -> None:
    import weakref

    axis = mesh_axis(ctx.mesh(), 0)
    with record_overlap() as log:
        value = all_reduce(torch.ones(4), axis, "sum")
        life = weakref.ref(value.pending)
        del value
        assert life() is None
    assert len(log.events) == 1


@pytest.mark.parametrize("kernel", ["decomposed", "pipelined"])
@on_ranks(2)
def test_a_fused_call_that_the_kernel_refuses_is_not_logged(ctx: RankContext, kernel: str) -> None:
    """No layer checked it before: it is made of deferred values by hand."""
    mesh, options = ctx.mesh(), FusionOptions(kernel)
    shard = HyperDTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])
    gathered = redistribute_deferred(shard, [Replicate()])._local_tensor
    weight_t = torch.ones(4, 3)

    def summed(weight_t: torch.Tensor) -> torch.Tensor:
        product = defer_matmul(DeferredMatmul([Term(torch.ones(4, 4), weight_t)], (4,), options))
        partial = HyperDTensor.from_local(product, mesh, [Partial()])
        return partial.redistribute(placements=[Shard(0)]).to_local()

    with record_overlap() as log:
        for call in summed, lambda weight_t: gather_matmul(gathered, weight_t, options):
            with pytest.raises(MC2ConstraintError, match=r"one dtype, got torch\.float32"):
                call(weight_t.double())
        assert (log.events, log.spans) == ([], [])
        same(summed(weight_t), torch.full((2, 3), 8.0))
        same(gather_matmul(gathered, weight_t, options)[0], torch.full((4, 3), 4.0))
    assert [(event.kind, event.kernel) for event in log.events] == [
        ("reduce_scatter", kernel),
        ("all_gather", kernel),
    ]
    for event in log.events:
        assert event.launched is None or event.started <= event.launched


# --- fused rules


@contextmanager
def rule_for(producer: str, consumer: str, rule: Any) -> Iterator[None]:
    """Has ``rule``, or none, for a pair, whatever other tests of this process have imported."""
    known = find_rule(producer, consumer)
    if known is not None:
        unregister_fused_rule(producer, consumer)
    if rule is not None:
        register_fused_rule(producer, consumer, rule)
    try:
        yield
    finally:
        if rule is not None:
            unregister_fused_rule(producer, consumer)
        if known is not None:
            register_fused_rule(producer, consumer, known)


@on_ranks(2)
def test_a_registered_rule_runs_and_completes_what_was_deferred(ctx: RankContext) -> None:
    """The worked example of a rule: it gets the deferred gather and completes it."""
    mesh = ctx.mesh()
    calls: list[tuple[str, str]] = []

    def rule(input: HyperDTensor, weight: DTensor, bias: DTensor | None) -> HyperDTensor:
        local = input._local_tensor
        assert isinstance(local, PendingLocal)
        calls.append((local.kind, str(local.state)))
        local.start()
        return F.linear(input, weight, bias)

    whole = torch.arange(12.0).view(4, 3)
    shard = HyperDTensor.from_local(whole.chunk(2)[ctx.rank], mesh, [Shard(0)])
    weight = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])

    with record_overlap() as log:
        deferred = redistribute_deferred(shard, [Replicate()])
        assert deferred._local_tensor.state is PendingState.DEFERRED
        assert "deferred" in repr(deferred)
        with (
            rule_for("all_gather", "linear", None),
            pytest.raises(DeferredReadError, match="linear"),
        ):
            F.linear(deferred, weight)
        with pytest.raises(DeferredReadError, match="relu"):
            F.relu(deferred)
        with pytest.raises(DeferredReadError):
            deferred.redistribute(placements=[Replicate()])
        assert log.events == []

        with rule_for("all_gather", "linear", rule):
            out = F.linear(deferred, weight)
            sibling = F.linear(deferred, weight)
        assert calls == [("all_gather", "deferred")]
        assert len(log.events) == 1
    expected = F.linear(whole, torch.ones(4, 3))
    for result in out, sibling:
        same(result.full_tensor(), expected)
    same(deferred.to_local(), whole)


@on_ranks(2)
def test_the_input_of_a_deferred_gather_must_stay_as_it_was(ctx: RankContext) -> None:
    for pending in False, True:
        part = torch.ones(2, 3)
        local = all_reduce(part, mesh_axis(ctx.mesh(), 0), "sum") if pending else part
        shard = HyperDTensor.from_local(local, ctx.mesh(), [Shard(0)])
        deferred = redistribute_deferred(shard, [Replicate()]).to_local()
        untouched = redistribute_deferred(shard + 0, [Replicate()]).to_local()
        local.add_(1)
        for _ in range(2):
            with pytest.raises(InFlightInputModifiedError, match="deferred all_gather"):
                deferred.start()
        assert deferred.state is PendingState.DEFERRED
        untouched.start()
        same(untouched, torch.full((4, 3), 1.0 + pending))
    with torch.inference_mode():
        shard = HyperDTensor.from_local(torch.ones(2, 3), ctx.mesh(), [Shard(0)])
        deferred = redistribute_deferred(shard, [Replicate()]).to_local()
        deferred.start()
        assert deferred.sum() == 12


@on_ranks(2)
def test_a_rule_for_a_reduction(ctx: RankContext) -> None:
    mesh = ctx.mesh()

    class Ones:
        kind = "test_ones"
        is_local = True

        def compute(self) -> torch.Tensor:
            return torch.ones(4, 3)

        def start(self) -> Any:
            raise AssertionError

    def partial() -> HyperDTensor:
        local = PendingLocal.deferred(Ones(), (4, 3), torch.float32, torch.device("cpu"))
        return HyperDTensor.from_local(local, mesh, [Partial()])

    seen: list[Any] = []

    def rule(local: PendingLocal, current: Any, target: Any, axis: Any, shape: Any) -> Any:
        seen.append((local.kind, current, target, axis.size, tuple(shape)))
        return torch.full((2, 3), 7.0)

    with rule_for("test_ones", "reduce_scatter", rule):
        fused = partial().redistribute(placements=[Shard(0)], async_op=True)
        unfused = partial().redistribute(placements=[Replicate()], async_op=True)
    assert seen == [("test_ones", Partial(), Shard(0), ctx.world_size, (4, 3))]
    same(fused.to_local(), torch.full((2, 3), 7.0))
    # Without a rule a deferred computation is local and runs; the reduction is launched.
    same(unfused.to_local(), torch.full((4, 3), 2.0))
    plain = partial().redistribute(placements=[Shard(0)])
    same(plain.to_local(), torch.full((2, 3), 2.0))
