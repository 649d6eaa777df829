"""MC2 layers where training puts them: checkpoints, autocast, meshes, optimizers, hooks, copies."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks
from tests.common.exact import by_name

if IN_RANK_PROCESS:
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor
    from torch.utils.checkpoint import checkpoint

    from mc2 import MC2ConstraintError, MC2Linear, fused_calls
    from mc2.autograd import RowLinear
    from mc2.options import FusionOptions
    from parallel_styles import (
        ColwiseParallel,
        MC2ColwiseParallel,
        MC2RowwiseParallel,
        PrepareModuleInput,
        parallelize_module,
    )
    from pending_dtensor import distribute_tensor, record_overlap
    from pending_dtensor.errors import DeferredReadError, InFlightInputModifiedError
    from pending_dtensor.hyper_dtensor import redistribute_deferred
    from pending_dtensor.linear import plan_linear
    from tests.common.mc2_models import (
        QKVO,
        calls,
        fused,
        make,
        nothing_launched,
        on_one_device,
        on_this_rank,
        run,
        upstream,
    )
    from tests.common.sharded_models import MLP, equal, full, gradients, part, whole_numbers

KERNELS = ["decomposed", "pipelined"]
each_kernel = pytest.mark.parametrize("kernel", KERNELS)

AG, RS = "all_gather", "reduce_scatter"
SHAPE = (3, 8, 8)


# --- checkpoint, autocast, more than one mesh axis


@each_kernel
@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(2, 4)
def test_checkpoint_recomputes_what_backward_needs(
    ctx: RankContext, kernel: str, reentrant: bool
) -> None:
    x = whole_numbers(*SHAPE)
    for cls, regather in ((MLP, False), (QKVO, False), (QKVO, True)):
        model = make(cls)
        expected = on_this_rank(on_one_device(model, x), 1)
        model = fused(ctx, model, 1, kernel, regather=regather)

        def forward(source: torch.Tensor, model: Any = model) -> torch.Tensor:
            return checkpoint(model, source, use_reentrant=reentrant)

        got = run(ctx, model, x, 1, forward=forward, leaf=False)
        equal(got.values, expected)
        # The other kind stops as soon as everything that was saved is there again.
        recompute = [(AG, kernel), (RS, kernel)] if reentrant else [(AG, kernel)]
        backward = [(AG, kernel), *[(AG, "unfused")] * regather, (RS, kernel)]
        assert got.calls == [(AG, kernel), (RS, kernel), *recompute, *backward]


@on_ranks(2)
def test_a_checkpoint_keeps_no_gather(ctx: RankContext) -> None:
    """Its input lives until backward, and the gather is remembered for its siblings to share."""
    from torch.multiprocessing.reductions import StorageWeakRef

    made: list[Any] = []
    complete = fused_calls.PendingLocal.complete

    def noted(self: Any, value: torch.Tensor) -> None:
        made.append(StorageWeakRef(value.untyped_storage()))
        complete(self, value)

    layers = [fused(ctx, make(QKVO), 1, "decomposed") for _ in range(3)]
    h = part(whole_numbers(*SHAPE), 1).requires_grad_() * 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_calls.PendingLocal, "complete", noted)
        for layer in layers:
            h = checkpoint(layer, h, use_reentrant=False)
    alive = [not reference.expired() for reference in made]
    assert alive == [False, False, True]  # the latest only
    h.sum().backward()
    assert all(reference.expired() for reference in made)


@each_kernel
@on_ranks(2, 4)
def test_autocast_computes_and_communicates_in_its_dtype(ctx: RankContext, kernel: str) -> None:
    x = whole_numbers(*SHAPE)
    cases = {
        "float32": (torch.float32, torch.float32, torch.bfloat16),
        "bfloat16 parameters": (torch.bfloat16, torch.float32, torch.bfloat16),
        "float16 input": (torch.float32, torch.float16, torch.bfloat16),
        "float64 is exempt": (torch.float64, torch.float64, torch.float64),
    }

    def check(name: str, case: Any) -> None:
        dtype, input_dtype, computed = case
        for cls in (MLP, QKVO):
            model = make(cls, 8, 8, dtype=dtype)
            with torch.autocast("cpu", torch.bfloat16):
                expected = on_one_device(model, x.to(input_dtype))
            model = fused(ctx, model, 1, kernel)
            source = part(x.to(input_dtype), 1).requires_grad_()
            with record_overlap() as log:
                with torch.autocast("cpu", torch.bfloat16):
                    out = model(source)
                out.backward(part(upstream(x.shape, out.dtype), 1))
            got = {"out": full(out), "x": source.grad, **gradients(model)}
            assert {key: value.dtype for key, value in got.items()} == {
                key: value.dtype for key, value in expected.items()
            }
            equal(got, on_this_rank(expected, 1))
            assert calls(log) == [(AG, kernel), (RS, kernel)] * 2
            assert {event.dtype for event in log.events} == {computed}

    by_name(cases, check)


@on_ranks(2)
def test_autocast_that_begins_after_the_gather_was_deferred_is_refused(ctx: RankContext) -> None:
    class Inside(QKVO):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    model = fused(ctx, make(Inside), 1, "decomposed", defer=True)
    with (
        nothing_launched(),
        pytest.raises(MC2ConstraintError, match="Expected operands of one dtype"),
    ):
        model(part(whole_numbers(*SHAPE), 1))


@each_kernel
@on_ranks(4)
def test_the_tensor_parallel_axis_of_a_mesh(ctx: RankContext, kernel: str) -> None:
    mesh = ctx.mesh(2, 2)
    data, tp = (mesh[name].get_local_rank() for name in ("dp", "tp"))
    x = whole_numbers(*SHAPE, seed=data)
    for cls in (MLP, QKVO):
        model = make(cls)
        expected = on_one_device(model, x)
        model = fused(ctx, model, 1, kernel, mesh=mesh["tp"])
        source = x.chunk(2, 1)[tp].clone().requires_grad_()
        with record_overlap() as log:
            out = model(source)
            out.backward(upstream(SHAPE, out.dtype).chunk(2, 1)[tp])
        for name in ("out", "x"):
            expected[name] = expected[name].chunk(2, 1)[tp]
        equal({"out": full(out), "x": source.grad, **gradients(model)}, expected)
        assert calls(log) == [(AG, kernel), (RS, kernel)] * 2
        assert {event.group for event in log.events} == {mesh.get_group("tp").group_name}


def layers_on(mesh: Any, tp_axis: int, seq: int, kernel: str) -> tuple[Any, Any, Any]:
    """A column and a row whose parameters are DTensors on all of a mesh, and their MLP."""

    def placed(tensor: torch.Tensor, placement: Any) -> nn.Parameter:
        placements = [Replicate()] * mesh.ndim
        placements[tp_axis] = placement
        return nn.Parameter(torch_distribute_tensor(tensor.detach(), mesh, placements))

    reference = make(MLP)
    model = copy.deepcopy(reference)
    group = mesh.get_group(tp_axis)
    for linear, mode, dim in ((model.w1, "all_gather", 0), (model.w2, "reduce_scatter", 1)):
        bias = Shard(0) if mode == "all_gather" else Replicate()
        linear.weight = placed(linear.weight, Shard(dim))
        linear.bias = placed(linear.bias, bias)
        layer = MC2Linear.from_linear(linear)
        layer.configure_mc2(mode, group=group, sequence_dim=seq, kernel=kernel)
    return reference, model, group.group_name


@each_kernel
@on_ranks(4)
def test_parameters_and_input_on_two_mesh_axes(ctx: RankContext, kernel: str) -> None:
    """The other axis shards the batch, the sequence too, or nothing."""
    meshes = {"tp last": (ctx.mesh(2, 2), 1), "tp first": (ctx.mesh(2, 2, names=("tp", "dp")), 0)}
    for (mesh, tp_axis), other in ((m, o) for m in meshes.values() for o in (0, 1, None)):
        if other == 1 and tp_axis == 0:
            continue  # refused: see below
        x = whole_numbers(4, 8, 8)
        reference, model, group = layers_on(mesh, tp_axis, 1, kernel)
        expected = on_one_device(reference, x)
        placements = [Replicate() if other is None else Shard(other)] * 2
        placements[tp_axis] = Shard(1)
        source = distribute_tensor(x, mesh, placements).requires_grad_()
        grad = distribute_tensor(upstream(x.shape, x.dtype), mesh, placements)
        with record_overlap() as log:
            out = model(source)
            out.backward(grad)
        assert out.placements == tuple(placements)
        assert calls(log) == [(AG, kernel), (RS, kernel)] * 2
        assert {event.group for event in log.events} == {group}
        equal({"out": full(out), "x": full(source.grad), **gradients(model)}, expected)


@on_ranks(4)
def test_what_a_mesh_of_two_axes_cannot_do_is_refused(ctx: RankContext) -> None:
    mesh = ctx.mesh(2, 2, names=("tp", "dp"))
    _, model, _ = layers_on(mesh, 0, 1, "decomposed")
    both = distribute_tensor(whole_numbers(4, 8, 8), mesh, [Shard(1), Shard(1)])
    with nothing_launched(), pytest.raises(MC2ConstraintError, match="no mesh axis after 0"):
        model(both)
    other_mesh = distribute_tensor(whole_numbers(4, 8, 8), ctx.mesh(4), [Shard(1)])
    with nothing_launched(), pytest.raises(MC2ConstraintError, match="on the mesh of the weight"):
        model(other_mesh)
    with nothing_launched(), pytest.raises(MC2ConstraintError, match="on the mesh of the weight"):
        model.w2(other_mesh)


# --- steps


@each_kernel
@on_ranks(2)
def test_a_weight_written_to_between_two_forwards_is_used(ctx: RankContext, kernel: str) -> None:
    x = whole_numbers(*SHAPE)
    reference = make(MLP)
    model = fused(ctx, make(MLP), 1, kernel)
    writes: dict[str, Callable[[Any], Any]] = {
        "in place": lambda p: p.mul_(2),
        "data": lambda p: p.data.add_(1),
        "local": lambda p: (p._local_tensor if isinstance(p, DTensor) else p).sub_(1),
        "nothing": lambda p: None,
    }
    unread = []
    with torch.no_grad():
        for name, write in writes.items():
            # Read after the write: the output is made of the parameters as they were.
            unread.append((name, model(part(x, 1)), part(reference(x), 1)))
            for parameter in (*model.parameters(), *reference.parameters()):
                write(parameter)
    by_name({name: pair for name, *pair in unread}, lambda _, pair: equal_tensors(*pair))
    expected = on_this_rank(on_one_device(reference, x), 1)
    equal(run(ctx, model, x, 1).values, expected)


def equal_tensors(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(full(got), full(expected))


@each_kernel
@on_ranks(2, 4)
def test_steps_of_an_optimizer_with_accumulated_gradients(ctx: RankContext, kernel: str) -> None:
    def trained(model: Any, inputs: Any, grads: Any) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            for x, grad in zip(inputs, grads, strict=True):
                model(x).backward(grad)
            optimizer.step()
            optimizer.zero_grad()
        return {name: full(parameter) for name, parameter in model.named_parameters()}

    inputs = [whole_numbers(*SHAPE, seed=seed).double() for seed in (0, 1)]
    grads = [whole_numbers(*SHAPE, seed=seed).double() / 64 for seed in (2, 3)]
    for cls in (MLP, QKVO):
        expected = trained(make(cls, dtype=torch.float64), inputs, grads)
        model = fused(ctx, make(cls, dtype=torch.float64), 1, kernel)
        got = trained(model, [part(x, 1) for x in inputs], [part(grad, 1) for grad in grads])
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12)
        start = dict(make(cls, dtype=torch.float64).named_parameters())
        assert all(not torch.allclose(value, start[name]) for name, value in expected.items())


@each_kernel
@pytest.mark.parametrize("options", [{}, {"regather": True}, {"column_backward": "overlap"}])
@on_ranks(2)
def test_backward_twice_through_a_retained_graph(
    ctx: RankContext, kernel: str, options: dict[str, Any]
) -> None:
    x = whole_numbers(*SHAPE)
    for cls in (MLP, QKVO):
        expected = on_this_rank(on_one_device(make(cls), x), 1)
        model = fused(ctx, make(cls), 1, kernel, **options)
        source = part(x, 1).requires_grad_()
        out = model(source)
        grad = part(upstream(SHAPE, x.dtype), 1)
        for times in (1, 2, 3):
            out.backward(grad, retain_graph=times < 3)
            got = {"x": source.grad, **gradients(model)}
            equal(got, {name: expected[name] * times for name in got})


@each_kernel
@on_ranks(2)
def test_no_grad_and_inference_mode(ctx: RankContext, kernel: str) -> None:
    x = whole_numbers(*SHAPE)
    reference = make(QKVO)
    for defer in (True, False):
        model = fused(ctx, make(QKVO), 1, kernel, defer=defer)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                source = part(x, 1)
                with record_overlap() as log:
                    out = model(source)
                expected = part(reference(x), 1)
            assert torch.equal(full(out), expected)
            assert not out.requires_grad
            # An inference tensor has no version counter that would tell whether to share.
            shares = defer or mode is torch.no_grad
            assert calls(log) == [*[(AG, kernel)] * (1 if shares else 3), (RS, kernel)]


@each_kernel
@on_ranks(2)
def test_writes_to_what_backward_needs_are_noticed(ctx: RankContext, kernel: str) -> None:
    model = fused(ctx, make(MLP), 1, kernel)
    x = part(whole_numbers(*SHAPE), 1)

    def hidden(x: torch.Tensor) -> torch.Tensor:
        h = F.relu(model.w1(x))
        out = model.w2(h)
        h.mul_(2)
        return out

    regathering = fused(ctx, make(MLP), 1, kernel, regather=True)

    def shard(x: torch.Tensor) -> torch.Tensor:
        source = x * 1
        out = regathering(source)
        source.mul_(2)
        return out

    def weight(x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        with torch.no_grad():
            model.w2.weight.mul_(2)
        return out

    for forward in (hidden, shard, weight):
        out = forward(x.clone().requires_grad_())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@each_kernel
@pytest.mark.parametrize("regather", [False, True])
@on_ranks(2)
def test_a_write_to_a_shard_whose_gather_was_deferred_is_noticed(
    ctx: RankContext, kernel: str, regather: bool
) -> None:
    """Before the first reader nothing is sent; after it, only who gathers again cares."""
    column = MC2ColwiseParallel(input_layouts=Shard(1), kernel=kernel, regather=regather)
    model = deferring(ctx, column)
    source = part(whole_numbers(*SHAPE), 1)

    def before(m: Any, gathered: Any) -> None:
        source.mul_(2)
        with nothing_launched(), pytest.raises(InFlightInputModifiedError, match="deferred"):
            m.w1(gathered)

    def between(m: Any, gathered: Any) -> None:
        first = m.w1(gathered)
        source.mul_(2)
        if regather:
            with pytest.raises(InFlightInputModifiedError, match="regathers"):
                m.w1(gathered)
        else:
            equal({"": m.w1(gathered)}, {"": first})

    for use in (before, between):
        model(source, use)


# --- what cannot be


class Reads(nn.Module if IN_RANK_PROCESS else object):  # type: ignore[misc]
    """A parent that is handed a deferred gather and does with it what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = make(nn.Linear, 8, 8)
        self.w2 = make(nn.Linear, 8, 8)

    def forward(self, x: torch.Tensor, use: Callable[[Any, torch.Tensor], Any]) -> Any:
        return use(self, x)


