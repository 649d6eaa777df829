"""Backward of the layers: grad_input, launch its reduction, grad_weight meanwhile, then wait.

Shown from a log of the operations in the order they run (`OpLog`), and from the overlap events. The
sizes below are all different, so that a matmul's shape says which gradient it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks

if IN_RANK_PROCESS:
    import torch
    import torch.distributed.tensor.parallel as torch_styles
    from torch import nn
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import checkpoint

    import parallel_styles
    from parallel_styles import ColwiseParallel, RowwiseParallel, parallelize_module
    from pending_dtensor import HyperDTensor, OverlapEvent, record_overlap
    from pending_dtensor.torch_compat import work_registry_size
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

    LAUNCHES = {
        torch.ops._c10d_functional.all_gather_into_tensor.default: "all_gather",
        torch.ops._c10d_functional.reduce_scatter_tensor.default: "reduce_scatter",
        torch.ops._c10d_functional.all_reduce.default: "all_reduce",
        torch.ops._c10d_functional.all_to_all_single.default: "all_to_all",
    }

    class OpLog(TorchDispatchMode):
        """Matmuls and bias sums by the names their result shapes are given, launches, waits."""

        def __init__(self, names: dict[tuple[int, ...], str]) -> None:
            super().__init__()
            self.names = names
            self.entries: list[str] = []
            self._stack = ExitStack()

        def __enter__(self) -> OpLog:
            self._stack.enter_context(record_overlap())
            log, began = self, OverlapEvent.begin_wait

            def begin_wait(event: OverlapEvent) -> None:
                log.entries.append(f"wait {event.kind}")
                began(event)

            self._stack.enter_context(mock.patch.object(OverlapEvent, "begin_wait", begin_wait))
            return super().__enter__()

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            self._stack.close()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in LAUNCHES:
                self.entries.append(LAUNCHES[func])
            elif func in (torch.ops.aten.mm.default, torch.ops.aten.sum.dim_IntList):
                self.entries.append(self.names.get(tuple(result.shape), "?"))
            return result

    class Marker(torch.autograd.Function):
        """Identity that calls ``told`` when its gradient arrives, and does not read it."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, told: Callable[[], None]) -> torch.Tensor:
            ctx.told = told
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            ctx.told()
            return grad, None


BATCH, LENGTH, FEATURES, HIDDEN = 2, 8, 12, 40  # rows 16; HIDDEN / 2 = 20, HIDDEN / 4 = 10


