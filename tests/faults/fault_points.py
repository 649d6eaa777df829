"""A training step, every point of it where a rank can fail, and what the others have to see."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext
from tests.faults.families import TIMEOUT_S, within

if TYPE_CHECKING or IN_RANK_PROCESS:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard

    from mc2 import piecewise_gather
    from parallel_styles import ColwiseParallel, RowwiseParallel, parallelize_module
    from pending_dtensor import HyperDTensor, collectives
    from pending_dtensor.errors import CollectiveFailedError
    from pending_dtensor.pending import Pending
    from pending_dtensor.torch_compat import work_registry_size
    from tests.common.mc2_models import fused, on_one_device, on_this_rank, upstream
    from tests.common.sharded_models import (
        MLP,
        equal,
        gradients,
        part,
        whole_numbers,
        with_whole_numbers,
    )

SEQ = 1
KINDS = ("styles", "pipelined", "decomposed")

# What a step of any kind on three ranks communicates, and what it waits for, as errors say it.
_MESSAGE = re.compile(
    r"Expected the ("
    r"(pipelined|decomposed) (all_gather_matmul|matmul_reduce_scatter) of \(24, 6\)"
    r"|all_gather of \(2, 12, 6\)|reduce_scatter of \(2, 4, 6\)|all_reduce of \(3,\)"
    r") float32 over group '\w+' \(default_pg, ranks 0, 1, 2\) to complete, got RuntimeError: .+ "
    r"\(waited for ("
    r"by (a read|linear|aten\.eq\.Scalar|redistribute with async_op=False)"
    r"|rows of rank [0-2] of the group|rows of the other ranks"
    r"|the others to take its rows"
    r")\)\. See on the other ranks .+",
    re.DOTALL,
)


def sent_in_a_step(kind: str) -> list[str]:
    """How errors name what the others miss, wherever in a step of that kind."""
    gather = "all_gather of (2, 12, 6)" if kind == "styles" else f"{kind} all_gather_matmul of"
    return [gather, "reduce_scatter of (2, 4, 6) float32", "all_reduce of (3,) float32"]


class Trainee:
    """A column and a row over all ranks of the default group, with sequence sharded activations.

    Fields: ``model``; ``x``, this rank's part of the input; ``out``, this rank's part of the output
    of the last step.
    """

    def __init__(self, ctx: RankContext, kind: str) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        self.mesh: DeviceMesh = mesh
        self.out: Any = None
        self.input = whole_numbers(2, 12, 6)
        # A row of plain styles shares its bias out, which is not exact on three ranks.
        unsharded = with_whole_numbers(MLP(6, 12, bias=kind != "styles"))
        self.expected = on_this_rank(on_one_device(unsharded, self.input), SEQ)
        if kind == "styles":
            plan = {
                "w1": ColwiseParallel(input_layouts=Shard(SEQ)),
                "w2": RowwiseParallel(output_layouts=Shard(SEQ)),
            }
            self.model = parallelize_module(unsharded, mesh, plan)
        else:
            chunks: dict[str, Any] = {"chunks": 2} if kind == "pipelined" else {}
            self.model = fused(ctx, unsharded, SEQ, kind, mesh=mesh, row=chunks, **chunks)

    def step(self, *, loss: bool = True) -> None:
        """Forward, backward, and a sum over ranks that is read: nobody gets past a lost rank."""
        self.model.zero_grad()
        self.x = part(self.input, SEQ).requires_grad_()
        out = self.model(self.x)
        self.out = out.detach()
        out.backward(part(upstream(self.input.shape, out.dtype), SEQ))
        if loss:
            summed = HyperDTensor.from_local(torch.ones(3), self.mesh, [Partial()])
            summed = summed.redistribute(placements=[Replicate()], async_op=True)
            assert (summed.to_local() == dist.get_world_size()).all()

    def check(self) -> None:
        """Makes a step, and compares it with one device: exactly, as all numbers are whole."""
        self.step()
        out = self.out + 0
        equal({"out": out, "x": self.x.grad, **gradients(self.model)}, self.expected)
        assert work_registry_size() == 0


@contextlib.contextmanager
def noting_points(at: Callable[[str], None]) -> Iterator[None]:
    """Calls ``at`` with a name just before each launch, wait and matmul inside the block."""

    def before(what: str, owner: Any, attribute: str) -> Any:
        function = getattr(owner, attribute)

        def call(*args: Any, **kwargs: Any) -> Any:
            at(what)
            return function(*args, **kwargs)

        return mock.patch.object(owner, attribute, call)

    with contextlib.ExitStack() as stack:
        for what, owner, attribute in (
            *(("launch", module, "note_launch") for module in _senders()),
            ("launch", collectives, "_start"),
            ("wait", piecewise_gather, "wait"),
            ("wait", Pending, "_finish_wait"),
            ("multiply", torch, "mm"),
        ):
            stack.enter_context(before(what, owner, attribute))
        yield


@functools.cache
def _senders() -> list[ModuleType]:
    """The modules whose ``note_launch`` a kernel calls before each message."""
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("mc2.")]
    return [module for module in modules if hasattr(module, "note_launch")]


def points_of_a_step(ctx: RankContext, kind: str) -> list[str]:
    """Names of the points of a step, in order, a healthy one at that; a rank body."""
    trainee = Trainee(ctx, kind)
    points: list[str] = []
    with noting_points(points.append):
        trainee.step()
    trainee.check()
    return points


def where_missed(points: Sequence[str]) -> range:
    """Numbers of the points of a step at which the others miss a rank that goes no further.

    At the last one, a rank has already sent all that they need.
    """
    return range(len(points) - 1)


def acting_at(number: int, act: Callable[[], object]) -> contextlib.AbstractContextManager[None]:
    """Calls ``act`` at the point of that number, counted from 0."""
    passed: list[str] = []

    def at(what: str) -> None:
        passed.append(what)
        if len(passed) == number + 1:
            act()

    return noting_points(at)


def error_of_a_survivor(step: Callable[[], object], timeout_s: float = TIMEOUT_S) -> str:
    """The message of the error that ends ``step`` in time, which names what did not come."""
    with within(timeout_s + 2), pytest.raises(CollectiveFailedError) as failure:
        step()
    message = message_of(failure.value)
    del failure  # its traceback has this frame, and the values of the step
    return message


def message_of(error: BaseException) -> str:
    """Its message, which names what did not come, over which group, and what was waited for."""
    assert isinstance(error, CollectiveFailedError)
    message = str(error)
    assert isinstance(error.__cause__, RuntimeError)
    assert not isinstance(error.__cause__, CollectiveFailedError)
    assert str(error.__cause__) in message
    assert f"over group '{dist.group.WORLD.group_name}'" in message
    assert _MESSAGE.fullmatch(message), message
    return message
