"""`debug_consistency`: ranks that disagree are told so, all of them, before anything is sent."""

from __future__ import annotations

import contextlib
import os
import runpy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext
from tests.common.script_on_ranks import run_script_on_ranks
from tests.faults.families import be_impatient, endings, meet, nursery, values
from tests.faults.fault_points import KINDS

# Python 3.12 warns of a fork beside other threads: here the launcher's, which only waits.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

if IN_RANK_PROCESS:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard

    from mc2 import fused_calls
    from parallel_styles import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleInputOutput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )
    from pending_dtensor import (
        HyperDTensor,
        collectives,
        consistency,
        debug_consistency,
        hyper_dtensor,
        record_overlap,
    )
    from pending_dtensor.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
    from pending_dtensor.errors import InconsistentRanksError
    from pending_dtensor.hyper_dtensor import redistribute_deferred
    from pending_dtensor.torch_compat import work_registry_size
    from tests.common.mc2_models import fused, upstream
    from tests.common.sharded_models import MLP, part, whole_numbers, with_whole_numbers
    from tests.faults.fault_points import SEQ, Trainee, noting_points


def refused(disagree: Callable[[], object], *sides: str, launches: int = 0) -> None:
    """Asserts that every rank raises and shows each of ``sides``, before anything more is sent.

    Args:
        disagree: does different things on different ranks.
        sides: what the message says, rank by rank.
        launches: messages that are sent before the ranks part.
    """
    launched: list[str] = []
    with debug_consistency(), noting_points(launched.append):
        with pytest.raises(InconsistentRanksError) as failure:
            disagree()
        message = str(failure.value)
    del failure
    assert message.startswith("Expected the same collective on every rank of group '0', got\n")
    assert "nothing was sent" in message
    for rank, side in enumerate(sides):
        assert f"\n  rank {rank}: {side}" in message, message
    assert launched.count("launch") == launches
    assert work_registry_size() == 0


def collectives_that_differ(ctx: RankContext) -> None:
    rank = ctx.rank
    axis = collectives.mesh_axis(ctx.mesh(), 0)

    def gather(rows: int = 2, dtype: Any = torch.float32, dim: int = 0) -> Any:
        return all_gather(torch.ones(rows, 2, dtype=dtype), dim, axis, [2, 2])

    refused(
        lambda: all_reduce(torch.ones(2 + rank), axis, "sum"),
        "all_reduce of shape (2,), op sum, dtype torch.float32",
        "all_reduce of shape (3,), op sum, dtype torch.float32",
    )
    refused(lambda: gather(2 + rank), "all_gather of", "all_gather of")
    refused(lambda: gather(dtype=(torch.float32, torch.float64)[rank]), "all_gather", "all_gather")
    refused(lambda: gather(dim=rank), "all_gather", "all_gather")
    refused(
        lambda: all_reduce(torch.ones(2), axis, ("sum", "max")[rank]), "all_reduce", "all_reduce"
    )
    refused(
        lambda: reduce_scatter(torch.ones(4, 2 + rank), 0, axis, [2, 2], "sum"),
        "reduce_scatter of shape (4, 2)",
        "reduce_scatter of shape (4, 3)",
    )
    refused(
        lambda: all_to_all(torch.ones(2, 4 + 2 * rank), 0, 1, axis, [2, 2], [2 + rank] * 2),
        "all_to_all of shape (4, 4)",
        "all_to_all of shape (4, 6)",
    )
    # Another order, and one that is left out.
    both = [lambda: all_reduce(torch.ones(2), axis, "sum"), gather]
    refused(lambda: [start() for start in both[:: 1 - 2 * rank]], "all_reduce of", "all_gather of")
    refused(lambda: [start() for start in both[rank:]], "all_reduce of", "all_gather of")

    # One starts early what the others leave deferred, and go on from.
    def starts_early() -> None:
        shard = HyperDTensor.from_local(torch.ones(2, 3), ctx.mesh(), [Shard(0)])
        gathered = redistribute_deferred(shard, [Replicate()]).to_local()
        if rank == 0:
            gathered.start()
        else:
            all_reduce(torch.ones(2), axis, "sum")

    refused(starts_early, "all_gather of shape (4, 3)", "all_reduce of shape (2,)")


