"""What was launched when, what was computed when, and how long anybody was blocked.

Nothing here waits or communicates. While no log is open and no profiler runs, the cost is one truth
test per collective and per matmul, and one question to the profiler per launch and wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from pending_dtensor.torch_compat import profiler_is_on


class Interval(NamedTuple):
    """From one moment to another, in ``time.perf_counter`` seconds."""

    began: float
    ended: float


class ComputeSpan(NamedTuple):
    """A stretch of computing on this rank: a matmul of ours, or a call of a fused kernel.

    Attributes:
        name: what was computed, such as ``grad_weight`` or ``pipelined all_gather_matmul``.
        began: when [s].
        ended: when it returned to the host [s]. Waits inside it are not taken off.
    """

    name: str
    began: float
    ended: float


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
        launched: when a kernel that computes first sent something [s]; None: at ``started``.
        wait_began: when the first read began to wait [s]; None while nobody has read it.
        readable: when that wait ended [s]; None while nobody has read it.
        finished: when the collective was over [s], if that is known: only a profiler sees it.
        exposed_s: seconds a reader was blocked. On an accelerator whose streams wait without the
            host this is host time only.
        waits: the stretches that make up ``exposed_s``.
        device: type of the device it ran on.
        detail: what a kernel or a fallback says of itself (chunk count, op name).
    """

    kind: str
    kernel: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    bytes: int
    group: str
    started: float
    launched: float | None = None
    wait_began: float | None = None
    readable: float | None = None
    exposed_s: float = 0.0
    waits: list[Interval] = field(default_factory=list)
    device: str = "cpu"
    detail: str = ""
    finished: float | None = None

    def begin_wait(self) -> None:
        """Marks the first read."""
        self.wait_began = time.perf_counter()

    def end_wait(self) -> None:
        """Marks the value readable and adds the time since `begin_wait` to what is exposed."""
        self.readable = time.perf_counter()
        if self.wait_began is not None:
            self.waits.append(Interval(self.wait_began, self.readable))
            self.exposed_s += self.readable - self.wait_began

    def ran_in_kernel(
        self, launched: float | None, waits: Sequence[Interval], detail: str, *, readable: bool
    ) -> None:
        """Notes what a fused kernel says of its call, which has just returned.

        Args:
            launched: when it sent its first message [s], if that is known.
            waits: when it was blocked.
            detail: what it says of itself.
            readable: whether its result is there, so that no wait follows.
        """
        if readable:
            self.readable = time.perf_counter()
            self.wait_began = waits[0].began if waits else self.readable
        self.launched = launched
        self.waits += waits
        self.exposed_s += sum(wait.ended - wait.began for wait in waits)
        self.detail = detail

    @property
    def in_flight_at_most(self) -> Interval | None:
        """From the launch until the collective was known to have finished; None if never read.

        What had to be waited for finished when the wait ended. What was done before it was read
        has only been seen to be done then, so for it this is longer than the truth.
        """
        if self.readable is None or self.kind == "fallback":
            return None
        ended = self.waits[-1].ended if self.waits else self.readable
        return Interval(self.started if self.launched is None else self.launched, ended)


@dataclass(eq=False)
class Recording:
    """What is recorded on one rank while it is open.

    Attributes:
        events: collectives and fallbacks, in order of launch.
        spans: matmuls and fused kernels, in the order they ended.
        rank: of this process, 0 without a process group.
        opened: when it was opened [s].
        opened_unix_s: the same moment in seconds since 1970, by which ranks are aligned.
        name: what is recorded, for pages and images that show several things.
    """

    events: list[OverlapEvent] = field(default_factory=list)
    spans: list[ComputeSpan] = field(default_factory=list)
    rank: int = 0
    opened: float = 0.0
    opened_unix_s: float = 0.0
    name: str = ""

    @property
    def title(self) -> str:
        """Name and rank."""
        return f"{self.name}, rank {self.rank}" if self.name else f"rank {self.rank}"

    @property
    def collectives(self) -> list[OverlapEvent]:
        """The events that communicated."""
        return [event for event in self.events if event.kind != "fallback"]

    @property
    def fallbacks(self) -> list[OverlapEvent]:
        """The events where something ran unfused, or gathered, although more was wanted."""
        return [event for event in self.events if event.kind == "fallback"]


_open_logs: list[Recording] = []
_nothing = nullcontext()


def open_recording(recording: Recording) -> None:
    """Lets ``recording`` have every event and span from now on."""
    _open_logs.append(recording)


def close_recording(recording: Recording) -> None:
    """Ends that. Its events still get the times of reads that come later."""
    _open_logs[:] = [other for other in _open_logs if other is not recording]


def record_event(
    kind: str,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    message_elements: int,
    group: str,
    kernel: str = "unfused",
    device: str = "cpu",
    detail: str = "",
    started: float | None = None,
) -> OverlapEvent | None:
    """Adds an event to every open log; one that ``started`` now, if that is None.

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
        started=time.perf_counter() if started is None else started,
        device=device,
        detail=detail,
    )
    for log in _open_logs:
        log.events.append(event)
    return event


class _Computing:
    __slots__ = ("_began", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, error_type: object, *_: object) -> None:
        if error_type is not None:
            return  # refused, or broken off: nothing was computed
        span = ComputeSpan(self._name, self._began, time.perf_counter())
        for log in _open_logs:
            log.spans.append(span)


def computing(name: str) -> AbstractContextManager[Any]:
    """Records the block as a compute span in every open log; nothing if there is none."""
    return _Computing(name) if _open_logs else _nothing


def named_in_profile(verb: str, what: str) -> AbstractContextManager[Any]:
    """Shows the block in ``torch.profiler`` as ``pending_dtensor::<verb> <what>``, if one runs."""
    if profiler_is_on():
        return torch.profiler.record_function(f"pending_dtensor::{verb} {what}")
    return _nothing
