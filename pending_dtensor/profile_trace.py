"""Recordings made of what ``torch.profiler`` saw, which knows when each collective was over.

On the host, the process group reports its work as ``gloo:all_reduce`` and the like, from a thread
of its own; somebody waits inside ``pending_dtensor::wait ...`` or torch's ``wait_tensor``. On a
GPU, collectives are kernels with ``nccl`` in their name, and what is exposed is the time in which
one of them runs and no other kernel does.

It works for any program, also for torch's own styles. Each message of a kernel that sends in
pieces counts as a collective, and sizes are not known.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from pending_dtensor.events import ComputeSpan, Interval, OverlapEvent, Recording
from pending_dtensor.intervals import subtract, union

_WORK = re.compile(r"gloo:(\w+)")
_LAUNCH = "c10d::"
_WAIT = re.compile(r"pending_dtensor::wait |_c10d_functional::wait_tensor$")
_MATMUL = re.compile(r"aten::(\w*mm_?|_scaled_dot_product\w*)$")
_FUSED = re.compile(r"mc2::(\w+?)_(all_gather_matmul|matmul_(?:reduce_)?scatter)")
_NCCL = re.compile(r"nccl\w*?_(AllGather|ReduceScatter|AllReduce|SendRecv|Broadcast|Reduce)")


class _Range(NamedTuple):
    """What the profiler saw from one moment to another [s]."""

    began: float
    ended: float
    name: str


def is_profile(trace: object) -> bool:
    """Whether a file's content is a trace that ``torch.profiler`` exported."""
    return isinstance(trace, dict) and {"schemaVersion", "traceEvents"} <= trace.keys()


def profiled(trace: dict[str, Any]) -> Recording:
    """The recording of one rank, made of a trace that ``torch.profiler`` exported."""
    on_host, on_device = _ranges(trace, "cpu_op", "user_annotation"), _ranges(trace, "kernel")
    if any(_is_nccl(kernel) for kernel in on_device):
        events, spans = _seen_on_device(on_device)
    else:
        events, spans = _seen_on_host(on_host)
    opened = min((span.began for span in (*on_host, *on_device)), default=0.0)
    return Recording(
        events,
        spans,
        rank=trace.get("distributedInfo", {}).get("rank", 0),
        opened=opened,
        opened_unix_s=trace.get("baseTimeNanoseconds", 0) / 1e9 + opened,
    )


def _ranges(trace: dict[str, Any], *categories: str) -> list[_Range]:
    """Those of some categories, by their beginning."""
    return sorted(
        _Range(event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6, event["name"])
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in categories
    )


# --- on the host


def _seen_on_host(ranges: Sequence[_Range]) -> tuple[list[OverlapEvent], list[ComputeSpan]]:
    work = [span for span in ranges if _WORK.match(span.name)]
    launches = [span for span in ranges if span.name.startswith(_LAUNCH)]
    # The process group begins a work when one of its threads is free; it was launched before.
    started = [span.began for span in (launches if len(launches) == len(work) else work)]
    fused = [span for span in ranges if _FUSED.match(span.name)]
    events = [
        _event(*_kind(span, began, fused), began, span.ended)
        for span, began in zip(work, started, strict=True)
    ]
    # Our name of a wait is around torch's.
    waits = union(span for span in ranges if _WAIT.match(span.name))
    for wait in waits:
        _attach(wait, events)
    return events, _spans(_innermost([span for span in ranges if _MATMUL.match(span.name)]))


def _kind(work: _Range, launched: float, fused: Sequence[_Range]) -> tuple[str, str]:
    """What was launched, and by which fused kernel."""
    for call in fused:
        found = _FUSED.match(call.name)
        if found and call.began <= launched <= call.ended:
            return "all_gather" if found[2].startswith("all") else "reduce_scatter", found[1]
    return work.name.partition(":")[2], "unfused"


def _attach(wait: Interval, events: Sequence[OverlapEvent]) -> None:
    """Adds a wait to the collective that it was for: the one that finished when the wait did."""
    launched = [event for event in events if event.started < wait.ended]
    if launched:
        _add_wait(min(launched, key=lambda event: abs((event.finished or 0) - wait.ended)), wait)


def _innermost(ranges: Sequence[_Range]) -> list[_Range]:
    """Those that have no other inside: a DTensor's matmul is around that of its local tensors."""
    return [
        span
        for span, following in zip_longest(ranges, ranges[1:])
        if following is None or following.began >= span.ended
    ]


# --- on a GPU


def _seen_on_device(kernels: Sequence[_Range]) -> tuple[list[OverlapEvent], list[ComputeSpan]]:
    compute = [kernel for kernel in kernels if not _is_nccl(kernel)]
    events = []
    counted = compute.copy()
    for kernel in filter(_is_nccl, kernels):
        found = _NCCL.search(kernel.name)
        kind = re.sub("(?<!^)([A-Z])", r"_\1", found[1]).lower() if found else "collective"
        event = _event(kind, "unfused", kernel.began, kernel.ended, device="cuda")
        for exposed in subtract([kernel], counted):
            _add_wait(event, exposed)
        counted.append(kernel)
        events.append(event)
    return events, _spans(compute)


def _is_nccl(kernel: _Range) -> bool:
    return "nccl" in kernel.name


# --- both


def _event(
    kind: str, kernel: str, began: float, ended: float, *, device: str = "cpu"
) -> OverlapEvent:
    """A collective that nobody has waited for yet: read when it was over."""
    return OverlapEvent(
        kind,
        kernel,
        shape=(),
        dtype=None,
        bytes=0,
        group="",
        started=began,
        wait_began=ended,
        readable=ended,
        device=device,
        finished=ended,
    )


def _add_wait(event: OverlapEvent, wait: Interval) -> None:
    if not event.waits:
        event.wait_began = wait.began
    event.waits.append(wait)
    event.readable = wait.ended
    event.exposed_s += wait.ended - wait.began


def _spans(ranges: Sequence[_Range]) -> list[ComputeSpan]:
    return [
        ComputeSpan(span.name.removeprefix("aten::"), span.began, span.ended) for span in ranges
    ]