def layers_that_differ(ctx: RankContext) -> None:
    rank, mesh = ctx.rank, ctx.mesh()

    def styled(kind: str, model: Any, *, local: bool = True, chunks: int = 2) -> Any:
        if kind == "styles":
            column = ColwiseParallel(input_layouts=Shard(SEQ), use_local_output=local)
            row = RowwiseParallel(output_layouts=Shard(SEQ), use_local_output=local)
            return parallelize_module(model, mesh, {"w1": column, "w2": row})
        cut: dict[str, Any] = {"chunks": chunks} if kind == "pipelined" else {}
        return fused(ctx, model, SEQ, kind, mesh=mesh, local=local, row=cut, **cut)

    def mlp() -> MLP:
        return with_whole_numbers(MLP(6, 12))

    for kind in KINDS:
        class_name = "Linear" if kind == "styles" else "MC2Linear"
        model = styled(kind, mlp())
        # Uneven shards taken for even ones; of a sequence of 1, one rank has nothing.
        for sizes in ((3, 2), (1, 0)):
            local = whole_numbers(2, sizes[rank], 6)
            sides = [
                f"input of module 'w1' ({class_name}) of shape (2, {size}, 6)" for size in sizes
            ]
            refused(lambda: model(local), *sides)  # noqa: B023 - called at once
        # With their global shape they are right.
        x = whole_numbers(2, 5, 6)
        whole_model = mlp()
        hyper = HyperDTensor.from_local(
            x.split([3, 2], SEQ)[rank], mesh, [Shard(SEQ)], shape=x.shape, stride=x.stride()
        )
        with debug_consistency():
            out = styled(kind, mlp(), local=False)(hyper).full_tensor()
        assert torch.equal(out, whole_model(x))

        # Backward: one rank wants the input's gradient, the other does not.
        def backward() -> None:
            source = part(whole_numbers(2, 4, 6), SEQ).requires_grad_(rank == 0)
            out = model(source)  # noqa: B023 - called at once
            out.backward(part(upstream((2, 4, 6), out.dtype), SEQ))
            all_reduce(torch.ones(2), collectives.mesh_axis(mesh, 0), "sum")

        scattering = "reduce_scatter" if kind == "styles" else f"{kind} matmul_reduce_scatter"
        sent = {"styles": 3, "pipelined": 6, "decomposed": 3}[kind]
        refused(backward, f"{scattering} of shape (2, 4, 6)", "all_reduce of", launches=sent)

    # The fused kernels would cut their messages differently.
    cut = styled("pipelined", mlp(), chunks=1 + rank)
    refused(
        lambda: cut(whole_numbers(2, 2, 6)),
        "pipelined all_gather_matmul of shape (2, 4, 6)",
        "pipelined all_gather_matmul of shape (2, 4, 6)",
    )
    uneven = whole_numbers(2, 3 - rank, 6)
    sharded: dict[str, Any] = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    named: dict[str, Any] = {
        "input_kwarg_layouts": {"input": Shard(1)},
        "desired_input_kwarg_layouts": {"input": Replicate()},
    }
    out: dict[str, Any] = {"output_layouts": Shard(1), "desired_output_layouts": Replicate()}
    for side, style, call in (
        ("input", SequenceParallel(), {}),
        ("input", PrepareModuleInput(**sharded), {}),
        ("input", PrepareModuleInput(**sharded, defer=True), {}),
        ("input", PrepareModuleInput(**named), {"input": uneven}),
        ("output", PrepareModuleOutput(**out), {}),
        ("input", PrepareModuleInputOutput(**sharded, **out), {}),
    ):
        model = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(6)})
        norm = parallelize_module(model, mesh, {"norm": style})["norm"]
        refused(
            lambda: norm(*() if call else (uneven,), **call),  # noqa: B023 - called at once
            *(f"{side} of module 'norm' (LayerNorm) of shape (2, {n}, 6)" for n in (3, 2)),
        )
    refused(
        lambda: HyperDTensor.from_local(torch.ones(2 - rank, 3), mesh, [Shard(0)]).redistribute(
            placements=[Replicate()]
        ),
        "from_local of shape (2, 3)",
        "from_local of shape (1, 3)",
    )


