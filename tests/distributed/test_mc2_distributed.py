"""MC2 layers on real ranks: values, gradients, and exactly which kernel calls they make.

Where numbers are small and whole, every order of summation gives the same float, in float16 and
bfloat16 too, so fused results equal those of one device in every bit.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks
from tests.common.exact import by_name

if IN_RANK_PROCESS:
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode

    from mc2 import fused_calls
    from mc2.row_layout import RowLayout
    from parallel_styles import (
        ColwiseParallel,
        MC2ColwiseParallel,
        MC2RowwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from pending_dtensor import distribute_tensor, record_overlap
    from tests.common.mc2_models import (
        QKVO,
        calls,
        fused,
        make,
        on_one_device,
        on_this_rank,
        run,
        upstream,
    )
    from tests.common.sharded_models import MLP, equal, full, gradients, part, whole_numbers

KERNELS = ["decomposed", "pipelined"]
each_kernel = pytest.mark.parametrize("kernel", KERNELS)

AG, RS = "all_gather", "reduce_scatter"


def shape_for(seq: int, ndim: int = 3) -> tuple[int, ...]:
    """Even for 1, 2 and 4 ranks along ``seq``; more than one row on its other sides."""
    shape = [*[3, 2, 5][: ndim - 1], 8]
    shape[seq] = 8
    return tuple(shape)


# --- forward and backward of columns and rows


@each_kernel
@pytest.mark.parametrize("seq", [0, 1, -2, -3])
@on_ranks(1, 2, 4)
def test_a_chain_is_four_fused_kernels_and_nothing_else(
    ctx: RankContext, kernel: str, seq: int
) -> None:
    x = whole_numbers(*shape_for(seq))
    for bias in (True, False):
        model = make(MLP, bias=bias)
        expected = on_this_rank(on_one_device(model, x), seq)
        got = run(ctx, fused(ctx, model, seq, kernel), x, seq)
        equal(got.values, expected)
        assert got.calls == [(AG, kernel), (RS, kernel), (AG, kernel), (RS, kernel)]


@each_kernel
@on_ranks(2)
def test_torch_sees_the_four_kernels_and_no_collective(ctx: RankContext, kernel: str) -> None:
    model = fused(ctx, make(MLP), 1, kernel)
    x = part(whole_numbers(*shape_for(1)), 1).requires_grad_()
    seen: list[str] = []

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = op.overloadpacket.__name__
            if op.namespace in ("mc2", "c10d", "_c10d_functional") and name != "wait_tensor":
                seen.append(name)
            return op(*args, **(kwargs or {}))

    with CommDebugMode() as comm, Ops():
        out = model(x)
        out.backward(torch.ones_like(out))
    assert comm.get_total_counts() == 0
    gather, reduction = f"{kernel}_all_gather_matmul", f"{kernel}_matmul_scatter_start"
    # A kernel that makes grad_weight as rows arrive has an op of its own for the row's backward.
    in_backward = gather if kernel != "pipelined" else f"{gather}_product"
    assert seen == [gather, reduction, in_backward, reduction]


@each_kernel
@on_ranks(2, 4)
def test_other_numbers_of_dims(ctx: RankContext, kernel: str) -> None:
    for ndim, seq in ((2, 0), (2, -2), (4, 0), (4, 1), (4, 2), (4, -3)):
        x = whole_numbers(*shape_for(seq, ndim))
        model = make(MLP)
        expected = on_this_rank(on_one_device(model, x), seq)
        got = run(ctx, fused(ctx, model, seq, kernel), x, seq)
        equal(got.values, expected)
        assert len(got.calls) == 4


@each_kernel
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@on_ranks(2, 4)
def test_dtypes_are_exact_where_numbers_are(ctx: RankContext, kernel: str, dtype: str) -> None:
    x = whole_numbers(*shape_for(1)).to(getattr(torch, dtype))
    for cls in (MLP, QKVO):
        model = make(cls, 8, 8, dtype=x.dtype)
        in_double = on_one_device(copy.deepcopy(model).double(), x.double())
        assert all(value.abs().max() <= 256 for value in in_double.values())  # bfloat16 holds it
        expected = {name: value.to(x.dtype) for name, value in in_double.items()}
        got = run(ctx, fused(ctx, model, 1, kernel), x, 1)
        equal(got.values, on_this_rank(expected, 1))
        assert len(got.calls) == 4


@each_kernel
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@on_ranks(2, 4)
def test_any_numbers_within_rounding(ctx: RankContext, kernel: str, dtype: str) -> None:
    """Against float64: within a few roundings of the sum of the terms' sizes.

    A rank's partial sum is rounded to the dtype, their sum is, and that with the bias is: ranks + 2
    roundings of half an eps. Summing 64 terms in float32 itself costs less than 8 more.
    """
    torch.manual_seed(3)
    x, grad = (torch.randn(2, 8, 64).to(getattr(torch, dtype)) for _ in range(2))
    roundings = ctx.world_size + 2 + (8 if x.dtype == torch.float32 else 0)
    bound = torch.finfo(x.dtype).eps / 2 * roundings
    for name, before, after in (("w1", 1, 2), ("w2", 2, 1)):
        linear = nn.Linear(64, 64).to(x.dtype)
        weight, bias = (p.detach().double() for p in (linear.weight, linear.bias))
        layer = fused(ctx, nn.ModuleDict({name: linear}), 1, kernel, local=False)[name]
        source = distribute_tensor(x, ctx.mesh(), [Shard(before)]).requires_grad_()
        out = layer(source)
        out.backward(distribute_tensor(grad, ctx.mesh(), [Shard(after)]))

        def gradients_of(w: Any, b: Any, xs: Any, gs: Any) -> dict[str, torch.Tensor]:
            rows, grads = xs.flatten(0, -2), gs.flatten(0, -2)
            return {
                "out": xs @ w.T + b,
                "grad_input": gs @ w,
                "grad_weight": grads.T @ rows,
                "grad_bias": grads.sum(0),
            }

        operands = (weight, bias, x.double(), grad.double())
        exact = gradients_of(*operands)
        sizes = gradients_of(*(operand.abs() for operand in operands))
        got = {
            "out": full(out),
            "grad_input": full(source.grad),
            "grad_weight": full(layer.weight.grad),
            "grad_bias": full(layer.bias.grad),
        }
        # What the bound must not hide: the last token left out.
        x_less, grad_less = (
            operand.clone().index_fill_(1, torch.tensor(7), 0) for operand in operands[2:]
        )
        damaged = gradients_of(weight, bias, x_less, grad_less)
        for what, value in got.items():
            error = (value.double() - exact[what]).abs() / sizes[what]
            assert error.max() <= bound, what
            assert ((damaged[what] - exact[what]).abs() / sizes[what]).max() > bound, what


@each_kernel
@on_ranks(2)
def test_batch_first_equals_the_unfused_layers(ctx: RankContext, kernel: str) -> None:
    """B=3 sharded on dim 1: rows flattened before the gather would be tokens in another order."""
    x = whole_numbers(3, 6, 8)
    unfused_styles = {
        "w1": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "w2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }

    def rank_by_rank(shape: Any, dim: int, sizes: Any, rank: int) -> RowLayout:
        return RowLayout(1, tuple(sizes), math.prod(shape[:dim] + shape[dim + 1 : -1]), rank)

    def results(layer: nn.Module, before: int, after: int) -> dict[str, torch.Tensor]:
        source = distribute_tensor(x, ctx.mesh(), [Shard(before)]).requires_grad_()
        out = layer(source)
        out.backward(distribute_tensor(upstream(x.shape, x.dtype), ctx.mesh(), [Shard(after)]))
        return {"out": full(out), "x": full(source.grad), **gradients(layer)}

    for (name, style), dims in zip(unfused_styles.items(), ((1, 2), (2, 1)), strict=True):

        def layer(name: str = name) -> nn.ModuleDict:
            return nn.ModuleDict({name: make(nn.Linear, 8, 8)})

        expected = results(parallelize_module(layer()[name], ctx.mesh(), style), *dims)
        equal(results(fused(ctx, layer(), 1, kernel, local=False)[name], *dims), expected)
        with mock.patch.object(fused_calls.RowLayout, "from_shape", rank_by_rank):
            permuted = results(fused(ctx, layer(), 1, kernel, local=False)[name], *dims)
        for what in ("out", "x", "weight"):
            assert not torch.equal(permuted[what], expected[what]), what


@each_kernel
@on_ranks(2, 4)
def test_the_bias_of_a_row_is_added_once(ctx: RankContext, kernel: str) -> None:
    x = whole_numbers(*shape_for(0))
    expected = on_this_rank(on_one_device(make(MLP), x), 0)
    equal(run(ctx, fused(ctx, make(MLP), 0, kernel), x, 0).values, expected)

    original = fused_calls.DeferredMatmul.__init__

    def on_every_rank(
        self: Any, terms: Any, lead: Any, options: Any, bias: Any = None, ranks: int = 1
    ) -> None:
        original(self, terms, lead, options, None if bias is None else bias * ctx.world_size, ranks)

    with mock.patch.object(fused_calls.DeferredMatmul, "__init__", on_every_rank):
        wrong = run(ctx, fused(ctx, make(MLP), 0, kernel), x, 0)
    assert not torch.equal(wrong.values["out"], expected["out"])


@each_kernel
@on_ranks(2)
def test_a_stale_gather_would_be_noticed(ctx: RankContext, kernel: str) -> None:
    """The negative control of all tests here that run a layer twice."""
    model = make(MLP)
    first, second = (whole_numbers(*shape_for(1), seed=seed) for seed in (0, 1))
    expected = on_this_rank(on_one_device(model, second), 1)
    model = fused(ctx, model, 1, kernel)
    kept: list[Any] = []
    original = fused_calls.get_kernel(kernel).all_gather_matmul

    def stale(shard: torch.Tensor, weights: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(shard, weights, *args, **kwargs)
        kept.append(result)
        return kept[0] if result.outs[0].shape == kept[0].outs[0].shape else result

    with mock.patch.object(fused_calls.get_kernel(kernel), "all_gather_matmul", stale):
        run(ctx, model, first, 1)
        model.zero_grad()
        got = run(ctx, model, second, 1)
    for name in ("out", "w1.weight", "w2.weight"):
        assert not torch.equal(got.values[name], expected[name]), name


@each_kernel
@on_ranks(2, 4)
def test_layouts_after_a_column_and_before_a_row(ctx: RankContext, kernel: str) -> None:
    x = whole_numbers(4, 8, 8)
    expected = on_this_rank(on_one_device(make(MLP), x), 1)
    between = {Replicate(): [AG], Shard(0): ["all_to_all"] * 2, Shard(-1): []}
    for (hidden, exchanges), local in itertools.product(between.items(), (True, False)):
        plan = {
            "w1": MC2ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=hidden,
                use_local_output=local,
                kernel=kernel,
            ),
            "w2": MC2RowwiseParallel(input_layouts=hidden, output_layouts=Shard(1), kernel=kernel),
        }
        got = run(ctx, parallelize_module(make(MLP), ctx.mesh(), plan), x, 1)
        equal(got.values, expected)
        unfused = [(kind, "unfused") for kind in exchanges]
        assert got.calls == [(AG, kernel), *unfused, (RS, kernel)] * 2, (hidden, local)


@each_kernel
@on_ranks(2, 3, 4)
def test_uneven_sequences_and_features(ctx: RankContext, kernel: str) -> None:
    for tokens, features, hidden in ((5, 8, 24), (1, 8, 24), (5, 5, 5), (2, 3, 2)):
        x = whole_numbers(3, tokens, features)
        model = make(MLP, features, hidden)
        expected = on_one_device(model, x)
        model = fused(ctx, model, 1, kernel, local=False)
        source = distribute_tensor(x, ctx.mesh(), [Shard(1)]).requires_grad_()
        grad = distribute_tensor(upstream(x.shape, x.dtype), ctx.mesh(), [Shard(1)])
        with record_overlap() as log:
            out = model(source)
            out.backward(grad)
        assert out.placements == (Shard(1),)
        equal({"out": full(out), "x": full(source.grad), **gradients(model)}, expected)
        assert calls(log) == [(AG, kernel), (RS, kernel)] * 2


@each_kernel
@on_ranks(2)
def test_no_rows_at_all(ctx: RankContext, kernel: str) -> None:
    model = fused(ctx, make(MLP), 1, kernel)
    x = torch.empty(0, 4, 8, requires_grad=True)
    out = model(x)
    out.sum().backward()
    assert (out.shape, x.grad.shape) == ((0, 4, 8), (0, 4, 8))
    assert all((grad == 0).all() for grad in gradients(model).values())


@each_kernel
@on_ranks(2, 4)
def test_a_gradient_that_is_whole_on_every_rank_is_not_gathered(
    ctx: RankContext, kernel: str
) -> None:
    """The gradient of a DTensor's ``sum`` is Replicate; that of its ``full_tensor`` is a shard."""
    x = whole_numbers(*shape_for(1))
    reads = {
        "sum": (lambda out: out.sum().full_tensor(), []),
        "full_tensor": (lambda out: out.full_tensor().sum(), [(AG, kernel)]),
        "to_local": (lambda out: out.to_local().sum(), [(AG, kernel)]),
    }

    def check(name: str, case: Any) -> None:
        read, gathers = case
        reference = make(MLP)
        reference(x).sum().backward()
        model = fused(ctx, make(MLP), 1, kernel, local=False)
        out = model(distribute_tensor(x, ctx.mesh(), [Shard(1)]).requires_grad_())
        loss = read(out)
        with record_overlap() as log:
            loss.backward()
        equal(gradients(model), gradients(reference))
        assert calls(log) == [*gathers, (RS, kernel)]

    by_name(reads, check)


