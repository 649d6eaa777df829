"""The MC2 layers through the real operators, forward and backward, over gloo."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks

if IN_RANK_PROCESS:
    import torch
    from torch import nn
    from torch.distributed.tensor import Shard

    from mc2 import MC2ConstraintError
    from pending_dtensor import distribute_tensor
    from tests.ascend.operators_on_cpu import hccl_over_gloo
    from tests.common.mc2_models import (
        QKVO,
        fused,
        nothing_launched,
        on_one_device,
        on_this_rank,
        run,
    )
    from tests.common.sharded_models import MLP, equal

FEATURES = 256  # the smallest contraction that the operators take
GATHER, SCATTER = "npu_all_gather_base_mm", "npu_mm_reduce_scatter_base"


def few_ones(module: nn.Module, per_row: int = 4) -> nn.Module:
    """``module`` with a few ones in each row of its weights: sums stay exact in bfloat16."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 2:
                places = torch.rand(parameter.shape, generator=generator).topk(per_row).indices
                parameter.zero_().scatter_(1, places, 1.0)
            else:
                parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
    return module


def small(shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(6)
    return torch.randint(-1, 2, shape, generator=generator)


def exact(model: nn.Module, x: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """The unsharded results, which ``dtype`` holds without rounding."""
    results = on_one_device(copy.deepcopy(model).double(), x.double())
    assert all(value.abs().max() <= 256 for value in results.values())
    return {name: value.to(dtype) for name, value in results.items()}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("seq", [0, 1])
@on_ranks(2, 4)
def test_a_chain_calls_four_operators(ctx: RankContext, dtype: str, seq: int) -> None:
    type_ = getattr(torch, dtype)
    x = small((8, 2, FEATURES) if seq == 0 else (2, 8, FEATURES)).to(type_)
    for bias in (True, False):
        model = few_ones(MLP(FEATURES, FEATURES * ctx.world_size, bias=bias)).to(type_)
        expected = on_this_rank(exact(model, x, type_), seq)
        with hccl_over_gloo() as operators:
            got = run(ctx, fused(ctx, model, seq, "ascend"), x, seq)
            assert [call.name for call in operators] == [GATHER, SCATTER] * 2
            # Row-major [S, B, H] goes in and out of the operators as it is.
            assert all(call.options == {} for call in operators)
        equal(got.values, expected)
        assert got.calls == [("all_gather", "ascend"), ("reduce_scatter", "ascend")] * 2


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("options", [{}, {"regather": True}, {"column_backward": "overlap"}])
@on_ranks(2, 4)
def test_siblings_and_options(ctx: RankContext, told: bool, options: dict[str, Any]) -> None:
    x = small((2, 8, FEATURES)).bfloat16()
    model = few_ones(QKVO(FEATURES, FEATURES * ctx.world_size), per_row=2).bfloat16()
    expected = on_this_rank(exact(model, x, torch.bfloat16), 1)
    with hccl_over_gloo() as operators:
        model = fused(ctx, model, 1, "ascend", defer=told, **options)
        got = run(ctx, model, x, 1, leaf=False)
        names = [call.name for call in operators]
    equal(got.values, expected)
    overlaps = "column_backward" in options
    assert names == [GATHER, SCATTER, GATHER, SCATTER][: 3 if overlaps else 4]


@on_ranks(2)
def test_uneven_rows_and_float32_are_refused_on_every_rank(ctx: RankContext) -> None:
    model = few_ones(MLP(FEATURES, FEATURES * 2)).bfloat16()
    with hccl_over_gloo() as operators:
        model = fused(ctx, model, 1, "ascend", local=False)
        uneven = distribute_tensor(small((2, 5, FEATURES)).bfloat16(), ctx.mesh(), [Shard(1)])
        single = distribute_tensor(small((2, 4, FEATURES)).float(), ctx.mesh(), [Shard(1)])
        with nothing_launched(), pytest.raises(MC2ConstraintError, match="divide evenly over 2"):
            model(uneven)
        with nothing_launched(), pytest.raises(MC2ConstraintError, match=r"got torch\.float32"):
            model(single)
        assert operators == []
