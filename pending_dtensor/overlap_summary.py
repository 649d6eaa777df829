"""Totals and text tables of a recording."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pending_dtensor.events import Interval, OverlapEvent, Recording
from pending_dtensor.in_flight import in_flight
from pending_dtensor.intervals import subtract, total, union


def summarize(recording: Recording) -> dict[str, Any]:
    """See `OverlapLog.summary`, which says what each number means."""
    collectives = recording.collectives
    flights = in_flight(collectives)
    waits = union(wait for event in collectives for wait in event.waits)
    return {
        "collectives": len(collectives),
        "by_kind": dict(Counter(event.kind for event in collectives)),
        "by_kernel": dict(Counter(event.kernel for event in collectives)),
        "fused": sum(event.kernel != "unfused" for event in collectives),
        "bytes": sum(event.bytes for event in collectives),
        **_times(collectives, flights),
        "compute_s": total(subtract(recording.spans, waits)),
        "unread": sum(event.wait_began is None for event in collectives),
        "fallbacks": len(recording.fallbacks),
    }


def _times(
    collectives: Sequence[OverlapEvent], flights: Mapping[OverlapEvent, Interval]
) -> dict[str, float | None]:
    exposed_s = math.fsum(event.exposed_s for event in collectives)
    waits = [wait for event in collectives for wait in event.waits]
    communication_s = total(union([*(flights[e] for e in collectives if e in flights), *waits]))
    seen = communication_s > 0 and all(
        event.device == "cpu" or event.finished is not None for event in collectives
    )
    return {
        "exposed_s": exposed_s,
        "communication_s": communication_s,
        "hidden_fraction": max(0.0, 1 - exposed_s / communication_s) if seen else None,
    }


def unfused_lines(recording: Recording) -> list[str]:
    """What ran unfused and why, a line for each: fallbacks, then collectives on their own."""
    alone = [event for event in recording.collectives if event.kernel == "unfused"]
    return [
        f"{event.kind} of shape {event.shape}: "
        f"{event.detail or 'launched on its own, not deferred to a fused kernel'}"
        for event in (*recording.fallbacks, *alone)
    ]


def kind_table(recording: Recording) -> str:
    """A line for each kind and kernel, their total, and the fallbacks."""
    groups: dict[tuple[str, str], list[OverlapEvent]] = {}
    for event in recording.collectives:
        groups.setdefault((event.kind, event.kernel), []).append(event)
    flights = in_flight(recording.collectives)
    rows = [_kind_row(*key, events, flights) for key, events in groups.items()]
    rows.append(_kind_row("total", "", recording.collectives, flights))
    header = ("collective", "kernel", "count", "MiB", "in flight ms", "exposed ms", "hidden")
    return "\n".join(
        [
            _aligned([header, *rows], left=2),
            *(f"fallback: {event.detail} {event.shape}" for event in recording.fallbacks),
        ]
    )


def _kind_row(
    kind: str,
    kernel: str,
    events: Sequence[OverlapEvent],
    flights: Mapping[OverlapEvent, Interval],
) -> tuple[str, ...]:
    times = _times(events, flights)
    return (
        kind,
        kernel,
        str(len(events)),
        _mib(sum(event.bytes for event in events)),
        _ms(times["communication_s"]),
        _ms(times["exposed_s"]),
        percent(times["hidden_fraction"]),
    )


def event_table(recording: Recording) -> str:
    """A line for each event."""
    header = ("event", "kernel", "dtype", "shape", "MiB", "at ms", "in flight ms", "exposed ms")
    rows = [(*header, "detail")]
    flights = in_flight(recording.collectives)
    for event in recording.events:
        rows.append(
            (
                event.kind,
                event.kernel,
                str(event.dtype or "-").removeprefix("torch."),
                "x".join(map(str, event.shape)),
                _mib(event.bytes),
                _ms(event.started - recording.opened),
                _ms(total([flights[event]]) if event in flights else None),
                _ms(None if event.wait_began is None else event.exposed_s),
                event.detail,
            )
        )
    return _aligned(rows, left=3)


def percent(fraction: float | None) -> str:
    """A fraction for people, a dash if there is none. Rounded down: 100% is all of it."""
    return "-" if fraction is None else f"{int(fraction * 100)}%"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.2f}" if size_bytes else "-"


def _aligned(rows: Iterable[Sequence[str]], left: int) -> str:
    """Columns of equal width: the first ``left`` and ``detail`` to the left, the others right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_left = [index < left or name == "detail" for index, name in enumerate(rows[0])]
    lines = (
        "  ".join(
            cell.ljust(width) if to_left else cell.rjust(width)
            for cell, width, to_left in zip(row, widths, is_left, strict=True)
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
