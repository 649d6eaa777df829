"""Random chains of styled layers against the same modules on one device.

Every number is small and whole and in float64, so that no order of summation rounds: outputs and
gradients have to be equal in every bit, also after a step of an optimizer that subtracts signs of
gradients. A combination that cannot run has to be refused, on every rank.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
from hypothesis import example, given

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks
from tests.common.property_profiles import examples
from tests.properties.layer_cases import Block, Case, Layer, Layout, cases, refusals

if IN_RANK_PROCESS:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

    from mc2 import MC2ConstraintError
    from parallel_styles import (
        ColwiseParallel,
        MC2ColwiseParallel,
        MC2RowwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )
    from pending_dtensor import HyperDTensor, debug_consistency, distribute_tensor, record_overlap
    from pending_dtensor.errors import DeferredReadError, InconsistentRanksError
    from tests.common.mc2_models import calls, upstream
    from tests.common.sharded_models import (
        equal,
        full,
        whole_numbers,
        with_whole_numbers,
    )

    ERRORS = {
        error.__name__: error
        for error in (DeferredReadError, InconsistentRanksError, MC2ConstraintError)
    }

    class Scale(nn.Module):
        """Stands for a norm, and is exact."""

        def __init__(self, features: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(features))
            self.bias = nn.Parameter(torch.empty(features))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight + self.bias

    class Columns(nn.Module):
        """What reads one tensor: the columns, and now and then a plain op."""

        def __init__(self, block: Block, features: int) -> None:
            super().__init__()
            self.block = block
            self.linears = nn.ModuleList(
                nn.Linear(features, block.hidden_features, bias=column.bias)
                for column in block.columns
            )

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            also = x * 2 if self.block.reads_gather == "before" else None
            first, *others = [self.linears[number](x) for number in self.block.calls]
            for number, other in enumerate(others):
                if self.block.product and number == 0:
                    first = F.relu(first) * other
                else:
                    first = F.relu(first) - other
            return first, x * 2 if self.block.reads_gather == "after" else also

    class Chain(nn.Module):
        """The blocks of a case, sharded if there is a mesh."""

        def __init__(self, case: Case) -> None:
            super().__init__()
            self.case = case
            self.mesh: Any = None
            features = case.shape[-1]
            self.blocks = nn.ModuleList(
                nn.ModuleDict(
                    {
                        **({"norm": Scale(features)} if block.norm is not None else {}),
                        "columns": Columns(block, features),
                        "row": nn.Linear(block.hidden_features, features, bias=block.row.bias),
                    }
                )
                for block in case.blocks
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            layout = self.case.source
            for block, modules in zip(self.case.blocks, self.blocks, strict=True):
                h = modules["norm"](x) if block.norm is not None else x
                h, also = modules["columns"](h)
                out = modules["row"](consumed(h, block.between))
                if block.residual:
                    out += self.moved(x, layout, block)
                out = consumed(out, block.after)
                if also is not None:
                    out = out + self.moved(also, None, block)
                x, layout = out, block.out
            return x

        def moved(self, x: torch.Tensor, layout: Layout, block: Block) -> torch.Tensor:
            """``x`` in the layout that a block's output has."""
            if self.mesh is None:
                return x
            if not isinstance(x, DTensor):
                if block.out_local and layout == block.out:
                    return x
                x = HyperDTensor.from_local(x, self.mesh, [placement(layout)])
            x = x.redistribute(placements=[placement(block.out)])
            return x.to_local() if block.out_local else x


def consumed(x: torch.Tensor, ops: tuple[str, ...]) -> torch.Tensor:
    """What ``ops`` make of an activation."""
    for op in ops:
        if op == "relu_":
            x = F.relu_(x)
        elif op == "mul_":
            x *= 2
        elif op == "relu":
            x = F.relu(x)
        elif op == "double":
            x = x + x
        elif op == "clamp":
            x = x.clamp(-2, 2)
        elif op == "turn":
            x = x.transpose(0, 1).neg().transpose(0, 1)
        else:
            x.detach().sum()
    return x


def placement(layout: Layout) -> Any:
    return Replicate() if layout is None else Shard(layout)


