"""What the overlap log, the profiler and `assert_fused` show of layers that really ran."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks
from tests.common.late_ranks import READ_HEAD_START_S, ahead

if IN_RANK_PROCESS:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.profiler import ProfilerActivity, profile

    from mc2 import assert_fused
    from mc2.deferred_matmul import DeferredMatmul, Term, defer_matmul
    from mc2.options import FusionOptions
    from parallel_styles import ColwiseParallel, RowwiseParallel, parallelize_module
    from pending_dtensor import HyperDTensor, NotFusedError, OverlapLog, record_overlap
    from pending_dtensor import events as events_module
    from pending_dtensor.chrome_trace import read_trace
    from pending_dtensor.collectives import all_reduce, mesh_axis
    from pending_dtensor.report import write_report
    from tests.common.mc2_models import QKVO, fused, make
    from tests.common.sharded_models import MLP, part, whole_numbers

SEQ = 1


def step(ctx: RankContext, model: Any) -> None:
    x = part(whole_numbers(2, 8, 8), SEQ).requires_grad_()
    model(x).sum().backward()


def plain(ctx: RankContext, model: Any) -> Any:
    """``model`` (w1, w2) with styles that fuse nothing."""
    plan = {
        "w1": ColwiseParallel(input_layouts=Shard(SEQ)),
        "w2": RowwiseParallel(output_layouts=Shard(SEQ)),
    }
    return parallelize_module(model, ctx.mesh(), plan)


# --- the log


@pytest.mark.parametrize("kernel", ["decomposed", "pipelined"])
@on_ranks(2)
def test_fused_kernels_say_when_they_sent_and_when_they_waited(
    ctx: RankContext, kernel: str
) -> None:
    model = fused(ctx, make(MLP), SEQ, kernel)
    with record_overlap() as log:
        step(ctx, model)
    log.require(fused=4)
    assert log.rank == ctx.rank
    for event in log.events:
        assert event.launched is not None
        assert event.readable is not None
        assert event.waits
        assert log.opened < event.started < event.launched < event.waits[0].began
        assert event.waits[-1].ended <= event.readable
        assert event.exposed_s == pytest.approx(
            sum(wait.ended - wait.began for wait in event.waits)
        )
    summary = log.summary()
    assert 0 < summary["exposed_s"] <= summary["communication_s"]
    assert 0 <= summary["hidden_fraction"] < 1
    names = [span.name for span in log.spans]
    assert names.count("all_gather_matmul") == names.count("matmul_reduce_scatter") == 2
    assert "grad_weight" in names  # the column's: the row's may be made in its gather's kernel


@on_ranks(2)
def test_plain_layers_record_their_matmuls(ctx: RankContext) -> None:
    model = plain(ctx, make(MLP))
    with record_overlap() as log:
        step(ctx, model)
    names = [span.name for span in log.spans]
    assert [names.count(name) for name in ("linear", "grad_input", "grad_weight")] == [2, 2, 2]
    assert log.summary()["compute_s"] > 0
    with pytest.raises(NotFusedError, match=r"all_gather of shape .* launched on its own"):
        log.require(fused=4)


@on_ranks(2)
def test_hidden_fraction_of_what_is_read_at_once_and_late(ctx: RankContext) -> None:
    axis = mesh_axis(ctx.mesh(), 0)
    with record_overlap() as at_once:
        ahead(ctx, lambda: all_reduce(torch.ones(4), axis, "sum")).sum()
    with record_overlap() as late:
        value = all_reduce(torch.ones(4), axis, "sum")
        time.sleep(2 * READ_HEAD_START_S)
        value.sum()
    if ctx.rank == 0:  # which was ahead, so that it waited
        assert at_once.summary()["hidden_fraction"] < 0.5
    assert late.summary()["hidden_fraction"] > 0.5


@on_ranks(2)
def test_no_span_is_made_while_no_log_is_open(ctx: RankContext) -> None:
    def no_span(*_: object) -> None:
        raise AssertionError("a span was made")

    model = fused(ctx, make(MLP), SEQ, "pipelined")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events_module, "_Computing", no_span)
        patch.setattr(torch.profiler, "record_function", no_span)
        step(ctx, model)
        with record_overlap(), pytest.raises(AssertionError, match="a span was made"):
            events_module.computing("linear")


@on_ranks(2)
def test_traces_of_ranks_are_joined(ctx: RankContext) -> None:
    model = fused(ctx, make(MLP), SEQ, "pipelined")
    with record_overlap() as log:
        step(ctx, model)
    folder = [tempfile.mkdtemp() if ctx.rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    traces = [Path(folder[0]) / f"{rank}.json" for rank in range(2)]
    log.to_chrome_trace(traces[ctx.rank])
    dist.barrier()
    if ctx.rank == 0:
        joined = traces[0].parent / "joined.json"
        text = write_report(traces, html=traces[0].parent / "page.html", trace=joined)
        assert text.count("4 collectives, 4 fused") == 2
        assert [recording.rank for recording in read_trace(joined)] == [0, 1]
        opened = [recording.opened_unix_s for recording in read_trace(joined)]
        assert abs(opened[0] - opened[1]) < 60


# --- the profiler


@on_ranks(2)
def test_profiler_shows_launches_waits_and_kernels_by_name(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    model = fused(ctx, make(MLP), SEQ, "pipelined")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(ctx, model)
        tensor = HyperDTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
        tensor.redistribute(placements=[Replicate()], async_op=True).sum()
    names = {event.name for event in profiler.events()}
    assert {
        "pending_dtensor::start all_gather_into_tensor",
        "pending_dtensor::wait all_gather",
        "pending_dtensor::wait reduce_scatter",
        "pending_dtensor::wait piece",
        "mc2::pipelined_all_gather_matmul",
        "mc2::pipelined_matmul_scatter_start",
    } <= names


@contextmanager
def logged_and_profiled() -> Iterator[list[OverlapLog]]:
    """Gives, after the block, what the log says of it and what the profiler says."""
    logs: list[OverlapLog] = []
    with record_overlap() as log, profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield logs
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        logs += [log, OverlapLog.from_trace(path)]


@on_ranks(2)
def test_profiler_and_log_agree_on_what_was_hidden(ctx: RankContext) -> None:
    """The other rank is late, and half of that time something else is done."""
    axis = mesh_axis(ctx.mesh(), 0)
    with logged_and_profiled() as logs:
        for kind in "sum", "max":
            value = ahead(ctx, lambda: all_reduce(torch.ones(4), axis, kind))  # noqa: B023
            if ctx.rank == 0:
                time.sleep(READ_HEAD_START_S / 2)
            value.sum()
    log, seen = (log.summary() for log in logs)
    assert (log["collectives"], seen["collectives"]) == (2, 2)
    if ctx.rank == 0:
        assert seen["communication_s"] > READ_HEAD_START_S
        assert seen["exposed_s"] == pytest.approx(log["exposed_s"], rel=0.1)
        assert 0.05 < seen["hidden_fraction"] < 0.95
        assert seen["hidden_fraction"] == pytest.approx(log["hidden_fraction"], abs=0.1)


@pytest.mark.parametrize("kernel", ["decomposed", "pipelined"])
@on_ranks(2)
def test_profiler_and_log_agree_on_what_was_fused(ctx: RankContext, kernel: str) -> None:
    model = fused(ctx, make(MLP), SEQ, kernel)
    with logged_and_profiled() as logs:
        step(ctx, model)
    calls, messages = (Counter((event.kind, event.kernel) for event in log.events) for log in logs)
    assert calls == {("all_gather", kernel): 2, ("reduce_scatter", kernel): 2}
    assert calls.keys() == messages.keys()
    assert all(messages[what] >= calls[what] for what in calls)  # it sends in pieces
    assert [log.rank for log in logs] == [ctx.rank, ctx.rank]


# --- assert_fused


def forward_hooks(model: Any) -> dict[str, int]:
    """How many each module has: the check leaves none of its own behind."""
    return {name: len(module._forward_hooks) for name, module in model.named_modules()}


@on_ranks(2)
def test_assert_fused_passes_for_fused_layers(ctx: RankContext) -> None:
    model = fused(ctx, make(QKVO), SEQ, "pipelined")
    before = forward_hooks(model)
    with assert_fused(model) as log:
        step(ctx, model)
    log.require(fused=4)  # q, k and v share one gather and one reduction
    assert forward_hooks(model) == before


@on_ranks(2)
def test_assert_fused_names_what_no_style_was_applied_to(ctx: RankContext) -> None:
    model = plain(ctx, make(MLP))
    with pytest.raises(NotFusedError) as raised, assert_fused(model):
        step(ctx, model)
    text = str(raised.value)
    for name, shard in (("w1", 0), ("w2", 1)):
        assert f"{name}: Linear with weight (Shard(dim={shard}),), to which no MC2 style" in text
    assert "the model has no MC2Linear" in text

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fused, self.output = fused(ctx, make(MLP), SEQ, "pipelined"), model

    both = Both()
    with pytest.raises(NotFusedError, match=r"- output\.w1: Linear"), assert_fused(both):
        step(ctx, both.fused)
    with assert_fused(both, unfused=["output.w1", "output.w2"]):
        step(ctx, both.fused)
    with (
        pytest.raises(ValueError, match=r"got \['w3'\] \(assert_fused\)"),
        assert_fused(both, unfused=["w3"]),
    ):
        raise AssertionError("the block ran")


@on_ranks(2)
def test_assert_fused_names_layers_that_did_not_run_or_ran_unfused(ctx: RankContext) -> None:
    model = fused(ctx, make(MLP), SEQ, "pipelined", local=False)
    with pytest.raises(NotFusedError, match="- w1: MC2Linear that was not"), assert_fused(model):
        pass

    def read_unreduced() -> None:
        x = DTensor.from_local(part(whole_numbers(2, 8, 8), SEQ), ctx.mesh(), [Shard(SEQ)])
        hidden = model.w1(x)
        local = hidden._local_tensor.detach()
        term = Term(local, model.w2.weight._local_tensor.detach().t())
        options = FusionOptions("pipelined", "auto", False, "fused")
        defer_matmul(DeferredMatmul([term], tuple(local.shape[:-1]), options)).sum()
        model.w2(hidden)

    with pytest.raises(NotFusedError, match="deferred for kernel 'pipelined'"), assert_fused(model):
        read_unreduced()


@on_ranks(2)
def test_an_error_inside_the_block_is_not_hidden(ctx: RankContext) -> None:
    model = fused(ctx, make(MLP), SEQ, "pipelined")
    before = forward_hooks(model)
    with pytest.raises(ZeroDivisionError), assert_fused(model):
        raise ZeroDivisionError
    assert forward_hooks(model) == before
