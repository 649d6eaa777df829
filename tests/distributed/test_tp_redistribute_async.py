"""Column and row layers whose boundaries redistribute asynchronously: values, gradients, states.

Where numbers are small and whole, every order of summation gives the same float, so sharded results
equal those of one device in every bit. Against the synchronous styles and torch's they are compared
in every bit with any numbers.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks
from tests.common.late_ranks import ahead

if IN_RANK_PROCESS:
    import torch
    import torch.distributed.tensor.parallel as torch_styles
    from torch import nn
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    import parallel_styles
    from examples.torch.llama3.model import ModelArgs, TransformerBlock, rope_table
    from parallel_styles import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )
    from pending_dtensor import HyperDTensor, PendingLocal, PendingState, record_overlap
    from tests.common.sharded_models import (
        MLP,
        equal,
        full,
        gradients,
        joined,
        part,
        whole_numbers,
        with_whole_numbers,
    )

    SHAPES = {None: (4, 8, 8), 0: (8, 3, 8), 1: (3, 8, 8)}  # by sequence dim: batch- or seq-first

sequence_dims = pytest.mark.parametrize("seq", [None, 1, 0], ids=["tp", "sp_dim1", "sp_dim0"])
biases = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
local_outputs = pytest.mark.parametrize("local", [True, False], ids=["local", "dtensor"])


def parallel_mlp(
    ctx: RankContext,
    model: MLP,
    seq: int | None,
    *,
    lib: Any = None,
    local: bool = True,
    **options: Any,
) -> MLP:
    lib = lib or parallel_styles
    outside = Replicate() if seq is None else Shard(seq)
    plan = {
        "w1": lib.ColwiseParallel(input_layouts=outside, use_local_output=local, **options),
        "w2": lib.RowwiseParallel(output_layouts=outside, use_local_output=local, **options),
    }
    return lib.parallelize_module(model, ctx.mesh(), plan)


def step(
    model: nn.Module, x: torch.Tensor, seq: int | None = None, *, input_grad: bool = True
) -> dict[str, Any]:
    """Whole output and gradients of one step on this rank's part of ``x``."""
    x = part(x, seq).requires_grad_(input_grad)
    out = model(x)
    local = out.to_local() if isinstance(out, DTensor) else out
    (local * weights_like(local, seq)).sum().backward()
    result = {"out": joined(full(local), seq), **gradients(model)}
    result["x"] = None if x.grad is None else joined(x.grad, seq)
    return result


def weights_like(local: torch.Tensor, seq: int | None) -> torch.Tensor:
    """What the loss weighs this rank's outputs with."""
    shape = list(local.shape)
    if seq is not None:
        shape[seq] *= torch.distributed.get_world_size()
    return part(whole_numbers(*shape, seed=7), seq)


# --- values


@sequence_dims
@biases
@local_outputs
@on_ranks(2, 4)
def test_equal_to_one_device(ctx: RankContext, seq: int | None, bias: bool, local: bool) -> None:
    model = with_whole_numbers(MLP(bias=bias))
    x = whole_numbers(*SHAPES[seq])
    expected = step(model, x)
    model.zero_grad()
    equal(step(parallel_mlp(ctx, model, seq, local=local), x, seq), expected)


@sequence_dims
@on_ranks(2)
def test_a_wrong_bias_or_shard_would_be_noticed(ctx: RankContext, seq: int | None) -> None:
    x = whole_numbers(*SHAPES[seq])
    expected = step(with_whole_numbers(MLP()), x)
    model = parallel_mlp(ctx, with_whole_numbers(MLP()), seq)
    with torch.no_grad():
        model.w2.bias.to_local().mul_(2)
    with pytest.raises(AssertionError, match="out: got"):
        equal(step(model, x, seq), expected)
    model = parallel_mlp(ctx, with_whole_numbers(MLP()), seq)
    if ctx.rank == 1:
        with torch.no_grad():
            model.w1.weight.to_local()[0, 0] += 1
    with pytest.raises(AssertionError, match="got"):
        equal(step(model, x, seq), expected)