# --- layers that share a gather


@each_kernel
@pytest.mark.parametrize("told", [True, False])
@on_ranks(2, 4)
def test_siblings_share_one_gather_and_one_reduction(
    ctx: RankContext, kernel: str, told: bool
) -> None:
    x = whole_numbers(*shape_for(1))
    for bias, leaf in itertools.product((True, False), (True, False)):
        model = make(QKVO, bias=bias)
        expected = on_this_rank(on_one_device(model, x), 1)
        model = fused(ctx, model, 1, kernel, defer=told)
        for _ in range(2):
            model.zero_grad()
            got = run(ctx, model, x, 1, leaf=leaf)
            equal(got.values, expected)
            assert got.calls == [(AG, kernel), (RS, kernel)] * 2


@on_ranks(2)
def test_siblings_save_the_very_same_memory(ctx: RankContext) -> None:
    x = whole_numbers(*shape_for(1))
    model = fused(ctx, make(QKVO, 8, 24), 1, "decomposed")
    with saved_tensors() as saved:
        model(part(x, 1))
    gathered = [tensor for tensor in saved if tensor.shape == x.shape]
    assert len(gathered) == 3
    assert len({tensor.data_ptr() for tensor in gathered}) == 1


@on_ranks(2)
def test_what_is_no_sibling_gathers_for_itself(ctx: RankContext) -> None:
    model = fused(ctx, make(QKVO), 1, "decomposed")
    other = fused(ctx, make(QKVO), 1, "decomposed", column_backward="overlap")

    def without_grad(x: torch.Tensor) -> None:
        with torch.no_grad():
            model.q(x)

    def in_bfloat16(x: torch.Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model.q(x)

    calls_and_gathers: dict[str, tuple[Callable[[Any], Any], int]] = {
        "siblings": (lambda x: (model.q(x), model.k(x), model.v(x)), 1),
        "a copy": (lambda x: (model.q(x), model.k(x.clone()), model.v(x)), 3),
        "written to": (lambda x: (model.q(x), model.k(x.add_(1))), 2),
        "the same layer": (lambda x: (model.q(x), model.q(x)), 2),
        "leaf from now on": (lambda x: (model.q(x), model.k(x.requires_grad_())), 2),
        "without a graph": (lambda x: (without_grad(x.requires_grad_()), model.k(x)), 2),
        "autocast": (lambda x: (in_bfloat16(x), model.k(x)), 2),
        "fused otherwise": (lambda x: (model.q(x), other.k(x)), 2),
    }

    def check(name: str, case: Any) -> None:
        forward, gathers = case
        with record_overlap() as log:
            forward(part(whole_numbers(*shape_for(1)), 1))
        assert calls(log) == [(AG, "decomposed")] * gathers

    by_name(calls_and_gathers, check)


@on_ranks(2)
def test_siblings_with_other_boundaries_do_not_mix(ctx: RankContext) -> None:
    """One tensor, handed to layers that take it to be sharded on different dims."""
    local = whole_numbers(2, 2, 8, seed=ctx.rank)
    everyones = [whole_numbers(2, 2, 8, seed=rank) for rank in range(2)]
    for name, seq in (("w1", 0), ("w3", 1)):
        linear = make(nn.Linear, 8, 8)
        expected = linear(torch.cat(everyones, seq)).detach()
        layer = fused(ctx, nn.ModuleDict({name: linear}), seq, "decomposed", local=False)[name]
        assert torch.equal(full(layer(local)), expected)


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
@on_ranks(2)
def test_a_tensor_that_is_filled_again_is_gathered_again(ctx: RankContext, mode: str) -> None:
    """In ways that autograd's version counter sees, and in ways that it does not."""
    fills: dict[str, Callable[[Any, Any], Any]] = {
        "copy_": lambda x, new: x.copy_(part(new, 1)),
        "numpy": lambda x, new: np.copyto(x.numpy(), part(new, 1).numpy()),
        "data": lambda x, new: x.data.copy_(part(new, 1)),
        "collective": lambda x, new: dist.scatter(
            x, [half.contiguous() for half in new.chunk(2, 1)] if ctx.rank == 0 else None
        ),
    }
    modes = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad}
    values = [whole_numbers(*shape_for(1), seed=seed) for seed in range(1 + len(fills))]
    reference = make(QKVO)
    model = fused(ctx, make(QKVO), 1, "decomposed")
    with modes.get(mode, torch.inference_mode)():
        x = part(values[0], 1)
        assert torch.equal(full(model(x)), part(reference(values[0]), 1))
        for (name, fill), value in zip(fills.items(), values[1:], strict=True):
            fill(x, value)
            assert torch.equal(full(model(x)), part(reference(value), 1)), name


