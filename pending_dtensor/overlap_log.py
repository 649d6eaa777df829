"""The overlap log: totals, tables, pictures and traces of what `record_overlap` recorded."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pending_dtensor.chrome_trace import read_trace, write_trace
from pending_dtensor.errors import NotFusedError
from pending_dtensor.events import Recording, close_recording, open_recording
from pending_dtensor.overlap_summary import event_table, kind_table, summarize, unfused_lines
from pending_dtensor.timeline_html import write_html
from pending_dtensor.timeline_png import write_png


@dataclass(eq=False)
class OverlapLog(Recording):
    """The events of one `record_overlap` block, in order of launch, and what was computed."""

    @classmethod
    def from_trace(cls, path: str | os.PathLike[str]) -> OverlapLog:
        """The log of one rank, from a file of `to_chrome_trace` or of ``torch.profiler``.

        A profile, exported on the rank with ``profiler.export_chrome_trace(path)``, tells when each
        collective was over, which a log can only estimate, and sees collectives of other libraries
        as well. It does not tell their sizes, and counts each message of a pipelined kernel.

        Raises:
            ValueError: the file is something else, or of several ranks.
        """
        recordings = read_trace(path)
        if len(recordings) != 1:
            raise ValueError(
                f"Expected a trace of one rank, got {len(recordings)} in {os.fspath(path)!r} "
                f"(from_trace). Join and draw those of several ranks with "
                f"python -m pending_dtensor.report."
            )
        return cls(**vars(recordings[0]))

    def summary(self) -> dict[str, Any]:
        """Totals over the log.

        ``hidden_fraction`` is 1 - exposed_s / communication_s: of the time in which a collective
        was in flight, the part in which no reader was blocked. ``communication_s`` is known as
        follows:

        - It is the time in which at least one collective was in flight: ten at once count once.
        - A collective that a reader had to wait for was in flight until that wait ended. If
          another rank launched it later, waiting for that rank is part of it.
        - One that was done before it was read is only known to have finished by then. It counts
          as long as its bytes take at the median rate of its like that were waited for, or else of
          all that were, and not beyond the read; if none was, until the read. The truth is in a
          profile, see `from_trace`.
        - All the time that somebody was blocked counts.
        - In a fused kernel it goes from the first message sent to the end of the last wait, with
          the gaps between its messages.

        Returns:
            ``collectives`` (count), ``by_kind`` and ``by_kernel`` (counts; kernel ``unfused`` is
            no kernel), ``fused`` (count), ``bytes``, ``exposed_s``, ``communication_s``,
            ``compute_s`` (in matmuls and kernels of our layers, without waits),
            ``hidden_fraction`` (None if nothing was read, and on accelerators, where streams wait
            and the host sees nothing of it), ``unread`` (launched, never read) and ``fallbacks``
            (count).
        """
        return summarize(self)

    def table(self, *, each: bool = False) -> str:
        """A text table: a line for each kind and kernel, or with ``each`` for each event."""
        return event_table(self) if each else kind_table(self)

    def require(self, *, fused: int) -> None:
        """For tests: raises unless that many collectives ran in fused kernels, and no fallback.

        Args:
            fused: the number expected on this rank.

        Raises:
            NotFusedError: another number ran fused, or something fell back. It lists what ran
                unfused, and why.
        """
        done = self.summary()["fused"]
        if done == fused and not self.fallbacks:
            return
        lines = [
            f"Expected {fused} collectives in fused kernels and no fallback, got {done} and "
            f"{len(self.fallbacks)} (rank {self.rank}).",
            *(f"  - {line}" for line in unfused_lines(self)),
        ]
        if len(lines) == 1:
            lines.append("  Nothing ran unfused: look at log.table(each=True) for what ran.")
        raise NotFusedError("\n".join(lines))

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> Path:
        """Writes a trace that Perfetto and chrome://tracing open.

        A process is a rank. Tracks, from the top: communication (as many as were in flight at
        once), exposed waits, compute. ``python -m pending_dtensor.report`` joins those of ranks.

        Returns:
            The path.
        """
        return write_trace(path, [self])

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Writes a page with the timeline, totals and table. Needs nothing but a browser.

        Returns:
            The path.
        """
        return write_html(path, [self])

    def to_png(self, path: str | os.PathLike[str]) -> Path:
        """Draws the timeline and the totals. Needs matplotlib, the extra ``report``.

        Returns:
            The path.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return write_png(path, [self])


@contextmanager
def record_overlap(name: str = "") -> Iterator[OverlapLog]:
    """Collects an event for each collective launched inside the block, on this rank.

    Blocks nest: each open log gets every event. Events launched inside and read after the block
    still get their wait times.

    Args:
        name: of what is recorded, for pages and images that show several things.

    Yields:
        OverlapLog: ``log.events`` fills up while the block runs.

    Raises:
        TypeError: ``name`` is no string.
    """
    if not isinstance(name, str):
        raise TypeError(f"Expected a str as name, got {name!r} (record_overlap).")
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    log = OverlapLog(
        rank=torch.distributed.get_rank() if initialized else 0,
        opened=time.perf_counter(),
        opened_unix_s=time.time(),
        name=name,
    )
    open_recording(log)
    try:
        yield log
    finally:
        close_recording(log)
