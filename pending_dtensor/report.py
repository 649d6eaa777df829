"""``python -m pending_dtensor.report TRACE...``: joins the ranks' traces, prints and draws them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pending_dtensor.chrome_trace import read_trace, write_trace
from pending_dtensor.overlap_summary import kind_table
from pending_dtensor.timeline import in_order, timelines
from pending_dtensor.timeline_html import write_html
from pending_dtensor.timeline_png import write_png


def write_report(
    traces: Sequence[str | Path],
    *,
    html: str | Path | None = None,
    png: str | Path | None = None,
    trace: str | Path | None = None,
) -> str:
    """Joins traces of ``log.to_chrome_trace`` or of ``torch.profiler``, one or more ranks each.

    Args:
        traces: paths to read.
        html: where to write the page.
        png: where to draw the image; needs matplotlib.
        trace: where to write the joined trace.

    Returns:
        Totals and a table for each rank, as text.

    Raises:
        ValueError: a file is no such trace, or a rank comes twice under one name.
    """
    recordings = in_order([recording for path in traces for recording in read_trace(path)])
    titles = [recording.title for recording in recordings]
    if len(set(titles)) < len(titles):
        raise ValueError(
            f"Expected traces of different ranks, got {titles}. Join the traces of one run, each "
            f"rank's once, or give runs a name: record_overlap(name)."
        )
    if html is not None:
        write_html(html, recordings)
    if png is not None:
        write_png(png, recordings)
    if trace is not None:
        write_trace(trace, recordings)
    return "\n\n".join(
        f"{timeline.title}: {', '.join(timeline.totals())}\n{kind_table(recording)}"
        for timeline, recording in zip(timelines(recordings), recordings, strict=True)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pending_dtensor.report",
        description="Joins the overlap traces of ranks, prints the totals and writes a page.",
    )
    parser.add_argument(
        "traces", nargs="+", metavar="TRACE", help="of log.to_chrome_trace, or torch.profiler"
    )
    parser.add_argument("--html", default="overlap.html", help="the page (%(default)s)")
    parser.add_argument("--png", help="an image too; needs matplotlib")
    parser.add_argument("--trace", help="the joined trace, for Perfetto")
    args = parser.parse_args(argv)
    try:
        text = write_report(args.traces, html=args.html, png=args.png, trace=args.trace)
    except (OSError, ValueError, ImportError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    written = ", ".join(path for path in (args.html, args.png, args.trace) if path)
    print(f"{text}\n\nwrote {written}")  # noqa: T201 - a command
    return 0


if __name__ == "__main__":
    sys.exit(main())
