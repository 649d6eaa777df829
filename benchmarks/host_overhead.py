"""Host time per call, without communication: ours against torch's styles and DTensor.

A fake process group completes every collective at once, and the tensors are tiny, so what is left
is Python and dispatch. Counted is the processor time of the calling thread, in which other programs
on the machine have no part.

    python -m benchmarks.host_overhead
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.interleaved import Sample, repeated, run_interleaved, slowest_rank
from benchmarks.results_file import table, write_results

ROUNDS = 15
CALLS = 100
RANKS = 2
BATCH, SEQUENCE, HIDDEN, INTERMEDIATE = 2, 4, 8, 16


@dataclass(frozen=True)
class Case:
    """One call, in two libraries.

    Attributes:
        torch, ours: the call.
        bar: largest ratio ours / torch aimed at, or None.
    """

    torch: Callable[[], Any]
    ours: Callable[[], Any]
    bar: float | None = None


def cases() -> dict[str, Case]:
    """All cases, by name. Joins a fake process group."""
    import torch
    import torch.distributed as dist
    import torch.distributed.tensor.parallel as torch_styles
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import parallel_styles as our_styles
    from benchmarks.workloads import MLP, finished
    from pending_dtensor import HyperDTensor

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    x = torch.randn(BATCH, SEQUENCE // RANKS, HIDDEN)
    grad_out = torch.ones_like(x)
    shard = torch.randn(SEQUENCE, HIDDEN)
    rows, whole = [Shard(0)], [Replicate()]

    def mlp(styles: Any, *, backward: bool) -> Callable[[], Any]:
        torch.manual_seed(0)
        plan = {
            "w1": styles.ColwiseParallel(input_layouts=Shard(1)),
            "w2": styles.RowwiseParallel(output_layouts=Shard(1)),
        }
        module = styles.parallelize_module(MLP(HIDDEN, INTERMEDIATE, bias=True), mesh, plan)

        def call() -> list[torch.Tensor]:
            with torch.set_grad_enabled(backward):
                leaf = x.detach().requires_grad_(backward)
                out = module(leaf)
                finished(out)
                if not backward:
                    return [finished(out)]
                module.zero_grad(set_to_none=True)
                out.backward(grad_out)
            return [finished(out), *(finished(p.grad) for p in (leaf, *module.parameters()))]

        return call

    plain = DTensor.from_local(shard, mesh, rows)
    hyper = HyperDTensor.from_local(shard, mesh, rows)

    def pair(call: Callable[[Any], Any], bar: float | None = None) -> Case:
        """The same call on a DTensor and on a HyperDTensor."""
        return Case(lambda: [finished(call(plain))], lambda: [finished(call(hyper))], bar)

    def gather(tensor: DTensor) -> DTensor:
        return tensor.redistribute(placements=whole, async_op=True)

    def gather_sync(tensor: DTensor) -> DTensor:
        return tensor.redistribute(placements=whole)

    return {
        "Col+Row MLP forward": Case(
            mlp(torch_styles, backward=False), mlp(our_styles, backward=False)
        ),
        "Col+Row MLP forward + backward": Case(
            mlp(torch_styles, backward=True), mlp(our_styles, backward=True), 0.6
        ),
        "redistribute, async_op=True": pair(gather, 1.0),
        "redistribute, async_op=False": pair(gather_sync, 1.0),
        "from_local": Case(
            lambda: [finished(DTensor.from_local(shard, mesh, rows))],
            lambda: [finished(HyperDTensor.from_local(shard, mesh, rows))],
        ),
        "elementwise x + x": pair(lambda t: t + t, 1.3),
        "elementwise x * 2.0": pair(lambda t: t * 2.0, 1.3),
        "elementwise relu(x)": pair(torch.relu, 1.3),
    }


def check_equal(case: Case, name: str) -> None:
    """Compares what both libraries return.

    Raises:
        AssertionError: they differ.
    """
    import torch

    ours, theirs = case.ours(), case.torch()
    assert len(ours) == len(theirs), name
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, msg=lambda words: f"{name}: {words}")


def measure(case: Case, rounds: int, calls: int) -> tuple[Sample, Sample]:
    """Seconds per call: torch's, ours."""
    clock = time.thread_time
    runs = {
        "torch": repeated(case.torch, calls, clock),
        "ours": repeated(case.ours, calls, clock),
    }
    taken = slowest_rank([run_interleaved(runs, rounds=rounds, clock=clock)])
    both = [Sample(tuple(s / calls for s in taken[name][0].seconds)) for name in runs]
    return both[0], both[1]


def main() -> int:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--calls", type=int, default=CALLS, help="calls per round")
    parser.add_argument("--no-file", action="store_true", help="print only")
    args = parser.parse_args()

    rows, losses, verdicts = [], [], []
    for name, case in cases().items():
        check_equal(case, name)
        theirs, ours = measure(case, args.rounds, args.calls)
        ratio = ours.ratio_to(theirs)
        rows.append(
            [
                name,
                f"{theirs.median * 1e6:.1f}",
                f"{theirs.spread:.1%}",
                f"{ours.median * 1e6:.1f}",
                f"{ours.spread:.1%}",
                f"{ratio.median:.2f}",
                f"{ratio.spread:.1%}",
                "" if case.bar is None else f"<= {case.bar}",
            ]
        )
        if ratio.median > min(case.bar or 1.0, 1.0):
            aim = "" if case.bar is None else f", aim {case.bar}"
            losses.append(f"{name}: {ratio.median:.2f} x torch{aim}")
        if case.bar is not None:
            verdicts.append(f"{name} {ratio.median:.2f} x torch (<= {case.bar})")
    header = [
        "call",
        "torch [us]",
        "spread",
        "ours [us]",
        "spread",
        "ours / torch",
        "spread",
        "aim",
    ]
    text = (
        f"Processor time of one thread, over a fake process group of {RANKS} ranks. MLP: x "
        f"({BATCH}, {SEQUENCE}, {HIDDEN}), intermediate {INTERMEDIATE}, with bias, batch-first, "
        f"sequence parallel. Single ops: ({SEQUENCE}, {HIDDEN}) as Shard(0). {args.rounds} rounds "
        f"of {args.calls} calls.\n\n"
    )
    conclusion = "; ".join(verdicts)
    if args.no_file:
        print("\n".join([table(header, rows), *losses, conclusion]))
    else:
        sections = [("Per call", text + table(header, rows))]
        write_results("host_overhead", "Host time per call", sections, losses, conclusion)
    return 0


if __name__ == "__main__":
    sys.exit(main())