@sequence_dims
@on_ranks(2, 4)
def test_equal_to_sync_and_to_torch_in_every_bit(ctx: RankContext, seq: int | None) -> None:
    torch.manual_seed(5)
    shapes = [SHAPES[seq]]
    if seq is None:
        shapes += [(8, 8), (2, 3, 2, 8)]
    if seq == 0:
        shapes += [(8, 8), (8, 1, 3, 8)]
    for shape in shapes:
        x = torch.randn(shape)
        for bias in (True, False):
            torch.manual_seed(6)
            weights = MLP(bias=bias).state_dict()

            results = []
            for lib, options in [
                (parallel_styles, {}),
                (parallel_styles, {"async_op": False}),
                (parallel_styles, {"local": False}),
                (torch_styles, {}),
            ]:
                model = MLP(bias=bias)
                model.load_state_dict(weights)
                model = parallel_mlp(ctx, model, seq, lib=lib, **options)
                results.append(step(model, x, seq))
            for other in results[1:]:
                equal(results[0], other)


@pytest.mark.parametrize("shape", [(8,), (8, 8), (2, 3, 2, 8), (1, 1, 8), (0, 8)], ids=str)
@on_ranks(2)
def test_inputs_of_any_rank(ctx: RankContext, shape: tuple[int, ...]) -> None:
    x = whole_numbers(*shape)
    expected = step(with_whole_numbers(MLP()), x)
    equal(step(parallel_mlp(ctx, with_whole_numbers(MLP()), None), x), expected)


@on_ranks(2)
def test_inputs_that_are_not_contiguous(ctx: RankContext) -> None:
    x = whole_numbers(8, 3, 8).transpose(0, 1)
    expected = step(with_whole_numbers(MLP()), x)
    model = parallel_mlp(ctx, with_whole_numbers(MLP()), 1)
    local = x.chunk(2, 1)[ctx.rank]
    assert not local.is_contiguous()
    out = model(local)
    assert torch.equal(joined(full(out), 1), expected["out"])


FROZEN = {
    "nothing": (),
    "weights": ("w1.weight", "w2.weight"),
    "biases": ("w1.bias", "w2.bias"),
    "w1": ("w1.weight", "w1.bias"),
    "w2": ("w2.weight", "w2.bias"),
    "all": ("w1.weight", "w1.bias", "w2.weight", "w2.bias"),
}


@sequence_dims
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("input_grad", [True, False], ids=["input_grad", "no_input_grad"])
@on_ranks(2)
def test_frozen_parameters(
    ctx: RankContext, seq: int | None, frozen: str, input_grad: bool
) -> None:
    if frozen == "all" and not input_grad:
        return  # nothing to differentiate

    def frozen_mlp() -> MLP:
        model = with_whole_numbers(MLP())
        for name in FROZEN[frozen]:
            model.get_parameter(name).requires_grad_(False)
        return model

    x = whole_numbers(*SHAPES[seq])
    expected = step(frozen_mlp(), x, input_grad=input_grad)
    model = parallel_mlp(ctx, frozen_mlp(), seq)
    assert [p.requires_grad for p in model.parameters()] == [
        name not in FROZEN[frozen] for name, _ in model.named_parameters()
    ]
    with record_overlap() as log:
        result = step(model, x, seq, input_grad=input_grad)
    equal(result, expected)
    # Forward as always; backward reduces grad_input only if somebody wants it.
    gathers_of_grad_out = 0 if seq is None else 1
    reductions_of_grad_in = 1 if input_grad else 0
    forward = 1 if seq is None else 2
    assert len(log.events) == forward + gathers_of_grad_out + reductions_of_grad_in


# --- states


