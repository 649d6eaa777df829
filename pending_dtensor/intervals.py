"""Sets of moments as sorted intervals that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from pending_dtensor.events import Interval


class HasTimes(Protocol):
    """An interval, or a compute span."""

    @property
    def began(self) -> float:
        """First moment [s]."""
        ...

    @property
    def ended(self) -> float:
        """Last moment [s]."""
        ...


def union(intervals: Iterable[HasTimes]) -> list[Interval]:
    """The moments in any of them."""
    merged: list[Interval] = []
    for interval in sorted(intervals, key=lambda interval: interval.began):
        if merged and interval.began <= merged[-1].ended:
            merged[-1] = Interval(merged[-1].began, max(merged[-1].ended, interval.ended))
        else:
            merged.append(Interval(interval.began, interval.ended))
    return merged


def subtract(intervals: Iterable[HasTimes], holes: Iterable[HasTimes]) -> list[Interval]:
    """The moments in any of ``intervals`` and in none of ``holes``."""
    left: list[Interval] = []
    holes = union(holes)
    for began, ended in union(intervals):
        for hole in holes:
            if hole.ended <= began or hole.began >= ended:
                continue
            if hole.began > began:
                left.append(Interval(began, hole.began))
            began = hole.ended
        if began < ended:
            left.append(Interval(began, ended))
    return left


def total(intervals: Iterable[HasTimes]) -> float:
    """Seconds in intervals that do not overlap."""
    return math.fsum(interval.ended - interval.began for interval in intervals)
