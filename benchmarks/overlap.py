"""How much communication is hidden: torch's styles, ours and MC2 between two ranks on a slow link.

The link's rate is chosen so that the collectives alone take a given fraction of the arithmetic
alone. The limit is max(compute, comm), where comm is what has to travel in any case: on gloo, a
reduce-scatter sends twice that.

    python -m benchmarks.overlap                                   # everything; about 40 minutes
    python -m benchmarks.overlap --workload mlp --order sequence-first --ratio 0.5
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.interleaved import ROUNDS, Sample, slowest_rank
from benchmarks.rank_processes import Ranks, rank_processes
from benchmarks.results_file import table, write_results
from benchmarks.slow_link import Link, slow_link_or_loopback

RANKS = 2
RATIOS = (0.25, 0.5, 1.0)
ORDERS = ("sequence-first", "batch-first")
SIZES = {
    "mlp": {"sequence": 2048, "hidden": 1024, "intermediate": 4096},
    "llama3": {"sequence": 1024, "hidden": 1024, "intermediate": 3584, "heads": 16, "kv_heads": 4},
}
BATCH = {"sequence-first": 1, "batch-first": 2}  # only from 2 on does the order make a difference
PROBE_BYTES_PER_S = 100e6

VARIANTS = ("torch", "sync", "async", "mc2 fused", "mc2 overlap")
COMPUTE, COLLECTIVES, WIRE = "compute", "collectives", "point to point"
PHASES = ("forward", "backward", "forward + backward")

MC2_OVER_LIMIT = 1.10
MC2_SPEEDUP = 1.30
ASYNC_BACKWARD_SPEEDUP = 1.10
BAR_FROM_RATIO = 0.45  # "about 0.5 and above"


@dataclass(frozen=True)
class Result:
    """One workload at one rate.

    Attributes:
        workload: its description.
        kind: ``mlp`` or ``llama3``.
        link: its description.
        samples: for each variant: forward, backward, and their sum.
    """

    workload: str
    kind: str
    link: str
    samples: Mapping[str, Sequence[Sample]]

    def comm_over_compute(self) -> float:
        """What the collectives take, as a fraction of the arithmetic; forward + backward."""
        return self.samples[COLLECTIVES][2].median / self.samples[COMPUTE][2].median

    def limit(self, phase: int) -> float:
        """Seconds that hiding everything would leave."""
        # The cheaper of the two ways to communicate, so that none can beat the limit.
        comm = min(self.samples[COLLECTIVES][phase].median, self.samples[WIRE][phase].median)
        return max(self.samples[COMPUTE][phase].median, comm)

    def over_limit(self, variant: str, phase: int) -> float:
        """A variant's seconds over the limit's."""
        return self.samples[variant][phase].median / self.limit(phase)

    def speedup(self, variant: str, phase: int) -> float:
        """How many times as fast as torch's styles; median of the rounds' ratios."""
        return self.samples["torch"][phase].ratio_to(self.samples[variant][phase]).median


# -- on the ranks ----------------------------------------------------------------------------------


def measure(sizes: dict[str, Any], rounds: int, variants: Sequence[str]) -> dict[str, Any]:
    """Checks that the variants agree, then times them.

    Args:
        sizes: fields of a `Workload`.
        rounds: rounds that count.
        variants: which to time besides the limits.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks import workloads
    from benchmarks.interleaved import run_interleaved

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    workload = workloads.Workload(**sizes)
    compute = workloads.compute_step(workload, mesh)
    steps = {name: workloads.parallel_step(workload, name, mesh) for name in variants}
    if steps:
        workloads.check_same_arithmetic(workload, compute, mesh.size())
        workloads.check_equal(steps)
    runs: dict[str, Any] = {
        COMPUTE: compute,
        COLLECTIVES: workloads.communication(workload, mesh, point_to_point=False),
        WIRE: workloads.communication(workload, mesh, point_to_point=True),
        **steps,
    }
    return run_interleaved(runs, rounds=rounds, barrier=dist.barrier)


def describe(sizes: dict[str, Any]) -> str:
    """A workload in words."""
    from benchmarks.workloads import Workload

    return str(Workload(**sizes))


# -- in the parent ---------------------------------------------------------------------------------


def measured(
    ranks: Ranks,
    link: Link,
    sizes: dict[str, Any],
    rounds: int,
    variants: Sequence[str] = VARIANTS,
) -> Result:
    """One workload at the link's rate."""
    samples = slowest_rank(ranks.call(measure, sizes=sizes, rounds=rounds, variants=variants))
    both = {name: [*phases, phases[0] + phases[1]] for name, phases in samples.items()}
    return Result(ranks.call(describe, sizes=sizes)[0], sizes["kind"], link.description, both)


def rate_for(ratio: float, probe: Result, probe_bytes_per_s: float) -> float:
    """Bytes per second at which the collectives take ``ratio`` of the arithmetic.

    At the rates in question they take the time of their bytes and little else.
    """
    return probe_bytes_per_s * probe.comm_over_compute() / ratio


