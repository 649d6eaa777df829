"""The main job, `make demo`: trains the same model once per mode and compares the losses.

Each mode is a launch of its own of `tensor_parallel_example.py`, on the same seed, text and ranks.
Exits with 1 if a mode's losses differ from the synchronous ones by more than its tolerance, or do
not fall.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

EXAMPLE = Path(__file__).with_name("tensor_parallel_example.py")
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclass(frozen=True)
class Mode:
    """One way of running the collectives.

    Attributes:
        flags: what selects it on the example's command line.
        tolerance: largest difference from the synchronous losses; 0.0 is bitwise.
    """

    flags: tuple[str, ...]
    tolerance: float


REFERENCE = Mode(("--no-async-redistribute",), tolerance=0.0)
# Asynchronous collectives run the same operations in the same order.
ASYNC = Mode(("--async-redistribute",), tolerance=0.0)


def run(mode: Mode, *, ranks: int, steps: int) -> dict[str, Any]:
    """Trains in one mode, progress on the terminal.

    Returns:
        What the example writes with `--json-out`.

    Raises:
        subprocess.CalledProcessError: the training failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        json_out = Path(folder, "result.json")
        options = ["--tp", str(ranks), "--steps", str(steps), "--json-out", str(json_out)]
        print("$ python", os.path.relpath(EXAMPLE), *mode.flags, *options, flush=True)
        subprocess.run(
            [sys.executable, str(EXAMPLE), *mode.flags, *options],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
        )
        result: dict[str, Any] = json.loads(json_out.read_text())
        return result


def max_difference(losses: list[float], reference: list[float]) -> float:
    """Largest distance of two loss curves at any step; NaN if one step has none."""
    differences = [abs(a - b) for a, b in zip(losses, reference, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def faults(mode: Mode, result: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """Lists what is wrong with one mode's losses, in words."""
    losses = result["losses"]
    found = []
    difference = max_difference(losses, reference["losses"])
    if not difference <= mode.tolerance:  # so written that NaN is a fault
        found.append(
            f"{result['mode']}: Expected losses within {mode.tolerance:g} of the synchronous ones, "
            f"got a difference of {difference:g}."
        )
    if not mean(losses[-3:]) < 0.9 * losses[0]:
        found.append(
            f"{result['mode']}: Expected losses that fall by a tenth, "
            f"got {losses[0]:.4f} at the first step and {mean(losses[-3:]):.4f} at the end."
        )
    return found


def table(results: list[dict[str, Any]]) -> str:
    """Renders the comparison; the first result is the reference."""
    header = ["mode", "first loss", "last loss", "max diff", "s/step", "exposed s/step", *KINDS]
    rows = [header]
    for result in results:
        overlap = result["overlap"]
        difference = max_difference(result["losses"], results[0]["losses"])
        rows.append(
            [
                result["mode"],
                f"{result['losses'][0]:.6f}",
                f"{result['losses'][-1]:.6f}",
                f"{difference:g}",
                f"{median(result['step_s']):.3f}",
                f"{median(step['exposed_s'] for step in overlap):.4f}",
                *(str(sum(step["by_kind"].get(kind, 0) for step in overlap)) for kind in KINDS),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def main() -> int:
    """Runs every mode, prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--steps", type=int, default=40, help="steps per mode (default 40)")
    args = parser.parse_args()

    modes = [REFERENCE, ASYNC]
    results = [run(mode, ranks=args.tp, steps=args.steps) for mode in modes]

    print(
        f"\n{args.steps} steps on {args.tp} ranks. Seconds are the median step of rank 0; exposed: "
        "blocked on collectives."
    )
    print(table(results))
    found = [
        fault
        for mode, result in zip(modes, results, strict=True)
        for fault in faults(mode, result, results[0])
    ]
    print("\n".join(found) if found else "Losses are equal in every mode, and fall.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