@sequence_dims
@on_ranks(2, 4)
def test_pending_between_the_hook_and_the_linear(ctx: RankContext, seq: int | None) -> None:
    """In flight after the column's input hook, not read by anybody before the Linear."""
    model = parallel_mlp(ctx, with_whole_numbers(MLP()), seq)
    seen: list[Any] = []

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        (x,) = args
        assert isinstance(x, HyperDTensor)
        assert x.placements == (Replicate(),)
        local = x._local_tensor
        if seq is None:
            assert not isinstance(local, AsyncCollectiveTensor)  # nothing to communicate
            return
        assert isinstance(local, PendingLocal)
        assert local.state is PendingState.IN_FLIGHT
        repr(x), x.shape, x.dtype, local.stride()
        assert local.state is PendingState.IN_FLIGHT
        seen.append((local, log.events[-1]))
        assert log.events[-1].wait_began is None

    model.w1.register_forward_pre_hook(look)
    with record_overlap() as log:
        out = model(part(whole_numbers(*SHAPES[seq]), seq))
    assert isinstance(out, PendingLocal)
    assert out.state is PendingState.IN_FLIGHT
    assert log.events[-1].wait_began is None
    if seq is not None:
        ((local, event),) = seen
        assert local.state is PendingState.READY
        assert event.kind == "all_gather"
        assert event.wait_began >= event.started
    full(out)
    assert log.events[-1].wait_began is not None


@pytest.mark.parametrize("output", [None, 0, 1, -1])
@on_ranks(2)
def test_a_row_returns_before_the_other_rank_begins(ctx: RankContext, output: int | None) -> None:
    layout = Replicate() if output is None else Shard(output)
    layer = with_whole_numbers(nn.Linear(8, 8))
    x = whole_numbers(2, 4, 8)
    expected = layer(x).detach()
    parallelize_module(layer, ctx.mesh(), RowwiseParallel(output_layouts=layout))
    local = part(x, -1).requires_grad_()
    out = ahead(ctx, lambda: layer(local), still_in_flight)
    assert torch.equal(joined(full(out), output), expected)


@pytest.mark.parametrize("output", [0, 1, None])
@on_ranks(2)
def test_a_column_returns_before_the_other_rank_begins(
    ctx: RankContext, output: int | None
) -> None:
    layout = Replicate() if output is None else Shard(output)
    layer = with_whole_numbers(nn.Linear(8, 8))
    x = whole_numbers(2, 4, 8)
    expected = layer(x).detach()
    parallelize_module(layer, ctx.mesh(), ColwiseParallel(output_layouts=layout))
    out = ahead(ctx, lambda: layer(x.requires_grad_()), still_in_flight)
    assert torch.equal(joined(full(out), output), expected)


