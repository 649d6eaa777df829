"""A rank that is killed at any point of a step: the others are told, and go on without it."""

from __future__ import annotations

import functools
import os
import signal

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext
from tests.common.script_on_ranks import run_script_on_ranks
from tests.faults.families import (
    LIMIT_S,
    be_impatient,
    endings,
    endings_of_each,
    meet,
    nursery,
    regroup,
    values,
    within,
)
from tests.faults.fault_points import KINDS, sent_in_a_step

# Python 3.12 warns of a fork beside other threads: here the launcher's, which only waits.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

if IN_RANK_PROCESS:
    import torch
    import torch.distributed as dist

    from mc2.kernels import get_kernel
    from mc2.row_layout import RowLayout
    from pending_dtensor.errors import CollectiveFailedError
    from pending_dtensor.torch_compat import work_registry_size
    from tests.faults.fault_points import (
        Trainee,
        acting_at,
        error_of_a_survivor,
        noting_points,
        points_of_a_step,
        where_missed,
    )

RANKS, VICTIM = 3, 1


def killed_at(ctx: RankContext, kind: str, number: int) -> str:
    trainee = Trainee(ctx, kind)
    meet(ctx)
    be_impatient()
    if ctx.rank == VICTIM:
        with acting_at(number, functools.partial(os.kill, os.getpid(), signal.SIGKILL)):
            trainee.step()
    message = error_of_a_survivor(trainee.step)
    del trainee
    assert work_registry_size() == 0
    regroup(ctx.rank - (ctx.rank > VICTIM), RANKS - 1)
    Trainee(ctx, kind).check()
    return message


def killed_at_every_point(ctx: RankContext, kind: str) -> list[str]:
    points = values(endings(RANKS, points_of_a_step, kind))[VICTIM]
    # All that the others see of a death before a multiplication is that the next message does not
    # come.
    numbers = [number for number in where_missed(points) if points[number] != "multiply"]
    messages = []
    for ends in endings_of_each(RANKS, killed_at, [(kind, number) for number in numbers]):
        assert ends[VICTIM].signal == signal.SIGKILL
        messages += values(ends, but=VICTIM)
    return messages


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_point(kind: str) -> None:
    messages = nursery(killed_at_every_point, kind)
    # Of whatever they lost, the survivors named it; among these are:
    for lost in sent_in_a_step(kind):
        assert any(message.startswith(f"Expected the {lost}") for message in messages), lost
    reads = ["waited for by aten.eq.Scalar", "waited for by a read"]
    # The victim's; those of a survivor that has given up itself may not be missed by anyone.
    pieces = {"pipelined": [f"waited for rows of rank {VICTIM} of the group"]}
    for read in reads + pieces.get(kind, []):
        assert any(f"({read})" in message for message in messages), read


def told_of_a_death(ctx: RankContext) -> None:
    """Rank 0 dies when rank 2 waits for rows of both others; those of rank 1 do not come either."""
    dead, silent, waiting = range(RANKS)
    pids: list[str] = []

    def at(what: str) -> None:
        if what == "wait" and not pids:
            pids.extend(meet(ctx))

    if ctx.rank == waiting:
        layout = RowLayout(1, (3, 3, 3), 1, ctx.rank)
        gather = get_kernel("pipelined").all_gather_matmul
        with (
            noting_points(at),
            within(LIMIT_S / 3),
            pytest.raises(CollectiveFailedError) as failure,
        ):
            gather(torch.ones(3, 4), [torch.eye(4)], layout, dist.group.WORLD, chunks=2)
        assert f"waited for rows of rank {dead} of" in str(failure.value)
        os.kill(int(pids[silent]), signal.SIGKILL)
    else:
        meet(ctx, str(os.getpid()))
        if ctx.rank == dead:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()


def told_in_time(ctx: RankContext) -> None:
    *_, waiting = endings(RANKS, told_of_a_death)
    values([waiting])


def test_what_has_failed_does_not_wait_for_others_that_hang() -> None:
    nursery(told_in_time)


SURVIVOR = """
    import os, signal, sys, time
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard
    from pending_dtensor import HyperDTensor
    from tests.common.script_on_ranks import join_default_group

    rank, _ = join_default_group()
    mesh = init_device_mesh("cpu", (2,))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def values():
        part = HyperDTensor.from_local(torch.ones(4), mesh, [Shard(0)])
        return [part.redistribute(placements=[Replicate()], async_op=True) for _ in range(3)]

    kept = values()
    try:
        print((kept[0].to_local() + 1).sum())
    except RuntimeError as error:
        print(str(error)[:38])
    kept += values()
"""


def test_a_survivor_ends_as_any_process_does() -> None:
    survivor, victim = run_script_on_ranks(SURVIVOR, 2)
    assert victim.exit_code == -signal.SIGKILL
    assert (survivor.exit_code, survivor.stderr) == (0, "")
    assert survivor.stdout == "Expected the all_gather of (8,) float3\n"
