"""How cost grows with sequence, ranks, rate and pieces; and a model of it that looks further.

An MLP, forward + backward, sequence-first, on 2 and 4 ranks. A cost model is fitted to some of the
sequence lengths, checked on the others, and predicts 8 to 64 ranks.

A case of which a ratio is nearer to its bar than its standard error, above it or below, is measured
again, at most four times altogether; the rounds are put together.

    python -m benchmarks.scaling        # about half an hour
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.cost_model import CHUNKS, Machine, Measured, Shape, errors, fit, kernel_costs
from benchmarks.interleaved import ROUNDS, Run, Sample, slowest_rank
from benchmarks.rank_processes import Ranks, rank_processes
from benchmarks.results_file import cores, table, write_results
from benchmarks.slow_link import slow_link_or_loopback
from mc2.cost_model import CostModel

HIDDEN, INTERMEDIATE = 256, 1024
RANK_COUNTS = (2, 4)
SEQUENCES = (256, 512, 1024, 2048, 4096, 8192)
HELD_OUT = (512, 2048)
RATES = (20e6, 80e6, 320e6)
FIXED_CHUNKS = (1, 2, 4, 8)
PREDICTED_RANKS = (8, 16, 32, 64)
NOT_TOLD = "auto, not told"
ROWS_TIMED_TOGETHER = 2048  # shorter sequences are run several times for one sample

MOST_TIMES = 4  # that a case is measured, until it is clear of its bars

AUTO_OVER_TORCH = 1.05
AUTO_OVER_BEST = 1.10
BARS = tuple(
    (name, of, bar)
    for name in ("auto", NOT_TOLD)
    for of, bar in (("torch", AUTO_OVER_TORCH), ("best fixed", AUTO_OVER_BEST))
)


@dataclass(frozen=True, eq=False)
class Case:
    """One sequence length on one link.

    Attributes:
        shape: sizes and rate.
        link: description.
        told: what "auto" was told, as measured on that link.
        auto_chunks: how often "auto" cut into how many pieces, in one forward and backward.
        samples: seconds of forward + backward by variant; MC2's are ``auto``, which is told the
            costs, ``auto, not told``, and by chunk count.
    """

    shape: Shape
    link: str
    told: CostModel
    auto_chunks: str
    samples: dict[str, Sample]

    def ratios(self, variant: str, of: str) -> Sample:
        """Seconds over seconds, by round; ``of`` may also be ``best fixed``."""
        other = self.best_fixed() if of == "best fixed" else of
        return self.samples[variant].ratio_to(self.samples[other])

    def ratio(self, variant: str, of: str) -> float:
        """Median of the rounds' `ratios`."""
        return self.ratios(variant, of).median

    def is_clear(self) -> bool:
        """Whether each ratio is further from its bar than its standard error."""
        ratios = [(self.ratios(name, of), bar) for name, of, bar in BARS]
        return all(abs(r.median - bar) > r.error * r.median for r, bar in ratios)

    def followed_by(self, other: Case) -> Case:
        """The rounds of both."""
        pairs = {name: (self.samples[name], other.samples[name]) for name in self.samples}
        samples = {name: first.followed_by(second) for name, (first, second) in pairs.items()}
        return replace(self, samples=samples)

    def best_fixed(self) -> str:
        """The fixed chunk count that was fastest."""
        return min(map(str, FIXED_CHUNKS), key=lambda name: self.samples[name].median)

    def measured(self) -> Measured:
        """As the cost model takes it."""
        medians = {name: sample.median for name, sample in self.samples.items()}
        return Measured(
            self.shape,
            medians["compute"],
            medians["collectives"],
            medians["point to point"],
            medians["torch"],
            medians["async"],
            {chunks: medians[str(chunks)] for chunks in FIXED_CHUNKS},
        )


# -- on the ranks ----------------------------------------------------------------------------------


