"""The main job, `make demo`: trains the same model once per mode and compares the losses.

The ranks are started once and train in each mode in turn, as `tensor_parallel_example.py` does on
its own, from the same seed and on the same text. A page shows the last step of each mode. Exits
with 1 if a mode's losses differ from the
synchronous ones by more than its tolerance, or do not fall.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

if not __package__:  # started as a file: make `examples` importable, and this folder not
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from examples.torch.llama3.tensor_parallel_example import launch, parse_args
from pending_dtensor.report import write_report

PAGE = Path(__file__).resolve().parents[3] / "build" / "demo" / "overlap.html"
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
# Fused kernels add up in another order, and float32 rounding grows from step to step: to 2e-6 after
# 25, 2e-5 after 40. A dead half of one layer's gradients is above the tolerance at the second step.
# A gradient of wrong scale would not be: AdamW divides it out. The tests compare gradients.
MC2 = Mode(("--mc2-kernel", "pipelined"), tolerance=1e-4)
MODES = (REFERENCE, ASYNC, MC2)


def run(modes: Sequence[Mode], *, ranks: int, steps: int, page: Path) -> list[dict[str, Any]]:
    """Trains in each mode, progress on the terminal, and writes the page.

    Returns:
        For each mode, what the example writes with `--json-out`.
    """
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder, str(number)) for number in range(len(modes))]
        common = ["--tp", str(ranks), "--steps", str(steps)]
        launch(
            [
                parse_args(
                    [
                        *(*common, *mode.flags),
                        *("--json-out", f"{place}.json", "--trace-out", str(place)),
                    ]
                )
                for mode, place in zip(modes, places, strict=True)
            ]
        )
        page.parent.mkdir(parents=True, exist_ok=True)
        write_report([trace for place in places for trace in place.iterdir()], html=page)
        return [json.loads(place.with_suffix(".json").read_text()) for place in places]


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


def fused_collectives(summary: dict[str, Any]) -> int:
    """Counts the collectives that ran inside a matmul kernel."""
    return sum(count for kernel, count in summary["by_kernel"].items() if kernel != "unfused")


def table(results: list[dict[str, Any]]) -> str:
    """Renders the comparison; the first result is the reference."""
    header = ["mode", "first loss", "last loss", "max diff", "s/step", "exposed s/step"]
    rows = [[*header, *KINDS, "fused"]]
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
                str(sum(fused_collectives(step) for step in overlap)),
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
    parser.add_argument("--steps", type=int, default=25, help="steps per mode (default 25)")
    parser.add_argument("--page", type=Path, default=PAGE, help="where to write the page")
    args = parser.parse_args()

    print(f"Starting {args.tp} ranks, which train in {len(MODES)} modes.", flush=True)
    results = run(MODES, ranks=args.tp, steps=args.steps, page=args.page)

    print(
        f"\n{args.steps} steps on {args.tp} ranks. Seconds are the median step of rank 0; exposed: "
        "blocked on collectives."
    )
    print(table(results))
    found = [
        fault
        for mode, result in zip(MODES, results, strict=True)
        for fault in faults(mode, result, results[0])
    ]
    agreed = (
        "Losses fall in every mode, and agree with the synchronous ones: async to the last bit, "
        f"mc2 within {MC2.tolerance:g}."
    )
    print("\n".join(found) if found else agreed)
    print(f"What the last step of each mode hid, and what not: {os.path.relpath(args.page)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