def deferring(ctx: RankContext, column: Any) -> Any:
    plan = {
        "": PrepareModuleInput(
            input_layouts=(Shard(1), None),
            desired_input_layouts=(Replicate(), None),
            defer=True,
        ),
        "w1": column,
        "w2": MC2RowwiseParallel(output_layouts=Shard(1), kernel="decomposed"),
    }
    return parallelize_module(Reads(), ctx.mesh(), plan)


@on_ranks(2)
def test_a_deferred_gather_is_read_by_a_fused_layer_or_not_at_all(ctx: RankContext) -> None:
    model = deferring(ctx, MC2ColwiseParallel(input_layouts=Shard(1), kernel="decomposed"))
    x = part(whole_numbers(*SHAPE), 1).requires_grad_()
    reads: dict[str, Callable[[Any], Any]] = {
        "sum": lambda g: g.sum(),
        "add": lambda g: g + 1,
        "relu": F.relu,
        "to_local": lambda g: g.to_local() + 1,
        "full_tensor": lambda g: g.full_tensor() + 1,
        "item": lambda g: g[0, 0, 0].item(),
        "cast": lambda g: g.double(),
        "slice": lambda g: g[:, 1:] * 2,
        "matmul": lambda g: g @ g.transpose(-1, -2),
    }

    def check(name: str, read: Any) -> None:
        with nothing_launched(), pytest.raises(DeferredReadError, match="a deferred all_gather"):
            model(x, lambda m, g: read(g))

    by_name(reads, check)

    layers: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
        "a row": (lambda m, g: m.w2(g), "Shard|S\\(2\\)|deferred"),
        "a part": (lambda m, g: m.w1(g[:, 1:]), "a whole deferred all_gather"),
        "transposed": (lambda m, g: m.w1(g.transpose(0, 1)), "a whole deferred all_gather"),
    }

    def refused(name: str, case: Any) -> None:
        use, match = case
        with (
            nothing_launched(),
            pytest.raises((MC2ConstraintError, DeferredReadError), match=match),
        ):
            model(x, use)

    by_name(layers, refused)
    with nothing_launched():
        model(x, lambda m, g: (repr(g), str(g.shape), g.dtype, g.requires_grad, g.view_as(g)))