def measure_costs() -> CostModel:
    """What a user would tell "auto" of this link and these cores."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from mc2 import measure_cost_model

    return measure_cost_model(init_device_mesh("cpu", (dist.get_world_size(),)))


def measure(sequence: int, rounds: int, told: CostModel) -> tuple[dict[str, Any], str]:
    """Checks that the variants agree, then times them; also tells what "auto" chose.

    Args:
        sequence: its length.
        rounds: of timing.
        told: what "auto" is told.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks import workloads
    from benchmarks.interleaved import repeated, run_interleaved
    from mc2 import use_cost_model
    from pending_dtensor import record_overlap

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def knowing(run: Run) -> Run:
        """The run, told what things cost."""

        def run_knowing() -> Sequence[float]:
            use_cost_model(told)
            try:
                return run()
            finally:
                use_cost_model(None)

        return run_knowing

    workload = workloads.Workload("mlp", True, 1, sequence, HIDDEN, INTERMEDIATE)
    steps = {name: workloads.parallel_step(workload, name, mesh) for name in ("torch", "async")}
    for name in ("auto", NOT_TOLD, *map(str, FIXED_CHUNKS)):
        chunks = int(name) if name.isdigit() else "auto"
        steps[name] = workloads.parallel_step(workload, "mc2 fused", mesh, chunks=chunks)
    workloads.check_equal(steps)
    with record_overlap() as log:
        knowing(steps["auto"])()
    chosen = ", ".join(
        event.detail.partition(" ")[2].partition(" steps")[0] for event in log.collectives
    )
    runs: dict[str, Run] = {
        "compute": workloads.compute_step(workload, mesh),
        "collectives": workloads.communication(workload, mesh, point_to_point=False),
        "point to point": workloads.communication(workload, mesh, point_to_point=True),
        **steps,
        "auto": knowing(steps["auto"]),
    }
    times = max(1, ROWS_TIMED_TOGETHER // sequence)
    together = {name: repeated(run, times) for name, run in runs.items()}
    taken = run_interleaved(together, rounds=rounds, warm_up=1, barrier=dist.barrier)
    return {
        name: [[seconds / times for seconds in phases[0]]] for name, phases in taken.items()
    }, chosen


# -- in the parent ---------------------------------------------------------------------------------


def measure_all(args: argparse.Namespace) -> list[Case]:
    """Every rank count, rate and sequence length."""
    cases = []
    for count in args.ranks:
        with (
            slow_link_or_loopback(count, RATES[0]) as link,
            rank_processes(link, count) as ranks,
        ):
            for rate in args.rate if link.is_slow else [math.inf]:
                link.set_rate(rate)
                told = ranks.call(measure_costs)[0]
                for sequence in args.sequence:
                    shape = Shape(count, sequence, HIDDEN, INTERMEDIATE, rate)
                    cases.append(measure_case(ranks, shape, link.description, told, args.rounds))
                    print(row(cases[-1]), file=sys.stderr, flush=True)
    return cases


def measure_case(ranks: Ranks, shape: Shape, link: str, told: CostModel, rounds: int) -> Case:
    """Measures until the bars are clear, or often enough."""

    def once() -> Case:
        answers = ranks.call(measure, sequence=shape.rows, rounds=rounds, told=told)
        samples = slowest_rank([taken for taken, _ in answers])
        seconds = {name: phases[0] for name, phases in samples.items()}
        return Case(shape, link, told, answers[0][1], seconds)

    case = once()
    for _ in range(MOST_TIMES - 1):
        if case.is_clear():
            break
        case = case.followed_by(once())
    return case


def row(case: Case) -> list[str]:
    """One line of the table of measurements."""
    best = case.best_fixed()
    return [
        f"{case.shape.rows}",
        f"{len(case.samples['auto'].seconds)}",
        *(f"{case.samples[name].median * 1e3:.2f}" for name in case.samples),
        f"{max(sample.spread for sample in case.samples.values()):.1%}",
        f"{case.ratio('auto', 'torch'):.3f}",
        f"{case.ratio('auto', best):.3f} ({best})",
        f"{case.ratio(NOT_TOLD, 'torch'):.3f}",
        f"{case.ratio(NOT_TOLD, best):.3f}",
        case.auto_chunks,
    ]


def measurements(cases: Sequence[Case]) -> str:
    """The tables, one for each link."""
    parts = []
    for link in dict.fromkeys(case.link for case in cases):
        there = [case for case in cases if case.link == link]
        header = [
            "seq",
            "rounds",
            *(f"{name} [ms]" for name in there[0].samples),
            "spread <=",
            "auto / torch",
            "auto / best fixed",
            "not told / torch",
            "not told / best fixed",
            "auto chose",
        ]
        told = there[0].told
        rates = f"{told.bytes_per_s / 1e6:.3g} MB/s, {told.flops_per_s / 1e9:.3g} GFLOP/s"
        parts += [
            f"{link}; measured, and told to auto: {rates}",
            table(header, [row(case) for case in there]),
            crossover(there),
        ]
    return "\n\n".join(parts)


def crossover(cases: Sequence[Case]) -> str:
    """From which sequence length on MC2 is faster, in words."""
    slower = [case.shape.rows for case in cases if case.ratio("auto", "torch") > 1]
    faster = [case.shape.rows for case in cases if case.shape.rows > max(slower, default=0)]
    if not slower:
        return "MC2 (auto) is faster than torch's styles at every length."
    if not faster:
        return "MC2 (auto) is not faster than torch's styles at the longest."
    return f"MC2 (auto) is faster than torch's styles from sequence {min(faster)} on."


def model_report(machine: Machine, costs: CostModel, cases: Sequence[Case]) -> str:
    """Constants, errors, choices and predictions of the fitted models."""
    held_out = [case.measured() for case in cases if case.shape.rows in HELD_OUT]
    constants = ", ".join(f"{name} {value:.4g}" for name, value in asdict(machine).items())
    parts = [f"Constants: {constants}."]
    if held_out:
        found = errors(machine, held_out)
        parts.append(
            f"Held out, {len(found)} times at sequences {', '.join(map(str, HELD_OUT))}: median "
            f"error {statistics.median(found):.1%}, largest {found[-1]:.1%}."
        )
    defaults = asdict(CostModel())
    parts.append(
        'What `CostModel`, by which `chunks="auto"` goes, has of this machine, fitted to the same '
        "lengths (its default): "
        + ", ".join(
            f"{name} {value:.3g} ({defaults[name]:.3g})"
            for name, value in asdict(costs).items()
            if value is not None
        )
        + "."
    )
    parts.append(predictions(machine, [case.shape.bytes_per_s for case in cases]))
    return "\n\n".join(parts)


def predictions(machine: Machine, rates: Sequence[float]) -> str:
    """What more ranks would do, each with a core of its own."""
    apart = Machine(**{**asdict(machine), "cores": math.inf})
    rows = []
    for rate in dict.fromkeys(rates):
        for ranks in PREDICTED_RANKS:
            shape = Shape(ranks, max(SEQUENCES), HIDDEN, INTERMEDIATE, rate)
            chunks = apart.best_chunks(shape)
            torch_s, mc2_s = apart.torch_s(shape), apart.mc2_s(shape, chunks)
            rows.append(
                [
                    f"{ranks}",
                    f"{rate / 1e6:.4g}",
                    f"{torch_s * 1e3:.2f}",
                    f"{mc2_s * 1e3:.2f}",
                    f"{torch_s / mc2_s:.2f}",
                    f"{chunks}",
                ]
            )
    header = ["ranks", "MB/s", "torch [ms]", "mc2 [ms]", "mc2 x torch", f"chunks out of {CHUNKS}"]
    return (
        f"Predicted for sequence {max(SEQUENCES)}, each rank on a core of its own:\n\n"
        f"{table(header, rows)}"
    )


def main() -> int:
    """Measures, fits, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANK_COUNTS)
    parser.add_argument("--sequence", type=int, nargs="+", default=SEQUENCES)
    parser.add_argument("--rate", type=float, nargs="+", default=RATES, help="bytes per second")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-file", action="store_true", help="print only")
    args = parser.parse_args()
    cases = measure_all(args)

    fitted_to = [case.measured() for case in cases if case.shape.rows not in HELD_OUT]
    sizes = f"hidden {HIDDEN}, intermediate {INTERMEDIATE}"
    sections = [
        (f"MLP, sequence-first, {sizes}, forward + backward", measurements(cases)),
    ]
    if len(fitted_to) > 1 and all(case.shape.bytes_per_s < math.inf for case in cases):
        machine = fit(fitted_to, cores())
        costs = kernel_costs(machine, fitted_to)
        sections.append(("Cost model", model_report(machine, costs, cases)))
    losses, worst = [], []
    for name, of, bar in BARS:
        ratios = {case: case.ratio(name, of) for case in cases}
        losses += [f"{name}: {r:.3f} x {of} at {c.shape}" for c, r in ratios.items() if r > bar]
        worst.append(f"{max(ratios.values()):.3f} x {of} (<= {bar})")
    conclusion = (
        f'chunks="auto" told what things cost, at worst: {worst[0]}, {worst[1]}; not told: '
        f"{worst[2]}, {worst[3]}"
    )
    if args.no_file:
        print("\n\n".join(f"{heading}\n\n{text}" for heading, text in sections))
        print("\n".join([*losses, conclusion]))
    else:
        write_results("scaling", "Scaling", sections, losses, conclusion)
    return 0


if __name__ == "__main__":
    sys.exit(main())
