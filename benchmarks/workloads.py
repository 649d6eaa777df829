"""What is timed: modules in each of the ways to parallelize them, and what they are held against.

A workload is a module whose input and output are sharded on the sequence dim. Its variants:

    compute           each rank's share of the arithmetic, no communication
    collectives       the all-gathers and reduce-scatters that torch's styles start, nothing else
    point to point    the least that has to travel: every shard once to every other rank
    torch             torch.distributed.tensor.parallel
    sync, async       parallel_styles with async_op=False and True
    mc2 fused         MC2 styles, pipelined kernel, column_backward="fused"
    mc2 overlap       the same with column_backward="overlap"
    mc2 regather      mc2 fused with regather=True
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_styles
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.flop_counter import FlopCounterMode

import parallel_styles as our_styles
from benchmarks.interleaved import Run
from examples.torch.llama3.model import (
    Attention,
    FeedForward,
    ModelArgs,
    TransformerBlock,
    apply_rope,
    rope_table,
)
from examples.torch.llama3.parallelize import SharedInput
from parallel_styles.mc2_styles import MC2ColwiseParallel, MC2RowwiseParallel

MC2_OPTIONS: dict[str, dict[str, Any]] = {
    "mc2 fused": {"column_backward": "fused"},
    "mc2 overlap": {"column_backward": "overlap"},
    "mc2 regather": {"column_backward": "fused", "regather": True},
}
PARALLELIZED = ("torch", "sync", "async", *MC2_OPTIONS)
RELATIVE_TOLERANCE = 1e-4  # float32 sums in another order: a matmul in pieces, partial sums by rank


@dataclass(frozen=True)
class Workload:
    """A module and its input.

    Attributes:
        kind: ``mlp`` or ``llama3``.
        sequence_first: whether tensors are (S, B, H) instead of (B, S, H).
        batch, sequence, hidden, intermediate: sizes B, S, H and I.
        heads, kv_heads: of the attention in ``llama3``.
    """

    kind: str
    sequence_first: bool
    batch: int
    sequence: int
    hidden: int
    intermediate: int
    heads: int = 16
    kv_heads: int = 4

    @property
    def sequence_dim(self) -> int:
        """The tensor dim that is sharded at the module's boundaries."""
        return 0 if self.sequence_first else 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """Global shape of input and output."""
        lead = (self.batch, self.sequence)
        return (*(lead[::-1] if self.sequence_first else lead), self.hidden)

    @property
    def blocks(self) -> int:
        """Pairs of column and row: each has one gather and one reduction, forward and backward."""
        return 1 if self.kind == "mlp" else 2

    def __str__(self) -> str:
        order = "sequence-first" if self.sequence_first else "batch-first"
        heads = f", {self.heads} heads, {self.kv_heads} kv" if self.kind == "llama3" else ""
        return (
            f"{self.kind}, {order}, batch {self.batch}, seq {self.sequence}, hidden {self.hidden}, "
            f"intermediate {self.intermediate}{heads}"
        )

    def module(self) -> nn.Module:
        """The unsharded module, always with the same weights."""
        torch.manual_seed(0)
        if self.kind == "mlp":
            return MLP(self.hidden, self.intermediate)
        args = ModelArgs(
            dim=self.hidden,
            n_heads=self.heads,
            n_kv_heads=self.kv_heads,
            ffn_dim=self.intermediate,
            max_seq_len=self.sequence,
        )
        return Block(args, self.sequence_first)

    def tensor(self, seed: int, rank: int, ranks: int) -> torch.Tensor:
        """This rank's sequence shard of a random tensor of `shape`."""
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randn(self.shape, generator=generator)
        return whole.chunk(ranks, self.sequence_dim)[rank].contiguous()


