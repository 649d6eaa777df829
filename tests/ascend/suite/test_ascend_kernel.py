"""The ``ascend`` kernel through the real operators, over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks

if IN_RANK_PROCESS:
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.utils.flop_counter import FlopCounterMode

    from mc2.errors import MC2ConstraintError
    from mc2.kernels import ascend, get_kernel, reasons_not_supported
    from mc2.row_layout import RowLayout
    from tests.ascend.operators_on_cpu import hccl_over_gloo

K = 256  # the smallest contraction that the operators take


def layouts(ctx: RankContext) -> Iterator[RowLayout]:
    """Even, with dims before, after and on both sides of the sequence."""
    for outer, size, inner in ((1, 4, 1), (3, 2, 1), (1, 2, 3), (2, 1, 2)):
        yield RowLayout(outer, (size,) * ctx.world_size, inner, ctx.rank)


def sparse(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """A quarter of ones, the rest zeros: sums stay below 256, so exact in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) < 0.25).to(dtype)


def rows_of_this_rank(tensor: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    whole = tensor.view(layout.outer, sum(layout.sizes), layout.inner, -1)
    return whole.chunk(layout.ranks, dim=1)[layout.rank].reshape(layout.local_rows, -1)


def unsharded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    product = x.float() @ weight.float()
    assert product.max() < 256
    return product.to(x.dtype)


# --- numbers


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("siblings", [1, 3])
@pytest.mark.parametrize("gather_output", [True, False])
@on_ranks(2, 4)
def test_all_gather_matmul(
    ctx: RankContext, dtype: str, siblings: int, gather_output: bool
) -> None:
    kernel, group = get_kernel("ascend"), dist.group.WORLD
    type_ = getattr(torch, dtype)
    weights = [sparse(3 + n, K, seed=10 * ctx.rank + n, dtype=type_).t() for n in range(siblings)]
    with hccl_over_gloo() as calls:
        kernel.prepare(group)
        for layout in layouts(ctx):
            x = sparse(layout.rows, K, seed=1, dtype=type_)
            result = kernel.all_gather_matmul(
                rows_of_this_rank(x, layout), weights, layout, group, gather_output=gather_output
            )
            for out, weight in zip(result.outs, weights, strict=True):
                assert torch.equal(out, unsharded(x, weight)), layout
            assert (result.gathered is None) is not gather_output
            assert result.gathered is None or torch.equal(result.gathered, x), layout
            assert (result.report.kernel, result.report.chunks) == ("ascend", 1)
            # One operator call for all siblings, the weight as it lies, and only what is needed.
            (call,) = calls
            assert call.name == "npu_all_gather_base_mm"
            assert call.x2.data_ptr() == weights[0].data_ptr()
            assert call.x2.stride() == (1, K)
            skips_gathered = siblings == 1 and not gather_output
            assert call.options == ({"gather_output": False} if skips_gathered else {})
            calls.clear()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("terms", [1, 2])
@on_ranks(2, 4)
def test_matmul_reduce_scatter(ctx: RankContext, dtype: str, terms: int) -> None:
    kernel, group = get_kernel("ascend"), dist.group.WORLD
    type_ = getattr(torch, dtype)

    def operands(rank: int, rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (
                sparse(rows, K + n, seed=10 * rank + n, dtype=type_),
                sparse(K + n, 5, seed=20 * rank + n, dtype=type_),
            )
            for n in range(terms)
        ]

    with hccl_over_gloo() as calls:
        kernel.prepare(group)
        for layout in layouts(ctx):
            by_rank = [operands(rank, layout.rows) for rank in range(ctx.world_size)]
            x = torch.cat([x for pairs in by_rank for x, _ in pairs], dim=1)
            weight = torch.cat([weight for pairs in by_rank for _, weight in pairs])
            mine = by_rank[ctx.rank]
            out, _ = kernel.matmul_reduce_scatter(mine, layout, group)
            assert torch.equal(out, rows_of_this_rank(unsharded(x, weight), layout)), layout
            (call,) = calls  # one reduction for all terms
            assert call.options == {}
            if terms == 1:
                assert call.x2.data_ptr() == mine[0][1].data_ptr()
                copied = call.x.data_ptr() != mine[0][0].data_ptr()
                assert copied is not layout.is_rank_major
            calls.clear()


@on_ranks(2)
def test_an_updated_weight_is_used(ctx: RankContext) -> None:
    kernel, group = get_kernel("ascend"), dist.group.WORLD
    layout = RowLayout(1, (2, 2), 1, ctx.rank)
    x, weight = torch.ones(2, K).half(), torch.ones(3, K).half()
    with hccl_over_gloo():
        kernel.prepare(group)
        first = kernel.all_gather_matmul(x, [weight.t()], layout, group)
        weight *= 2
        second = kernel.all_gather_matmul(x, [weight.t()], layout, group)
    assert torch.equal(second.outs[0], 2 * first.outs[0])


@on_ranks(2)
def test_shapes_and_flops_without_running(ctx: RankContext) -> None:
    kernel, group = get_kernel("ascend"), dist.group.WORLD
    layout = RowLayout(3, (2, 2), 1, ctx.rank)
    with hccl_over_gloo() as calls:
        kernel.prepare(group)
        with FakeTensorMode(), FlopCounterMode(display=False) as flops:
            shard, x = torch.empty(6, K).half(), torch.empty(12, K).half()
            weights = [torch.empty(n, K).half().t() for n in (3, 4)]
            gathered = kernel.all_gather_matmul(shard, weights, layout, group)
            scattered = kernel.matmul_reduce_scatter([(x, weights[0])], layout, group)
        assert not calls
    assert [tuple(out.shape) for out in gathered.outs] == [(12, 3), (12, 4)]
    assert gathered.gathered.shape == (12, K)
    assert scattered.out.shape == (6, 3)
    assert flops.get_total_flops() == 2 * 12 * K * (3 + 4 + 3)


# --- communicators


@on_ranks(4)
def test_a_communicator_for_each_group_looked_up_once(ctx: RankContext) -> None:
    mesh = ctx.mesh(2, 2)
    kernel = ascend.AscendKernel()
    with hccl_over_gloo() as calls:
        for axis in ("tp", "dp"):
            group = mesh.get_group(axis)
            layout = RowLayout(1, (2, 2), 1, mesh.get_local_rank(axis))
            x = torch.full((2, K), float(ctx.rank)).half()
            with pytest.raises(RuntimeError, match="Expected a prepared process group"):
                kernel.all_gather_matmul(x, [torch.ones(K, 1).half()], layout, group)
            kernel.prepare(group)
            result = kernel.all_gather_matmul(x, [torch.ones(K, 1).half()], layout, group)
            ranks = dist.get_process_group_ranks(group)
            assert result.gathered[:, 0].tolist() == [ranks[0]] * 2 + [ranks[1]] * 2
        assert len(calls) == 2
        with mock.patch.object(ascend, "hccl_communicator_name", side_effect=AssertionError):
            kernel.prepare(mesh.get_group("tp"))
    # Without HCCL on it, a prepared group is still known.
    assert not kernel.reasons_not_supported(
        "all_gather_matmul", ascend.CallFacts(group=mesh.get_group("tp"))
    )


@on_ranks(2)
def test_a_group_without_hccl_is_refused_before_communication(ctx: RankContext) -> None:
    group, kernel = dist.new_group([0, 1]), ascend.AscendKernel()
    layout = RowLayout(1, (2, 2), 1, ctx.rank)
    with CommDebugMode() as comm:
        (reason,) = reasons_not_supported("ascend", "all_gather_matmul", group=group)
        assert "Expected a process group with HCCL" in reason
        with pytest.raises(MC2ConstraintError, match="with HCCL"):
            kernel.prepare(group)
        with pytest.raises(MC2ConstraintError, match="with HCCL"):
            kernel.all_gather_matmul(
                torch.ones(2, K).half(), [torch.ones(K, 1).half()], layout, group
            )
    assert comm.get_total_counts() == 0


# --- refused calls


@on_ranks(2)
def test_operands_of_a_call(ctx: RankContext) -> None:
    kernel, group = get_kernel("ascend"), dist.group.WORLD
    layout = RowLayout(1, (2, 2), 1, ctx.rank)
    x = torch.ones(2, K).half()
    strided = torch.ones(2 * K, 4).half()[::2]
    with hccl_over_gloo() as calls:
        kernel.prepare(group)
        with pytest.raises(MC2ConstraintError, match=r"contiguous or the \.t\(\)"):
            kernel.all_gather_matmul(x, [torch.ones(K, 4).half(), strided], layout, group)
        with pytest.raises(MC2ConstraintError, match="2-D by 2-D"):
            kernel.all_gather_matmul(x[None], [torch.ones(K, 4).half()], layout, group)
        term = torch.ones(4, 32768).half(), torch.ones(32768, 1).half()
        with pytest.raises(MC2ConstraintError, match="K < 65535, got 65536"):  # summed over terms
            kernel.matmul_reduce_scatter([term, term], layout, group)
        assert not calls
        # An activation that is not contiguous, such as a gradient of a sum, is copied.
        kernel.all_gather_matmul(
            torch.ones(1, 1).half().expand(2, K), [torch.ones(K, 4).half()], layout, group
        )
        assert calls[0].x.is_contiguous()


@on_ranks(2)
def test_every_reason_at_once(ctx: RankContext) -> None:
    reasons = reasons_not_supported(
        "ascend",
        "matmul_reduce_scatter",
        contractions=[255, 65535],
        dtypes=[torch.float32, torch.float16],
        layout=RowLayout(1, (2, 2, 1), 1, 0),
        group=dist.group.WORLD,
        chunks=2,
    )
    text = "\n".join(reasons)
    for part in ("255", "65535", "float32", "one dtype", "3", "divide evenly", "HCCL", "chunks"):
        assert part in text
