"""How long the scaling benchmark measures a case, and against what it compares."""

from __future__ import annotations

from typing import Any, cast

import pytest

from benchmarks.cost_model import Shape
from benchmarks.rank_processes import Ranks
from benchmarks.scaling import FIXED_CHUNKS, MOST_TIMES, NOT_TOLD, Case, measure_case
from mc2.cost_model import CostModel

ROUNDS = 7
SHAPE = Shape(2, 256, 8, 16, 1e6)


class _OneRank:
    """Answers as `Ranks` of one rank, with steps of a second of which one takes another time."""

    def __init__(self, name: str, *medians: float, wobble: float) -> None:
        self._name, self._medians, self._wobble = name, medians, wobble
        self.calls = 0

    def call(self, function: Any, *, rounds: int, **_: Any) -> list[Any]:
        """The seconds of a few rounds, which differ."""
        around = [1 + self._wobble * (2 * i / (rounds - 1) - 1) for i in range(rounds)]
        seconds = self._medians[min(self.calls, len(self._medians) - 1)]
        self.calls += 1
        names = ("torch", "auto", NOT_TOLD, *map(str, FIXED_CHUNKS))
        taken = {name: [[1.0] * rounds] for name in names}
        taken[self._name] = [[seconds * factor for factor in around]]
        return [(taken, "chunks=1")]


def measured(ranks: _OneRank) -> Case:
    """The case that comes of it."""
    return measure_case(cast("Ranks", ranks), SHAPE, "a link", CostModel(), ROUNDS)


@pytest.mark.parametrize("seconds", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("name", ["auto", NOT_TOLD])
def test_what_is_clear_is_measured_once(name: str, seconds: float) -> None:
    ranks = _OneRank(name, seconds, wobble=0.02)
    case = measured(ranks)
    assert ranks.calls == 1
    assert case.ratio(name, "torch") == pytest.approx(seconds)
    assert case.ratio(name, "best fixed") == pytest.approx(seconds)


@pytest.mark.parametrize("name", ["auto", NOT_TOLD])
@pytest.mark.parametrize("seconds", [1.045, 1.055, 1.095, 1.105])
def test_next_to_a_bar_it_is_measured_again(name: str, seconds: float) -> None:
    """Above it as well as below: stopping on one side only would choose the result."""
    ranks = _OneRank(name, seconds, wobble=0.5)
    case = measured(ranks)
    assert ranks.calls == MOST_TIMES
    assert len(case.samples[name].seconds) == MOST_TIMES * ROUNDS


def test_all_rounds_count() -> None:
    """Those that led to measuring again too."""
    ranks = _OneRank("auto", 1.045, 2.0, 2.0, wobble=0.05)
    case = measured(ranks)
    assert ranks.calls == 2
    assert 1.045 < case.ratio("auto", "torch") < 2.0
