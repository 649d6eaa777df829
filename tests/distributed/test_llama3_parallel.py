"""The parallelized Llama-3 example: equal to the unsharded model, and equal sync and async."""

from __future__ import annotations

import time
from itertools import chain
from typing import Any

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks

if IN_RANK_PROCESS:
    from contextlib import nullcontext

    import torch
    import torch.nn.functional as F
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel

    from examples.torch.llama3.model import ModelArgs, Transformer
    from examples.torch.llama3.parallelize import parallelize_llama3
    from mc2 import MC2ConstraintError
    from pending_dtensor import record_overlap

N_LAYERS = 2
# In float64 only the order of summation differs from one device: over ranks instead of along the
# contraction, a few hundred terms. A missing or doubled term would show at 1e-3 or more.
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}

plans = pytest.mark.parametrize(
    ("sequence_parallel", "with_loss_parallel"),
    [(True, False), (True, True), (False, False), (False, True)],
    ids=["sp", "sp-loss_parallel", "tp", "tp-loss_parallel"],
)


def make_model(dtype: torch.dtype) -> Transformer:
    torch.manual_seed(0)
    args = ModelArgs(dim=32, n_layers=N_LAYERS, n_heads=8, n_kv_heads=4, ffn_dim=48, max_seq_len=16)
    model = Transformer(args)
    with torch.no_grad():
        for parameter in model.parameters():  # larger than at the start: softmax and silu bend
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(dtype)


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(256, (3, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def forward_backward(
    model: Transformer, *, with_loss_parallel: bool = False
) -> dict[str, torch.Tensor]:
    """Logits, loss and every gradient, whole, by name."""
    tokens, targets = make_batch()
    with loss_parallel() if with_loss_parallel else nullcontext():
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
    results = {"logits": full(logits).detach(), "loss": full(loss).detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        results[name] = full(parameter.grad).clone()
    return results


def parallelized(
    ctx: RankContext, dtype: torch.dtype, *, sequence_parallel: bool, **options: Any
) -> Transformer:
    return parallelize_llama3(
        make_model(dtype), ctx.mesh(), enable_sequence_parallel=sequence_parallel, **options
    )


@plans
@on_ranks(2, 4)
def test_equals_the_unsharded_model(
    ctx: RankContext, sequence_parallel: bool, with_loss_parallel: bool
) -> None:
    expected = forward_backward(make_model(torch.float64))
    model = parallelized(
        ctx,
        torch.float64,
        sequence_parallel=sequence_parallel,
        enable_loss_parallel=with_loss_parallel,
    )
    actual = forward_backward(model, with_loss_parallel=with_loss_parallel)
    torch.testing.assert_close(actual, expected, **TOLERANCE)


@pytest.mark.parametrize("kernel", ["pipelined", "decomposed"])
@on_ranks(2, 4)
def test_fused_equals_the_unsharded_model(ctx: RankContext, kernel: str) -> None:
    expected = forward_backward(make_model(torch.float64))
    model = parallelized(
        ctx, torch.float64, sequence_parallel=True, enable_mc2=True, mc2_kernel=kernel
    )
    with record_overlap() as log:
        actual = forward_backward(model)
    torch.testing.assert_close(actual, expected, **TOLERANCE)
    halves = 2 * N_LAYERS
    assert log.summary()["by_kernel"] == {
        kernel: 4 * halves,  # column and row, forward and backward; siblings share theirs
        "unfused": 2 + 3,  # of the embedding and of the head, as without MC2
    }
    assert log.summary()["fallbacks"] == 0


@on_ranks(2)
def test_one_wrong_shard_is_noticed(ctx: RankContext) -> None:
    expected = forward_backward(make_model(torch.float64))
    model = parallelized(ctx, torch.float64, sequence_parallel=True)
    if ctx.rank == 1:
        with torch.no_grad():
            model.layers[1].attention.wv.weight.to_local()[0, 0] += 1e-3
    actual = forward_backward(model)
    for name in ("logits", "tok_embeddings.weight", "layers.1.attention.wo.weight"):
        with pytest.raises(AssertionError, match="not close"):
            torch.testing.assert_close(actual[name], expected[name], **TOLERANCE)


@plans
@on_ranks(2, 4)
def test_async_is_bitwise_equal_to_sync(
    ctx: RankContext, sequence_parallel: bool, with_loss_parallel: bool
) -> None:
    """Float32, as trained in: here another order of the same sums would show."""
    results = []
    for async_redistribute in (False, True):
        model = parallelized(
            ctx,
            torch.float32,
            sequence_parallel=sequence_parallel,
            enable_loss_parallel=with_loss_parallel,
            async_redistribute=async_redistribute,
        )
        results.append(forward_backward(model, with_loss_parallel=with_loss_parallel))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@on_ranks(2)
def test_collectives_with_sequence_parallelism(ctx: RankContext) -> None:
    with record_overlap() as log:
        model = parallelized(ctx, torch.float32, sequence_parallel=True)
        tokens, targets = make_batch()
        logits = model(tokens)
        forward = log.summary()["by_kind"]
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    halves = 2 * N_LAYERS  # one gather and one reduce-scatter for each attention and feed-forward
    assert forward == {"all_gather": halves + 2, "reduce_scatter": halves + 1}
    assert log.summary()["by_kind"] == {
        "all_gather": (halves + 2) + (halves + 1),  # head: input and logits; embedding's backward
        "reduce_scatter": (halves + 1) + (halves + 1),
    }
    assert log.summary()["unread"] == 0


@on_ranks(2)
def test_collectives_without_sequence_parallelism(ctx: RankContext) -> None:
    with record_overlap() as log:
        model = parallelized(ctx, torch.float32, sequence_parallel=False)
        tokens, targets = make_batch()
        logits = model(tokens)
        forward = log.summary()["by_kind"]
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    halves = 2 * N_LAYERS
    assert forward == {"all_reduce": halves + 1, "all_gather": 1}
    assert log.summary()["by_kind"] == {"all_reduce": (halves + 1) + (halves + 1), "all_gather": 1}


@on_ranks(2)
def test_input_gradients_are_reduced_while_weight_gradients_are_computed(ctx: RankContext) -> None:
    assert weight_gradients_during_reduction(ctx, async_redistribute=True) == {
        "output": [True],
        **{f"layers.{i}.feed_forward": [True, True] for i in range(N_LAYERS)},
        **{f"layers.{i}.attention": [True, True, True] for i in range(N_LAYERS)},
    }


@on_ranks(2)
def test_synchronous_reductions_hide_behind_nothing(ctx: RankContext) -> None:
    hidden = weight_gradients_during_reduction(ctx, async_redistribute=False)
    assert not any(chain.from_iterable(hidden.values()))


def weight_gradients_during_reduction(
    ctx: RankContext, *, async_redistribute: bool
) -> dict[str, list[bool]]:
    """Of each group of columns: which weight gradients came between launch and first wait."""
    model = parallelized(
        ctx, torch.float32, sequence_parallel=True, async_redistribute=async_redistribute
    )
    groups = {"output": [model.output]}
    for i in reversed(range(N_LAYERS)):  # in the order of backward
        attention, feed_forward = model.layers[i].attention, model.layers[i].feed_forward
        groups[f"layers.{i}.feed_forward"] = [feed_forward.w1, feed_forward.w3]
        groups[f"layers.{i}.attention"] = [attention.wq, attention.wk, attention.wv]
    arrived: dict[Any, float] = {}

    def note_arrival(parameter: torch.Tensor) -> None:
        arrived[parameter] = time.perf_counter()  # the clock of the log

    for linear in chain.from_iterable(groups.values()):
        linear.weight.register_post_accumulate_grad_hook(note_arrival)
    tokens, targets = make_batch()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    with record_overlap() as log:
        loss.backward()
    reductions = [event for event in log.events if event.kind == "reduce_scatter"]
    return {
        name: [event.started < arrived[linear.weight] < event.wait_began for linear in linears]
        for (name, linears), event in zip(groups.items(), reductions, strict=True)
    }


@on_ranks(2)
def test_what_does_not_fit_is_refused(ctx: RankContext) -> None:
    model = make_model(torch.float32)
    with pytest.raises(ValueError, match="enable_sequence_parallel=True with enable_mc2=True"):
        parallelize_llama3(model, ctx.mesh(), enable_mc2=True, enable_sequence_parallel=False)
    with pytest.raises(MC2ConstraintError, match="could run here"):  # auto: no npu
        parallelize_llama3(model, ctx.mesh(), enable_mc2=True)
    with pytest.raises(ValueError, match="1-D tp_mesh, got 2 axes"):
        parallelize_llama3(model, ctx.mesh(1, 2))
    uneven = Transformer(ModelArgs(dim=12, n_heads=3, n_kv_heads=3, ffn_dim=9))
    with pytest.raises(ValueError, match="got n_heads=3, n_kv_heads=3, ffn_dim=9 "):
        parallelize_llama3(uneven, ctx.mesh())
    assert not any(isinstance(p, DTensor) for m in (model, uneven) for p in m.parameters())