@on_ranks(2)
def test_the_norm_of_a_sequence_returns_before_the_other_rank_begins(ctx: RankContext) -> None:
    """Its input comes sharded elsewhere, so that an all_to_all is in flight in the hook."""
    norm = parallelize_module(nn.LayerNorm(8), ctx.mesh(), SequenceParallel())
    x = distribute_tensor(whole_numbers(2, 4, 8), ctx.mesh(), [Shard(0)])
    seen = []

    def look_and_stop(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(args[0])
        raise InterruptedError

    norm.register_forward_pre_hook(look_and_stop)

    def start() -> None:
        with pytest.raises(InterruptedError):
            norm(x)

    ahead(ctx, start, lambda _: still_in_flight(seen[0].to_local()))
    assert seen[0].placements == (Shard(1),)
    assert torch.equal(full(seen[0]), whole_numbers(2, 4, 8))


def still_in_flight(tensor: torch.Tensor) -> None:
    assert isinstance(tensor, PendingLocal)
    assert tensor.state is PendingState.IN_FLIGHT


@on_ranks(2)
def test_redistribute_is_synchronous_unless_asked(ctx: RankContext) -> None:
    x = whole_numbers(4, 6)
    for source, target in [
        (Shard(0), Replicate()),
        (Shard(0), Shard(1)),
        (Shard(1), Replicate()),
        (Partial(), Replicate()),
        (Partial(), Shard(1)),
        (Replicate(), Shard(1)),
    ]:
        dtensor = HyperDTensor.from_local(
            x.clone().requires_grad_(), ctx.mesh(), [source], run_check=False
        )
        with record_overlap() as log:
            moved = dtensor.redistribute(placements=[target])
            assert type(moved._local_tensor) is torch.Tensor
            assert all(event.readable is not None for event in log.events)
            gradient_types = []
            dtensor.register_hook(lambda g, t=gradient_types: t.append(type(g._local_tensor)))
            moved.to_local().sum().backward()
        assert gradient_types == [torch.Tensor]
        assert log.summary()["unread"] == 0
        assert type(torch_like(dtensor, target)._local_tensor) is type(moved._local_tensor)


def torch_like(tensor: HyperDTensor, target: Any) -> DTensor:
    """What torch's own redistribute gives with its default arguments."""
    plain = DTensor.from_local(
        full(tensor.to_local()), tensor.device_mesh, tensor.placements, run_check=False
    )
    return plain.redistribute(placements=[target])


@sequence_dims
@on_ranks(2)
def test_synchronous_styles_hand_out_nothing_pending(ctx: RankContext, seq: int | None) -> None:
    model = parallel_mlp(ctx, with_whole_numbers(MLP()), seq, async_op=False)

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        local = args[0]._local_tensor if isinstance(args[0], DTensor) else args[0]
        assert not isinstance(local, AsyncCollectiveTensor)

    model.w1.register_forward_pre_hook(look)
    model.w2.register_forward_pre_hook(look)
    x = part(whole_numbers(*SHAPES[seq]), seq).requires_grad_()
    with record_overlap() as log:
        out = model(x)
        assert type(out) is torch.Tensor
        out.sum().backward()
    for event, following in zip(log.events, log.events[1:], strict=False):
        assert event.readable <= following.started


# --- collectives


@sequence_dims
@local_outputs
@on_ranks(2)
def test_collective_counts(ctx: RankContext, seq: int | None, local: bool) -> None:
    counts = {}
    for lib in (parallel_styles, torch_styles):
        model = parallel_mlp(ctx, with_whole_numbers(MLP()), seq, lib=lib, local=local)
        x = part(whole_numbers(*SHAPES[seq]), seq).requires_grad_()
        with CommDebugMode() as forward, record_overlap() as log:
            out = model(x)
        with CommDebugMode() as backward, record_overlap() as backward_log:
            (out.to_local() if isinstance(out, DTensor) else out).sum().backward()
        if lib is torch_styles:
            full(x.grad)  # left in flight there
        counts[lib] = (forward.get_comm_counts(), backward.get_comm_counts())
        if lib is parallel_styles:
            kinds = {"all_reduce": 1} if seq is None else {"all_gather": 1, "reduce_scatter": 1}
            assert log.summary()["by_kind"] == kinds
            assert backward_log.summary()["by_kind"] == kinds
            assert forward.get_total_counts() == len(log.events)
            assert backward.get_total_counts() == len(backward_log.events)
    assert counts[parallel_styles] == counts[torch_styles]


# --- a Llama-3 block

# In float64 only the order of summation differs from one device, over ranks instead of along the
# contraction: at most a few hundred terms. A missing term would show at 1e-2 or more.
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def llama_block() -> TransformerBlock:
    torch.manual_seed(1)
    return TransformerBlock(ModelArgs(dim=32, n_heads=8, n_kv_heads=4, ffn_dim=48))


def parallel_block(
    ctx: RankContext, block: nn.Module, lib: Any, *, sp: bool, prepare: bool, **options: Any
) -> nn.Module:
    """``prepare`` gathers once for all the columns, as torch's examples do; else each gathers."""
    outside = Shard(1) if sp else Replicate()
    column = lib.ColwiseParallel(input_layouts=Replicate() if prepare else outside, **options)
    row = lib.RowwiseParallel(output_layouts=outside, **options)
    plan = {
        "attention.w[qkv]": column,
        "attention.wo": row,
        "feed_forward.w[13]": column,
        "feed_forward.w2": row,
    }
    if sp:
        plan["*_norm"] = lib.SequenceParallel(**options)
    if prepare:
        plan["attention"] = lib.PrepareModuleInput(
            input_layouts=(outside, None), desired_input_layouts=(Replicate(), None)
        )
        plan["feed_forward"] = lib.PrepareModuleInput(
            input_layouts=(outside,), desired_input_layouts=(Replicate(),)
        )
    return lib.parallelize_module(block, ctx.mesh(), plan)


class RunBlock:
    """A step of a block on this rank's part of one input."""

    def __init__(self, block: nn.Module, dtype: torch.dtype, seq: int | None) -> None:
        torch.manual_seed(2)
        rope = rope_table(4, 8, 1e4).to(dtype)
        x = part(torch.randn(2, 8, 32, dtype=dtype), seq).requires_grad_()
        weights = part(torch.randn(2, 8, 32, dtype=dtype), seq)
        with CommDebugMode() as forward:
            out = block(x, rope)
        with CommDebugMode() as backward:
            (out * weights).sum().backward()
        self.counts = (forward.get_comm_counts(), backward.get_comm_counts())
        self.results = {
            "out": joined(full(out), seq),
            "x": joined(x.grad, seq),
            **gradients(block),
        }


@pytest.mark.parametrize("sp", [True, False], ids=["sp", "tp"])
@pytest.mark.parametrize("prepare", [True, False], ids=["one_gather", "each_gathers"])
@on_ranks(2, 4)
def test_llama_block(ctx: RankContext, sp: bool, prepare: bool) -> None:
    seq = 1 if sp else None
    one_device = RunBlock(llama_block().double(), torch.float64, None).results
    block = parallel_block(ctx, llama_block().double(), parallel_styles, sp=sp, prepare=prepare)
    torch.testing.assert_close(RunBlock(block, torch.float64, seq).results, one_device, **CLOSE)

    runs = [
        RunBlock(
            parallel_block(ctx, llama_block(), lib, sp=sp, prepare=prepare, **options),
            torch.float32,
            seq,
        )
        for lib, options in [
            (parallel_styles, {}),
            (parallel_styles, {"async_op": False}),
            (torch_styles, {}),
        ]
    ]
    for other in runs[1:]:
        equal(runs[0].results, other.results)
        assert runs[0].counts == other.counts


# --- uneven sequences


@pytest.mark.parametrize("seq", [1, 0], ids=["batch_first", "sequence_first"])
@pytest.mark.parametrize("length", [5, 1])
@on_ranks(2, 3, 4)
def test_uneven_sequence_with_hyper_dtensor_outputs(
    ctx: RankContext, seq: int, length: int
) -> None:
    """Three steps of training; some ranks may have no rows at all."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.norm = nn.LayerNorm(12)
            self.mlp = MLP(12, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.mlp(self.norm(x))

    shape = (length, 2, 12) if seq == 0 else (2, length, 12)
    torch.manual_seed(4)
    x, weights = torch.randn(2, *shape, dtype=torch.float64)

    def train(model: nn.Module, x: torch.Tensor, weights: torch.Tensor) -> dict[str, Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results: dict[str, Any] = {}
        for number in range(3):
            model.zero_grad()
            x = x.detach().requires_grad_()
            out = model(x)
            (out * weights).sum().backward()
            results[f"out {number}"] = full(out)
            results[f"x.grad {number}"] = full(x.grad)
            results |= {f"{name} {number}": grad for name, grad in gradients(model).items()}
            optimizer.step()
        return results

    expected = train(Block().double(), x, weights)
    model = Block().double()
    outside = Shard(seq)
    plan = {
        "norm": SequenceParallel(sequence_dim=seq),
        "mlp.w1": ColwiseParallel(input_layouts=outside, use_local_output=False),
        "mlp.w2": RowwiseParallel(output_layouts=outside, use_local_output=False),
    }
    parallelize_module(model, ctx.mesh(), plan)
    result = train(
        model,
        distribute_tensor(x, ctx.mesh(), [outside]),
        distribute_tensor(weights, ctx.mesh(), [outside]),
    )
    torch.testing.assert_close(result, expected, **CLOSE)
