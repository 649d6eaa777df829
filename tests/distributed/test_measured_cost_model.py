"""`measure_cost_model`: one model for all ranks, with the rates of the slowest."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks

if IN_RANK_PROCESS:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from mc2 import CostModel, measure_cost_model, use_cost_model
    from mc2.cost_model import cost_model


@on_ranks(2, 3)
def test_the_slowest_rank_counts(ctx: RankContext) -> None:
    # Every run takes as many seconds as its rank's number, from 1, says the clock.
    ticks = iter(range(0, 1_000 * (ctx.rank + 1), ctx.rank + 1))
    with mock.patch("time.perf_counter", side_effect=ticks):
        got = measure_cost_model(ctx.mesh())
    slowest_s = ctx.world_size
    assert got == dataclasses.replace(
        CostModel(),
        bytes_per_s=(ctx.world_size - 1) * 2**22 / slowest_s,
        flops_per_s=2 * 1024**3 / slowest_s,
    )


@on_ranks(2)
def test_it_measures_what_auto_then_goes_by(ctx: RankContext) -> None:
    use_cost_model(CostModel(s_per_message=1e-3))
    try:
        measured = measure_cost_model(ctx.mesh())
        every: list[object] = [None] * ctx.world_size
        dist.all_gather_object(every, measured)
        assert every == [measured] * ctx.world_size
        assert measured.s_per_message == 1e-3
        # Neither this machine's memory nor its cores are that fast, or that slow.
        assert measured.bytes_per_s is not None
        assert 1e5 < measured.bytes_per_s < 1e13
        assert 1e7 < measured.flops_per_s < 1e14
        use_cost_model(measured)
        assert cost_model("cpu") == measured
    finally:
        use_cost_model(None)


@on_ranks(2)
def test_what_it_refuses(ctx: RankContext) -> None:
    with pytest.raises(TypeError, match="Expected a DeviceMesh, got 'tp'"):
        measure_cost_model("tp")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp"))
    for wrong in mesh, mesh["dp"]:
        with pytest.raises(ValueError, match="Expected one mesh dim of at least 2 ranks"):
            measure_cost_model(wrong)
