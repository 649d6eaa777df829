"""What a long run holds on to: nothing that grows; and the same bits whenever it is run."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, RankPool, on_ranks
from tests.common.exact import by_name

if IN_RANK_PROCESS:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate, Shard

    from benchmarks import memory, workloads
    from parallel_styles import ColwiseParallel, RowwiseParallel, parallelize_module
    from pending_dtensor import HyperDTensor, PendingLocal, pending
    from pending_dtensor.collectives import all_reduce, mesh_axis
    from pending_dtensor.pending_local import materialized
    from pending_dtensor.torch_compat import work_registry_size
    from tests.common.mc2_models import fused
    from tests.common.sharded_models import MLP, part

STEPS = 1000
WARM_UP_STEPS = 50
ROWS, FEATURES = 120, 36
# One activation is 17 KiB, and one that is kept in each step 15 MiB. What allocators and
# interpreters take without any leak stays far below a quarter of that.
RESIDENT_MARGIN_BYTES = 3 * 2**20


class Census(NamedTuple):
    """What the process holds."""

    tensors: int
    in_flight: int
    works: int
    descriptors: int
    threads: int
    resident_bytes: int


def census() -> Census:
    return Census(
        tensors=sum(isinstance(kept, torch.Tensor) for kept in gc.get_objects()),
        in_flight=len(pending._in_flight),
        works=work_registry_size(),
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        resident_bytes=resident_bytes(),
    )


def resident_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # the allocator keeps what was freed
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(
    step: Callable[[], None], steps: int, warm_up: int, settle_s: float = 10.0
) -> dict[str, int]:
    """What there is more of after ``steps`` than after ``warm_up``.

    Gloo's threads let go of a buffer a moment after they say that the work is done, so what has
    grown is counted again for up to ``settle_s`` seconds.
    """
    for _ in range(warm_up):
        step()
    before = census()
    for _ in range(steps - warm_up):
        step()
    deadline = time.monotonic() + settle_s
    while grown := grown_since(before):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return grown


def grown_since(before: Census) -> dict[str, int]:
    margins = Census(0, 0, 0, 0, 0, RESIDENT_MARGIN_BYTES)
    changes = zip(Census._fields, census(), before, margins, strict=True)
    return {name: now - then for name, now, then, margin in changes if now - then > margin}


@contextlib.contextmanager
def no_garbage_collector() -> Iterator[None]:
    """Keeps cycles, so that they count."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def column_and_row(ctx: RankContext, styles: str) -> Any:
    """A column-row pair, sequence parallel: with plain styles, or MC2 ones of a kernel."""
    model = MLP(FEATURES, 2 * FEATURES, bias=False)
    if styles == "plain":
        plan = {
            "w1": ColwiseParallel(input_layouts=Shard(1)),
            "w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        return parallelize_module(model, ctx.mesh(), plan)
    kernel, _, chunks = styles.partition(", ")
    cut = {"chunks": int(chunks[0])} if chunks else {}
    return fused(ctx, model, 1, kernel, row=cut, **cut)


def training_step(ctx: RankContext, styles: str) -> Callable[[], None]:
    """Forward, backward and optimizer."""
    model = column_and_row(ctx, styles)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = part(torch.randn(1, ROWS, FEATURES), 1).requires_grad_()

    def step() -> None:
        x.grad = None
        out = model(x)
        (out * out).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("styles", ["plain", "pipelined"])
@on_ranks(2)
def test_a_thousand_steps_leave_nothing(ctx: RankContext, styles: str) -> None:
    assert growth(training_step(ctx, styles), STEPS, WARM_UP_STEPS) == {}


@on_ranks(2)
def test_what_a_step_leaves_is_noticed(ctx: RankContext) -> None:
    """Each leak alone, and garbage that only a collection of cycles would free."""
    kept: list[Any] = []
    axis = mesh_axis(ctx.mesh(), 0)
    end = threading.Event()

    def thread() -> None:
        kept.append(threading.Thread(target=end.wait))
        kept[-1].start()

    def cycle() -> None:
        garbage: list[Any] = [torch.ones(1)]
        garbage.append(garbage)

    leaks: dict[str, tuple[Callable[[], Any], str]] = {
        "tensor": (lambda: kept.append(torch.ones(1)), "tensors"),
        "cycle": (cycle, "tensors"),
        "in flight": (lambda: kept.append(all_reduce(torch.ones(1), axis, "sum")), "works"),
        "descriptor": (lambda: kept.append(os.pipe()), "descriptors"),
        "thread": (thread, "threads"),
        "memory": (lambda: kept.append(bytearray(os.urandom(2**19))), "resident_bytes"),
    }
    try:
        for name, (leak, what) in leaks.items():
            with no_garbage_collector():
                assert what in growth(leak, 12, 2, settle_s=0.1), name
    finally:
        end.set()
        for value in kept:
            if isinstance(value, PendingLocal):
                value.wait()
            if isinstance(value, tuple):
                for descriptor in value:
                    os.close(descriptor)


def dropping_steps(ctx: RankContext) -> dict[str, Callable[[], None]]:
    """Steps in which something is dropped before anybody has read it."""
    mesh = ctx.mesh()
    source = HyperDTensor.from_local(torch.ones(4, 5, 6), mesh, [Shard(0)])
    summand = HyperDTensor.from_local(torch.ones(4, 5, 6), mesh, [Partial()])
    x = part(torch.randn(1, ROWS, FEATURES), 1).requires_grad_()
    models: dict[str, Any] = {
        "plain": column_and_row(ctx, "plain"),
        "pipelined": column_and_row(ctx, "pipelined"),
    }

    def moved(tensor: Any, placement: Any) -> Callable[[], None]:
        return lambda: drop(tensor.redistribute(placements=[placement], async_op=True))

    def drop(tensor: HyperDTensor) -> None:
        local = tensor._local_tensor
        buffer = weakref.ref(local.pending._buffer)
        del local, tensor
        freed(buffer)

    def raises(model: Any) -> None:
        with pytest.raises(RuntimeError, match="between"):
            between(model.w1(x))

    def between(_: torch.Tensor) -> None:
        raise RuntimeError("between two layers")

    def half_used(model: Any) -> None:
        x.grad = None
        used, unused = model(x), model(x)
        used.sum().backward()
        del unused
        model.zero_grad()

    steps: dict[str, Callable[[], None]] = {
        "a gather": moved(source, Replicate()),
        "an all-to-all": moved(source, Shard(2)),
        "an uneven all-to-all": moved(source, Shard(1)),
        "an all-reduce": moved(summand, Replicate()),
        "a reduce-scatter": moved(summand, Shard(0)),
        "a reduce-scatter of another dim": moved(summand, Shard(1)),
    }
    for name, model in models.items():
        steps[f"a training step, {name}"] = training_step(ctx, name)
        steps[f"an output, {name}"] = lambda model=model: drop_output(model(x))
        steps[f"an input deferred or in flight, {name}"] = lambda model=model: raises(model)
        steps[f"one output of two, {name}"] = lambda model=model: half_used(model)
    return steps


def drop_output(_: torch.Tensor) -> None:
    """Takes the last reference along."""


def freed(buffer: weakref.ref[torch.Tensor]) -> None:
    """Gloo's thread lets go of a buffer a moment after it says that the work is done."""
    assert work_registry_size() == 0
    deadline = time.monotonic() + 10
    while buffer() is not None:
        assert time.monotonic() < deadline, "the buffer is still there"
        time.sleep(0.001)


@on_ranks(2)
def test_what_is_dropped_is_released_at_once(ctx: RankContext) -> None:
    """Without the garbage collector's help."""

    def nothing_grows(name: str, step: Callable[[], None]) -> None:
        with no_garbage_collector():
            assert growth(step, 12, 4) == {}

    by_name(dropping_steps(ctx), nothing_grows)


@on_ranks(2)
def test_peak_is_that_of_sync_and_what_is_in_flight(ctx: RankContext) -> None:
    """As counted by the benchmark, which shows larger sizes in a table."""
    sizes = {"kind": "mlp", "sequence_first": False, "batch": 2}
    workload = workloads.Workload(**sizes, sequence=256, hidden=512, intermediate=1024)
    group = dist.new_group(backend="fake")
    usages = {}
    try:
        mesh = DeviceMesh.from_group(group, "cpu")
        for name in ("sync", "async", "mc2 fused", "mc2 regather"):
            step = workloads.parallel_step(workload, name, mesh)
            step()
            usages[name] = memory.count(step)
    finally:
        dist.destroy_process_group(group)
    assert usages["async"].in_flight > 0
    assert memory.more_than_allowed(usages) == []


# --- the same bits


def digest(ctx: RankContext, styles: str, late: int) -> str:
    """Of everything that three steps compute on this rank from one seed; one rank comes late."""
    torch.manual_seed(7)
    model = column_and_row(ctx, styles)
    optimizer = torch.optim.AdamW(model.parameters())
    whole = torch.randn(2, 24, FEATURES)
    bits = hashlib.sha256()

    def add(tensor: torch.Tensor) -> None:
        local = materialized(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
        bits.update(local.detach().contiguous().view(torch.uint8).numpy().tobytes())

    for _ in range(3):
        if ctx.rank == late:
            time.sleep(0.02)
        x = part(whole, 1).requires_grad_()
        out = model(x)
        (out * out).sum().backward()
        for tensor in (out, x.grad, *(p.grad for p in model.parameters())):
            add(tensor)
        optimizer.step()
        optimizer.zero_grad()
    return bits.hexdigest()


STYLES = ["plain", "decomposed", "pipelined", "pipelined, 2 chunks"]


def digests(ctx: RankContext, late: int) -> list[list[str]]:
    """Two runs of each of the styles."""
    return [[digest(ctx, styles, late + run) for styles in STYLES] for run in range(2)]


def test_same_seed_same_bits() -> None:
    """Run after run, on any order of arrival, in fresh processes too; and the seed matters."""
    found = []
    for late in 0, 1:
        fresh = RankPool(3)
        try:
            found.append(fresh.run(digests, late))
        finally:
            fresh.close()
    for first, second in zip(*found, strict=True):  # by rank
        assert first[0] == first[1] == second[0] == second[1]
    assert found[0][0][0] != found[0][1][0], "ranks hold different parts"
