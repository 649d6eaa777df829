"""Any program on pending tensors gives what it gives on finished ones, and waits once for each."""

from __future__ import annotations

import time
from typing import Any, NamedTuple
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks
from tests.common.exact import same_bits
from tests.common.property_profiles import examples
from tests.properties.op_programs import Step, run, steps

if IN_RANK_PROCESS:
    import torch
    from torch.distributed.tensor import Partial, Replicate, Shard

    from pending_dtensor import HyperDTensor, PendingLocal, record_overlap
    from pending_dtensor.hyper_dtensor import take_local
    from pending_dtensor.pending_local import materialized
    from pending_dtensor.torch_compat import work_registry_size

    MODES = {
        "grad": torch.enable_grad,
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
    }
    PLACEMENTS = {"S0": Shard(0), "S1": Shard(1), "R": Replicate(), "P": Partial()}


class Input(NamedTuple):
    """A pending tensor: this rank's part of a (rows, columns) one after ``moves``.

    Attributes:
        moves: placements, of which the first is the source.
        owned: whether it is taken as the styles take their output, so that it may be written to.
    """

    moves: tuple[str, ...]
    rows: int
    columns: int
    dtype: str
    requires_grad: bool
    owned: bool


class Program(NamedTuple):
    """Inputs, steps, then what enters a loss, and what is read in the end in which order."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    mode: str
    loss: tuple[int, ...]
    reads: tuple[int, ...]
    late: int


mostly = st.sampled_from([True, True, False])
MOVES = ["S1 R", "S0 R", "P R", "S0 S1", "P S1", "P S0", "S1 S0", "S0 R S0", "S1 R S1 R", "R S0"]

inputs = st.builds(
    Input,
    st.sampled_from([tuple(moves.split()) for moves in MOVES]),
    st.sampled_from([3, 2, 1, 4]),
    st.sampled_from([4, 2, 1, 3]),
    st.sampled_from(["float32", "float32", "bfloat16", "float64", "int64"]),
    mostly,
    mostly,
)
some = st.lists(st.integers(0, 11), max_size=5).map(tuple)
programs = st.builds(
    Program,
    st.lists(inputs, min_size=1, max_size=3).map(tuple),
    st.lists(steps, min_size=1, max_size=10).map(tuple),
    st.sampled_from(["grad", "grad", "grad", "no_grad", "inference"]),
    some,
    some,
    st.integers(0, 2),
)

LATE_S = 0.003


@examples(250)
@given(program=programs)
@on_ranks(2, 3, keep_if_all_raise=True)
def test_a_program_on_pending_tensors(ctx: RankContext, program: Program) -> None:
    refused: set[int] = set()
    with record_overlap() as log, counted_waits() as waits:
        got, alive = outcome(ctx, program, refused, async_op=True)
        # What was refused is left out here; nothing else may be refused.
        expected, _ = outcome(ctx, program, refused, async_op=False)
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            # In inference mode torch says of some views that they require a gradient.
            equal(one, other, graph=program.mode != "inference")
        del got, one
        alive.clear()
    assert work_registry_size() == 0
    assert all(len(event.waits) <= 1 for event in log.events), log.events
    assert waits.call_count == len(log.events)


def counted_waits() -> Any:
    """Counts all waits for collectives, also those for values that were dropped unread."""
    functional = torch.ops._c10d_functional
    return mock.patch.object(functional, "wait_tensor", mock.Mock(wraps=functional.wait_tensor))


def equal(got: Any, expected: Any, graph: bool) -> None:
    """Asserts that a thing seen of the one run is what was seen of the other."""
    if not isinstance(expected, torch.Tensor):
        assert got == expected
        return
    described, wanted = (in_graph(tensor) for tensor in (got, expected))
    assert described == wanted or not graph, f"got {described}, expected {wanted}"
    finished = materialized(got)
    assert (type(finished), finished.stride()) == (type(expected), expected.stride())
    same_bits(finished, expected)


def in_graph(tensor: torch.Tensor) -> Any:
    """How autograd sees a tensor; also where it refuses one, since its base was written to."""
    try:
        return tensor.stride(), tensor.requires_grad, tensor.is_leaf
    except RuntimeError as error:
        return str(error)


def outcome(
    ctx: RankContext, program: Program, refused: set[int], *, async_op: bool
) -> tuple[list[Any], list[Any]]:
    """What there is to see of a program, and what it leaves alive."""
    leaves, values = [], []
    # One rank is late, so that others read before the value is there.
    time.sleep(LATE_S if async_op and ctx.rank == program.late else 0)
    for index, made in enumerate(program.inputs):
        leaf = local_part(ctx, made, index)
        tensor = HyperDTensor.from_local(leaf, ctx.mesh(), [PLACEMENTS[made.moves[0]]])
        for move in made.moves[1:]:
            tensor = tensor.redistribute(placements=[PLACEMENTS[move]], async_op=async_op)
        values.append(take_local(tensor) if made.owned else tensor.to_local())
        leaves.append(leaf)
    assert async_op or not any(isinstance(value, PendingLocal) for value in values)
    with MODES[program.mode]():
        seen = run(values, program.steps, refused)
        try:
            chosen = [values[index % len(values)] for index in program.loss]
            losses = [weighted_sum(value) for value in chosen if value.requires_grad]
            if losses and program.mode == "grad":
                torch.stack(losses).sum().backward()
        except RuntimeError as error:
            seen.append(type(error))
        seen += [values[index % len(values)] for index in program.reads]
        seen += [leaf.grad for leaf in leaves]
    return seen, values


def weighted_sum(value: torch.Tensor) -> torch.Tensor:
    """A loss to which each element adds otherwise: one that is put elsewhere is noticed."""
    return (value.double() * torch.arange(1.0, value.numel() + 1).view(value.shape)).sum()


def local_part(ctx: RankContext, made: Input, index: int) -> torch.Tensor:
    """This rank's part of a leaf, such that every rank has the same values after the moves.

    Else the ranks would do different things where values decide, and start different collectives.
    """
    numbers = torch.arange(-3, made.rows * made.columns - 3).view(made.rows, made.columns)
    numbers = numbers * (index + 1) + (10 * ctx.rank if made.moves[-1] == "R" else 0)
    for move in made.moves[1:]:
        if move[0] == "S":
            numbers = torch.cat([numbers] * ctx.world_size, int(move[1]))
    leaf = (numbers / 2).to(getattr(torch, made.dtype))
    return leaf.requires_grad_(made.requires_grad and leaf.is_floating_point())