@on_ranks(2)
def test_in_inference_mode_a_write_between_layers_is_seen(ctx: RankContext) -> None:
    values = [whole_numbers(*shape_for(1), seed=seed) for seed in range(2)]
    model, reference = fused(ctx, make(QKVO), 1, "decomposed"), make(QKVO)
    with torch.inference_mode():
        x = part(values[0], 1)
        assert torch.equal(full(model.q(x)), part(reference.q(values[0]), 2))
        x.copy_(part(values[1], 1))
        assert torch.equal(full(model.k(x)), part(reference.k(values[1]), 2))


# --- gradients that are not needed


@each_kernel
@on_ranks(2)
def test_no_work_for_gradients_that_nobody_needs(ctx: RankContext, kernel: str) -> None:
    """Every combination of trainable and frozen, of one column and of one row."""
    x = whole_numbers(4, 4, 8)
    for weight, bias, input in itertools.product((True, False), repeat=3):
        for name, before, after in (("w1", 1, 2), ("w2", 2, 1)):
            linear = make(nn.Linear, 8, 8)
            linear.weight.requires_grad_(weight)
            linear.bias.requires_grad_(bias)
            expected = on_one_device(linear, x, input_grad=input)
            layer = fused(ctx, nn.ModuleDict({name: linear}), 1, kernel, local=False)[name]
            source = distribute_tensor(x, ctx.mesh(), [Shard(before)]).requires_grad_(input)
            grad = distribute_tensor(upstream(x.shape, x.dtype), ctx.mesh(), [Shard(after)])
            with record_overlap() as log:
                out = layer(source)
                if out.requires_grad:
                    out.backward(grad)
            wanted: list[Any]
            if name == "w1":
                wanted = [(AG, kernel), *[(RS, kernel)] * input]
            elif input:
                wanted = [(RS, kernel), (AG, kernel)]
            elif weight:
                wanted = [(RS, kernel), (AG, "unfused")]  # there is no matmul to fuse it with
            elif bias:
                wanted = [(RS, kernel), ("all_reduce", "unfused")]  # of N numbers
            else:
                wanted = [(RS, kernel)]
            assert calls(log) == wanted, (name, weight, bias, input)
            grad_input = None if source.grad is None else full(source.grad)
            equal({"out": full(out), "x": grad_input, **gradients(layer)}, expected)


