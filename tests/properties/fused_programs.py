"""Programs of deferred values, and what replays one on a rank beside the same on one device.

A program says what each of its steps must launch or raise and what is deferred after it, so that a
replay checks them as it goes. The parent, which writes programs, imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext

if TYPE_CHECKING or IN_RANK_PROCESS:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.utils._python_dispatch import TorchDispatchMode

    from mc2 import MC2ConstraintError
    from mc2.autograd import RowLinear
    from mc2.options import FusionOptions
    from mc2.rules import all_gather_linear
    from pending_dtensor import PendingLocal, distribute_tensor, record_overlap
    from pending_dtensor.errors import DeferredReadError
    from pending_dtensor.hyper_dtensor import redistribute_deferred
    from pending_dtensor.linear import plan_linear
    from pending_dtensor.pending import PendingState
    from pending_dtensor.pending_local import materialized
    from tests.common.mc2_models import calls
    from tests.common.sharded_models import whole_numbers

    ERRORS = {error.__name__: error for error in (DeferredReadError, MC2ConstraintError)}

    # How a plain op, or torch, may come to read a deferred gather. None of it may launch it.
    NON_MATCHING_READS = (
        lambda g: g.sum(),
        lambda g: g * 2,
        lambda g: g + g,
        lambda g: g.to_local() + 1,
        lambda g: g.full_tensor() + 1,
        lambda g: g[:, :1].neg(),
        lambda g: g.redistribute(placements=[Shard(0)]),
        lambda g: g.float().tolist(),
        lambda g: g.detach().to_local().numpy(),
        lambda g: g.add_(1),
    )

    class FusedCalls(TorchDispatchMode):
        """Counts the kernels of mc2 that torch sees."""

        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += op.namespace == "mc2"
            return op(*args, **(kwargs or {}))


class Setup(NamedTuple):
    """Sizes and what is trained.

    Attributes:
        shape: of the inputs, features last.
        hidden: features after a column.
        sequence_dim: the dim that the inputs are sharded on.
        input_grads: of the two inputs, and of what goes into a row.
        frozen: names of parameters without gradient.
    """

    ranks: int
    shape: tuple[int, int, int]
    hidden: int
    sequence_dim: int
    input_grads: tuple[bool, bool, bool]
    frozen: tuple[str, ...]


class Options(NamedTuple):
    """Those of a fused layer."""

    kernel: str = "pipelined"
    chunks: int = 1
    regather: bool = False
    column_backward: str = "fused"


class Step(NamedTuple):
    """One step.

    Attributes:
        op: its name.
        values: numbers of the values it reads; the inputs are 0 and 1, and 2 goes into a row.
        out: number of the value it makes, or -1.
        args: whatever else the op needs.
        raises: name of the error it must raise, or "".
        events: kind and kernel of what it must put in the log; None in backward, which depends on
            autograd's order.
        deferred: numbers of the values that must be deferred after it; all others must not be.
    """

    op: str
    values: tuple[int, ...]
    out: int
    args: tuple[Any, ...]
    raises: str
    events: list[tuple[str, str]] | None
    deferred: frozenset[int]


PARAMETERS = ("column0", "column1", "row0", "row1", "column_bias", "row_bias")


class Replay:
    """Values and parameters on the ranks, each with its twin on one device, by number and name."""

    def __init__(self, ctx: RankContext, setup: Setup) -> None:
        self.ctx = ctx
        self.setup = setup
        self.mesh = ctx.mesh()
        features, hidden = setup.shape[-1], setup.hidden
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {
            "column0": ((hidden, features), Shard(0)),
            "column1": ((hidden, features), Shard(0)),
            "row0": ((features, hidden), Shard(1)),
            "row1": ((features, hidden), Shard(1)),
            "column_bias": ((hidden,), Shard(0)),
            "row_bias": ((features,), Replicate()),
        }
        self.parameters: dict[str, tuple[Any, Any]] = {}
        for seed, (name, (shape, placement)) in enumerate(shapes.items()):
            # Shares of a bias are whole numbers on 2, 3 and 4 ranks.
            whole = whole_numbers(*shape, seed=seed).double() * (12 if "bias" in name else 1)
            placed = torch_distribute_tensor(whole, self.mesh, [placement], src_data_rank=None)
            trained = name not in setup.frozen
            self.parameters[name] = (
                nn.Parameter(placed, requires_grad=trained),
                whole.requires_grad_(trained),
            )
        sequence = (setup.shape, Shard(setup.sequence_dim))
        inputs = [sequence, sequence, ((*setup.shape[:-1], hidden), Shard(2))]
        self.values: dict[int, tuple[Any, Any]] = {}
        for number, (shape, placement) in enumerate(inputs):
            grad = setup.input_grads[number]
            whole = whole_numbers(*shape, seed=20 + number).double()
            placed = distribute_tensor(whole, self.mesh, [placement], src_data_rank=None)
            self.values[number] = (placed.requires_grad_(grad), whole.requires_grad_(grad))
        self.leaves = {**self.parameters, **{f"x{n}": pair for n, pair in self.values.items()}}

    def step(self, step: Step) -> list[tuple[str, str]]:
        """Runs one step on both; returns what the log has of it."""
        with record_overlap() as log, CommDebugMode() as comm, FusedCalls() as fused:
            if step.raises:
                with pytest.raises(ERRORS[step.raises], match=r"^Expected .*, got "):
                    getattr(self, step.op)(step)
            else:
                made = getattr(self, step.op)(step)
        happened = calls(log)
        if step.events is not None:
            assert happened == step.events, f"launched {happened}"
        # Nothing unreported: each kernel that torch saw, and each collective, is one event.
        kernels = [kernel for kind, kernel in happened if kind != "fallback"]
        unfused = kernels.count("unfused")
        assert (fused.count, comm.get_total_counts()) == (len(kernels) - unfused, unfused)
        if not step.raises and step.out >= 0:
            self.values[step.out] = made
        assert {number for number in self.values if self.is_deferred(number)} == step.deferred
        return happened

    def is_deferred(self, number: int) -> bool:
        local = self.values[number][0]._local_tensor
        return isinstance(local, PendingLocal) and local.state is PendingState.DEFERRED

    def pairs(self, step: Step) -> list[tuple[Any, Any]]:
        return [self.values[number] for number in step.values]

    # --- steps

    def gather(self, step: Step) -> tuple[Any, Any]:
        ((x, twin),) = self.pairs(step)
        return redistribute_deferred(x, [Replicate()]), twin

    def column(self, step: Step) -> tuple[Any, Any]:
        ((x, twin),) = self.pairs(step)
        which, with_bias, options, is_view = step.args
        weight, whole_weight = self.parameters[f"column{which}"]
        bias, whole_bias = self.parameters["column_bias"] if with_bias else (None, None)
        x = x.unsqueeze(0) if is_view else x
        out = all_gather_linear(x, weight, bias, FusionOptions(*options))
        return out, F.linear(twin, whole_weight, whole_bias)

    def row(self, step: Step) -> tuple[Any, Any]:
        ((x, twin),) = self.pairs(step)
        which, with_bias, options = step.args
        weight, whole_weight = self.parameters[f"row{which}"]
        bias, whole_bias = self.parameters["row_bias"] if with_bias else (None, None)
        plan = plan_linear(x._spec, weight._spec, None if bias is None else bias._spec)
        group = self.mesh.get_group().group_name
        out = RowLinear.apply(x, weight, bias, plan, FusionOptions(*options), group)
        return out, F.linear(twin, whole_weight, whole_bias)

    def reduce(self, step: Step) -> tuple[Any, Any]:
        ((x, twin),) = self.pairs(step)
        dim, how = step.args
        target = [Replicate() if dim is None else Shard(dim)]
        if how == "defer":
            return redistribute_deferred(x, target), twin
        return x.redistribute(placements=target, async_op=how == "async"), twin

    def add(self, step: Step) -> tuple[Any, Any]:
        (x, twin), (y, other) = self.pairs(step)
        return x + y, twin + other

    def twice(self, step: Step) -> tuple[Any, Any]:
        ((x, twin),) = self.pairs(step)
        return x * 2, twin * 2

    def relu(self, step: Step) -> tuple[Any, Any]:
        ((x, twin),) = self.pairs(step)
        return F.relu(x), F.relu(twin)

    def start(self, step: Step) -> None:
        ((x, _),) = self.pairs(step)
        x.to_local().start()

    def drop(self, step: Step) -> None:
        for number in step.values:
            del self.values[number]

    def misread(self, step: Step) -> None:
        ((x, _),) = self.pairs(step)
        NON_MATCHING_READS[step.args[0]](x)

    def read(self, step: Step) -> None:
        ((x, _),) = self.pairs(step)
        materialized(x.to_local())

    def backward(self, step: Step) -> None:
        ((x, twin),) = self.pairs(step)
        assert x.requires_grad == twin.requires_grad
        if not twin.requires_grad:
            return
        grad = whole_numbers(*twin.shape, seed=step.args[0]).double()
        placements = [Replicate() if p.is_partial() else p for p in x.placements]
        placed = distribute_tensor(grad, self.mesh, placements, src_data_rank=None)
        x.backward(placed, retain_graph=True)
        twin.backward(grad, retain_graph=True)

    # --- checks

    def check_values(self) -> None:
        """Every value that may be read is what it is on one device."""
        for number in self.values:
            x, twin = self.values[number]
            assert x.requires_grad == twin.requires_grad
            if self.is_deferred(number) and x._local_tensor.kind == "all_gather":
                continue
            local = materialized(x.to_local()).detach()
            if x.placements == (Partial(),):
                local = local.clone()
                dist.all_reduce(local)
            elif x.placements != (Replicate(),):
                twin = distribute_tensor(twin.detach(), self.mesh, x.placements, src_data_rank=None)
                twin = twin.to_local()
            assert torch.equal(local, twin.detach()), number

    def check_gradients(self) -> None:
        """No gradient was lost, or counted twice.

        Where DTensor adds gradients that are Partial and Replicate it shares the second out. A
        third rounds: on 3 ranks the nearest whole numbers are compared.
        """
        for name, (leaf, twin) in self.leaves.items():
            assert (leaf.grad is None) == (twin.grad is None), name
            if twin.grad is None:
                continue
            got = leaf.grad.full_tensor()
            if self.ctx.world_size == 3:
                assert (got - got.round()).abs().max() < 0.01, name
                got = got.round()
            assert torch.equal(got, twin.grad), f"{name}: got {got}, expected {twin.grad}"


def replay(ctx: RankContext, setup: Setup, program: list[Step]) -> list[list[tuple[str, str]]]:
    """Runs a program and checks it; returns what was launched in each step."""
    state = Replay(ctx, setup)
    launched = []
    for number, step in enumerate(program):
        try:
            launched.append(state.step(step))
        except BaseException as error:
            error.add_note(f"in step {number}: {step}")
            raise
    state.check_gradients()
    state.check_values()
    return launched