@on_ranks(2)
def test_a_gather_that_was_started_is_no_longer_fused(ctx: RankContext) -> None:
    model = deferring(ctx, MC2ColwiseParallel(input_layouts=Shard(1), kernel="decomposed"))

    def use(m: Any, g: Any) -> Any:
        g.to_local().start()
        with nothing_launched(), pytest.raises(MC2ConstraintError, match="PendingLocal"):
            m.w1(g)
        return g.sum().full_tensor()

    x = whole_numbers(*SHAPE)
    assert model(part(x, 1), use) == x.sum()


@on_ranks(2)
def test_a_plain_column_refuses_a_deferred_gather(ctx: RankContext) -> None:
    model = deferring(ctx, ColwiseParallel())
    with nothing_launched(), pytest.raises(MC2ConstraintError, match="MC2ColwiseParallel"):
        model(part(whole_numbers(*SHAPE), 1), lambda m, g: m.w1(g))


@each_kernel
@on_ranks(2, 4)
def test_others_may_read_what_a_fused_layer_has_gathered(ctx: RankContext, kernel: str) -> None:
    """Their part of the gradient is added before the reduction, which then runs unfused: an event
    says so."""
    x = whole_numbers(*SHAPE)

    class Mixed(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            twice = x * 2
            if isinstance(twice, DTensor):
                twice = twice.redistribute(placements=[Shard(1)]).to_local()
            return out + twice

    expected = on_this_rank(on_one_device(make(Mixed), x), 1)
    got = run(ctx, fused(ctx, make(Mixed), 1, kernel, defer=True), x, 1)
    equal(got.values, expected)
    assert got.calls[:2] == [(AG, kernel), (RS, kernel)]
    assert (RS, "unfused") in got.calls
    assert ("fallback", "unfused") in got.calls


@each_kernel
@on_ranks(2, 4)
def test_a_row_by_hand_that_is_read_twice(ctx: RankContext, kernel: str) -> None:
    """Reduced twice, its gradients are added before the one gather; read otherwise, it is told."""
    mesh, group = ctx.mesh(), ctx.mesh().get_group().group_name
    wholes = [whole_numbers(*shape, seed=seed) for seed, shape in enumerate((SHAPE, (8, 8), (8,)))]

    def row(*operands: torch.Tensor) -> Any:
        plan = plan_linear(*(operand._spec for operand in operands))
        return RowLinear.apply(*operands, plan, FusionOptions(kernel), group)

    def leaves() -> list[Any]:
        placed = zip(wholes, (Shard(2), Shard(1), Replicate()), strict=True)
        return [distribute_tensor(x, mesh, [p]).requires_grad_() for x, p in placed]

    def on_both(out: Any, again: Any) -> Any:
        return F.relu(out) + again * 2

    alone = [x.clone().requires_grad_() for x in wholes]
    expected = F.linear(*alone)
    on_both(expected, expected).backward(upstream(SHAPE, torch.float32))
    grad = distribute_tensor(upstream(SHAPE, torch.float32), mesh, [Shard(1)])

    operands = leaves()
    with record_overlap() as log:
        out = row(*operands)
        result = on_both(*(redistribute_deferred(out, [Shard(1)]) for _ in range(2)))
        result.backward(grad)
    assert calls(log) == [(RS, kernel), (RS, kernel), (AG, kernel)]
    assert torch.equal(full(result), on_both(expected, expected))
    for leaf, twin in zip(operands, alone, strict=True):
        assert torch.equal(full(leaf.grad), twin.grad)

    others: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "whole": (lambda out: out.redistribute(placements=[Replicate()]), Replicate()),
        "another dim": (lambda out: redistribute_deferred(out, [Shard(0)]), Shard(0)),
        "unreduced": (lambda out: out * 2, Replicate()),
        "changed": (lambda out: redistribute_deferred(out * 2, [Shard(1)]), Shard(1)),
    }

    def check(name: str, other: Any) -> None:
        read, placement = other
        out = row(*leaves())
        outs = redistribute_deferred(out, [Shard(1)]), read(out)
        grads = grad, distribute_tensor(upstream(SHAPE, torch.float32), mesh, [placement])
        with nothing_launched(), pytest.raises(DeferredReadError, match="else may read that sum"):
            torch.autograd.backward(outs, grads)

    by_name(others, check)