def report(result: Result) -> str:
    """The table of one workload at one rate."""
    header = ["variant"]
    for phase in PHASES:
        header += [f"{phase} [s]", "spread", "x limit", "x torch"]
    rows = []
    for name, samples in result.samples.items():
        cells = [name]
        for number, sample in enumerate(samples):
            cells += [f"{sample.median:.4f}", f"{sample.spread:.1%}"]
            parallelized = name in VARIANTS
            cells.append(f"{result.over_limit(name, number):.3f}" if parallelized else "")
            cells.append(f"{result.speedup(name, number):.3f}" if parallelized else "")
        rows.append(cells)
    limits = [[f"{result.limit(number):.4f}", "", "1.000", ""] for number in range(len(PHASES))]
    rows.append(["limit", *itertools.chain(*limits)])
    where = f"{result.link}; comm / compute {result.comm_over_compute():.2f}"
    return f"{where}\n\n{table(header, rows)}"


def verdicts(result: Result) -> list[tuple[bool, str]]:
    """What the benchmark aims at, as far as it concerns one result: (reached, in words)."""
    if result.kind != "mlp" or result.comm_over_compute() < BAR_FROM_RATIO:
        return []
    mc2 = min(
        (name for name in result.samples if name.startswith("mc2")),
        key=lambda name: result.over_limit(name, 2),
    )
    over, speedup = result.over_limit(mc2, 2), result.speedup(mc2, 2)
    backward = result.speedup("async", 1)
    where = f"at comm / compute {result.comm_over_compute():.2f}, {result.workload}"
    return [
        (over <= MC2_OVER_LIMIT, f"{mc2} {over:.3f} x limit (<= {MC2_OVER_LIMIT}) {where}"),
        (speedup >= MC2_SPEEDUP, f"{mc2} {speedup:.3f} x torch (>= {MC2_SPEEDUP}) {where}"),
        (
            backward >= ASYNC_BACKWARD_SPEEDUP,
            f"async backward {backward:.3f} x torch (>= {ASYNC_BACKWARD_SPEEDUP}) {where}",
        ),
    ]


def slower_than_torch(result: Result) -> list[str]:
    """Where a variant of ours does not reach torch's speed, in words."""
    return [
        f"{name} {PHASES[phase]}: {result.speedup(name, phase):.3f} x torch at comm / compute "
        f"{result.comm_over_compute():.2f}, {result.workload}"
        for name in result.samples
        if name in ("sync", "async") or name.startswith("mc2")
        for phase in range(3)
        if result.speedup(name, phase) < 0.98
    ]


def main() -> int:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=list(SIZES), action="append")
    parser.add_argument("--order", choices=ORDERS, action="append")
    parser.add_argument("--ratio", type=float, action="append", help="comm / compute")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-file", action="store_true", help="print only")
    args = parser.parse_args()

    with (
        slow_link_or_loopback(RANKS, PROBE_BYTES_PER_S) as link,
        rank_processes(link, RANKS) as ranks,
    ):
        for kind in args.workload or SIZES:
            sections, results = measure_kind(kind, args, link, ranks)
            conclude(kind, sections, results, write=not args.no_file)
    return 0


def measure_kind(
    kind: str, args: argparse.Namespace, link: Link, ranks: Ranks
) -> tuple[list[tuple[str, str]], list[Result]]:
    """One kind of workload in every order and at every rate: sections of a report, and results."""
    sections: list[tuple[str, str]] = []
    results: list[Result] = []
    for order in args.order or ORDERS:
        sizes = {
            "kind": kind,
            "sequence_first": order == "sequence-first",
            "batch": BATCH[order],
            **SIZES[kind],
        }
        link.set_rate(PROBE_BYTES_PER_S)
        probe = measured(ranks, link, sizes, rounds=3, variants=())
        texts = []
        for ratio in args.ratio or RATIOS if link.is_slow else [None]:
            if ratio is not None:
                link.set_rate(rate_for(ratio, probe, PROBE_BYTES_PER_S))
            results.append(measured(ranks, link, sizes, args.rounds))
            texts.append(report(results[-1]))
            print(f"{results[-1].workload}\n{texts[-1]}\n", file=sys.stderr, flush=True)
        sections.append((results[-1].workload, "\n\n".join(texts)))
    return sections, results


def conclude(
    kind: str, sections: Sequence[tuple[str, str]], results: Sequence[Result], *, write: bool
) -> None:
    """Writes, or only prints: aims reached and missed, and where torch is faster."""
    checked = [verdict for result in results for verdict in verdicts(result)]
    missed = [f"missed: {words}" for reached, words in checked if not reached]
    losses = missed + [line for result in results for line in slower_than_torch(result)]
    conclusion = "; ".join(words for _, words in checked) or "No rate at which an aim is set."
    if write:
        title = f"Communication hidden: {kind}"
        write_results(f"overlap_{kind}", title, sections, losses, conclusion)
    else:
        print("\n".join([*losses, conclusion]))


if __name__ == "__main__":
    sys.exit(main())
