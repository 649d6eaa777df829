"""Writes ``results/<theme>_<hardware>_<yyyymm>.md``: what was run, on what, and what came of it."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import date
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).with_name("results")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that can also be read as it is."""
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def write_results(
    theme: str,
    title: str,
    sections: Sequence[tuple[str, str]],
    losses: Sequence[str],
    conclusion: str,
    folder: Path = RESULTS,
) -> Path:
    """Writes the file of one benchmark and prints its text.

    Args:
        theme: of the benchmark; the file's name begins with it.
        title: heading of the file.
        sections: heading and text of each, in order.
        losses: where the library is slower, or misses what it aims at; one line each.
        conclusion: the last line, with the ratio.
        folder: where the file goes.

    Returns:
        The path.
    """
    parts = [f"# {title}", f"`{command()}`", environment()]
    parts += [f"## {heading}\n\n{text}" for heading, text in sections]
    lost = "\n".join(f"- {line}" for line in losses) or "Nowhere in what was measured."
    parts += [f"## Where we lose\n\n{lost}", conclusion]
    text = "\n\n".join(parts) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{theme}_{hardware_slug(processor(), cores())}_{date.today():%Y%m}.md"
    path.write_text(text)
    print(f"({os.path.relpath(path)})\n\n{text}", end="")
    return path


def command() -> str:
    """The command line that is running, as one would type it."""
    spec = sys.modules["__main__"].__spec__
    program = f"-m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name
    return " ".join(["python", program, *map(shlex.quote, sys.argv[1:])])


def environment() -> str:
    """Hardware and versions, as a list."""
    facts = {
        "date": f"{date.today():%Y-%m-%d}",
        "hardware": f"{processor()}, {cores()} cores, {memory_gib():.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {_version(name)}" for name in ("torch", "pending-dtensor")),
        "each rank": "one process on one core, OMP_NUM_THREADS=1, process group gloo, float32",
    }
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def hardware_slug(name: str, count: int) -> str:
    """Short name of a machine for a file's name."""
    plain = re.sub(r"\(.*?\)|@.*|\b(cpu|processor|core)\b", " ", name, flags=re.IGNORECASE)
    words = re.findall(r"[a-z0-9]+", plain.lower())
    return "-".join([*words[:3], f"{count}cores"])


def processor() -> str:
    """Name of the CPU."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_gib() -> float:
    """Memory of the machine [GiB]."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "(not installed)"
