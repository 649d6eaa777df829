"""Traces that Perfetto and chrome://tracing open, and from which recordings can be read back.

The bars are in ``traceEvents``. ``pendingDtensor``, which viewers skip, holds the recordings as
they are, one for each rank. Traces of ``torch.profiler`` are read as well.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from pending_dtensor.events import ComputeSpan, Interval, OverlapEvent, Recording
from pending_dtensor.profile_trace import is_profile, profiled
from pending_dtensor.timeline import Bar, RankTimeline, timelines

_KEY = "pendingDtensor"
_GZIP = b"\x1f\x8b"


def write_trace(path: str | os.PathLike[str], recordings: Sequence[Recording]) -> Path:
    """Writes recordings of one or more ranks as one trace, and gives the path."""
    trace = {
        "traceEvents": [
            event
            for pid, timeline in enumerate(timelines(recordings))
            for event in _trace_events(timeline, pid)
        ],
        "displayTimeUnit": "ms",
        _KEY: [_as_json(recording) for recording in recordings],
    }
    path = Path(path)
    path.write_text(json.dumps(trace))
    return path


def _trace_events(timeline: RankTimeline, pid: int) -> Iterator[dict[str, Any]]:
    yield _named("process_name", pid, 0, timeline.title)
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    lanes = [("communication", lane) for lane in timeline.communication]
    lanes += [("exposed waits", timeline.waits), ("compute", timeline.compute)]
    for tid, (name, bars) in enumerate(lanes, start=1):
        yield _named("thread_name", pid, tid, name)
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": pid,
            "tid": tid,
            "args": {"sort_index": tid},
        }
        for bar in bars:
            duration = (bar.ended - bar.began) * 1e6
            yield {**_at(bar, pid, tid, name), "ph": "X", "dur": duration}
    for name, marks in (("never read", timeline.unread), ("fallback", timeline.fallbacks)):
        for bar in marks:
            yield {**_at(bar, pid, 1, name), "ph": "i", "s": "t", "name": f"{name}: {bar.name}"}


def _at(bar: Bar, pid: int, tid: int, category: str) -> dict[str, Any]:
    event = {"name": bar.name, "cat": category, "pid": pid, "tid": tid, "ts": bar.began * 1e6}
    if bar.event is not None:
        event["args"] = {
            "kernel": bar.event.kernel,
            "shape": str(bar.event.shape),
            "dtype": str(bar.event.dtype),
            "bytes": bar.event.bytes,
            "group": bar.event.group,
            "exposed_ms": bar.event.exposed_s * 1e3,
            "detail": bar.event.detail,
        }
    return event


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _as_json(recording: Recording) -> dict[str, Any]:
    events = [
        {**vars(event), "dtype": None if event.dtype is None else str(event.dtype)}
        for event in recording.events
    ]
    return {**vars(recording), "events": events}


def read_trace(path: str | os.PathLike[str]) -> list[Recording]:
    """The recordings in a trace that `write_trace` or ``torch.profiler`` wrote, maybe gzipped.

    Raises:
        ValueError: it is something else.
    """
    data = Path(path).read_bytes()
    try:
        trace = json.loads(gzip.decompress(data) if data.startswith(_GZIP) else data)
    except ValueError:
        trace = None
    if is_profile(trace):
        return [profiled(trace)]
    if not isinstance(trace, dict) or _KEY not in trace:
        raise ValueError(
            f"Expected a trace with {_KEY!r} in it, or one of torch.profiler, got "
            f"{os.fspath(path)!r}. Write it with log.to_chrome_trace(path) or "
            f"profiler.export_chrome_trace(path)."
        )
    return [_from_json(recording) for recording in trace[_KEY]]


def _from_json(recording: dict[str, Any]) -> Recording:
    events = [
        OverlapEvent(
            **{
                **event,
                "dtype": _dtype(event["dtype"]),
                "shape": tuple(event["shape"]),
                "waits": [Interval(*wait) for wait in event["waits"]],
            }
        )
        for event in recording["events"]
    ]
    spans = [ComputeSpan(*span) for span in recording["spans"]]
    return Recording(**{**recording, "events": events, "spans": spans})


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name.removeprefix("torch."))