class MLP(nn.Module):
    """``w2(silu(w1 x))``."""

    def __init__(self, hidden: int, intermediate: int, *, bias: bool = False) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, intermediate, bias=bias)
        self.w2 = nn.Linear(intermediate, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (*, hidden) to itself."""
        return self.w2(F.silu(self.w1(x)))


class Block(TransformerBlock):
    """The example's Llama-3 block, with its rotary angles, for either order of dims."""

    def __init__(self, args: ModelArgs, sequence_first: bool) -> None:
        super().__init__(args)
        if sequence_first:
            self.attention = SequenceFirstAttention(args)
        self.rope = rope_table(args.head_dim, args.max_seq_len, args.rope_theta)

    def forward(self, x: torch.Tensor, rope: torch.Tensor | None = None) -> torch.Tensor:
        """Maps the residual stream to itself."""
        return super().forward(x, self.rope if rope is None else rope)


class SequenceFirstAttention(Attention):
    """The example's attention on (S, B, dim)."""

    def forward(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """Attends over ``x``."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)
            for projection in (self.wq, self.wk, self.wv)
        )
        out = F.scaled_dot_product_attention(
            apply_rope(q, rope).transpose(1, 2),
            apply_rope(k, rope).transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        return self.wo(out.permute(2, 0, 1, 3).flatten(2))


def plan(
    workload: Workload, variant: str, *, chunks: int | str = "auto"
) -> dict[str, ParallelStyle]:
    """The styles of one variant, by submodule."""
    shard = Shard(workload.sequence_dim)
    if workload.kind == "mlp":
        column, row = _layer_styles(variant, shard, chunks)
        return {"w1": column, "w2": row}
    lib: Any = torch_styles if variant == "torch" else our_styles
    asynchronous = {} if variant == "torch" else {"async_op": variant != "sync"}
    norm = lib.SequenceParallel(sequence_dim=workload.sequence_dim, **asynchronous)
    # A gather is shared by wq, wk, wv (and w1, w3), in the way that each library has for it.
    gathered = Replicate() if not variant.startswith("mc2") else shard
    column, row = _layer_styles(variant, shard, chunks, column_input=gathered)
    styles = {
        "attention_norm": norm,
        "attention.w[qkv]": column,
        "attention.wo": row,
        "ffn_norm": norm,
        "feed_forward.w[13]": column,
        "feed_forward.w2": row,
    }
    if variant == "async":
        shared = SharedInput(input_layouts=shard, async_op=True)
        return {**styles, "attention": shared, "feed_forward": shared}
    if not variant.startswith("mc2"):
        styles["attention"] = lib.PrepareModuleInput(
            input_layouts=(shard, None), desired_input_layouts=(Replicate(), None)
        )
        styles["feed_forward"] = lib.PrepareModuleInput(
            input_layouts=(shard,), desired_input_layouts=(Replicate(),)
        )
    return styles


def _layer_styles(
    variant: str, shard: Shard, chunks: int | str, column_input: Any = None
) -> tuple[ParallelStyle, ParallelStyle]:
    layouts = {"input_layouts": column_input or shard}
    if variant.startswith("mc2"):
        kernel: dict[str, Any] = {"kernel": "pipelined", "chunks": chunks}
        column = MC2ColwiseParallel(**layouts, **kernel, **MC2_OPTIONS[variant])
        return column, MC2RowwiseParallel(output_layouts=shard, **kernel)
    if variant == "torch":
        return (
            torch_styles.ColwiseParallel(**layouts),
            torch_styles.RowwiseParallel(output_layouts=shard),
        )
    async_op = {"sync": False, "async": True}[variant]
    return (
        our_styles.ColwiseParallel(**layouts, async_op=async_op),
        our_styles.RowwiseParallel(output_layouts=shard, async_op=async_op),
    )


class Step:
    """Forward and backward of one variant, to be run as a `Run` with these two phases.

    Forward ends when the output can be read, backward when every gradient can.
    """

    def __init__(self, module: nn.Module, x: torch.Tensor, grad_out: torch.Tensor) -> None:
        self.module = module
        self.x = x.requires_grad_()
        self.grad_out = grad_out
        self.out: torch.Tensor | None = None

    def __call__(self) -> list[float]:
        """Runs both."""
        self.forget()
        self.out = self.forward()
        ends = [time.perf_counter()]
        self.backward(self.out)
        return [*ends, time.perf_counter()]

    def forward(self) -> torch.Tensor:
        """The output, which can be read without waiting."""
        out = self.module(self.x)
        finished(out)
        return out

    def backward(self, out: torch.Tensor) -> None:
        """Makes all gradients."""
        out.backward(self.grad_out)
        for _, grad in self.gradients():
            finished(grad)

    def forget(self) -> None:
        """Drops output and gradients of the last run."""
        self.out = self.x.grad = None
        self.module.zero_grad(set_to_none=True)

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        """Gradients of input and parameters, by name."""
        named = [("input", self.x), *self.module.named_parameters()]
        return [(name, tensor.grad) for name, tensor in named if tensor.grad is not None]

    def results(self) -> dict[str, torch.Tensor]:
        """Output and gradients of the last run, local and finished."""
        assert self.out is not None
        tensors = {"output": self.out, **dict(self.gradients())}
        return {name: finished(tensor).detach() for name, tensor in tensors.items()}


def finished(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor, waited for: neither library hands out anything in flight as plain."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def parallel_step(
    workload: Workload, variant: str, mesh: DeviceMesh, *, chunks: int | str = "auto"
) -> Step:
    """One of the `PARALLELIZED` variants."""
    lib: Any = torch_styles if variant == "torch" else our_styles
    module = lib.parallelize_module(workload.module(), mesh, plan(workload, variant, chunks=chunks))
    return _step(workload, module, mesh)


def compute_step(workload: Workload, mesh: DeviceMesh) -> Step:
    """Variant ``compute``.

    Each Linear has this rank's share of the features; gathers and reductions are replaced by
    tensors of the right shape that are there already. The results mean nothing.
    """
    ranks = mesh.size()
    module = workload.module()
    for name, child in list(module.named_modules()):
        if isinstance(child, nn.Linear):
            is_row = name.split(".")[-1] in ("w2", "wo")
            parts = (1, ranks) if is_row else (ranks, 1)
            child.weight = nn.Parameter(_corner(child.weight, *parts))
    whole = torch.randn(workload.shape) * 0.1
    for child in list(module.modules()):
        if isinstance(child, (MLP, Attention, FeedForward)):
            child.register_forward_pre_hook(
                lambda _, args: (_Gathered.apply(args[0], whole), *args[1:])
            )
            child.register_forward_hook(
                lambda _, args, out: _Reduced.apply(out, whole, workload.sequence_dim, ranks)
            )
    return _step(workload, module, mesh)


def _step(workload: Workload, module: nn.Module, mesh: DeviceMesh) -> Step:
    rank, ranks = mesh.get_local_rank(), mesh.size()
    return Step(module, workload.tensor(1, rank, ranks), workload.tensor(2, rank, ranks))


def _corner(weight: torch.Tensor, row_parts: int, column_parts: int) -> torch.Tensor:
    rows, columns = weight.shape
    return weight.detach()[: rows // row_parts, : columns // column_parts].clone()


class _Gathered(torch.autograd.Function):
    """In place of a gather: a tensor of the gathered shape; backward, a part of the gradient."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        ctx.shape = shard.shape
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        dim = next((d for d in range(grad.dim()) if grad.shape[d] != ctx.shape[d]), 0)
        return grad.narrow(dim, 0, ctx.shape[dim]), None


class _Reduced(torch.autograd.Function):
    """In place of a reduction: a part of the summand; backward, a tensor of the whole shape."""

    @staticmethod
    def forward(
        ctx: Any, summand: torch.Tensor, whole: torch.Tensor, dim: int, ranks: int
    ) -> torch.Tensor:
        ctx.whole = whole
        return summand.narrow(dim, 0, summand.shape[dim] // ranks)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return ctx.whole, None, None, None


def communication(workload: Workload, mesh: DeviceMesh, *, point_to_point: bool) -> Run:
    """Variants ``collectives`` and ``point to point``, without any arithmetic.

    The message is a contiguous shard in either order of dims, which favours communication alone.
    """
    rank, ranks = mesh.get_local_rank(), mesh.size()
    group = mesh.get_group()
    shard = workload.tensor(1, rank, ranks).flatten()
    whole = torch.randn(shard.numel() * ranks)
    received = torch.empty(shard.numel() * (ranks - 1))
    functional = torch.ops._c10d_functional

    def collectives() -> None:
        for _ in range(workload.blocks):
            gathered = functional.all_gather_into_tensor(shard, ranks, group.group_name)
            functional.wait_tensor(gathered)
            reduced = functional.reduce_scatter_tensor(whole, "sum", ranks, group.group_name)
            functional.wait_tensor(reduced)

    def exchange() -> None:
        # Receives first: on gloo, a send that is started first holds up the word that its own rank
        # is ready to receive, and the link is used in one direction at a time.
        others = [other for other in range(ranks) if other != rank]
        for _ in range(2 * workload.blocks):
            works = [
                dist.irecv(place, group_src=other, group=group)
                for other, place in zip(others, received.chunk(ranks - 1), strict=True)
            ]
            works += [dist.isend(shard, group_dst=other, group=group) for other in others]
            for work in works:
                work.wait()

    once = exchange if point_to_point else collectives

    def run() -> list[float]:
        ends = []
        for _ in ("forward", "backward"):
            once()
            ends.append(time.perf_counter())
        return ends

    return run


def check_equal(steps: dict[str, Step]) -> None:
    """Runs each once and compares all outputs and gradients with those of the first.

    Raises:
        AssertionError: they differ by more than the order of summation explains.
    """
    for step in steps.values():
        step()
    (first, reference), *others = [(name, step.results()) for name, step in steps.items()]
    for name, results in others:
        assert results.keys() == reference.keys(), f"{name}: gradients of {list(results)}"
        for what, expected in reference.items():
            actual = results[what]
            error = ((actual - expected).norm() / expected.norm()).item()
            assert error <= RELATIVE_TOLERANCE, (
                f"Expected {what} of {name!r} as of {first!r} within {RELATIVE_TOLERANCE}, got a "
                f"relative difference of {error:.3g}."
            )


def check_same_arithmetic(workload: Workload, compute: Callable[[], Any], ranks: int) -> None:
    """Counts the matmul FLOPs of the variant ``compute``: one rank's share of the whole module's.

    Raises:
        AssertionError: they differ.
    """
    whole = Step(workload.module(), torch.zeros(workload.shape), torch.zeros(workload.shape))
    counts = []
    for run in (whole, compute):
        with FlopCounterMode(display=False) as counter:
            run()
        counts.append(counter.get_total_flops())
    assert counts[1] * ranks == counts[0], (
        f"Expected {counts[0]} / {ranks} FLOPs in variant 'compute' of {workload}, got {counts[1]}."
    )
