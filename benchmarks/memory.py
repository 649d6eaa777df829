"""Memory of forward and backward: bytes saved for backward, the peak, and buffers in flight.

Every allocation and release of torch's CPU allocator is taken from the profiler, so the numbers
are exact, and do not depend on the speed of anything. Parameters and input are there before and do
not count; gradients do, in the peak. What is in flight at once is what the peak may be higher by
than that of ``sync``, which waits for each collective where it launches it.

    python -m benchmarks.memory
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.rank_processes import rank_processes
from benchmarks.results_file import table, write_results
from benchmarks.slow_link import Loopback

RANK_COUNTS = (2, 4)
VARIANTS = ("torch", "sync", "async", "mc2 fused", "mc2 overlap", "mc2 regather")
WORKLOADS: dict[str, dict[str, Any]] = {
    kind: {"kind": kind, "sequence_first": False, "batch": 2, "hidden": 1024, **sizes}
    for kind, sizes in {
        "mlp": {"sequence": 512, "intermediate": 4096},
        "llama3": {"sequence": 256, "intermediate": 3584},
    }.items()
}
MIB = 2**20
FORWARD_ENDED = "forward ended"
UNSEEN_BYTES = MIB // 4  # Python's own small tensors, such as the profiler's


@dataclass(frozen=True)
class Usage:
    """What one forward and backward allocates on one rank, in bytes.

    Attributes:
        saved: held between forward and backward, besides the output.
        forward_peak: most held during forward.
        peak: most held during forward and backward.
        left: held after everything was dropped; not 0 means that the count is wrong.
        in_flight: the most that was launched and not read yet: the buffers of collectives, at once.
    """

    saved: int
    forward_peak: int
    peak: int
    left: int
    in_flight: int = 0


def most_at_once(held: Sequence[tuple[float, float | None, int]]) -> int:
    """The most bytes that are held at one time.

    Args:
        held: from when, until when (None: for ever), and how many.
    """
    changes = [(began, size) for began, _, size in held]
    changes += [(ended, -size) for _, ended, size in held if ended is not None]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def usage_of(changes: Sequence[int | str], output_bytes: int) -> Usage:
    """Adds up allocations.

    Args:
        changes: bytes allocated (positive) or released (negative) in order of time, with
            `FORWARD_ENDED` in between.
        output_bytes: size of the output.
    """
    held = saved = forward_peak = peak = 0
    for change in changes:
        if change == FORWARD_ENDED:
            saved, forward_peak = held - output_bytes, peak
        elif isinstance(change, int):
            held += change
            peak = max(peak, held)
    return Usage(saved, forward_peak, peak, held)


def gathered_bytes(sizes: dict[str, Any]) -> int:
    """All gathered inputs of columns in one forward, in bytes: one for each column-row pair."""
    pairs = 1 if sizes["kind"] == "mlp" else 2
    return 4 * pairs * sizes["batch"] * sizes["sequence"] * sizes["hidden"]


# -- on the ranks ----------------------------------------------------------------------------------


def check(sizes: dict[str, Any], variants: Sequence[str]) -> None:
    """Raises if the variants disagree."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks import workloads

    workload = workloads.Workload(**sizes)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    workloads.check_equal(
        {name: workloads.parallel_step(workload, name, mesh) for name in variants}
    )


def describe(sizes: dict[str, Any]) -> str:
    """A workload in words."""
    from benchmarks.workloads import Workload

    return str(Workload(**sizes))


# -- in the parent ---------------------------------------------------------------------------------