@each_kernel
@on_ranks(2, 4)
def test_frozen_chains(ctx: RankContext, kernel: str) -> None:
    x = whole_numbers(*shape_for(1))
    fwd, gather, reduction = [(AG, kernel), (RS, kernel)], (AG, kernel), (RS, kernel)
    every = ["w1.weight", "w1.bias", "w2.weight", "w2.bias"]
    cases: dict[str, tuple[list[str], list[Any]]] = {
        "weights": (["w1.weight", "w2.weight"], [*fwd, gather]),
        "biases": (["w1.bias", "w2.bias"], [*fwd, gather]),
        "second layer": (["w2.weight", "w2.bias"], [*fwd, gather]),
        "everything": (every, fwd),
        "all but the last bias": (every[:-1], [*fwd, ("all_reduce", "unfused")]),
    }

    def check(name: str, case: Any) -> None:
        frozen, without_input_grad = case
        for input_grad in (True, False):
            model = make(MLP)
            for path, parameter in model.named_parameters():
                parameter.requires_grad_(path not in frozen)
            expected = on_this_rank(on_one_device(model, x, input_grad=input_grad), 1)
            got = run(ctx, fused(ctx, model, 1, kernel), x, 1, input_grad=input_grad)
            equal(got.values, expected)
            assert got.calls == ([*fwd, gather, reduction] if input_grad else without_input_grad)

    by_name(cases, check)