@each_kernel
@on_ranks(2, 4)
def test_rows_of_one_feature_may_have_any_stride(ctx: RankContext, kernel: str) -> None:
    """Transposed, they are contiguous to torch all the same, and are sent as bytes."""
    x, grad = (whole_numbers(1, 8, seed=seed) for seed in (0, 1))
    reference = make(MLP, 1, 4)
    leaf = x.clone().requires_grad_()
    reference(leaf.t()).t().backward(grad)
    model = fused(ctx, make(MLP, 1, 4), 0, kernel, row={"chunks": 1}, chunks=1)
    source = part(x, 1).requires_grad_()
    model(source.t()).t().backward(part(grad, 1))
    equal(
        {"x": source.grad, **gradients(model)},
        {"x": part(leaf.grad, 1), **gradients(reference)},
    )


@each_kernel
@on_ranks(2)
def test_second_derivatives_are_refused(ctx: RankContext, kernel: str) -> None:
    for name, before in (("w1", 1), ("w2", 2)):
        linear = nn.ModuleDict({name: make(nn.Linear, 8, 8)})
        layer = fused(ctx, linear, 1, kernel, local=False)[name]
        x = distribute_tensor(whole_numbers(*SHAPE), ctx.mesh(), [Shard(before)]).requires_grad_()
        loss = (layer(x) ** 2).to_local().sum()
        with pytest.raises(NotImplementedError, match="create_graph=False"):
            torch.autograd.grad(loss, [x], create_graph=True)


