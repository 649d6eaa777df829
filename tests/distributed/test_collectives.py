"""The four collectives on plain local tensors, against the same computation in one process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks
from tests.common.exact import by_name, same
from tests.common.late_ranks import ahead

if IN_RANK_PROCESS:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import CommDebugMode

    from pending_dtensor import PendingLocal, PendingState, record_overlap
    from pending_dtensor.collectives import (
        Axis,
        all_gather,
        all_reduce,
        all_to_all,
        chunk_sizes,
        mesh_axis,
    )
    from pending_dtensor.collectives import reduce_scatter as start_reduce_scatter

DTYPES = ["float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8", "bool"]

# One case: a launch, and what it must give.
Case = tuple[Callable[[], Any], Any]


def ramp(shape: tuple[int, ...], dtype: str = "float32", *, step: int = 1) -> torch.Tensor:
    """Small integers 0 to 5, the same on every rank."""
    values = torch.arange(math.prod(shape)).mul(step).remainder(6).view(shape)
    return values.to(getattr(torch, dtype))


def layouts(value: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same value contiguous, transposed in memory, and with gaps in memory."""
    gaps = value.new_zeros((*value.shape, 2))
    gaps[..., 1] = value
    return {
        "contiguous": value.contiguous(),
        "transposed": value.transpose(0, -1).contiguous().transpose(0, -1),
        "gaps": gaps[..., 1],
    }


def run(ctx: RankContext, cases: dict[str, Case]) -> None:
    """Launches every case while the other ranks are late, then compares all."""

    def in_flight(started: dict[str, PendingLocal]) -> None:
        by_name(started, lambda name, value: is_in_flight(value, cases[name][1]))

    started = ahead(ctx, lambda: {name: launch() for name, (launch, _) in cases.items()}, in_flight)
    by_name(cases, lambda name, case: same(started[name], fresh(case[1])))


def fresh(value: torch.Tensor) -> torch.Tensor:
    """A copy whose strides are those of a new tensor, also for sizes of 1."""
    return torch.empty(value.shape, dtype=value.dtype).copy_(value)


def is_in_flight(value: PendingLocal, expected: torch.Tensor) -> None:
    # Nothing is sent for an empty value. It is empty on every rank: the shard of one may be, while
    # those of others are not.
    if expected.numel():
        assert value.state is PendingState.IN_FLIGHT
    assert (value.shape, value.dtype) == (expected.shape, expected.dtype)
    assert value.is_contiguous()


def sizes_of_a_dim(ranks: int) -> dict[str, int]:
    return {"even": 2 * ranks, "uneven": 2 * ranks - 1, "one": 1, "empty": 0}