@each_kernel
@on_ranks(2)
def test_a_sibling_that_the_loss_leaves_out(ctx: RankContext, kernel: str) -> None:
    model = fused(ctx, make(QKVO), 1, kernel)
    x = part(whole_numbers(*shape_for(1)), 1).requires_grad_()
    q, _, v = model.q(x), model.k(x), model.v(x)
    with record_overlap() as log:
        (q.sum() + v.sum()).backward()
    assert calls(log) == [(RS, kernel)]
    assert model.k.weight.grad is None


# --- options of a column


@contextlib.contextmanager
def saved_tensors() -> Iterator[list[Any]]:
    """Everything that is saved for backward inside."""
    saved: list[Any] = []

    def pack(tensor: Any) -> Any:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


@contextlib.contextmanager
def gathers_of_kernels() -> Iterator[list[StorageWeakRef]]:
    """The storages of all tensors that fused kernels gathered inside."""
    made: list[StorageWeakRef] = []
    original = fused_calls.PendingLocal.complete

    def complete(self: Any, value: torch.Tensor) -> None:
        if self.kind == AG:
            made.append(StorageWeakRef(value.untyped_storage()))
        original(self, value)

    with mock.patch.object(fused_calls.PendingLocal, "complete", complete):
        yield made


@each_kernel
@pytest.mark.parametrize("told", [True, False])
@on_ranks(2, 4)
def test_regather_saves_a_shard_and_gathers_behind_grad_input(
    ctx: RankContext, kernel: str, told: bool
) -> None:
    x = whole_numbers(*shape_for(1))
    for cls, regather, outlives in itertools.product((MLP, QKVO), (False, True), (False, True)):
        model = make(cls, 8, 24)
        expected = on_this_rank(on_one_device(model, x), 1)
        model = fused(ctx, model, 1, kernel, regather=regather, defer=told)
        leaf = part(x, 1).requires_grad_()
        with saved_tensors() as saved, record_overlap() as log, gathers_of_kernels() as gathers:
            source = leaf * 1
            out = model(source)
            if not outlives:
                del source  # the input of a residual connection would stay
            alive = sum(not gather.expired() for gather in gathers)
            out.backward(part(upstream(x.shape, x.dtype), 1))
        inputs = {t.data_ptr(): t.nbytes for t in saved if t.dim() == 3 and t.shape[-1] == 8}
        assert sum(inputs.values()) == x.nbytes // (ctx.world_size if regather else 1)
        assert alive == (0 if regather else 1)
        equal({"out": full(out), "x": leaf.grad, **gradients(model)}, expected)
        assert calls(log)[:3] == [(AG, kernel), (RS, kernel), (AG, kernel)]
        if not regather:
            assert calls(log)[3:] == [(RS, kernel)]
            continue
        again, reduction = log.events[3:]
        assert calls(log)[3:] == [(AG, "unfused"), (RS, kernel)]
        assert again.started < reduction.started < again.wait_began