def plan_of(case: Case) -> dict[str, Any]:
    """The styles of a case, by module name."""
    plan: dict[str, Any] = {}
    layout = case.source
    for number, block in enumerate(case.blocks):
        if block.norm is not None:
            layout, local, async_op = block.norm
            plan[f"blocks.{number}.norm"] = SequenceParallel(
                sequence_dim=layout, use_local_output=local, async_op=async_op
            )
        if block.told:
            plan[f"blocks.{number}.columns"] = PrepareModuleInput(
                input_layouts=placement(layout), desired_input_layouts=Replicate(), defer=True
            )
        for index, column in enumerate(block.columns):
            plan[f"blocks.{number}.columns.linears.{index}"] = column_style(column, layout, block)
        plan[f"blocks.{number}.row"] = row_style(block)
        layout = block.out
    return plan


def column_style(column: Layer, layout: Layout, block: Block) -> Any:
    boundaries = {
        "input_layouts": placement(layout),
        "output_layouts": placement(block.hidden),
        "use_local_output": block.hidden_local,
    }
    if not column.mc2:
        return ColwiseParallel(**boundaries, async_op=column.async_op)
    return MC2ColwiseParallel(
        **boundaries,
        kernel=column.kernel,
        chunks=column.chunks,
        regather=column.regather,
        column_backward=column.column_backward,
    )


def row_style(block: Block) -> Any:
    row = block.row
    boundaries = {
        "input_layouts": placement(block.hidden),
        "output_layouts": placement(block.out),
        "use_local_output": block.out_local,
    }
    if not row.mc2:
        return RowwiseParallel(**boundaries, async_op=row.async_op)
    return MC2RowwiseParallel(**boundaries, kernel=row.kernel, chunks=row.chunks)