def column_names(ranks: int, hidden: int = HIDDEN) -> dict[tuple[int, ...], str]:
    return {
        (BATCH * LENGTH, FEATURES): "dX",
        (hidden // ranks, FEATURES): "dW",
        (hidden // ranks,): "db",
    }


def column(ctx: RankContext, layout: Any, *, bias: bool, lib: Any = None, **options: Any) -> Any:
    layer = with_whole_numbers(nn.Linear(FEATURES, HIDDEN, bias=bias))
    lib = lib or parallel_styles
    return lib.parallelize_module(
        layer, ctx.mesh(), lib.ColwiseParallel(input_layouts=layout, **options)
    )


def sequence(dim: int | None, *, grad: bool = True) -> torch.Tensor:
    return part(whole_numbers(BATCH, LENGTH, FEATURES), dim).requires_grad_(grad)


inputs = pytest.mark.parametrize("seq", [None, 1, 0], ids=["replicated", "seq_dim1", "seq_dim0"])
REDUCTION = {None: "all_reduce", 0: "reduce_scatter", 1: "reduce_scatter"}


# --- one layer


@inputs
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@on_ranks(2)
def test_column(ctx: RankContext, seq: int | None, bias: bool) -> None:
    layer = column(ctx, Replicate() if seq is None else Shard(seq), bias=bias)
    x = sequence(seq)
    out = layer(x)
    with OpLog(column_names(2)) as log:
        out.sum().backward()
    late = ["dW", "db"] if bias else ["dW"]
    reduction = REDUCTION[seq]
    assert log.entries[:2] == ["dX", reduction]
    assert sorted(log.entries[2:-1]) == late
    assert log.entries[-1] == f"wait {reduction}"
    one_device = with_whole_numbers(nn.Linear(FEATURES, HIDDEN, bias=bias))
    whole = whole_numbers(BATCH, LENGTH, FEATURES).requires_grad_()
    one_device(whole).sum().backward()
    equal(
        {"x": joined(x.grad, seq), **gradients(layer)},
        {"x": whole.grad, **gradients(one_device)},
    )


@inputs
@on_ranks(2)
def test_the_log_shows_that_torch_launches_last(ctx: RankContext, seq: int | None) -> None:
    """The same log of torch's style, and of ours made synchronous: both matmuls come first."""
    for lib, options in [(torch_styles, {}), (parallel_styles, {"async_op": False})]:
        layer = column(
            ctx, Replicate() if seq is None else Shard(seq), bias=False, lib=lib, **options
        )
        x = sequence(seq)
        out = layer(x)
        names = column_names(2) | {(HIDDEN, FEATURES): "dW"}  # torch's is seen at its global shape
        with OpLog(names) as log:
            out.sum().backward()
        launch = log.entries.index(REDUCTION[seq])
        waits = [i for i, entry in enumerate(log.entries) if entry.startswith("wait")]
        if lib is torch_styles:
            full(x.grad)
            assert waits == []  # torch's waits do not show
        else:
            assert waits == [launch + 1]
        assert sorted(log.entries[:launch]) == ["dW", "dX"]


@pytest.mark.parametrize("launch", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@on_ranks(2)
def test_row_whose_input_is_redistributed(ctx: RankContext, launch: str, bias: bool) -> None:
    layout = {"all_gather": Replicate(), "all_to_all": Shard(1)}[launch]
    dim = None if launch == "all_gather" else 1
    layer = with_whole_numbers(nn.Linear(FEATURES, HIDDEN, bias=bias))
    parallelize_module(layer, ctx.mesh(), RowwiseParallel(input_layouts=layout))
    x = sequence(dim)
    out = layer(x)
    names = {
        (BATCH * LENGTH, FEATURES // 2): "dX",
        (HIDDEN, FEATURES // 2): "dW",
        (HIDDEN,): "db",
    }
    with OpLog(names) as log:
        out.sum().backward()
    assert log.entries[:2] == ["dX", launch]
    assert sorted(log.entries[2:-1]) == (["dW", "db"] if bias else ["dW"])
    assert log.entries[-1] == f"wait {launch}"


@inputs
@on_ranks(2)
def test_frozen_weight_or_input_without_grad(ctx: RankContext, seq: int | None) -> None:
    layout = Replicate() if seq is None else Shard(seq)
    layer = column(ctx, layout, bias=True)
    layer.weight.requires_grad_(False)
    out = layer(sequence(seq))
    with OpLog(column_names(2)) as log:
        out.sum().backward()
    # The bias gradient is too little to hide anything behind.
    assert log.entries == ["dX", "db", REDUCTION[seq], f"wait {REDUCTION[seq]}"]
    layer = column(ctx, layout, bias=False)
    out = layer(sequence(seq, grad=False))
    with OpLog(column_names(2)) as log:
        out.sum().backward()
    assert log.entries == ["dW"]


@inputs
@on_ranks(2)
def test_parameters_are_done_before_what_came_before_the_layer(
    ctx: RankContext, seq: int | None
) -> None:
    """So FSDP2 expects it, whose node in front of a module reduces its parameters' gradients."""
    layer = column(ctx, Replicate() if seq is None else Shard(seq), bias=True)
    log = OpLog(column_names(2))
    x = Marker.apply(sequence(seq), lambda: log.entries.append("marker"))
    layer.weight.register_post_accumulate_grad_hook(lambda _: log.entries.append("weight.grad"))
    layer.bias.register_post_accumulate_grad_hook(lambda _: log.entries.append("bias.grad"))
    out = layer(x)
    with log:
        out.sum().backward()
    marker = log.entries.index("marker")
    assert {"weight.grad", "bias.grad"} <= set(log.entries[:marker])
    assert log.entries[marker + 1 :] == [f"wait {REDUCTION[seq]}"]


# --- layers that share an input


@pytest.mark.parametrize("seq", [1, 0])
@on_ranks(2)
def test_siblings_that_share_a_gathered_input(ctx: RankContext, seq: int) -> None:
    widths = {"q": 40, "k": 20, "v": 28}
    qkv = nn.ModuleDict({name: nn.Linear(FEATURES, width) for name, width in widths.items()})
    with_whole_numbers(qkv)
    parallelize_module(qkv, ctx.mesh(), {"*": ColwiseParallel()})
    names = {(BATCH * LENGTH, FEATURES): "dX"}
    for name, width in widths.items():
        names |= {(width // 2, FEATURES): f"dW {name}", (width // 2,): f"db {name}"}
    x = sequence(seq)
    gathered = HyperDTensor.from_local(x, ctx.mesh(), [Shard(seq)]).redistribute(
        placements=[Replicate()], async_op=True
    )
    loss = sum(layer(gathered).sum() for layer in qkv.values())
    with OpLog(names) as log:
        loss.backward()
    assert log.entries[:4] == ["dX", "dX", "dX", "reduce_scatter"]
    assert sorted(log.entries[4:-1]) == sorted(f"d{p} {name}" for p in "Wb" for name in widths)
    assert log.entries[-1] == "wait reduce_scatter"


@inputs
@on_ranks(2)
def test_siblings_that_each_reduce(ctx: RankContext, seq: int | None) -> None:
    """Without a shared gather each layer has its own reduction, behind its own weight gradient."""
    qkv = nn.ModuleDict({name: nn.Linear(FEATURES, HIDDEN, bias=False) for name in "qkv"})
    with_whole_numbers(qkv)
    outside = Replicate() if seq is None else Shard(seq)
    parallelize_module(qkv, ctx.mesh(), {"*": ColwiseParallel(input_layouts=outside)})
    x = sequence(seq) * 1  # no leaf: nobody waits for each gradient of it
    loss = sum(layer(x).sum() for layer in qkv.values())
    with OpLog(column_names(2)) as log:
        loss.backward()
    one, wait = ["dX", REDUCTION[seq], "dW"], f"wait {REDUCTION[seq]}"
    assert [entry for entry in log.entries if entry != wait] == one * 3
    assert log.entries[:6] == one * 2  # the first wait adds up the second gradient of x


@on_ranks(2)
def test_the_event_shows_it_too(ctx: RankContext) -> None:
    """Started before, waited after every weight gradient of the siblings has arrived."""
    qkv = nn.ModuleDict({name: nn.Linear(FEATURES, HIDDEN) for name in "qkv"})
    parallelize_module(qkv, ctx.mesh(), {"*": ColwiseParallel()})
    arrived = []
    for parameter in qkv.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: arrived.append(time.perf_counter()))
    gathered = HyperDTensor.from_local(sequence(1), ctx.mesh(), [Shard(1)]).redistribute(
        placements=[Replicate()], async_op=True
    )
    loss = sum(layer(gathered).sum() for layer in qkv.values())
    with record_overlap() as log:
        loss.backward()
    (event,) = log.events
    assert len(arrived) == 6
    assert event.started < min(arrived)
    assert max(arrived) < event.wait_began < event.readable


@on_ranks(2)
def test_a_chain_of_column_and_row(ctx: RankContext) -> None:
    model = with_whole_numbers(MLP(FEATURES, HIDDEN, bias=False))
    plan = {
        "w1": ColwiseParallel(input_layouts=Shard(1)),
        "w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, ctx.mesh(), plan)
    out = model(sequence(1))
    names = {
        (BATCH * LENGTH, HIDDEN // 2): "dX2",
        (FEATURES, HIDDEN // 2): "dW2",
        (BATCH * LENGTH, FEATURES): "dX1",
        (HIDDEN // 2, FEATURES): "dW1",
    }
    with OpLog(names) as log:
        out.sum().backward()
    assert log.entries[:2] == ["all_gather", "wait all_gather"]  # dX2 reads it at once
    assert sorted(log.entries[2:4]) == ["dW2", "dX2"]
    assert log.entries[4:] == ["dX1", "reduce_scatter", "dW1", "wait reduce_scatter"]


# --- hooks


@inputs
@on_ranks(2)
def test_hooks_see_plain_finished_gradients(ctx: RankContext, seq: int | None) -> None:
    """Tensor hooks, hooks on AccumulateGrad, and module hooks; as often as with torch's styles."""
    calls = {}
    for lib in (parallel_styles, torch_styles):
        layer = column(ctx, Replicate() if seq is None else Shard(seq), bias=True, lib=lib)
        seen: list[tuple[str, Any, Any]] = []

        def see(name: str, tensor: torch.Tensor, seen: list[Any] = seen) -> None:
            assert type(tensor) is DTensor
            assert type(tensor._local_tensor) is torch.Tensor
            seen.append((name, tensor.placements, full(tensor)))

        accumulators = []  # kept: autograd holds them weakly
        for name, parameter in layer.named_parameters():
            parameter.register_hook(lambda grad, n=name: see(f"{n} hook", grad))
            parameter.register_post_accumulate_grad_hook(
                lambda p, n=name: see(f"{n} accumulated", p.grad)
            )
            node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
            accumulators.append(node)
            node.register_prehook(lambda grads, n=name: see(f"{n} before", grads[0]))
        x = sequence(seq)
        x.register_hook(lambda grad, seen=seen: seen.append(("x", None, full(grad))))
        layer(x).sum().backward()
        calls[lib] = sorted(seen, key=lambda call: call[0])
    ours, theirs = calls.values()
    assert [call[:2] for call in ours] == [call[:2] for call in theirs]
    assert len(ours) == 7
    for (name, _, got), (_, _, expected) in zip(ours, theirs, strict=True):
        assert torch.equal(got, expected), name


@on_ranks(2)
def test_a_hook_may_change_the_gradient(ctx: RankContext) -> None:
    layer = column(ctx, Shard(1), bias=False)
    x = sequence(1)
    layer.weight.register_hook(lambda grad: grad * 3)
    x.register_hook(lambda grad: grad * 5)
    layer(x).sum().backward()
    plain = column(ctx, Shard(1), bias=False)
    y = sequence(1)
    plain(y).sum().backward()
    assert torch.equal(full(layer.weight.grad), 3 * full(plain.weight.grad))
    assert torch.equal(x.grad, 5 * y.grad)


@inputs
@on_ranks(2)
def test_gradients_at_leaves_have_torch_s_type(ctx: RankContext, seq: int | None) -> None:
    layer = column(ctx, Replicate() if seq is None else Shard(seq), bias=True)
    x = sequence(seq)
    layer(x).sum().backward()
    assert type(x.grad) is torch.Tensor
    for parameter in layer.parameters():
        assert type(parameter) is nn.Parameter or isinstance(parameter, DTensor)
        assert type(parameter.grad) is DTensor
        assert type(parameter.grad.to_local()) is torch.Tensor
        assert parameter.grad.placements == parameter.placements


# --- what autograd offers


def parallel_mlp(ctx: RankContext, seq: int | None, **options: Any) -> MLP:
    outside = Replicate() if seq is None else Shard(seq)
    plan = {
        "w1": ColwiseParallel(input_layouts=outside, **options),
        "w2": RowwiseParallel(output_layouts=outside, **options),
    }
    return parallelize_module(
        with_whole_numbers(MLP(FEATURES, HIDDEN, bias=True)), ctx.mesh(), plan
    )


@inputs
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
@pytest.mark.parametrize("local", [True, False], ids=["local", "dtensor"])
@on_ranks(2)
def test_checkpoint(ctx: RankContext, seq: int | None, reentrant: bool, local: bool) -> None:
    results = []
    for through_checkpoint in (False, True):
        model = parallel_mlp(ctx, seq, use_local_output=local)
        x = sequence(seq)

        def run(x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return model(x)

        for _ in range(2):
            out = checkpoint(run, x, use_reentrant=reentrant) if through_checkpoint else run(x)
            loss = full_graph(out)
            names = {
                (BATCH * LENGTH, FEATURES): "dX1",
                (HIDDEN // 2, FEATURES): "dW1",
                (HIDDEN // 2,): "db1",
            }
            with OpLog(names) as log:
                loss.backward()
            assert work_registry_size() == 0
        order = [entry for entry in log.entries if entry in ("dX1", "dW1", REDUCTION[seq])]
        assert order[-3:] == ["dX1", REDUCTION[seq], "dW1"]
        assert log.entries[-1] == f"wait {REDUCTION[seq]}"
        results.append({"x": x.grad, **gradients(model)})
    equal(results[1], results[0])


def full_graph(out: torch.Tensor) -> torch.Tensor:
    return (out.to_local() if isinstance(out, DTensor) else out).sum()


@inputs
@on_ranks(2)
def test_two_microbatches(ctx: RankContext, seq: int | None) -> None:
    one_device = with_whole_numbers(MLP(FEATURES, HIDDEN))
    model = parallel_mlp(ctx, seq)
    for seed in (0, 1):
        x = whole_numbers(BATCH, LENGTH, FEATURES, seed=seed)
        one_device(x).sum().backward()
        model(part(x, seq).requires_grad_()).sum().backward()
        equal(gradients(model), gradients(one_device))
        for parameter in model.parameters():
            assert type(parameter.grad) is DTensor


@inputs
@on_ranks(2)
def test_backward_twice_through_one_graph(ctx: RankContext, seq: int | None) -> None:
    one_device = with_whole_numbers(MLP(FEATURES, HIDDEN))
    whole = whole_numbers(BATCH, LENGTH, FEATURES).requires_grad_()
    one_device(whole).sum().backward()
    model = parallel_mlp(ctx, seq)
    x = sequence(seq)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    for name, grad in gradients(one_device).items():
        assert torch.equal(gradients(model)[name], 2 * grad), name
    assert torch.equal(joined(x.grad, seq), 2 * whole.grad)


@inputs
@on_ranks(2)
def test_gradients_of_some_inputs_only(ctx: RankContext, seq: int | None) -> None:
    one_device = with_whole_numbers(MLP(FEATURES, HIDDEN))
    whole = whole_numbers(BATCH, LENGTH, FEATURES).requires_grad_()
    one_device(whole).sum().backward()
    model = parallel_mlp(ctx, seq)
    x = sequence(seq)
    loss = model(x).sum()
    (w1,) = torch.autograd.grad(loss, [model.w1.weight], retain_graph=True)
    assert torch.equal(full(w1), one_device.w1.weight.grad)
    (of_x,) = torch.autograd.grad(loss, [x], retain_graph=True)
    assert torch.equal(joined(full(of_x), seq), whole.grad)
    b2, w2 = torch.autograd.grad(loss, [model.w2.bias, model.w2.weight])
    assert torch.equal(full(b2), one_device.w2.bias.grad)
    assert torch.equal(full(w2), one_device.w2.weight.grad)


@inputs
@on_ranks(2)
def test_a_layer_called_twice_in_one_forward(ctx: RankContext, seq: int | None) -> None:
    def run(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x * 2).sum() + layer(x + 1).sum()

    one_device = with_whole_numbers(nn.Linear(FEATURES, HIDDEN))
    whole = whole_numbers(BATCH, LENGTH, FEATURES).requires_grad_()
    run(one_device, whole).backward()
    layer = column(ctx, Replicate() if seq is None else Shard(seq), bias=True)
    x = sequence(seq)
    run(layer, x).backward()
    equal(gradients(layer), gradients(one_device))
    assert torch.equal(joined(x.grad, seq), whole.grad)


@inputs
@on_ranks(2)
def test_gradients_of_gradients(ctx: RankContext, seq: int | None) -> None:
    """create_graph=True: the gradient of the squared input gradient, which all layers enter."""

    class Squares(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w2(self.w1(x).square())

    def penalized(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
        x = x.double().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        return {**gradients(model), "x": x.grad, "grad": full(grad)}

    one_device = with_whole_numbers(Squares(FEATURES, HIDDEN)).double()
    expected = penalized(one_device, whole_numbers(BATCH, LENGTH, FEATURES))
    model = with_whole_numbers(Squares(FEATURES, HIDDEN)).double()
    outside = Replicate() if seq is None else Shard(seq)
    plan = {
        "w1": ColwiseParallel(input_layouts=outside),
        "w2": RowwiseParallel(output_layouts=outside),
    }
    parallelize_module(model, ctx.mesh(), plan)
    result = penalized(model, sequence(seq, grad=False))
    result = {
        name: joined(full(value), seq) if name in ("x", "grad") else value
        for name, value in result.items()
    }
    equal(result, expected)


@on_ranks(2)
def test_a_weight_changed_between_forward_and_backward_is_noticed(ctx: RankContext) -> None:
    layer = column(ctx, Shard(1), bias=False)
    out = layer(sequence(1))
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@on_ranks(2)
def test_a_weight_that_is_computed(ctx: RankContext) -> None:
    """A parametrization: the weight gradient goes on through what made the weight."""

    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(input, self.weight * 2, self.bias)

    one_device = with_whole_numbers(Doubled(FEATURES, HIDDEN))
    whole = whole_numbers(BATCH, LENGTH, FEATURES).requires_grad_()
    one_device(whole).sum().backward()
    layer = with_whole_numbers(Doubled(FEATURES, HIDDEN))
    parallelize_module(layer, ctx.mesh(), ColwiseParallel(input_layouts=Shard(1)))
    x = sequence(1)
    layer(x).sum().backward()
    equal(gradients(layer), gradients(one_device))
    assert torch.equal(joined(x.grad, 1), whole.grad)
