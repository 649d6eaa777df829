"""The timeline as a page of its own: no script, nothing loaded from elsewhere."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from pending_dtensor.events import Recording
from pending_dtensor.overlap_summary import event_table, kind_table
from pending_dtensor.timeline import (
    COMMUNICATION_COLOR,
    COMPUTE_COLOR,
    EXPOSED_COLOR,
    UNSEEN_COLOR,
    Bar,
    RankTimeline,
    in_order,
    timelines,
)

_LEFT, _PLOT, _RIGHT = 70, 950, 230  # widths in px: lane names, bars, totals
_LANE, _BAR, _AXIS = 32, 26, 24  # heights in px
_MOST_TICKS = 10
_PX_PER_LETTER = 7.2
_UP = 12  # from a lane's end to the foot of its letters, in px

_STYLE = f"""
body {{ font: 14px system-ui, sans-serif; margin: 2em; color: #222; background: #fff }}
svg {{ font: 12px system-ui, sans-serif; max-width: 100% }}
pre {{ font-size: 12px; overflow-x: auto }}
.communication {{ fill: {COMMUNICATION_COLOR} }}
.unseen {{ fill: {UNSEEN_COLOR} }}
.exposed {{ fill: {EXPOSED_COLOR} }}
.compute {{ fill: {COMPUTE_COLOR}; stroke: #fff }}
.unread {{ fill: none; stroke: {COMMUNICATION_COLOR} }}
.fallback {{ fill: #000 }}
.grid {{ stroke: #e4e4e4 }}
h3 {{ margin: 1em 0 .3em }}
.first {{ font-size: 22px; font-weight: 600 }}
.key {{ display: inline-block; width: 1em; height: 1em; margin: 0 .4em 0 1.2em }}
"""


def write_html(path: str | os.PathLike[str], recordings: Sequence[Recording]) -> Path:
    """Writes a page with each rank's timeline, totals and tables, and gives the path."""
    lanes = timelines(recordings)
    span_s = max((timeline.ended for timeline in lanes), default=0.0) or 1.0
    legend = "".join(
        f'<span class="key" style="background: {color}"></span>{meaning}'
        for color, meaning in (
            (COMMUNICATION_COLOR, "a collective in flight"),
            (UNSEEN_COLOR, "not read yet, probably done"),
            (EXPOSED_COLOR, "exposed: somebody waited for it"),
            (COMPUTE_COLOR, "compute: matmuls and kernels of our layers"),
        )
    )
    pictures = "".join(_picture(timeline, span_s) for timeline in lanes)
    tables = "".join(
        f"<h2>{escape(recording.title)}</h2><pre>{escape(kind_table(recording))}</pre>"
        f"<details><summary>Each event</summary>"
        f"<pre>{escape(event_table(recording))}</pre></details>"
        for recording in in_order(recordings)
    )
    path = Path(path)
    path.write_text(
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>Overlap</title>'
        f"<style>{_STYLE}</style><h1>What was hidden behind compute</h1>"
        f"<p>{legend}</p>{pictures}{tables}</html>\n",
        encoding="utf-8",
    )
    return path


def _between_ticks(span_s: float) -> float:
    """A round time, so that at most so many fit in."""
    unit = 10.0 ** math.floor(math.log10(span_s / _MOST_TICKS))
    return next(unit * size for size in (1, 2, 5, 10) if unit * size * _MOST_TICKS >= span_s)


def _picture(timeline: RankTimeline, span_s: float) -> str:
    """One rank: communication above compute, a time axis below, totals to the right."""
    px_per_s = _PLOT / span_s
    lanes = len(timeline.communication) or 1
    height = max((lanes + 1) * _LANE + _AXIS, 8 * 18 + 10)
    bottom = (lanes + 1) * _LANE

    def rects(bars: Sequence[Bar], lane: int, kind: str) -> Iterator[str]:
        for bar in bars:
            x, width = _LEFT + bar.began * px_per_s, (bar.ended - bar.began) * px_per_s
            y = lane * _LANE + (_LANE - _BAR) / 2
            label = f"{bar.name}, {(bar.ended - bar.began) * 1e3:.3f} ms"
            yield (
                f'<rect class="{kind}" x="{x:.2f}" y="{y}" width="{max(width, 0.7):.2f}" '
                f'height="{_BAR}"><title>{escape(label)}\n{escape(bar.detail)}</title></rect>'
            )

    parts = [
        f'<text x="{_LEFT - 8}" y="{_LANE - _UP}" text-anchor="end">in flight</text>',
        f'<text x="{_LEFT - 8}" y="{bottom - _UP}" text-anchor="end">compute</text>',
    ]
    step_s = _between_ticks(span_s)
    for tick in range(int(span_s / step_s) + 1):
        x = _LEFT + tick * step_s * px_per_s
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}"/>')
        time = f"{tick * step_s * 1e3:g} ms"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{time}</text>')
    for lane, bars in enumerate(timeline.communication):
        parts += rects(bars, lane, "communication")
    for lane, bar in timeline.in_communication_lanes(timeline.unseen):
        parts += rects([bar], lane, "unseen")
    parts += rects(timeline.compute, lanes, "compute")
    for lane, bar in timeline.in_communication_lanes(timeline.waits):
        for row in (lane, lanes):
            parts += rects([bar], row, "exposed")
    for lane, bars in enumerate([*timeline.until_read, timeline.compute]):
        for bar in bars:
            name = bar.name_within((bar.ended - bar.began) * px_per_s / _PX_PER_LETTER)
            x, y = _LEFT + bar.began * px_per_s + 3, (lane + 1) * _LANE - _UP
            parts.append(f'<text x="{x:.2f}" y="{y}" pointer-events="none">{escape(name)}</text>')
    parts += rects(timeline.unread, 0, "unread")
    parts += rects(timeline.fallbacks, lanes, "fallback")
    for line, text in enumerate(timeline.totals()):
        first = ' class="first"' if line == 0 and len(text) < 20 else ""
        x, y = _LEFT + _PLOT + 35, 20 + line * 19
        parts.append(f'<text x="{x}" y="{y}"{first}>{escape(text)}</text>')
    width = _LEFT + _PLOT + _RIGHT
    return (
        f"<h3>{escape(timeline.title)}</h3>"
        f'<svg role="img" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f"{''.join(parts)}</svg>"
    )
