"""The cost model: what it says of known machines, and that a fit finds a machine again."""

from __future__ import annotations

import dataclasses
import math

import pytest

from benchmarks.cost_model import (
    CHUNKS,
    MATMULS,
    Machine,
    Measured,
    Shape,
    errors,
    fit,
    kernel_costs,
    least_squares,
)
from mc2.cost_model import CostModel

MACHINE = Machine(
    cores=4,
    s_per_flop=4e-11,
    s_per_matmul=2e-5,
    s_per_message=3e-4,
    collective_factor=1.8,
    message_factor=1.02,
    busy_s_per_byte=1e-9,
    torch_host_s=2e-3,
    mc2_host_s=1e-3,
)


def shape(rows: int = 2048, ranks: int = 2, bytes_per_s: float = 50e6) -> Shape:
    return Shape(ranks, rows, 512, 2048, bytes_per_s)


def as_measured(machine: Machine, case: Shape, noise: float = 1.0) -> Measured:
    """What a machine without any noise but this would measure."""
    collectives = 4 * (
        (case.ranks - 1) * machine.s_per_message
        + machine.collective_factor * case.message_bytes / case.bytes_per_s
    )
    return Measured(
        case,
        MATMULS * machine.matmul_s(case),
        collectives,
        4 * machine.message_s(case),
        machine.torch_s(case) * noise,
        MATMULS * machine.matmul_s(case) + collectives,
        {chunks: machine.mc2_s(case, chunks) * noise for chunks in CHUNKS},
    )


CASES = [
    shape(rows, ranks, rate)
    for rows in (256, 1024, 4096)
    for ranks in (2, 4)
    for rate in (10e6, 40e6, 160e6)
]


def test_a_message_is_a_shard_for_each_other_rank() -> None:
    assert shape(2048, ranks=4).message_bytes == 4 * 512 * 512 * 3
    assert shape(2048, ranks=1).message_bytes == 0


def test_torch_is_the_sum_of_arithmetic_and_communication() -> None:
    case = shape()
    measured = as_measured(MACHINE, case)
    total = measured.compute_s + measured.collectives_s + MACHINE.torch_host_s
    assert MACHINE.torch_s(case) == pytest.approx(total)


def test_mc2_is_never_below_arithmetic_or_communication() -> None:
    ideal = dataclasses.replace(MACHINE, s_per_matmul=0.0, busy_s_per_byte=0.0, mc2_host_s=0.0)
    for case in CASES:
        for chunks in CHUNKS:
            measured = as_measured(ideal, case)
            assert ideal.mc2_s(case, chunks) >= measured.compute_s * (1 - 1e-12)
            assert ideal.mc2_s(case, chunks) >= 4 * ideal.message_s(case, chunks)


def test_more_pieces_hide_more_until_their_fixed_cost_is_more() -> None:
    slow_link = shape(8192, bytes_per_s=10e6)
    assert MACHINE.mc2_s(slow_link, 8) < MACHINE.mc2_s(slow_link, 1)
    assert MACHINE.mc2_s(shape(64), 16) > MACHINE.mc2_s(shape(64), 1)


def test_few_rows_are_not_cut() -> None:
    assert MACHINE.best_chunks(shape(16)) == 1


def test_the_picked_count_is_the_cheapest_of_the_choices() -> None:
    for case in CASES:
        cost = MACHINE.mc2_s(case, MACHINE.best_chunks(case, (1, 2, 4)))
        assert cost == min(MACHINE.mc2_s(case, chunks) for chunks in (1, 2, 4))


def test_ranks_that_share_cores_take_longer_to_compute_and_not_to_send() -> None:
    alone = dataclasses.replace(MACHINE, cores=math.inf)
    shared = dataclasses.replace(MACHINE, cores=2)
    case = shape(ranks=4)
    assert shared.matmul_s(case) == pytest.approx(2 * alone.matmul_s(case))
    assert shared.message_s(case) == alone.message_s(case)


def test_a_fit_finds_the_machine_again() -> None:
    fitted = fit([as_measured(MACHINE, case) for case in CASES], cores=4)
    expected = dataclasses.asdict(MACHINE)
    for name, value in dataclasses.asdict(fitted).items():
        # Two constants are searched on a grid whose steps are 17 %.
        tolerance = 0.2 if name.endswith(("_host_s", "busy_s_per_byte")) else 1e-3
        assert value == pytest.approx(expected[name], rel=tolerance), name


def test_the_fit_predicts_what_it_has_not_seen() -> None:
    fitted = fit([as_measured(MACHINE, case) for case in CASES], cores=4)
    unseen = [as_measured(MACHINE, shape(rows, 8, 80e6)) for rows in (512, 2048, 16384)]
    assert errors(fitted, unseen)[-1] < 0.02


def test_errors_show_a_machine_that_does_not_fit() -> None:
    slower = [as_measured(MACHINE, case, noise=1.5) for case in CASES]
    assert errors(MACHINE, slower) == pytest.approx([1 / 3] * len(errors(MACHINE, slower)))


def test_one_case_is_not_enough() -> None:
    with pytest.raises(ValueError, match="at least two measured cases, got 1"):
        fit([as_measured(MACHINE, CASES[0])], cores=4)


def test_least_squares_counts_relative_errors() -> None:
    rows = [(1.0, 1.0), (10.0, 1.0), (100.0, 1.0)]
    a, b = least_squares(rows, [2 * x + 3 * y for x, y in rows])
    assert (a, b) == (pytest.approx(2.0), pytest.approx(3.0))


@pytest.mark.parametrize(
    ("targets", "expected"),
    [([0.5, 9.5, 99.5], (None, 0.0)), ([2.0, 1.0, 0.5], (0.0, None))],
)
def test_least_squares_gives_nothing_negative(
    targets: list[float], expected: tuple[float | None, float | None]
) -> None:
    found = least_squares([(1.0, 1.0), (10.0, 1.0), (100.0, 1.0)], targets)
    assert min(found) >= 0
    for value, wanted in zip(found, expected, strict=True):
        assert wanted is None or value == wanted


def test_least_squares_of_one_direction_only() -> None:
    assert least_squares([(1.0, 2.0), (2.0, 4.0)], [3.0, 6.0]) == (pytest.approx(3.0), 0.0)


def test_what_auto_goes_by_is_found_again() -> None:
    known = CostModel(flops_per_s=2e10, s_per_message=5e-4, s_pipeline=3e-3, collective_factor=1.7)
    machine = dataclasses.replace(
        MACHINE, s_per_flop=1 / known.flops_per_s, collective_factor=known.collective_factor
    )

    def seconds(case: Shape, chunks: int) -> float:
        arithmetic = machine.share(case) * case.matmul_flops / known.flops_per_s
        travel = case.message_bytes / case.bytes_per_s
        if chunks == 0:
            return 4 * (arithmetic + known.collective_factor * travel)
        weight = case.hidden * case.intermediate / case.ranks
        piece = known.s_per_message + weight * known.s_per_weight_element
        pieces = chunks * (case.ranks - 1) * piece
        overlapped = max(arithmetic + 0.75 * pieces, travel + arithmetic / case.ranks / chunks)
        return 4 * (overlapped + 0.25 * pieces + known.s_pipeline)

    cases = [
        dataclasses.replace(
            as_measured(machine, case),
            async_s=seconds(case, 0),
            mc2_s={chunks: seconds(case, chunks) for chunks in CHUNKS},
        )
        for case in CASES
        if case.ranks == 2
    ]
    assert dataclasses.astuple(kernel_costs(machine, cases)) == pytest.approx(
        dataclasses.astuple(known)
    )