# --- what others do to layers


@each_kernel
@on_ranks(2)
def test_hooks_of_users(ctx: RankContext, kernel: str) -> None:
    x = whole_numbers(*SHAPE)
    for defer, early in ((d, e) for d in (True, False) for e in (True, False)):
        expected = on_this_rank(on_one_device(make(QKVO), x), 1)
        model = make(QKVO)
        seen: list[str] = []

        def watch(model: Any, seen: list[str] = seen) -> None:
            for name, layer in model.named_children():
                layer.register_forward_pre_hook(lambda *_, name=name: seen.append(f"pre {name}"))
                layer.register_forward_hook(lambda *_, name=name: seen.append(f"post {name}"))
                layer.register_full_backward_hook(
                    lambda *_, name=name: seen.append(f"backward {name}")
                )

        if early:
            watch(model)
        model = fused(ctx, model, 1, kernel, defer=defer)
        if not early:
            watch(model)
        got = run(ctx, model, x, 1)
        equal(got.values, expected)
        assert got.calls == [(AG, kernel), (RS, kernel)] * 2
        assert sorted(seen) == sorted(
            f"{when} {name}" for when in ("pre", "post", "backward") for name in "qkvo"
        )


@each_kernel
@on_ranks(2)
def test_copies_and_state_dicts(ctx: RankContext, kernel: str) -> None:
    x = whole_numbers(*SHAPE)
    model = fused(ctx, make(MLP), 1, kernel)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    expected = on_this_rank(on_one_device(make(MLP), x), 1)
    equal(run(ctx, twin, x, 1).values, expected)
    model.load_state_dict(twin.state_dict())
    equal(run(ctx, model, x, 1).values, expected)


