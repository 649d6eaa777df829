"""Timing of variants against each other: interleaved rounds, medians, spread, paired ratios.

On a busy machine a slow second hits whoever runs in it. So each round runs every variant once, in
an order that turns from round to round; ratios are taken within a round, and their median reported.
Imports no torch: the process that starts the ranks needs none.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

ROUNDS = 7
WARM_UP_ROUNDS = 2

# Runs a variant once; returns what the clock shows at the end of each of its phases.
Run = Callable[[], Sequence[float]]


@dataclass(frozen=True)
class Sample:
    """The seconds of one variant (or one phase of it), a number for each round.

    Attributes:
        seconds: by round; rounds of samples that were taken together correspond.
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one [s]."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a fraction of the median."""
        return spread(self.seconds)

    @property
    def error(self) -> float:
        """Standard error of the median, as a fraction of it, were the values normal.

        That of a mean is sigma / sqrt(n), that of a median sqrt(pi / 2) times as much; half the
        distance between quartiles is 0.6745 sigma.
        """
        sigma = self.spread / 0.6745
        return math.sqrt(math.pi / 2 / len(self.seconds)) * sigma

    def followed_by(self, other: Sample) -> Sample:
        """The rounds of both."""
        return Sample(self.seconds + other.seconds)

    def ratio_to(self, other: Sample) -> Sample:
        """This one's seconds over the other's, round by round: a sample without unit."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return Sample(tuple(mine / others for mine, others in pairs))

    def __add__(self, other: Sample) -> Sample:
        pairs = zip(self.seconds, other.seconds, strict=True)
        return Sample(tuple(mine + others for mine, others in pairs))


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles, as a fraction of the median; 0 for one value."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle


def run_interleaved(
    variants: Mapping[str, Run],
    *,
    rounds: int = ROUNDS,
    warm_up: int = WARM_UP_ROUNDS,
    barrier: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[list[float]]]:
    """Runs every variant once a round.

    Args:
        variants: what to run, by name; the same names in the same order on every rank.
        rounds: rounds that count.
        warm_up: rounds before them that do not.
        barrier: called before each run, so that ranks start together.
        clock: gives seconds; the runs use the same.

    Returns:
        For each variant and each of its phases, the seconds by round, on this rank.
    """
    if rounds < 1:
        raise ValueError(f"Expected at least one round, got {rounds} (run_interleaved).")
    names = list(variants)
    taken: dict[str, list[list[float]]] = {}
    gc.collect()
    gc.disable()
    try:
        for number in range(warm_up + rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                barrier()
                started = clock()
                ends = variants[name]()
                if number < warm_up:
                    continue
                phases = taken.setdefault(name, [[] for _ in ends])
                for phase, begin, end in zip(phases, [started, *ends], ends, strict=False):
                    phase.append(end - begin)
            gc.collect()
    finally:
        gc.enable()
    return taken


def repeated(
    call: Callable[[], object], times: int, clock: Callable[[], float] = time.perf_counter
) -> Run:
    """A run of one phase that makes many calls: for what is too short to be timed once."""

    def run() -> list[float]:
        for _ in range(times):
            call()
        return [clock()]

    return run


def slowest_rank(
    by_rank: Sequence[Mapping[str, Sequence[Sequence[float]]]],
) -> dict[str, list[Sample]]:
    """Merges what `run_interleaved` gave on each rank: a phase lasts as long as on the slowest.

    Returns:
        For each variant a sample for each of its phases.
    """
    return {
        name: [
            Sample(tuple(max(seconds) for seconds in zip(*phase_by_rank, strict=True)))
            for phase_by_rank in zip(*(ranks[name] for ranks in by_rank), strict=True)
        ]
        for name in by_rank[0]
    }
