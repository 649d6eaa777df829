"""A picture of what is hidden, and whether the overlap log and ``torch.profiler`` agree on it.

One step of an MLP between two ranks on a slow link, by torch's styles, ours and MC2. Each step is
recorded by both. Only the profiler sees when a collective was over, and sees torch's own: the
picture is drawn from its traces.

    python -m benchmarks.timeline    # two minutes; writes docs/images/overlap.png
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.overlap import PROBE_BYTES_PER_S, RANKS, SIZES, describe, measured, rate_for
from benchmarks.rank_processes import rank_processes
from benchmarks.results_file import table, write_results
from benchmarks.slow_link import slow_link_or_loopback

TITLES = {"torch": "torch's styles", "async": "async styles", "mc2 fused": "MC2, pipelined"}
RATIO = 0.5
ROUNDS = 5
WARM_UP_ROUNDS = 1
AGREE_WITHIN = 0.10
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "overlap.png"


@dataclass(frozen=True)
class Seen:
    """One step on one rank: what is hidden, as a fraction of the communication.

    Attributes:
        step_s: what it took, by the profiler.
        logged: by the overlap log; None for what is not of this library.
        profiled: by the profiler.
        trace: the profiler's trace.
    """

    step_s: float
    logged: float | None
    profiled: float
    trace: str


# -- on the ranks ----------------------------------------------------------------------------------


def record(sizes: dict[str, Any], rounds: int, folder: str) -> dict[str, list[Seen]]:
    """Runs each variant in turn, ``rounds`` times after a warm-up.

    Args:
        sizes: fields of a `Workload`.
        rounds: rounds that count.
        folder: where the traces go.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks import workloads

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    workload = workloads.Workload(**sizes)
    steps = {name: workloads.parallel_step(workload, name, mesh) for name in TITLES}
    seen: dict[str, list[Seen]] = {name: [] for name in TITLES}
    for number in range(-WARM_UP_ROUNDS, rounds):
        for name, step in steps.items():
            path = Path(folder, f"{number}-{name}-{dist.get_rank()}.json")
            dist.barrier()
            once = _step(step, TITLES[name], path)
            if number >= 0:
                seen[name].append(once)
    return seen


def _step(step: Any, title: str, path: Path) -> Seen:
    from torch.profiler import ProfilerActivity, profile

    from pending_dtensor import OverlapLog, record_overlap
    from pending_dtensor.timeline import timelines

    with record_overlap() as log, profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    profiler.export_chrome_trace(str(path))
    profiled = OverlapLog.from_trace(path)
    profiled.name = title
    profiled.to_chrome_trace(path)
    (lanes,) = timelines([profiled])
    hidden, logged = (each.summary()["hidden_fraction"] for each in (profiled, log))
    return Seen(lanes.ended, logged, hidden, str(path))


# -- in the parent ---------------------------------------------------------------------------------


def rows(ranks: Sequence[Mapping[str, Sequence[Seen]]]) -> list[list[str]]:
    """A row for each variant and rank: the medians of the rounds."""
    return [
        [
            TITLES[name],
            str(rank),
            f"{median(once.step_s for once in seen[name]):.3f}",
            f"{median(once.profiled for once in seen[name]):.1%}",
            "-" if name == "torch" else f"{median(_logged(seen[name])):.1%}",
        ]
        for name in TITLES
        for rank, seen in enumerate(ranks)
    ]


def largest_distance(ranks: Sequence[Mapping[str, Sequence[Seen]]]) -> float:
    """Between the log's fraction and the profiler's: the largest median of any variant and rank."""
    return max(
        median(
            abs(once.profiled - logged)
            for once, logged in zip(seen[name], _logged(seen[name]), strict=True)
        )
        for seen in ranks
        for name in TITLES
        if name != "torch"
    )


def _logged(rounds: Sequence[Seen]) -> list[float]:
    """The log's fractions; it has seen every collective of this library."""
    return [once.logged for once in rounds if once.logged is not None]


def draw(path: Path, ranks: Sequence[Mapping[str, Sequence[Seen]]]) -> None:
    """Draws the step of median length of each variant, on rank 0."""
    from pending_dtensor.report import write_report

    traces = [
        sorted(ranks[0][name], key=lambda once: once.step_s)[len(ranks[0][name]) // 2].trace
        for name in TITLES
    ]
    write_report(traces, png=path)


def main() -> int:
    """Measures, prints, draws and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ratio", type=float, default=RATIO, help="comm / compute")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--png", type=Path, default=PICTURE)
    parser.add_argument("--no-file", action="store_true", help="print only, beside the picture")
    args = parser.parse_args()

    sizes = {"kind": "mlp", "sequence_first": True, "batch": 1, **SIZES["mlp"]}
    with (
        tempfile.TemporaryDirectory() as folder,
        slow_link_or_loopback(RANKS, PROBE_BYTES_PER_S) as link,
        rank_processes(link, RANKS) as ranks,
    ):
        if link.is_slow:
            probe = measured(ranks, link, sizes, rounds=3, variants=())
            link.set_rate(rate_for(args.ratio, probe, PROBE_BYTES_PER_S))
        results = ranks.call(record, sizes=sizes, rounds=args.rounds, folder=folder)
        workload = ranks.call(describe, sizes=sizes)[0]
        draw(args.png, results)
    header = ["variant", "rank", "step [s]", "hidden, by torch.profiler", "by the log"]
    text = f"{link.description}\n\n{table(header, rows(results))}"
    distance = largest_distance(results)
    conclusion = (
        f"Hidden fraction by the log and by torch.profiler: {distance:.3f} apart at most "
        f"(<= {AGREE_WITHIN:.2f})"
    )
    losses = [] if distance <= AGREE_WITHIN else [f"missed: {conclusion}"]
    if args.no_file:
        print("\n".join([text, *losses, conclusion]))
    else:
        write_results("timeline", "What is hidden", [(workload, text)], losses, conclusion)
    return 0


if __name__ == "__main__":
    sys.exit(main())