def shard(ctx: RankContext, whole: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This rank's part as a DTensor would have it: the last ones may be shorter, or empty."""
    if layout is None:
        return whole.clone()
    parts = whole.chunk(ctx.world_size, layout)
    part = parts[ctx.rank] if ctx.rank < len(parts) else whole.narrow(layout, 0, 0)
    return part.clone()


def source_of(ctx: RankContext, case: Case, whole: torch.Tensor) -> Any:
    """The leaf that is handed in, holding this rank's part of ``whole``."""
    if case.kind == "local":
        leaf = shard(ctx, whole, case.source)
    else:
        distribute = distribute_tensor if case.kind == "hyper" else torch_distribute_tensor
        leaf = distribute(whole, ctx.mesh(), [placement(case.source)], src_data_rank=None)
    return leaf.detach().requires_grad_(case.input_grad)


def model_of(case: Case) -> Any:
    model = with_whole_numbers(Chain(case)).double()
    parameters = list(model.parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter *= unit_of(name)
    for number in case.frozen:
        parameters[number % len(parameters)].requires_grad_(False)
    return model


def parallelized(ctx: RankContext, model: Any) -> Any:
    model = copy.deepcopy(model)
    model.mesh = ctx.mesh()
    return parallelize_module(model, ctx.mesh(), plan_of(model.case), src_data_rank=None)


def unit_of(name: str) -> int:
    """What a parameter is a multiple of: a row may share its bias out among 2, 3 or 4 ranks."""
    return 12 if name.endswith("row.bias") else 1


def step(model: Any, leaf: Any, grad: Any) -> dict[str, Any]:
    """One step of training; output and gradients by name, copied before anything changes them."""
    leaf.grad = None
    out = model(leaf if model.case.leaf else leaf * 1)
    if out.requires_grad:
        out.backward(grad)
    found = {"out": out, "x": leaf.grad, **{n: p.grad for n, p in model.named_parameters()}}
    found = {name: None if t is None else t.detach().clone() for name, t in found.items()}
    trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
    if trained:
        groups = [{"params": [p], "lr": float(unit_of(name))} for name, p in trained.items()]
        optimizer = torch.optim.SGD(groups)
        for parameter in trained.values():
            parameter.grad = parameter.grad.sign()  # keeps the numbers small
        optimizer.step()
        optimizer.zero_grad()
    return found


def inputs_of(case: Case) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What goes in at each step, and the gradient that comes back.

    Where gradients that are Partial and Replicate meet, DTensor adds a share of the Replicate one
    on each of 2, 3 or 4 ranks: once a block.
    """
    values = [whole_numbers(*case.shape, seed=seed).double() for seed in (0, 1)]
    return values, upstream(case.shape, torch.float64) * 12 ** len(case.blocks)


def expect(case: Case) -> list[dict[str, Any]]:
    """Each step's output and gradients on one device."""
    values, grad = inputs_of(case)
    model = model_of(case)
    return [step(model, value.requires_grad_(case.input_grad), grad) for value in values]


def equal_on_this_rank(
    ctx: RankContext, got: dict[str, Any], expected: dict[str, Any], layouts: dict[str, Layout]
) -> None:
    """Asserts that local tensors, and those of DTensors, are their part of what is expected."""
    parts: dict[str, Any] = {}
    for name, found in got.items():
        if found is None or expected[name] is None:
            parts[name] = expected[name]
            continue
        layout = layouts.get(name)
        if isinstance(found, DTensor):
            (placed,) = found.placements
            if placed.is_partial():
                got[name], layout = found.full_tensor(), None
            else:
                got[name], layout = full(found.to_local()), getattr(placed, "dim", None)
        parts[name] = shard(ctx, expected[name], layout)
    equal(got, parts)


def check_runs(ctx: RankContext, case: Case) -> None:
    """A case gives on the ranks what it gives on one device."""
    (first, second), grad = inputs_of(case)
    model = parallelized(ctx, model_of(case))
    last = case.blocks[-1]
    leaf = source_of(ctx, case, first)
    if case.evaluated:
        with torch.no_grad():
            model(leaf)
    if last.out_local:
        grad = shard(ctx, grad, last.out)
    else:
        grad = distribute_tensor(grad, ctx.mesh(), [placement(last.out)], src_data_rank=None)
    with record_overlap() as log:
        for number, expected in enumerate(expect(case)):
            if number == 1 and case.refilled:
                with torch.no_grad():
                    leaf.copy_(source_of(ctx, case, second))
            elif number == 1:
                leaf = source_of(ctx, case, second)
            got = step(model, leaf, grad)
            equal_on_this_rank(ctx, got, expected, {"out": last.out, "x": case.source})
    if not any(block.told for block in case.blocks):
        assert log.fallbacks == []
    everyones: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(everyones, calls(log))
    assert everyones == [calls(log)] * ctx.world_size


def check_is_refused(ctx: RankContext, case: Case, names: set[str]) -> None:
    """A case raises one of the errors on every rank, and nobody is left in a collective."""
    errors = tuple(ERRORS[name] for name in sorted(names))
    inputs, _ = inputs_of(case)
    with (
        debug_consistency() if "InconsistentRanksError" in names else contextlib.nullcontext(),
        pytest.raises(errors, match=r"Expected .*, got\s") as raised,
    ):
        parallelized(ctx, model_of(case))(source_of(ctx, case, inputs[0]))
    everyones: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(everyones, type(raised.value).__name__)
    assert everyones == [type(raised.value).__name__] * ctx.world_size


def check_case(ctx: RankContext, case: Case) -> None:
    names = refusals(case, ctx.world_size)
    if names:
        check_is_refused(ctx, case, names)
        return
    with debug_consistency() if case.checked else contextlib.nullcontext():
        check_runs(ctx, case)


COLUMN = Layer(mc2=True, kernel="decomposed")
# Rarely drawn: siblings that are handed the leaf itself, which is filled again for the next step.
REFILLED = Case(
    shape=(2, 12, 3),
    source=1,
    kind="local",
    leaf=True,
    input_grad=True,
    blocks=(
        Block(
            norm=None,
            columns=(COLUMN, COLUMN),
            calls=(0, 1),
            told=False,
            reads_gather="",
            product=False,
            hidden_features=12,
            hidden=-1,
            hidden_local=True,
            between=(),
            row=Layer(mc2=True),
            out=1,
            out_local=True,
            after=(),
            residual=False,
        ),
    ),
    frozen=(),
    evaluated=True,
    refilled=True,
    checked=False,
)


@examples(30)
@given(case=cases())
@example(case=REFILLED)
@on_ranks(2, 3, 4, keep_if_all_raise=True)
def test_layers_equal_those_of_one_device(ctx: RankContext, case: Case) -> None:
    check_case(ctx, case)
