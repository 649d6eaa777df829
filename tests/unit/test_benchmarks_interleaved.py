"""The timing of benchmarks: who runs when, what counts, and the statistics."""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Callable

import pytest

from benchmarks.interleaved import Run, Sample, repeated, run_interleaved, slowest_rank, spread


def ticking_clock() -> Callable[[], float]:
    """A clock that shows one more at each look."""
    ticks = itertools.count()
    return lambda: float(next(ticks))


def test_each_variant_runs_once_a_round_in_an_order_that_turns() -> None:
    order: list[str] = []

    def variant(name: str) -> Run:
        def run() -> list[float]:
            order.append(name)
            return [0.0]

        return run

    names = ("a", "b", "c")
    run_interleaved({name: variant(name) for name in names}, rounds=3, warm_up=1)
    rounds = ["".join(order[i : i + 3]) for i in range(0, 12, 3)]
    assert rounds == ["abc", "bca", "cab", "abc"]


def test_warm_up_rounds_do_not_count() -> None:
    clock = ticking_clock()
    taken = run_interleaved({"a": lambda: [clock()]}, rounds=4, warm_up=3, clock=clock)
    assert taken == {"a": [[1.0] * 4]}


def test_phases_are_timed_from_one_end_to_the_next() -> None:
    ends = iter([[3.0, 10.0], [5.0, 6.0]])
    taken = run_interleaved(
        {"a": lambda: next(ends)}, rounds=2, warm_up=0, clock=iter([1.0, 2.0]).__next__
    )
    assert taken == {"a": [[2.0, 3.0], [7.0, 1.0]]}


def test_ranks_start_each_run_together_and_garbage_is_not_collected_in_it() -> None:
    seen: list[object] = []

    def run() -> list[float]:
        seen.append(gc.isenabled())
        return [0.0]

    run_interleaved({"a": run}, rounds=2, warm_up=0, barrier=lambda: seen.append("barrier"))
    assert seen == ["barrier", False, "barrier", False]
    assert gc.isenabled()


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one round, got 0"):
        run_interleaved({"a": lambda: [0.0]}, rounds=0)


def test_repeated_calls_are_one_phase() -> None:
    calls: list[int] = []
    run = repeated(lambda: calls.append(1), 5, clock=lambda: 7.0)
    assert run() == [7.0]
    assert len(calls) == 5


def test_a_phase_lasts_as_long_as_on_the_slowest_rank() -> None:
    merged = slowest_rank([{"a": [[1.0, 5.0], [2.0, 2.0]]}, {"a": [[3.0, 4.0], [1.0, 9.0]]}])
    assert merged == {"a": [Sample((3.0, 5.0)), Sample((2.0, 9.0))]}


def test_ratios_are_taken_within_a_round() -> None:
    # The machine was ten times slower in the second round: the ratio is the same all the same.
    slow, fast = Sample((2.0, 20.0, 2.2)), Sample((1.0, 10.0, 1.1))
    assert slow.ratio_to(fast).median == pytest.approx(2.0)
    assert slow.median / fast.median != slow.seconds[1] / fast.seconds[0]


def test_samples_add_up_by_round() -> None:
    assert Sample((1.0, 2.0)) + Sample((10.0, 20.0)) == Sample((11.0, 22.0))


@pytest.mark.parametrize(
    ("values", "expected"),
    [((1.0, 1.0, 1.0), 0.0), ((5.0,), 0.0), ((1.0, 2.0, 3.0, 4.0, 5.0), 1 / 3)],
)
def test_spread_is_half_the_quartile_distance(values: tuple[float, ...], expected: float) -> None:
    assert spread(values) == pytest.approx(expected)


def test_one_outlier_does_not_change_the_spread() -> None:
    values = (1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06)
    assert spread((*values[:-1], 100.0)) == pytest.approx(spread(values))


def test_the_error_is_that_of_a_median_of_normal_values() -> None:
    normal = statistics.NormalDist(mu=10.0, sigma=1.0)
    values = [normal.inv_cdf((i + 0.5) / 400) for i in range(400)]
    assert Sample(tuple(values)).error == pytest.approx(1.2533 * 0.1 / 20, rel=0.02)
    medians = [statistics.median(normal.samples(25, seed=seed)) for seed in range(400)]
    expected = statistics.mean(
        Sample(tuple(normal.samples(25, seed=seed))).error * 10.0 for seed in range(400)
    )
    assert statistics.stdev(medians) == pytest.approx(expected, rel=0.1)


def test_more_rounds_follow() -> None:
    assert Sample((1.0, 2.0)).followed_by(Sample((3.0,))) == Sample((1.0, 2.0, 3.0))
