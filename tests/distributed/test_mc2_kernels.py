"""Every kernel against the unsharded matmul, exactly, on every kind of row layout."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks

if IN_RANK_PROCESS:
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    from mc2 import piecewise_gather, piecewise_scatter, row_exchange
    from mc2.errors import MC2ConstraintError
    from mc2.kernels import get_kernel, pipelined
    from mc2.row_layout import RowLayout
    from pending_dtensor.torch_compat import work_registry_size

KERNELS = [
    ("decomposed", "auto"),
    ("pipelined", 1),
    ("pipelined", 2),
    ("pipelined", 3),
    ("pipelined", "auto"),
]
every_kernel = pytest.mark.parametrize(("kernel", "chunks"), KERNELS)
each_portable_kernel = pytest.mark.parametrize("kernel", ["decomposed", "pipelined"])


def layouts(ctx: RankContext) -> Iterator[RowLayout]:
    """Dims before, after, on both sides of the sequence; even, uneven and empty ranks."""
    even = (4,) * ctx.world_size
    uneven = (5, 3, 4, 1)[: ctx.world_size]
    short = (2, 0, 1, 0)[: ctx.world_size]
    for outer, inner in ((1, 1), (3, 1), (1, 2), (2, 3)):
        for sizes in (even, uneven, short):
            yield RowLayout(outer, sizes, inner, ctx.rank)
    yield RowLayout(2, (0,) * ctx.world_size, 1, ctx.rank)


def bits(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros and ones: their sums of products are exact in every dtype here, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, shape, generator=generator).to(dtype)


def rows_of_this_rank(tensor: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """This rank's part of a global (M, F) tensor, cut along the sequence dim."""
    features = tensor.shape[1]
    whole = tensor.view(layout.outer, sum(layout.sizes), layout.inner, features)
    part = whole.split(list(layout.sizes), dim=1)[layout.rank]
    return part.reshape(layout.local_rows, features)