@each_kernel
@pytest.mark.parametrize("told", [True, False])
@on_ranks(2, 4)
def test_overlap_reduces_while_grad_weights_are_made(
    ctx: RankContext, kernel: str, told: bool
) -> None:
    x = whole_numbers(*shape_for(1))
    for cls, columns in ((MLP, ["w1"]), (QKVO, ["q", "k", "v"])):
        model = make(cls)
        expected = on_this_rank(on_one_device(model, x), 1)
        model = fused(ctx, model, 1, kernel, column_backward="overlap", defer=told)
        arrived: dict[str, float] = {}

        def note(name: str, arrived: dict[str, float] = arrived) -> Callable[[Any], None]:
            return lambda _: arrived.__setitem__(name, time.perf_counter())  # the log's clock

        for name in columns:
            getattr(model, name).weight.register_post_accumulate_grad_hook(note(name))
        source = part(x, 1).requires_grad_()
        with record_overlap() as log:
            # More than a leaf, which would have its gradient finished at once.
            out = model(source * 1)
            out.backward(part(upstream(x.shape, x.dtype), 1))
        equal({"out": full(out), "x": source.grad, **gradients(model)}, expected)
        assert calls(log) == [(AG, kernel), (RS, kernel), (AG, kernel), (RS, "unfused")]
        reduction = log.events[-1]
        for name in columns:
            assert reduction.started < arrived[name] < reduction.wait_began, name


