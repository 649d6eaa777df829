"""The overlap log: what was launched when, how long anybody was blocked on it.

Nothing here waits or communicates. While no log is open the cost is one truth test per collective.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

_open_logs: list[OverlapLog] = []


@dataclass(eq=False)
class OverlapEvent:
    """One collective, fused or not, or one fallback.

    Times are ``time.perf_counter`` seconds on the host of this rank.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``fallback``.
        kernel: ``unfused``, or the name of the fused kernel that ran it.
        shape: shape of the value that becomes readable on this rank.
        dtype: dtype that is communicated.
        bytes: message size as nccl-tests counts it: the gathered, reduced or exchanged buffer of
            one rank, in bytes.
        group: name of the process group.
        started: when the launch was asked for [s].
        wait_began: when the first read began to wait [s]; None while nobody has read it.
        readable: when that wait ended [s]; None while nobody has read it.
        exposed_s: seconds a reader was blocked. On an accelerator whose streams wait without the
            host this is host time only.
        detail: what a kernel or a fallback says of itself (chunk count, op name).
    """

    kind: str
    kernel: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    bytes: int
    group: str
    started: float
    wait_began: float | None = None
    readable: float | None = None
    exposed_s: float = 0.0
    detail: str = ""

    def begin_wait(self) -> None:
        """Marks the first read."""
        self.wait_began = time.perf_counter()

    def end_wait(self) -> None:
        """Marks the value readable and adds up the time since `begin_wait`."""
        self.readable = time.perf_counter()
        if self.wait_began is not None:
            self.exposed_s = self.readable - self.wait_began


@dataclass(eq=False)
class OverlapLog:
    """The events of one `record_overlap` block, in order of launch."""

    events: list[OverlapEvent] = field(default_factory=list)

    @property
    def collectives(self) -> list[OverlapEvent]:
        """The events that communicated."""
        return [event for event in self.events if event.kind != "fallback"]

    @property
    def fallbacks(self) -> list[OverlapEvent]:
        """The events where something ran unfused, or gathered, although more was wanted."""
        return [event for event in self.events if event.kind == "fallback"]

    def summary(self) -> dict[str, object]:
        """Totals over the log.

        Returns:
            ``collectives`` (count), ``by_kind`` and ``by_kernel`` (counts), ``bytes``,
            ``exposed_s``, ``unread`` (launched, never read) and ``fallbacks`` (count).
        """
        collectives = self.collectives
        return {
            "collectives": len(collectives),
            "by_kind": dict(Counter(event.kind for event in collectives)),
            "by_kernel": dict(Counter(event.kernel for event in collectives)),
            "bytes": sum(event.bytes for event in collectives),
            "exposed_s": math.fsum(event.exposed_s for event in collectives),
            "unread": sum(event.wait_began is None for event in collectives),
            "fallbacks": len(self.fallbacks),
        }


@contextmanager
def record_overlap() -> Iterator[OverlapLog]:
    """Collects an event for each collective launched inside the block, on this rank.

    Blocks nest: each open log gets every event. Events launched inside and read after the block
    still get their wait times.

    Yields:
        OverlapLog: ``log.events`` fills up while the block runs.
    """
    log = OverlapLog()
    _open_logs.append(log)
    try:
        yield log
    finally:
        _open_logs[:] = [other for other in _open_logs if other is not log]


def record_event(
    kind: str,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    message_elements: int,
    group: str,
    kernel: str = "unfused",
    detail: str = "",
) -> OverlapEvent | None:
    """Adds an event to every open log.

    Returns:
        The event, for its waits to be marked, or None if no log is open.
    """
    if not _open_logs:
        return None
    itemsize = dtype.itemsize if dtype is not None else 0
    event = OverlapEvent(
        kind=kind,
        kernel=kernel,
        shape=tuple(shape),
        dtype=dtype,
        bytes=message_elements * itemsize,
        group=group,
        started=time.perf_counter(),
        detail=detail,
    )
    for log in _open_logs:
        log.events.append(event)
    return event