@on_ranks(2)
def test_keyword_input_and_wrong_inputs(ctx: RankContext) -> None:
    model = fused(ctx, make(MLP), 1, "decomposed")
    x = whole_numbers(*SHAPE)
    out = model.w2(input=F.relu(model.w1(input=part(x, 1))))
    assert torch.equal(full(out), part(make(MLP)(x), 1))
    for layer in (model.w1, model.w2):
        for wrong in (None, [part(x, 1)], 3.0):
            with nothing_launched(), pytest.raises(TypeError, match="Tensor or DTensor"):
                layer(wrong)
        with nothing_launched(), pytest.raises(TypeError):
            layer(part(x, 1), part(x, 1))


@contextlib.contextmanager
def refused(match: str) -> Any:
    with nothing_launched(), pytest.raises(MC2ConstraintError, match=match):
        yield


@on_ranks(2, 4)
def test_refused_at_call_on_every_rank_before_any_communication(ctx: RankContext) -> None:
    """What a style cannot know when it is applied."""
    mesh, x = ctx.mesh(), whole_numbers(4, 8, 8)
    model = fused(ctx, make(MLP, 8, 8), 1, "decomposed")
    by_placement = {
        placement: distribute_tensor(x, mesh, [placement])
        for placement in (Replicate(), Shard(0), Shard(1), Shard(2))
    }
    wide = {dim: distribute_tensor(whole_numbers(4, 8, 12), mesh, [Shard(dim)]) for dim in (1, 2)}
    for placement in (Replicate(), Shard(0), Shard(2)):
        with refused("sharded on sequence dim 1"):
            model.w1(by_placement[placement])
    for layer in (model.w1, model.w2):
        with refused("before the last of 2 dims, got 1"):
            layer(part(x[0], 1))
    with refused("fits the weight"):
        model.w1(wide[1])
    with refused("fits the weight"):
        model.w2(wide[2])
    with refused("one dtype, got torch.float64, torch.float32"):
        model.w1(part(x, 1).double())
    with refused("one dtype, got torch.float64, torch.float32"):
        model.w2(part(x, 2).double())
    feature_dim = parallelize_module(
        make(MLP, 8, 8),
        mesh,
        {
            "w1": MC2ColwiseParallel(input_layouts=Shard(2), kernel="decomposed"),
            "w2": MC2RowwiseParallel(
                input_layouts=Shard(0), output_layouts=Shard(2), kernel="decomposed"
            ),
        },
    )
    with refused("before the last of 3 dims, got 2"):
        feature_dim.w1(part(x, 2))
    with refused("before the last of 3 dims, got 2"):
        feature_dim.w2(part(x, 0))  # would be exchanged to Shard(-1) first
    # A rank that would have gone on would wait for the others here.
    torch.distributed.barrier()


@on_ranks(2)
def test_a_bias_of_another_dtype_is_refused(ctx: RankContext) -> None:
    for style in (
        MC2ColwiseParallel(input_layouts=Shard(1), kernel="decomposed"),
        MC2RowwiseParallel(output_layouts=Shard(1), kernel="decomposed"),
    ):
        linear = make(nn.Linear, 8, 8).half()
        linear.bias = nn.Parameter(linear.bias.detach().float())
        with refused("one dtype, got torch.float16, torch.float32"):
            parallelize_module(linear, ctx.mesh(), style)
        assert type(linear) is nn.Linear


@on_ranks(2)
def test_a_plain_tensor_is_refused(ctx: RankContext) -> None:
    model = fused(ctx, make(MLP), 1, "decomposed")
    for layer in (model.w1, model.w2):
        with nothing_launched(), pytest.raises(TypeError, match="Expected a DTensor, got Tensor"):
            MC2Linear.forward(layer, part(whole_numbers(*SHAPE), 1))
