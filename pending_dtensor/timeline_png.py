"""The timeline as an image, drawn by matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pending_dtensor.events import Recording
from pending_dtensor.timeline import (
    COMMUNICATION_COLOR,
    COMPUTE_COLOR,
    EXPOSED_COLOR,
    UNSEEN_COLOR,
    Bar,
    RankTimeline,
    timelines,
)

_INCHES_WIDE, _INCHES_PER_LANE = 12.0, 0.34
_DPI = 130
_PLOT_WIDTH = 0.74  # of the figure; totals take the rest
_LETTERS_ACROSS = 125  # of a label's size, side by side over the plot
_BAR_HEIGHT = 0.78


def write_png(path: str | os.PathLike[str], recordings: Sequence[Recording]) -> Path:
    """Draws each rank's timeline with its totals beside it, and gives the path.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "Expected matplotlib to draw an image, got none installed (to_png). Install the extra: "
            "pip install 'pending-dtensor[report]', or write a page with to_html instead."
        ) from error
    ranks = timelines(recordings)
    span_ms = (max((rank.ended for rank in ranks), default=0.0) or 1e-3) * 1e3
    lanes = [max(len(rank.communication), 1) + 1 for rank in ranks]
    heights = [max(count * _INCHES_PER_LANE, 1.35) for count in lanes]
    figure = Figure(figsize=(_INCHES_WIDE, sum(heights) + 0.35 * len(ranks) + 1.0), dpi=_DPI)
    FigureCanvasAgg(figure)
    # Not pyplot: a library leaves the figures and the backend of its user alone.
    axes = figure.subplots(
        len(ranks), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    for axis, rank in zip(axes, ranks, strict=True):
        _draw(axis, rank, span_ms)
    axes[-1].set_xlabel("ms")
    legend = [
        Patch(color=COMMUNICATION_COLOR, label="in flight, hidden"),
        Patch(color=UNSEEN_COLOR, label="not read yet, probably done"),
        Patch(color=EXPOSED_COLOR, label="exposed: somebody waited"),
        Patch(color=COMPUTE_COLOR, label="compute"),
    ]
    inches = figure.get_size_inches()[1]
    figure.subplots_adjust(
        left=0.085, right=0.085 + _PLOT_WIDTH, top=1 - 0.7 / inches, bottom=0.5 / inches
    )
    figure.legend(handles=legend, loc="upper left", ncols=4, frameon=False, fontsize=10)
    path = Path(path)
    figure.savefig(path, format="png")
    return path


def _draw(axis: Any, rank: RankTimeline, span_ms: float) -> None:
    """One rank: communication above compute, waits in red over both."""
    lanes = max(len(rank.communication), 1)
    for lane, bars in enumerate(rank.communication):
        _draw_bars(axis, bars, lane, COMMUNICATION_COLOR, span_ms)
    _draw_bars(axis, rank.compute, lanes, COMPUTE_COLOR, span_ms)
    for lane, bar in rank.in_communication_lanes(rank.unseen):
        _draw_bars(axis, [bar], lane, UNSEEN_COLOR, span_ms)
    for lane, wait in rank.in_communication_lanes(rank.waits):
        for row in (lane, lanes):
            _draw_bars(axis, [wait], row, EXPOSED_COLOR, span_ms)
    for lane, bars in enumerate([*rank.until_read, rank.compute]):
        _name_bars(axis, bars, lane, span_ms)
    for marks, lane, color in (
        (rank.unread, 0, COMMUNICATION_COLOR),
        (rank.fallbacks, lanes, "black"),
    ):
        axis.plot(
            [mark.began * 1e3 for mark in marks],
            [lane] * len(marks),
            "v",
            color=color,
            clip_on=False,
        )
    axis.set_ylim(lanes + 0.6, -0.6)
    axis.set_xlim(0, span_ms)
    axis.set_yticks([(lanes - 1) / 2, lanes], ["in flight", "compute"])
    axis.set_title(rank.title, loc="left", fontsize=10, pad=3)
    axis.tick_params(left=False, labelsize=9)
    axis.grid(axis="x", color="#e4e4e4")
    axis.set_axisbelow(True)
    for side in ("top", "left", "right"):
        axis.spines[side].set_visible(False)
    first, *others = rank.totals()
    place = {"transform": axis.transAxes, "va": "top"}
    size = 17 if len(first) < 20 else 10
    axis.text(1.02, 1.04, first, fontsize=size, fontweight="bold", **place)
    axis.text(1.02, 0.76, "\n".join(others), fontsize=9.5, linespacing=1.35, **place)


def _draw_bars(axis: Any, bars: Sequence[Bar], lane: int, color: str, span_ms: float) -> None:
    """Bars in one lane."""
    if not bars:
        return
    # A bar is never thinner than a line, else short waits could not be seen.
    least = span_ms / 1500
    times = [(bar.began * 1e3, max((bar.ended - bar.began) * 1e3, least)) for bar in bars]
    edge = 0.5 if color == COMPUTE_COLOR else 0
    place = (lane - _BAR_HEIGHT / 2, _BAR_HEIGHT)
    axis.broken_barh(times, place, facecolors=color, edgecolors="white", linewidth=edge)


def _name_bars(axis: Any, bars: Sequence[Bar], lane: int, span_ms: float) -> None:
    """The bars' names, where there is room."""
    for bar in bars:
        letters = (bar.ended - bar.began) * 1e3 / span_ms * _LETTERS_ACROSS
        name = bar.name_within(letters - 1)
        x = bar.began * 1e3 + span_ms / 300
        axis.text(x, lane, name, va="center", fontsize=8, clip_on=True)
