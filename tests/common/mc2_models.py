"""Models with MC2 styles, run on ranks and on one device, and what they launch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext

if TYPE_CHECKING or IN_RANK_PROCESS:
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    from parallel_styles import (
        MC2ColwiseParallel,
        MC2RowwiseParallel,
        PrepareModuleInput,
        parallelize_module,
    )
    from pending_dtensor import OverlapLog, record_overlap
    from tests.common.sharded_models import (
        full,
        gradients,
        part,
        whole_numbers,
        with_whole_numbers,
    )

    class QKVO(nn.Module):
        """Three columns that read one tensor, and a row."""

        def __init__(self, features: int = 8, hidden: int = 8, *, bias: bool = True) -> None:
            super().__init__()
            self.q = nn.Linear(features, hidden, bias=bias)
            self.k = nn.Linear(features, hidden, bias=bias)
            self.v = nn.Linear(features, hidden, bias=bias)
            self.o = nn.Linear(hidden, features, bias=bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.o(F.relu(self.q(x)) + self.k(x) - self.v(x))


def make(cls: Any, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """A module of whole numbers, the same on every rank."""
    return with_whole_numbers(cls(*args, **kwargs)).to(dtype)


def fused(
    ctx: RankContext,
    model: Any,
    seq: int,
    kernel: str,
    *,
    defer: bool = False,
    mesh: Any = None,
    local: bool = True,
    row: dict[str, Any] | None = None,
    **column: Any,
) -> Any:
    """``model`` with MC2 styles: its children w2 and o are rows, the others columns.

    Args:
        ctx: the rank.
        model: a module whose children are all Linears.
        seq: the sequence dim.
        kernel: of every layer.
        defer: whether the model's input is gathered for all columns by `PrepareModuleInput`.
        mesh: 1-D mesh; None for all ranks.
        local: whether the layers give local tensors.
        row: further arguments of the rows' style.
        **column: further arguments of the columns' style.
    """
    plan: dict[str, Any] = {}
    for name, _ in model.named_children():
        if name in ("w2", "o"):
            plan[name] = MC2RowwiseParallel(
                output_layouts=Shard(seq), kernel=kernel, use_local_output=local, **(row or {})
            )
        else:
            plan[name] = MC2ColwiseParallel(
                input_layouts=Shard(seq), kernel=kernel, use_local_output=local, **column
            )
    if defer:
        plan[""] = PrepareModuleInput(
            input_layouts=(Shard(seq),), desired_input_layouts=(Replicate(),), defer=True
        )
    return parallelize_module(model, mesh or ctx.mesh(), plan)


def upstream(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """The gradient that comes back for an output of ``shape``."""
    return whole_numbers(*shape, seed=7).to(dtype)


def on_one_device(
    model: nn.Module, x: torch.Tensor, *, input_grad: bool = True
) -> dict[str, torch.Tensor | None]:
    """Output and gradients of the unsharded model, by name."""
    model = copy.deepcopy(model)
    x = x.clone().requires_grad_(input_grad)
    out = model(x)
    if out.requires_grad:
        out.backward(upstream(out.shape, out.dtype))
    return {"out": out.detach(), "x": x.grad, **gradients(model)}


def on_this_rank(expected: dict[str, Any], seq: int) -> dict[str, Any]:
    """What this rank should see of the results of one device."""
    return {
        name: part(value, seq) if name in ("out", "x") and value is not None else value
        for name, value in expected.items()
    }


class Run(NamedTuple):
    """Output and gradients by name, and what was launched or fell back, in order."""

    values: dict[str, Any]
    calls: list[tuple[str, str]]


def run(
    ctx: RankContext,
    model: Any,
    x: torch.Tensor,
    seq: int,
    *,
    input_grad: bool = True,
    leaf: bool = True,
    forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Run:
    """The sharded model, from and to this rank's part of the sequence.

    Args:
        ctx: the rank.
        model: with sharded parameters.
        x: the whole input.
        seq: the sequence dim.
        input_grad: whether the input requires grad.
        leaf: whether the model is handed the leaf itself.
        forward: what to call instead of ``model``.
    """
    source = part(x, seq).requires_grad_(input_grad)
    with record_overlap() as log:
        out = (model if forward is None else forward)(source if leaf else source * 1)
        if out.requires_grad:
            shape = list(out.shape)
            shape[seq] *= ctx.world_size
            out.backward(part(upstream(shape, out.dtype), seq))
    return Run({"out": full(out), "x": source.grad, **gradients(model)}, calls(log))


def calls(log: OverlapLog) -> list[tuple[str, str]]:
    """Kind and kernel of every event, in order."""
    return [(event.kind, event.kernel) for event in log.events]


@contextlib.contextmanager
def nothing_launched() -> Iterator[None]:
    """Asserts that nothing inside communicates or falls back."""
    with record_overlap() as log, CommDebugMode() as comm:
        yield
    assert calls(log) == []
    assert comm.get_total_counts() == 0