def weights_of(rank: int, contraction: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Three siblings, the last without features on rank 1; a Linear's weight transposed, or not."""
    features = (2, 4, 0 if rank == 1 else 3)
    plain = bits(contraction, features[0], seed=100 + rank, dtype=dtype)
    others = [bits(n, contraction, seed=n + rank, dtype=dtype).t() for n in features[1:]]
    return [plain, *others]


@every_kernel
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@on_ranks(2, 3, 4)
def test_all_gather_matmul_equals_the_unsharded_matmul(
    ctx: RankContext, kernel: str, chunks: Any, dtype: str
) -> None:
    contraction = 5
    weights = weights_of(ctx.rank, contraction, getattr(torch, dtype))
    for layout in layouts(ctx):
        x = bits(layout.rows, contraction, seed=layout.rows, dtype=getattr(torch, dtype))
        outs, gathered, report, _ = get_kernel(kernel).all_gather_matmul(
            rows_of_this_rank(x, layout), weights, layout, dist.group.WORLD, chunks=chunks
        )
        assert torch.equal(gathered, x), layout
        for out, weight in zip(outs, weights, strict=True):
            assert torch.equal(out, x @ weight), layout
        assert report.kernel == kernel
        if chunks != "auto" and layout.rows:
            assert report.chunks == min(chunks, layout.max_rows)
            assert report.steps == report.chunks * (ctx.world_size - 1)


@every_kernel
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@on_ranks(2, 3, 4)
def test_the_product_with_the_gathered_rows_is_made_besides(
    ctx: RankContext, kernel: str, chunks: Any, dtype: str
) -> None:
    chosen, group = get_kernel(kernel), dist.group.WORLD
    weights = weights_of(ctx.rank, 5, getattr(torch, dtype))
    for layout in layouts(ctx):
        gathered = bits(layout.rows, 5, seed=layout.rows, dtype=getattr(torch, dtype))
        shard = rows_of_this_rank(gathered, layout)
        x = bits(3 + ctx.rank, layout.rows, seed=ctx.rank, dtype=getattr(torch, dtype)).t()
        plain = chosen.all_gather_matmul(shard, weights, layout, group, chunks=chunks)
        for keep in (True, False):
            result = chosen.all_gather_matmul(
                shard, weights, layout, group, product_with=x, gather_output=keep, chunks=chunks
            )
            assert result.product is not None
            assert torch.equal(result.product, gathered.t() @ x), layout
            assert result.product.dtype == x.dtype
            for out, expected in zip(result.outs, plain.outs, strict=True):
                assert torch.equal(out, expected), layout
            assert (result.gathered is None) == (not keep)
            assert result.report.steps == plain.report.steps


@on_ranks(2)
def test_a_product_in_many_pieces_is_rounded_once(ctx: RankContext) -> None:
    """2,048 times 1.0: bfloat16 cannot count beyond 256."""
    layout = RowLayout(1, (1024, 1024), 1, ctx.rank)
    ones = torch.ones(layout.rows, 1, dtype=torch.bfloat16)
    result = get_kernel("pipelined").all_gather_matmul(
        ones[:1024], [ones[:1]], layout, dist.group.WORLD, product_with=ones, chunks=1024
    )
    assert result.product is not None
    assert result.product.item() == 2048


@every_kernel
@on_ranks(2, 3, 4)
def test_started_scatter_is_in_flight_and_ends_as_the_finished_one(
    ctx: RankContext, kernel: str, chunks: Any
) -> None:
    chosen = get_kernel(kernel)
    for layout in layouts(ctx):
        terms = terms_of(ctx.rank, layout.rows, 3, torch.float32)
        expected, _ = chosen.matmul_reduce_scatter(terms, layout, dist.group.WORLD, chunks=chunks)
        if ctx.rank == 0 and layout.rows and layout.outer == 3:
            time.sleep(0.1)
        started = chosen.start_matmul_reduce_scatter(terms, layout, dist.group.WORLD, chunks=chunks)
        assert (work_registry_size() > 0) == (layout.rows > 0), layout
        buffers = [torch.ops._c10d_functional.wait_tensor(buffer) for buffer in started.buffers]
        assert torch.equal(started.finish(*buffers), expected), layout
        assert work_registry_size() == 0
    args = (
        [x for x, _ in terms],
        [weight for _, weight in terms],
        *(layout.outer, layout.sizes, layout.inner, layout.rank, dist.group.WORLD.group_name),
        *((2, False) if kernel == "pipelined" else ()),
    )
    torch.library.opcheck(chosen.start_op, args, test_utils=("test_schema", "test_faketensor"))


def terms_of(rank: int, rows: int, features: int, dtype: torch.dtype) -> list[Any]:
    """Three terms of different contractions, one of them empty on rank 1."""
    contractions = (3, 1, 0 if rank == 1 else 4)
    return [
        (
            bits(rows, k, seed=10 * rank + k, dtype=dtype),
            bits(features, k, seed=20 * rank + k, dtype=dtype).t(),
        )
        for k in contractions
    ]


@every_kernel
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@on_ranks(2, 3, 4)
def test_matmul_reduce_scatter_equals_the_unsharded_matmul(
    ctx: RankContext, kernel: str, chunks: Any, dtype: str
) -> None:
    for layout in layouts(ctx):
        by_rank = [
            terms_of(rank, layout.rows, 5, getattr(torch, dtype)) for rank in range(ctx.world_size)
        ]
        total = sum(x @ weight for terms in by_rank for x, weight in terms)
        out, report = get_kernel(kernel).matmul_reduce_scatter(
            by_rank[ctx.rank], layout, dist.group.WORLD, chunks=chunks
        )
        assert torch.equal(out, rows_of_this_rank(total, layout)), layout
        assert report.kernel == kernel
        if chunks != "auto" and layout.rows:
            assert report.chunks == min(chunks, layout.max_rows)


@on_ranks(2)
def test_the_oracle_sees_permuted_tokens_and_a_missing_summand(ctx: RankContext) -> None:
    layout = RowLayout(3, (4, 4), 1, ctx.rank)
    flattened = dataclasses.replace(layout, outer=1, sizes=(12, 12))  # the classic mistake
    x = bits(layout.rows, 5, seed=0, dtype=torch.float32)
    weight = torch.eye(5)
    kernel = get_kernel("pipelined")
    shard = rows_of_this_rank(x, layout)
    wrong = kernel.all_gather_matmul(shard, [weight], flattened, dist.group.WORLD).outs[0]
    assert not torch.equal(wrong, x @ weight)
    assert torch.equal(wrong.sort(0).values, (x @ weight).sort(0).values)

    terms = terms_of(ctx.rank, layout.rows, 5, torch.float32)
    one_short = kernel.matmul_reduce_scatter(terms[:2], layout, dist.group.WORLD).out
    assert not torch.equal(
        one_short, kernel.matmul_reduce_scatter(terms, layout, dist.group.WORLD).out
    )


@each_portable_kernel
@on_ranks(1)
def test_one_rank_multiplies_and_copies_nothing(ctx: RankContext, kernel: str) -> None:
    layout = RowLayout(2, (3,), 2, 0)
    x, weight = torch.randn(12, 4), torch.randn(4, 5)
    result = get_kernel(kernel).all_gather_matmul(x, [weight], layout, dist.group.WORLD)
    assert result.gathered is x
    torch.testing.assert_close(result.outs[0], x @ weight)
    out = get_kernel(kernel).matmul_reduce_scatter([(x, weight)], layout, dist.group.WORLD).out
    torch.testing.assert_close(out, x @ weight)


@every_kernel
@on_ranks(3)
def test_gathered_only_if_asked_for(ctx: RankContext, kernel: str, chunks: Any) -> None:
    for layout in layouts(ctx):
        x = bits(layout.rows, 5, seed=1, dtype=torch.float32)
        weight = bits(5, 2, seed=2, dtype=torch.float32)
        result = get_kernel(kernel).all_gather_matmul(
            rows_of_this_rank(x, layout),
            [weight],
            layout,
            dist.group.WORLD,
            gather_output=False,
            chunks=chunks,
        )
        assert result.gathered is None
        assert torch.equal(result.outs[0], x @ weight)


@pytest.mark.parametrize("dtype", ["int64", "complex64", "float64"])
@on_ranks(3)
def test_pipelined_takes_any_dtype(ctx: RankContext, dtype: str) -> None:
    layout = RowLayout(2, (3, 1, 2), 1, ctx.rank)
    x = bits(layout.rows, 5, seed=1, dtype=getattr(torch, dtype))
    weight = bits(5, 2, seed=2, dtype=getattr(torch, dtype))
    kernel = get_kernel("pipelined")
    gathered = kernel.all_gather_matmul(
        rows_of_this_rank(x, layout), [weight], layout, dist.group.WORLD, chunks=2
    )
    assert torch.equal(gathered.outs[0], x @ weight)
    scattered = kernel.matmul_reduce_scatter([(x, weight)], layout, dist.group.WORLD, chunks=2)
    assert torch.equal(scattered.out, rows_of_this_rank(3 * (x @ weight), layout))


@on_ranks(3)
def test_operands_need_not_be_contiguous(ctx: RankContext) -> None:
    layout = RowLayout(2, (3, 1, 2), 1, ctx.rank)
    x = bits(7, layout.rows, seed=1, dtype=torch.float32).t()
    weight = bits(14, 8, seed=2, dtype=torch.float32)[::2, ::2]
    for kernel in (get_kernel("decomposed"), get_kernel("pipelined")):
        shard = rows_of_this_rank(x.contiguous(), layout).t().contiguous().t()
        assert not shard.is_contiguous() or len(shard) == 1
        outs, *_ = kernel.all_gather_matmul(shard, [weight], layout, dist.group.WORLD)
        assert torch.equal(outs[0], x @ weight)
        out = kernel.matmul_reduce_scatter([(x, weight)], layout, dist.group.WORLD).out
        assert torch.equal(out, rows_of_this_rank(3 * (x @ weight), layout))


# --- order


@pytest.mark.parametrize("chunks", [1, 3, "auto"])
@on_ranks(4)
def test_pipelined_adds_partial_sums_in_rank_order(ctx: RankContext, chunks: Any) -> None:
    layout = RowLayout(1, (3, 3, 3, 3), 1, ctx.rank)
    ones = torch.ones(layout.rows, 1)

    def reduced(by_rank: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        weight = torch.tensor([[by_rank[ctx.rank]]], dtype=dtype)
        terms = [(ones.to(dtype), weight)]
        kernel = get_kernel("pipelined")
        return kernel.matmul_reduce_scatter(terms, layout, dist.group.WORLD, chunks=chunks).out

    # ((1e8 + 1) - 1e8) + 1 is 1 in float32, as 1e8 + 1 is 1e8; another order gives 0 or 2.
    assert (reduced([1e8, 1, -1e8, 1], torch.float32) == 1).all()
    # Half precision is added up in float32: in float16, 2048 + 1 is 2048.
    assert (reduced([2048, 1, 1, 0], torch.float16) == 2050).all()


@every_kernel
@on_ranks(2, 4)
def test_two_runs_give_the_same_bits(ctx: RankContext, kernel: str, chunks: Any) -> None:
    layout = RowLayout(2, (5, 3, 4, 1)[: ctx.world_size], 3, ctx.rank)
    generator = torch.Generator().manual_seed(ctx.rank)
    shard = torch.randn(layout.local_rows, 33, generator=generator)
    x = torch.randn(layout.rows, 33, generator=generator)
    weight = torch.randn(33, 17, generator=generator)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        chosen = get_kernel(kernel)
        gathered = chosen.all_gather_matmul(
            shard, [weight], layout, dist.group.WORLD, chunks=chunks
        )
        scattered = chosen.matmul_reduce_scatter(
            [(x, weight)], layout, dist.group.WORLD, chunks=chunks
        )
        return gathered.outs[0], scattered.out

    first = run()
    if ctx.rank == 0:
        time.sleep(0.1)  # another order of arrival
    second = run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def noting_calls(log: list[str], owner: Any, attribute: str, what: str) -> Any:
    """A context in which each call of a function is noted."""
    function = getattr(owner, attribute)

    def call(*args: Any, **kwargs: Any) -> Any:
        log.append(what)
        return function(*args, **kwargs)

    return mock.patch.object(owner, attribute, call)


@on_ranks(2, 4)
def test_pipelined_overlaps_by_its_order_of_work(ctx: RankContext) -> None:
    """Own rows before any wait when gathering; each piece sent when made, own rows last."""
    kernel, chunks = get_kernel("pipelined"), 2
    layout = RowLayout(1, (4,) * ctx.world_size, 1, ctx.rank)
    peers = ctx.world_size - 1
    log: list[str] = []
    patched = functools.partial(noting_calls, log)

    with (
        patched(piecewise_gather, "RowExchange", "start"),
        patched(piecewise_gather, "wait", "wait"),
        patched(piecewise_scatter, "RowExchange", "start"),
        patched(pipelined, "wait_tensor", "wait"),
        patched(torch, "mm", "multiply"),
    ):
        x, weight = torch.ones(layout.rows, 3), torch.ones(3, 2)
        shard = x[: layout.local_rows]
        kernel.all_gather_matmul(shard, [weight], layout, dist.group.WORLD, chunks=chunks)
        gathering = list(log)
        log.clear()
        kernel.matmul_reduce_scatter([(x, weight)], layout, dist.group.WORLD, chunks=chunks)
        scattering = list(log)

    ahead = min(peers, 2)
    start = ["start"] * chunks
    expected = start * ahead + ["multiply"]
    for peer in range(peers):  # the next but one is asked when the last piece is there
        expected += ["wait", "multiply"] * (chunks - 1)
        expected += ["wait", *(start if peer + ahead < peers else []), "multiply"]
    sent = ["wait"] * chunks * peers
    assert gathering == expected + sent
    made_and_sent = ["multiply", "start"] * chunks * peers
    # Every block is waited for; of the own ones, which come first, nothing is on its way.
    waits = ["wait"] * chunks * (peers + 1)
    assert scattering == made_and_sent + ["multiply"] * chunks + waits


@on_ranks(4)
def test_beside_one_collective_own_rows_are_multiplied(ctx: RankContext) -> None:
    """Then those of the ranks below, and of those above, where there are any."""
    layout = RowLayout(1, (4,) * ctx.world_size, 1, ctx.rank)
    log: list[str] = []
    patched = functools.partial(noting_calls, log)

    with (
        patched(piecewise_gather, "start_gather_rows", "start"),
        patched(piecewise_gather, "wait_tensor", "wait"),
        patched(torch, "mm", "multiply"),
    ):
        shard, weight = torch.ones(4, 3), torch.ones(3, 2)
        result = get_kernel("pipelined").all_gather_matmul(
            shard, [weight], layout, dist.group.WORLD
        )
    assert str(result.report) == "pipelined one collective"
    others = 1 if ctx.rank in (0, ctx.world_size - 1) else 2
    assert log == ["start", "multiply", "wait", *["multiply"] * others]


@every_kernel
@on_ranks(3)
def test_a_late_rank_is_waited_for(ctx: RankContext, kernel: str, chunks: Any) -> None:
    layout = RowLayout(2, (2, 3, 1), 1, ctx.rank)
    x = bits(layout.rows, 5, seed=1, dtype=torch.float32)
    weight = bits(5, 2, seed=2, dtype=torch.float32)
    shard = rows_of_this_rank(x, layout)
    dist.barrier()
    if ctx.rank == 1:
        time.sleep(0.3)
    outs, _, gather_report, _ = get_kernel(kernel).all_gather_matmul(
        shard, [weight], layout, dist.group.WORLD, chunks=chunks
    )
    assert torch.equal(outs[0], x @ weight)
    dist.barrier()
    if ctx.rank == 1:
        time.sleep(0.3)
    out, scatter_report = get_kernel(kernel).matmul_reduce_scatter(
        [(x, weight)], layout, dist.group.WORLD, chunks=chunks
    )
    assert torch.equal(out, rows_of_this_rank(3 * (x @ weight), layout))
    if ctx.rank != 1:
        # The sleeper's 0.3 s, less what scheduling takes; the report counts them as blocked.
        assert gather_report.blocked_s > 0.1
        assert scatter_report.blocked_s > 0.1


# --- groups


@every_kernel
@on_ranks(4)
def test_both_axes_of_a_mesh_at_once(ctx: RankContext, kernel: str, chunks: Any) -> None:
    mesh = ctx.mesh(2, 2)
    for axis in ("tp", "dp"):
        group = mesh.get_group(axis)
        layout = RowLayout(3, (3, 1), 1, mesh.get_local_rank(axis))
        other = mesh.get_local_rank("dp" if axis == "tp" else "tp")
        x = bits(layout.rows, 5, seed=7 + other, dtype=torch.float32)
        weight = bits(5, 2, seed=2, dtype=torch.float32)
        outs, *_ = get_kernel(kernel).all_gather_matmul(
            rows_of_this_rank(x, layout), [weight], layout, group, chunks=chunks
        )
        assert torch.equal(outs[0], x @ weight)
        out, _ = get_kernel(kernel).matmul_reduce_scatter(
            [(x, weight)], layout, group, chunks=chunks
        )
        assert torch.equal(out, rows_of_this_rank(2 * (x @ weight), layout))


@every_kernel
@on_ranks(2, 3)
def test_other_collectives_of_the_group_in_flight(
    ctx: RankContext, kernel: str, chunks: Any
) -> None:
    functional = torch.ops._c10d_functional
    name = dist.group.WORLD.group_name
    layout = RowLayout(2, (2, 3, 1)[: ctx.world_size], 1, ctx.rank)
    x = bits(layout.rows, 5, seed=1, dtype=torch.float32)
    weight = bits(5, 2, seed=2, dtype=torch.float32)
    large = torch.full((1 << 18,), ctx.rank + 1.0)
    before = [functional.all_reduce(large * i, "sum", name) for i in range(4)]
    outs, *_ = get_kernel(kernel).all_gather_matmul(
        rows_of_this_rank(x, layout), [weight], layout, dist.group.WORLD, chunks=chunks
    )
    between = functional.all_reduce(large, "sum", name)
    out, _ = get_kernel(kernel).matmul_reduce_scatter(
        [(x, weight)], layout, dist.group.WORLD, chunks=chunks
    )
    total = ctx.world_size * (ctx.world_size + 1) / 2
    assert torch.equal(outs[0], x @ weight)
    assert torch.equal(out, rows_of_this_rank(ctx.world_size * (x @ weight), layout))
    for i, reduced in enumerate([*before, between]):
        factor = i if i < 4 else 1
        assert (functional.wait_tensor(reduced) == total * factor).all()


# --- as ops


@on_ranks(1)
def test_a_forked_process_posts_by_a_thread_of_its_own(ctx: RankContext) -> None:
    """Threads do not survive a fork."""
    parent = row_exchange._poster().submit(os.getpid).result()
    child = os.fork()
    if child == 0:
        try:
            poster = row_exchange._poster().submit(os.getpid)
            os._exit(0 if poster.result(timeout=10) == os.getpid() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert parent == os.getpid()


@each_portable_kernel
@on_ranks(2)
def test_each_is_one_op_to_tracing_counting_and_debugging(ctx: RankContext, kernel: str) -> None:
    layout = RowLayout(2, (4, 3), 1, ctx.rank)
    shard, x = torch.randn(layout.local_rows, 6), torch.randn(layout.rows, 6)
    weights = [torch.randn(6, 5), torch.randn(6, 2)]
    chosen, group = get_kernel(kernel), dist.group.WORLD

    def gather(shard: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
        result = chosen.all_gather_matmul(shard, weights, layout, group)
        return [result.gathered, *result.outs]

    def scatter(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return chosen.matmul_reduce_scatter([(x, weight), (x, weight)], layout, group).out

    def shapes(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
        return [tuple(tensor.shape) for tensor in tensors]

    real = [*gather(shard, *weights), scatter(x, weights[0])]
    with CommDebugMode() as comm, FlopCounterMode(display=False) as flops:
        gather(shard, *weights)
        scatter(x, weights[0])
    assert comm.get_total_counts() == 0  # the kernel's own collectives are inside the op
    assert flops.get_total_flops() == 2 * 14 * 6 * 7 + 2 * 14 * 6 * 5 * 2

    with FakeTensorMode() as mode:
        faked = [mode.from_tensor(tensor) for tensor in (shard, x, *weights)]
        fake = [*gather(faked[0], *faked[2:]), scatter(faked[1], faked[2])]
    assert shapes(fake) == shapes(real)
    assert [t.stride() for t in fake] == [t.stride() for t in real]

    for function, args in ((gather, (shard, *weights)), (scatter, (x, weights[0]))):
        graph = make_fx(function, tracing_mode="fake")(*args).graph
        calls = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        assert [call for call in calls if "getitem" not in call] == [
            f"mc2.{kernel}_{'all_gather_matmul' if function is gather else 'matmul_reduce_scatter'}"
            ".default"
        ]
    with torch.profiler.profile() as profile:
        gather(shard, *weights)
    assert f"mc2::{kernel}_all_gather_matmul" in {event.key for event in profile.key_averages()}


@each_portable_kernel
@on_ranks(2)
def test_opcheck(ctx: RankContext, kernel: str) -> None:
    layout = RowLayout(2, (4, 3), 1, ctx.rank)
    chosen, group = get_kernel(kernel), dist.group.WORLD.group_name
    rows = (layout.outer, layout.sizes, layout.inner, layout.rank)
    extra = (2, False) if kernel == "pipelined" else ()
    tests = ("test_schema", "test_faketensor")
    weight = torch.randn(6, 5)
    shard = torch.randn(layout.local_rows, 6)
    for gather_output in (True, False):
        args = (shard, [weight, weight], *rows, gather_output, group, *extra)
        torch.library.opcheck(chosen.ops["all_gather_matmul"], args, test_utils=tests)
        if chosen.product_op is not None:
            args = (torch.randn(layout.rows, 4), *args)
            torch.library.opcheck(chosen.product_op, args, test_utils=tests)
    args = ([torch.randn(layout.rows, 6)], [weight], *rows, group, *extra)
    torch.library.opcheck(chosen.ops["matmul_reduce_scatter"], args, test_utils=tests)


# --- refusals, on every rank before anything is sent


@each_portable_kernel
@on_ranks(2)
def test_every_reason_at_once_and_nothing_sent(ctx: RankContext, kernel: str) -> None:
    layout = RowLayout(1, (4, 3), 1, ctx.rank)
    chosen, group = get_kernel(kernel), dist.group.WORLD
    shard, weight = torch.ones(layout.local_rows, 6), torch.ones(6, 5)
    with CommDebugMode() as comm:
        with pytest.raises(MC2ConstraintError) as wrong:
            chosen.all_gather_matmul(
                shard[1:], [weight.half(), torch.ones(7, 2)], layout, group, chunks=0
            )
        assert "chunks" in str(wrong.value)
        assert "one dtype, got torch.float32, torch.float16" in str(wrong.value)
        assert f"{layout.local_rows} rows" in str(wrong.value)
        assert "equal contractions, got 6 and 7" in str(wrong.value)
        with pytest.raises(MC2ConstraintError, match="at least one weight"):
            chosen.all_gather_matmul(shard, [], layout, group)
        with pytest.raises(MC2ConstraintError, match=r"\(7, F\) of .* product_with"):
            chosen.all_gather_matmul(shard, [weight], layout, group, product_with=weight)
        with pytest.raises(MC2ConstraintError, match="2-D by 2-D"):
            chosen.matmul_reduce_scatter([(torch.ones(1, 7, 6), weight)], layout, group)
        other = RowLayout(1, (4, 3, 1), 1, ctx.rank)
        with pytest.raises(MC2ConstraintError, match="a layout for the group"):
            chosen.all_gather_matmul(shard, [weight], other, group)
        with pytest.raises(RuntimeError, match="no autograd"):
            chosen.all_gather_matmul(shard.requires_grad_(), [weight], layout, group)
    assert comm.get_total_counts() == 0
    outs, *_ = chosen.all_gather_matmul(shard.detach(), [weight], layout, group)
    assert torch.equal(outs[0], torch.full((7, 5), 6.0))  # the group still works


@on_ranks(2)
def test_a_group_that_is_gone(ctx: RankContext) -> None:
    group = dist.new_group([0, 1])
    dist.destroy_process_group(group)
    layout = RowLayout(1, (2, 2), 1, ctx.rank)
    with pytest.raises(RuntimeError, match="process group to be alive"):
        get_kernel("pipelined").all_gather_matmul(
            torch.ones(2, 3), [torch.ones(3, 2)], layout, group
        )