@on_ranks(2)
def test_columns_told_to_share_have_to_be_fused_alike(ctx: RankContext) -> None:
    from mc2 import MC2ConstraintError
    from parallel_styles import PrepareModuleInput

    for other in ({"kernel": "pipelined"}, {"column_backward": "overlap"}):
        model = make(QKVO)
        column = {"input_layouts": Shard(1), "kernel": "decomposed"}
        defer = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), defer=True
        )
        plan = {"": defer, "q": MC2ColwiseParallel(**column)}
        plan["k"] = MC2ColwiseParallel(**{**column, **other})
        parallelize_module(model, ctx.mesh(), plan)
        with pytest.raises(MC2ConstraintError, match="Expected them to be fused alike"):
            model(part(whole_numbers(*shape_for(1)), 1))


@pytest.mark.parametrize("chunks", [1, 2, 3, 100])
@on_ranks(2, 4)
def test_any_number_of_chunks(ctx: RankContext, chunks: int) -> None:
    x = whole_numbers(*shape_for(1))
    expected = on_this_rank(on_one_device(make(QKVO), x), 1)
    model = fused(ctx, make(QKVO), 1, "pipelined", chunks=chunks, row={"chunks": chunks})
    source = part(x, 1).requires_grad_()
    with record_overlap() as log:
        out = model(source)
        out.backward(part(upstream(x.shape, x.dtype), 1))
    equal({"out": full(out), "x": source.grad, **gradients(model)}, expected)
    rows = x.shape[0] * x.shape[1] // ctx.world_size
    assert {event.detail.split()[1] for event in log.events} == {f"chunks={min(chunks, rows)}"}


@pytest.mark.parametrize(
    ("rate", "chunks"),
    [
        (20e6, [2, 2, 4, 2]),  # a row's backward multiplies each piece twice
        (35e6, [2, 2, 2, 1]),  # grad_weight hides a column's reduction
    ],
)
@on_ranks(2)
def test_backward_is_cut_for_what_it_multiplies(
    ctx: RankContext, rate: float, chunks: list[int]
) -> None:
    """By all ranks alike, also where one of them wants no grad_weight."""
    from mc2 import CostModel, use_cost_model

    model = fused(ctx, make(MLP, 256, 1024, bias=False), 0, "pipelined")
    for weight in (model.w1.weight, model.w2.weight):
        weight.requires_grad_(ctx.rank == 0)
    use_cost_model(CostModel(34e9, bytes_per_s=rate, s_per_message=1e-3, s_per_weight_element=2e-9))
    try:
        with record_overlap() as log:
            out = model(torch.ones(256, 1, 256, requires_grad=True))
            out.backward(torch.ones_like(out))
    finally:
        use_cost_model(None)
    cut = [(event.kind, event.detail.split()[1]) for event in log.collectives]
    kinds = ["all_gather", "reduce_scatter", "all_gather", "reduce_scatter"]
    assert cut == [(kind, f"chunks={count}") for kind, count in zip(kinds, chunks, strict=True)]