def shapes(ranks: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name, shape and dim: each kind of size along each dim of 1-D to 3-D tensors."""
    for ndim in (1, 2, 3):
        for dim in range(ndim):
            for name, size in sizes_of_a_dim(ranks).items():
                shape = [3, 2, 4][:ndim]
                shape[dim] = size
                yield f"{name} dim {dim} of {ndim}", tuple(shape), dim
    # A leading size of 1 is where no copy is needed.
    yield "dim 1 behind 1", (1, 2 * ranks, 3), 1
    yield "uneven dim 1 behind 1", (1, 2 * ranks - 1, 3), 1


@on_ranks(2)
def test_chunk_sizes_are_those_of_shard(ctx: RankContext) -> None:
    for ranks, size in itertools.product([1, 2, 3, 4], range(1, 10)):
        parts = [part.numel() for part in torch.empty(size).chunk(ranks)]
        assert chunk_sizes(size, ranks) == parts + [0] * (ranks - len(parts))
    assert chunk_sizes(0, 3) == [0, 0, 0]


# --- each collective


@on_ranks(2, 3, 4)
def test_all_gather(ctx: RankContext) -> None:
    axis = mesh_axis(ctx.mesh(), 0)
    cases: dict[str, Case] = {}
    for name, shape, dim in shapes(ctx.world_size):
        whole = ramp(shape)
        sizes = chunk_sizes(shape[dim], ctx.world_size)
        for layout, part in layouts(whole.split(sizes, dim)[ctx.rank]).items():
            cases[f"{name}, {layout}"] = launch(all_gather, part, dim, axis, sizes), whole
    run(ctx, cases)


@on_ranks(2, 3)
def test_all_gather_of_parts_of_any_size(ctx: RankContext) -> None:
    axis = mesh_axis(ctx.mesh(), 0)
    cases: dict[str, Case] = {}
    for sizes in ([1, 3, 2], [0, 0, 4], [3, 0, 1]):
        sizes = sizes[-ctx.world_size :]
        for dim in (0, 1):
            shape = [2, 2]
            shape[dim] = sum(sizes)
            whole = ramp(tuple(shape))
            part = whole.split(sizes, dim)[ctx.rank]
            cases[f"{sizes} along {dim}"] = launch(all_gather, part, dim, axis, sizes), whole
    run(ctx, cases)


def launch(collective: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: collective(*args)


def summands(ctx: RankContext, whole: torch.Tensor, reduce_op: str) -> torch.Tensor:
    """This rank's part of a reduction whose result `reduced` knows."""
    scale = ctx.world_size if reduce_op == "avg" else 1  # the mean is exact
    if whole.dtype == torch.bool:
        return whole if ctx.rank == 0 else torch.zeros_like(whole)
    return whole * (ctx.rank + 1) * scale


def reduced(ctx: RankContext, whole: torch.Tensor, reduce_op: str) -> torch.Tensor:
    ranks = ctx.world_size
    if whole.dtype == torch.bool:
        return whole if reduce_op in ("sum", "max") else torch.zeros_like(whole)
    factor = {"min": 1, "max": ranks}.get(reduce_op, ranks * (ranks + 1) // 2)
    return whole * factor


@on_ranks(2, 3, 4)
def test_reduce_scatter(ctx: RankContext) -> None:
    axis = mesh_axis(ctx.mesh(), 0)
    cases: dict[str, Case] = {}
    for (name, shape, dim), reduce_op in itertools.product(
        shapes(ctx.world_size), ("sum", "avg", "max", "min")
    ):
        whole = ramp(shape)
        sizes = chunk_sizes(shape[dim], ctx.world_size)
        expected = reduced(ctx, whole, reduce_op).split(sizes, dim)[ctx.rank]
        layout_names = ["contiguous", "transposed", "gaps"] if reduce_op == "sum" else ["gaps"]
        for layout in layout_names:
            local = layouts(summands(ctx, whole, reduce_op))[layout]
            cases[f"{name}, {layout}, {reduce_op}"] = (
                launch(start_reduce_scatter, local, dim, axis, sizes, reduce_op),
                expected,
            )
    run(ctx, cases)


@on_ranks(2, 3, 4)
def test_all_reduce(ctx: RankContext) -> None:
    axis = mesh_axis(ctx.mesh(), 0)
    cases: dict[str, Case] = {}
    for shape, reduce_op in itertools.product(
        [(), (1,), (5,), (3, 4), (2, 3, 4), (0, 3)], ("sum", "avg", "max", "min")
    ):
        whole = ramp(shape)
        local = summands(ctx, whole, reduce_op)
        for layout, variant in (layouts(local) if shape else {"scalar": local}).items():
            cases[f"{shape}, {layout}, {reduce_op}"] = (
                launch(all_reduce, variant, axis, reduce_op),
                reduced(ctx, whole, reduce_op),
            )
    run(ctx, cases)


@on_ranks(2, 3, 4)
def test_all_to_all(ctx: RankContext) -> None:
    axis = mesh_axis(ctx.mesh(), 0)
    ranks = ctx.world_size
    kinds = sizes_of_a_dim(ranks)
    cases: dict[str, Case] = {}
    for ndim in (2, 3):
        for gather_dim, scatter_dim in itertools.permutations(range(ndim), 2):
            for (gather, gather_size), (scatter, scatter_size) in itertools.product(
                kinds.items(), repeat=2
            ):
                shape = [3, 2, 4][:ndim]
                shape[gather_dim], shape[scatter_dim] = gather_size, scatter_size
                whole = ramp(tuple(shape))
                now = chunk_sizes(gather_size, ranks)
                then = chunk_sizes(scatter_size, ranks)
                part = whole.split(now, gather_dim)[ctx.rank]
                expected = whole.split(then, scatter_dim)[ctx.rank]
                layout = ["contiguous", "transposed", "gaps"][len(cases) % 3]
                cases[f"{gather} {gather_dim} -> {scatter} {scatter_dim} of {ndim}, {layout}"] = (
                    launch(
                        all_to_all,
                        layouts(part)[layout],
                        gather_dim,
                        scatter_dim,
                        axis,
                        now,
                        then,
                    ),
                    expected,
                )
    run(ctx, cases)


@on_ranks(2)
def test_an_expanded_input(ctx: RankContext) -> None:
    axis = mesh_axis(ctx.mesh(), 0)
    row = ramp((1, 4)).expand(3, 4)
    sizes = [3, 3]
    run(
        ctx,
        {
            "all_gather": (launch(all_gather, row, 0, axis, sizes), torch.cat([row, row])),
            "all_reduce": (launch(all_reduce, row, axis, "sum"), row * 2),
            "reduce_scatter": (
                launch(start_reduce_scatter, row, 1, axis, [2, 2], "sum"),
                row.chunk(2, 1)[ctx.rank] * 2,
            ),
            "all_to_all": (
                launch(all_to_all, row, 0, 1, axis, sizes, [2, 2]),
                torch.cat([row, row]).chunk(2, 1)[ctx.rank],
            ),
        },
    )


# --- dtypes


@pytest.mark.parametrize("dtype", DTYPES)
@on_ranks(2, 3)
def test_dtypes(ctx: RankContext, dtype: str) -> None:
    axis = mesh_axis(ctx.mesh(), 0)
    ranks = ctx.world_size
    whole = ramp((3, 2 * ranks - 1), dtype)
    columns = chunk_sizes(whole.size(1), ranks)
    rows = chunk_sizes(whole.size(0), ranks)
    part = whole.split(columns, 1)[ctx.rank]
    cases: dict[str, Case] = {
        "all_gather": (launch(all_gather, part, 1, axis, columns), whole),
        "all_to_all": (
            launch(all_to_all, part, 1, 0, axis, columns, rows),
            whole.split(rows)[ctx.rank],
        ),
    }
    for reduce_op in reductions_of(dtype):
        local = summands(ctx, whole, reduce_op)
        expected = reduced(ctx, whole, reduce_op)
        cases[f"all_reduce {reduce_op}"] = launch(all_reduce, local, axis, reduce_op), expected
        cases[f"reduce_scatter {reduce_op}"] = (
            launch(start_reduce_scatter, local, 1, axis, columns, reduce_op),
            expected.split(columns, 1)[ctx.rank],
        )
    run(ctx, cases)


def reductions_of(dtype: str) -> list[str]:
    if dtype == "bool":
        return []
    return ["sum", "max", "min"] if "int" in dtype else ["sum", "avg", "max", "min"]


# --- what is seen of it


@on_ranks(2, 3)
def test_events(ctx: RankContext) -> None:
    axis = mesh_axis(ctx.mesh(), 0)
    ranks = ctx.world_size
    size = 2 * ranks - 1
    sizes = chunk_sizes(size, ranks)
    part = torch.zeros(3, sizes[ctx.rank], dtype=torch.bfloat16)
    whole = torch.zeros(size, 4, dtype=torch.float64)
    with record_overlap() as log, CommDebugMode() as comm:
        values = [
            all_gather(part, 1, axis, sizes),
            start_reduce_scatter(whole, 0, axis, sizes, "sum"),
            all_reduce(whole, axis, "max"),
            all_to_all(part.contiguous(), 1, 0, axis, sizes, chunk_sizes(3, ranks)),
            all_gather(whole[:0], 0, axis, [0] * ranks),  # empty: nothing is sent
            all_reduce(whole[:0], axis, "sum"),
        ]
        counts = {str(op): count for op, count in comm.get_comm_counts().items()}
    assert counts == {
        "c10d_functional.all_gather_into_tensor": 1,
        "c10d_functional.reduce_scatter_tensor": 1,
        "c10d_functional.all_reduce": 1,
        "c10d_functional.all_to_all_single": 1,
    }
    assert [(event.kind, event.kernel, event.shape, event.dtype) for event in log.events] == [
        ("all_gather", "unfused", (3, size), torch.bfloat16),
        ("reduce_scatter", "unfused", (sizes[ctx.rank], 4), torch.float64),
        ("all_reduce", "unfused", (size, 4), torch.float64),
        ("all_to_all", "unfused", tuple(values[3].shape), torch.bfloat16),
    ]
    assert [event.bytes for event in log.events] == [
        3 * 2 * ranks * 2,  # padded
        2 * ranks * 4 * 8,  # padded
        size * 4 * 8,
        3 * sizes[ctx.rank] * 2,
    ]
    assert {event.group for event in log.events} == {axis.group}
    assert [value.state for value in values[4:]] == [PendingState.READY] * 2

    assert all(event.wait_began is None for event in log.events)
    for value in values:
        value.wait()
    for event in log.events:
        assert event.wait_began is not None
        assert event.readable is not None
        assert event.started <= event.wait_began <= event.readable
        assert event.exposed_s == event.readable - event.wait_began


@on_ranks(2)
def test_a_view_is_not_copied_where_no_copy_is_needed(ctx: RankContext) -> None:
    """The buffer that the collective filled is the value: for dim 0, and behind sizes of 1."""
    axis = mesh_axis(ctx.mesh(), 0)
    for value in (
        all_gather(torch.ones(2, 3), 0, axis, [2, 2]),
        all_gather(torch.ones(1, 2, 3), 1, axis, [2, 2]),
        start_reduce_scatter(torch.ones(4, 3), 0, axis, [2, 2], "sum"),
        start_reduce_scatter(torch.ones(1, 4, 3), 1, axis, [2, 2], "sum"),
        all_reduce(torch.ones(4), axis, "sum"),
    ):
        buffer = value.pending._buffer
        assert buffer is not None
        assert value.wait().data_ptr() == buffer.data_ptr()


@on_ranks(2)
def test_a_pending_input_is_no_part_of_this_layer(ctx: RankContext) -> None:
    """Below autograd: what a collective gives has no history, whatever its input has."""
    axis = mesh_axis(ctx.mesh(), 0)
    leaf = torch.ones(2, requires_grad=True)
    for value in (all_gather(leaf * 2, 0, axis, [2, 2]), all_reduce(leaf * 2, axis, "sum")):
        assert not value.requires_grad
        assert not value.wait().requires_grad


@on_ranks(2)
def test_a_group_that_is_gone(ctx: RankContext) -> None:
    from pending_dtensor.errors import ProcessGroupGoneError

    group = dist.new_group()
    axis = Axis(group.group_name, 2, ctx.rank)
    same(all_reduce(torch.ones(2), axis, "sum"), torch.full((2,), 2.0))
    dist.destroy_process_group(group)
    part = torch.ones(2, 2)
    for start in (
        lambda: all_reduce(part, axis, "sum"),
        lambda: all_gather(part, 0, axis, [2, 2]),
        lambda: start_reduce_scatter(part, 0, axis, [1, 1], "sum"),
        lambda: all_to_all(part, 0, 1, axis, [2, 2], [1, 1]),
    ):
        with pytest.raises(ProcessGroupGoneError, match="Expected a process group to be alive"):
            start()
