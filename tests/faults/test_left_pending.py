"""What becomes of pending values when their process group is destroyed, or the process forks."""

from __future__ import annotations

import multiprocessing

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext
from tests.faults.families import (
    TIMEOUT_S,
    be_impatient,
    endings,
    join,
    meet,
    nursery,
    values,
    within,
)

# Python 3.12 warns of a fork beside other threads: here the launcher's, which only waits.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

if IN_RANK_PROCESS:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Partial, Replicate, Shard

    from mc2.deferred_matmul import DeferredMatmul, Term, defer_matmul
    from mc2.options import FusionOptions
    from pending_dtensor import HyperDTensor, PendingLocal, PendingState
    from pending_dtensor.errors import CollectiveFailedError, ForkedPendingError
    from pending_dtensor.hyper_dtensor import redistribute_deferred
    from pending_dtensor.torch_compat import work_registry_size
    from tests.common.sharded_models import part
    from tests.faults.fault_points import Trainee


def pending_values(ctx: RankContext) -> dict[str, PendingLocal]:
    """One of each kind: in flight (one message, several), a view, a later step, deferred."""
    mesh = ctx.mesh()
    shard = HyperDTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    gathered = shard.redistribute(placements=[Replicate()], async_op=True).to_local()
    deferred = redistribute_deferred(shard, [Replicate()]).to_local()
    terms = [Term(torch.ones(2 * ctx.world_size, 3), torch.ones(3, 5))]
    matmul = defer_matmul(
        DeferredMatmul(terms, (2 * ctx.world_size,), FusionOptions("pipelined", 2))
    )
    partial = HyperDTensor.from_local(matmul, mesh, [Partial()])
    scattered = redistribute_deferred(partial, [Shard(0)]).to_local()
    found = {
        "gathered": gathered,
        "view": gathered[1:],
        "later": gathered.after(lambda value: value * 2, gathered.shape),
        "scattered": scattered,
        "deferred": deferred,
    }
    states = [value.state for value in found.values()]
    assert states == [PendingState.IN_FLIGHT] * 4 + [PendingState.DEFERRED]
    return found


def check_values(ctx: RankContext, found: dict[str, PendingLocal]) -> None:
    assert (found["gathered"] == 1).all()
    assert (found["view"] == 1).all()
    assert (found["later"] == 2).all()
    assert (found["scattered"] == 3 * ctx.world_size).all()


def destroyed(ctx: RankContext) -> None:
    """The other rank never comes; this one destroys the group with values pending."""
    trainee = Trainee(ctx, "pipelined")
    meet(ctx)
    be_impatient()
    if ctx.rank == 0:
        shard = part(trainee.input, 1)
        found, unread = pending_values(ctx), pending_values(ctx)
        with within(3 * TIMEOUT_S):
            dist.destroy_process_group()
            del unread
            for name in ("gathered", "view", "later", "scattered"):
                for _ in range(2):
                    with pytest.raises(CollectiveFailedError, match="over group '0' ") as failure:
                        found[name] + 1
                    del failure
            with pytest.raises(RuntimeError, match="Expected a process group to be alive"):
                found["deferred"].start()
            with pytest.raises(RuntimeError, match="Expected a process group to be alive"):
                trainee.model(shard)
        assert work_registry_size() == 0
    else:
        dist.destroy_process_group()
    del trainee
    meet(ctx)
    join(ctx.rank, ctx.world_size)
    Trainee(ctx, "pipelined").check()
    check_values(ctx, pending_values(ctx))
    assert work_registry_size() == 0


def child_of(found: dict[str, PendingLocal]) -> None:
    """In a forked child: reads are refused, drops do nothing, and the process ends by itself."""
    for name in ("gathered", "view", "later", "scattered"):
        with pytest.raises(ForkedPendingError, match="in a forked child"):
            found[name] + 1
    with pytest.raises(RuntimeError, match="a fused rule covers"):
        found["deferred"] + 1
    found.clear()


def forks(ctx: RankContext) -> None:
    trainee = Trainee(ctx, "pipelined")
    meet(ctx)
    if ctx.rank == 1:
        meet(ctx)  # until the children of rank 0 have ended, what it started is in flight
    found, unread = pending_values(ctx), pending_values(ctx)
    if ctx.rank == 0:
        with within(30):
            context = multiprocessing.get_context("fork")
            child = context.Process(target=child_of, args=(found,))
            child.start()
            child.join()
        assert child.exitcode == 0
        meet(ctx)
    check_values(ctx, found)
    del found, unread
    assert work_registry_size() == 0
    trainee.check()


def in_families(ctx: RankContext) -> None:
    values(endings(2, destroyed))
    values(endings(2, forks))


def test_a_destroyed_group_and_a_fork() -> None:
    nursery(in_families)