def a_block_of_local_outputs(ctx: RankContext) -> None:
    """Whose sequence does not divide: the module that is handed the parts is named."""
    plan = {
        "tokens": RowwiseParallel(output_layouts=Shard(SEQ)),
        "norm": SequenceParallel(use_local_output=True),
        "w1": ColwiseParallel(input_layouts=Shard(SEQ)),
        "w2": RowwiseParallel(output_layouts=Shard(SEQ)),
    }
    for length in (5, 1):
        layers = {
            "tokens": torch.nn.Embedding(8, 6),
            "norm": torch.nn.LayerNorm(6),
            "w1": torch.nn.Linear(6, 12),
            "w2": torch.nn.Linear(12, 6),
        }
        block = parallelize_module(torch.nn.Sequential(OrderedDict(layers)), ctx.mesh(), plan)
        tokens = torch.zeros(2, length, dtype=torch.int64)
        sizes = collectives.chunk_sizes(length, ctx.world_size)
        sides = (f"input of module 'norm' (LayerNorm) of shape (2, {size}, 6)" for size in sizes)
        refused(lambda: block(tokens), *sides, launches=1)  # noqa: B023 - called at once


def noticed(ctx: RankContext) -> None:
    collectives_that_differ(ctx)
    layers_that_differ(ctx)
    Trainee(ctx, "pipelined").check()


def who_starts_nothing_is_named_by_what_the_others_do(ctx: RankContext) -> None:
    axis = collectives.mesh_axis(ctx.mesh(), 0)
    be_impatient()
    meet(ctx)
    if ctx.rank == 0:
        expected = (
            r"every rank of group '0' \(default_pg, ranks 0, 1\) to start the same collective, got "
            r"RuntimeError: .*this rank was about to do all_reduce of shape \(2,\)"
        )
        with debug_consistency(), pytest.raises(InconsistentRanksError, match=expected):
            all_reduce(torch.ones(2), axis, "sum")
    meet(ctx)


def every_collective_once(ctx: RankContext) -> None:
    """Of those that agree, each is compared, forward and backward, and none is while it is off."""
    with mock.patch.dict(os.environ, PENDING_DTENSOR_CHECK="1"):
        assert runpy.run_path(consistency.__file__)["checking"]()
    compared: list[str] = []

    def noting(what: str, *args: Any, **facts: Any) -> None:
        compared.append(what)
        consistency.check_consistent(what, *args, **facts)

    for kind in KINDS:
        trainee = Trainee(ctx, kind)
        with contextlib.ExitStack() as stack:
            for module in (collectives, fused_calls, hyper_dtensor):
                stack.enter_context(mock.patch.object(module, "check_consistent", noting))
            stack.enter_context(mock.patch.object(dist, "all_gather_object", AssertionError))
            trainee.step()
        assert compared == []
        with contextlib.ExitStack() as stack:
            for module in (collectives, fused_calls, hyper_dtensor):
                stack.enter_context(mock.patch.object(module, "check_consistent", noting))
            stack.enter_context(debug_consistency())
            log = stack.enter_context(record_overlap())
            trainee.step()
        fused_as = {"all_gather": "all_gather_matmul", "reduce_scatter": "matmul_reduce_scatter"}
        assert [what for what in compared if "input" not in what and what != "from_local"] == [
            event.kind if event.kernel == "unfused" else f"{event.kernel} {fused_as[event.kind]}"
            for event in log.events
        ]
        assert len(log.events) == 5
        compared.clear()