def count_all(ranks: int) -> list[dict[str, Usage]]:
    """Counts every variant of every workload as rank 0.

    Over a fake process group, which has no threads: what a thread of gloo is the last to hold and
    releases is not in the profile.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from benchmarks import workloads

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        usages: list[dict[str, Usage]] = []
        for sizes in WORKLOADS.values():
            workload = workloads.Workload(**sizes)
            usages.append({})
            for name in VARIANTS:
                step = workloads.parallel_step(workload, name, mesh)
                step()  # what is made once and kept is there from now on
                usages[-1][name] = count(step)
        return usages
    finally:
        dist.destroy_process_group()


def count(step: Any) -> Usage:
    """Allocations of one forward and backward.

    Raises:
        AssertionError: what was allocated was not released, so something was not seen.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    from pending_dtensor import record_overlap

    with record_overlap() as log:
        step()
    in_flight = most_at_once([(event.started, event.readable, event.bytes) for event in log.events])
    step.forget()
    gc.collect()
    gc.disable()  # what only the garbage collector frees counts, and always does
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        out = step.forward()
        with record_function(FORWARD_ENDED):
            pass
        output_bytes = out.numel() * out.element_size()
        step.backward(out)
        del out
        step.forget()
        gc.collect()
    gc.enable()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    usage = usage_of(
        [
            FORWARD_ENDED if event.name() == FORWARD_ENDED else event.nbytes()
            for event in events
            if event.name() in (FORWARD_ENDED, "[memory]")
        ],
        output_bytes,
    )
    assert abs(usage.left) < UNSEEN_BYTES, f"Expected everything to be released, got {usage}."
    return replace(usage, in_flight=in_flight)


def more_than_allowed(usages: dict[str, Usage]) -> list[str]:
    """Variants whose peak is above that of ``sync`` and the buffers in flight."""
    return [
        name
        for name, usage in usages.items()
        if usage.peak > usages["sync"].peak + usage.in_flight + UNSEEN_BYTES
    ]


def regather_saves(usages: dict[str, Usage]) -> int:
    """Bytes that regather=True does not save for backward."""
    return usages["mc2 fused"].saved - usages["mc2 regather"].saved


def report(usages: dict[str, Usage]) -> str:
    """The table of one workload."""
    reference = usages["torch"]
    rows = [
        [
            name,
            f"{usage.saved / MIB:.2f}",
            f"{usage.saved / reference.saved:.3f}",
            f"{usage.forward_peak / MIB:.2f}",
            f"{usage.peak / MIB:.2f}",
            f"{usage.peak / reference.peak:.3f}",
            f"{usage.in_flight / MIB:.2f}",
            f"{(usages['sync'].peak + usage.in_flight) / MIB:.2f}",
        ]
        for name, usage in usages.items()
    ]
    header = [
        "variant",
        "saved [MiB]",
        "x torch",
        "forward peak [MiB]",
        "peak [MiB]",
        "x torch",
        "in flight [MiB]",
        "sync + in flight [MiB]",
    ]
    return table(header, rows)


def main() -> int:
    """Counts, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-file", action="store_true", help="print only")
    args = parser.parse_args()
    sections, losses, verdicts = [], [], []
    for world_size in RANK_COUNTS:
        with rank_processes(Loopback("nothing is timed"), world_size) as ranks:
            for sizes in WORKLOADS.values():
                ranks.call(check, sizes=sizes, variants=VARIANTS)
        for sizes, usages in zip(WORKLOADS.values(), count_all(world_size), strict=True):
            name = f"{world_size} ranks, {describe(sizes)}"
            sections.append((name, report(usages)))
            for variant, usage in usages.items():
                for what in ("saved", "peak"):
                    ratio = getattr(usage, what) / getattr(usages["torch"], what)
                    if ratio > 1.005:
                        losses.append(f"{variant}, {what}: {ratio:.3f} x torch ({name})")
            losses += [
                f"{variant}: peak above that of sync and what is in flight ({name})"
                for variant in more_than_allowed(usages)
            ]
            kept = 1 - regather_saves(usages) / gathered_bytes(sizes)
            if kept > 1.05 / world_size:
                losses.append(
                    f"mc2 regather keeps {kept:.3f} of the gathered input, not 1/R: the input "
                    f"outlives the layer, so its gather stays to be shared until backward ({name})"
                )
            verdicts.append(
                f"regather=True keeps {kept:.4f} of the gathered input (1/R = "
                f"{1 / world_size:.4f}; {sizes['kind']}, {world_size} ranks)"
            )
    conclusion = "; ".join(verdicts)
    if args.no_file:
        print("\n\n".join(f"{heading}\n{text}" for heading, text in sections))
        print("\n".join([*losses, conclusion]))
    else:
        write_results("memory", "Memory", sections, losses, conclusion)
    return 0


if __name__ == "__main__":
    sys.exit(main())
