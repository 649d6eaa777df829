"""A rank raises, is stopped or interrupted: an error for the others, and the next step is right."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext
from tests.faults.families import (
    Family,
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
    from pending_dtensor import PendingLocal
    from pending_dtensor.collectives import all_gather, all_reduce, mesh_axis
    from pending_dtensor.pending import Launch
    from pending_dtensor.torch_compat import work_registry_size
    from tests.faults.fault_points import (
        Trainee,
        acting_at,
        error_of_a_survivor,
        message_of,
        noting_points,
        points_of_a_step,
        where_missed,
    )

    functional = torch.ops._c10d_functional

RANKS, VICTIM = 3, 1
# Side by side, each with a share of the points: nearly all of the time they wait for a timeout.
FAMILIES = 16


def raised_by(step: Callable[[], object], number: int, error: type[BaseException]) -> str:
    """Raises ``error`` at a point of ``step``, and catches it; returns its message."""

    def act() -> None:
        raise error("of the test")

    try:
        with acting_at(number, act):
            step()
    except error as caught:
        return str(caught)
    raise AssertionError(f"not raised at {number}")


# --- every rank at the same point: the group stays good


def each_raises_at_every_point(ctx: RankContext, kind: str) -> int:
    trainee = Trainee(ctx, kind)
    points: list[str] = points_of_a_step(ctx, kind)
    for error in (torch.OutOfMemoryError, KeyboardInterrupt):
        for number in range(len(points)):
            assert raised_by(trainee.step, number, error) == "of the test"
            trainee.out = None  # may be in flight, and is the trainee's to keep
            assert work_registry_size() == 0, f"{error} at {points[number]} {number}"
            trainee.check()
    return len(points)


def each_raises(ctx: RankContext, kind: str) -> list[int]:
    two, three = (Family(ranks, each_raises_at_every_point, kind) for ranks in (2, 3))
    with two, three:  # at once, as ranks wait for each other a lot
        return [values(family.endings())[0] for family in (two, three)]


@pytest.mark.parametrize("kind", KINDS)
def test_all_raise_at_any_point_and_go_on_with_the_same_group(kind: str) -> None:
    assert min(nursery(each_raises, kind)) > 5


# --- one rank, when all that it has to send has been sent: the group stays good


def one_raises_late(ctx: RankContext, kind: str) -> list[str]:
    trainee = Trainee(ctx, kind)
    points: list[str] = []
    with noting_points(points.append):
        trainee.step(loss=False)
    late = [number for number in range(len(points)) if "launch" not in points[number:]]
    for number in late:
        step = functools.partial(trainee.step, loss=False)
        if ctx.rank == VICTIM:
            raised_by(step, number, ValueError)
        else:
            step()
        trainee.out = trainee.x = None
        assert work_registry_size() == 0
        trainee.check()
    return [points[number] for number in late]


def raises_between_launch_and_wait(ctx: RankContext) -> None:
    """As people meet it: no model, one rank raises with values in flight, and catches it."""
    axis = mesh_axis(ctx.mesh(), 0)

    def step(number: int, fails: bool) -> torch.Tensor:
        gathered = all_gather(torch.full((2, 3), float(number)), 1, axis, [3] * axis.size)
        summed = all_reduce(torch.full((4,), float(number)), axis, "sum")
        if fails:
            raise ValueError("of the user")
        return gathered.sum() + summed.sum()

    for number in range(1, 4):
        try:
            total = step(number, fails=number == 2 and ctx.rank == VICTIM)
            assert total == number * (6 + 4) * axis.size
        except ValueError:
            assert (number, ctx.rank) == (2, VICTIM)
        assert work_registry_size() == 0


def late_raises(ctx: RankContext) -> dict[str, list[str]]:
    values(endings(3, raises_between_launch_and_wait))
    return {kind: values(endings(3, one_raises_late, kind))[VICTIM] for kind in KINDS}


def test_one_raises_after_its_last_launch_and_the_group_stays_good() -> None:
    passed = nursery(late_raises)
    assert all(passed[kind] for kind in KINDS), passed


# --- one rank in the middle: the others are told in time, and a new group is right


def end_of_a_step(
    ctx: RankContext, how: str, kind: str, number: int, timeout_s: float
) -> str | None:
    """The message of the error on this rank, after which a new group has made a right step.

    None on all ranks if one was so late that the victim did not get to the point.
    """
    trainee = Trainee(ctx, kind)
    pids = meet(ctx, str(os.getpid()))
    be_impatient(timeout_s)
    at_the_point = False

    def fail() -> None:
        nonlocal at_the_point
        at_the_point = True
        if how == "raised":
            raise torch.OutOfMemoryError("of the test")
        os.kill(os.getpid(), signal.SIGSTOP)

    if ctx.rank != VICTIM:
        message = error_of_a_survivor(trainee.step, timeout_s)
    else:
        with (
            within(2 * (timeout_s + 2)),  # stopped for a half of it
            pytest.raises(RuntimeError) as failure,
            acting_at(number, fail),
        ):
            trainee.step()
        raised = at_the_point and how == "raised"
        message = str(failure.value) if raised else message_of(failure.value)
        assert (message == "of the test") == raised
        del failure
    trainee.out = trainee.x = None
    assert work_registry_size() == 0
    # Stopped until all others have failed; again and again, since it may stop only now.
    said = meet(ctx, str(at_the_point), last=lambda rank: os.kill(int(pids[rank]), signal.SIGCONT))
    regroup(ctx.rank, ctx.world_size)
    Trainee(ctx, kind).check()
    return message if said[VICTIM] == "True" else None


def ends_of_steps(ctx: RankContext, how: str, cases: Sequence[tuple[str, int]]) -> list[str]:
    messages = []
    for kind, number in cases:
        timeout_s = 1.0
        try:
            while (message := end_of_a_step(ctx, how, kind, number, timeout_s)) is None:
                timeout_s *= 4
        except BaseException as error:
            raise AssertionError(f"{how} at point {number} of {kind}") from error
        messages.append(message)
    return messages


def one_at_every_point(ctx: RankContext, how: str) -> list[str]:
    """What the others were told."""
    steps = endings_of_each(RANKS, points_of_a_step, [(kind,) for kind in KINDS])
    points = {kind: values(ends)[VICTIM] for kind, ends in zip(KINDS, steps, strict=True)}
    cases = [(kind, number) for kind in KINDS for number in where_missed(points[kind])]
    shares = [(how, cases[first::FAMILIES]) for first in range(FAMILIES)]
    ends = endings_of_each(RANKS, ends_of_steps, shares, at_once=FAMILIES)
    for family in ends:
        values(family)  # the victim's, too
    return [message for family in ends for told in values(family, but=VICTIM) for message in told]


@pytest.mark.parametrize("how", ["stopped", "raised"])
def test_one_is_stopped_or_raises_at_any_point_and_a_new_group_is_right(how: str) -> None:
    messages = nursery(one_at_every_point, how)
    for kind in KINDS:
        for lost in sent_in_a_step(kind):
            assert any(message.startswith(f"Expected the {lost}") for message in messages), lost


# --- Ctrl-C


def interrupted(ctx: RankContext) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    axis = mesh_axis(ctx.mesh(), 0)
    layout = RowLayout(1, (3, 3), 1, ctx.rank)
    shard = torch.full((3, 4), float(ctx.rank))
    whole = torch.arange(2.0).repeat_interleave(3)[:, None].expand(6, 4)

    def gathered() -> torch.Tensor:
        return all_gather(shard, 0, axis, [3, 3]) + 0

    def multiplied() -> torch.Tensor:
        kernel = get_kernel("pipelined")
        return kernel.all_gather_matmul(
            shard, [torch.eye(4)], layout, dist.group.WORLD, chunks=2
        ).outs[0]

    pending = all_gather(shard, 0, axis, [3, 3])
    for read in (gathered, multiplied):
        meet(ctx)
        if ctx.rank == 0:
            timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                read()
        else:
            time.sleep(0.3)  # the other waits when the signal comes
            assert torch.equal(read(), whole)
        assert torch.equal(read(), whole)
    assert torch.equal(pending + 0, whole)
    assert work_registry_size() == 0


def interrupted_at_a_read(ctx: RankContext) -> None:
    axis = mesh_axis(ctx.mesh(), 0)

    finishes = 0

    def finish(buffer: torch.Tensor) -> torch.Tensor:
        nonlocal finishes
        finishes += 1
        buffer.add_(1)
        raise KeyboardInterrupt

    def launched(finish: Any = None) -> PendingLocal:
        buffer = functional.all_reduce(torch.ones(3), "sum", axis.group)
        return PendingLocal.in_flight(Launch("all_reduce", axis.group, buffer, finish), (3,))

    # In the wait: the next read takes it up again.
    value = launched()
    with (
        mock.patch.object(functional, "wait_tensor", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        value + 1
    assert torch.equal(value + 1, torch.full((3,), 1.0 + axis.size))

    # In the finish, which may work in place: it is not done twice.
    value = launched(finish)
    with pytest.raises(KeyboardInterrupt):
        value + 1
    for _ in range(2):
        with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
            value + 1
    assert finishes == 1
    assert work_registry_size() == 0


def interruptions(ctx: RankContext) -> None:
    values(endings(2, interrupted))
    values(endings(2, interrupted_at_a_read))


def test_keyboard_interrupt_in_a_wait() -> None:
    nursery(interruptions)