def in_families(ctx: RankContext) -> None:
    for body in (
        noticed,
        who_starts_nothing_is_named_by_what_the_others_do,
        every_collective_once,
    ):
        values(endings(2, body))
    for ranks in (2, 4):
        values(endings(ranks, a_block_of_local_outputs))


def test_ranks_that_disagree() -> None:
    nursery(in_families)


WHOLE_RUN = """
    import os, sys
    if "PENDING_DTENSOR_CHECK" not in os.environ:
        # As a shell starts it: in a process that has imported nothing of ours yet.
        os.environ.update(PENDING_DTENSOR_CHECK="1", PENDING_DTENSOR_RANK_PROCESS="1")
        script = os.path.join(os.path.dirname(os.environ["SCRIPT_STORE"]), "script.py")
        os.execv(sys.executable, [sys.executable, script])
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Shard
    from parallel_styles import ColwiseParallel, RowwiseParallel, parallelize_module
    from pending_dtensor.errors import InconsistentRanksError
    from tests.common.distributed_launcher import RankContext
    from tests.common.mc2_models import fused, make, on_one_device, on_this_rank, run
    from tests.common.script_on_ranks import join_default_group
    from tests.common.sharded_models import MLP, equal, whole_numbers

    ctx = RankContext(*join_default_group())
    compare = dist.all_gather_object
    compared = []

    def counted(*args, **kwargs):
        compared.append(args)
        compare(*args, **kwargs)

    dist.all_gather_object = counted

    def sharded(kind):
        model = make(MLP, dtype=torch.float64)
        if kind != "styles":
            return fused(ctx, model, 1, kind)
        column = ColwiseParallel(input_layouts=Shard(1))
        plan = {"w1": column, "w2": RowwiseParallel(output_layouts=Shard(1))}
        return parallelize_module(model, ctx.mesh(), plan)

    for kind in ("styles", "pipelined", "decomposed"):
        alone, model = make(MLP, dtype=torch.float64), sharded(kind)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.125) for m in (alone, model)]
        for step in range(3):
            x = whole_numbers(2, 8, 8, seed=step).double()
            expected = on_one_device(alone, x)
            for name, parameter in alone.named_parameters():
                parameter.grad = expected[name]
            compared.clear()
            equal(run(ctx, model, x, 1).values, on_this_rank(expected, 1))
            print(kind, "compared", len(compared))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if step == 1:  # nothing is sent, so the next step is right
                try:
                    model(whole_numbers(2, 3 - ctx.rank, 8).double())
                except InconsistentRanksError as error:
                    print(error)
    model(whole_numbers(2, 2 + ctx.rank, 8).double())
"""


def test_a_whole_run_is_compared() -> None:
    """``PENDING_DTENSOR_CHECK=1``: what agrees trains as ever, and what does not ends on each."""

    def sides(name: str, rows: tuple[int, int]) -> list[str]:
        return [
            f"  rank {rank}: input of module 'w1' ({name}) of shape (2, {number}, 8), dtype "
            f"torch.float64, placements (Shard(dim=1),)\n"
            for rank, number in enumerate(rows)
        ]

    for end in run_script_on_ranks(WHOLE_RUN, 2):
        assert end.exit_code == 1, end.stderr
        assert all(side in end.stderr for side in sides("MC2Linear", (2, 3))), end.stderr
        for kind in KINDS:
            _, *steps = end.stdout.split(f"{kind} compared ")
            # The inputs of two layers, and two collectives each way.
            assert [step.partition("\n")[0] for step in steps] == ["6", "6", "6"], end.stdout
            told = "".join(sides("Linear" if kind == "styles" else "MC2Linear", (3, 2)))
            assert f"on every rank of group '0', got\n{told}" in steps[1], end.stdout
