"""Every argument of every style, and the calls that real modules make of parallelized layers.

Numbers are small and whole, so that results equal those of one device in every bit.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks
from tests.common.script_on_ranks import run_script_on_ranks

if IN_RANK_PROCESS:
    import torch
    import torch.distributed.tensor.parallel as torch_styles
    from torch import nn
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    import parallel_styles
    from parallel_styles import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleInputOutput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )
    from pending_dtensor import HyperDTensor, PendingLocal, PendingState, record_overlap
    from pending_dtensor.torch_compat import work_registry_size
    from tests.common.sharded_models import (
        equal,
        full,
        gradients,
        joined,
        part,
        whole_numbers,
        with_whole_numbers,
    )

    class AddNorm(nn.Module):
        """norm(x + residual) and the sum, as fused residual norms have it."""

        def __init__(self, output: str = "out") -> None:
            super().__init__()
            self.weight = nn.Parameter(whole_numbers(8))
            self.output = output

        def forward(
            self, x: torch.Tensor, residual: torch.Tensor | None = None, scale: Any = None
        ) -> Any:
            total = x if residual is None else x + residual
            out = total * self.weight * (1 if scale is None else scale)
            if self.output == "tuple":
                return out, total
            if self.output == "dict":
                return {"out": out, "rest": [total, None, 3]}
            return out

    class Look(nn.Module):
        """Hands out what it was given."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.args, self.kwargs = args, kwargs
            return args if len(args) != 1 else args[0]


STYLES = ("ColwiseParallel", "RowwiseParallel")


class Run(NamedTuple):
    """What a layer made of an input on this rank."""

    out: Any
    x: Any
    layer: Any

    def whole(self, output: int | str | None, x_dim: int | None) -> dict[str, Any]:
        local = self.out.to_local() if isinstance(self.out, DTensor) else self.out
        if output == "partial":
            whole = full(local).clone()
            torch.distributed.all_reduce(whole)
        else:
            whole = joined(full(local), output)
        results = {"out": whole, **gradients(self.layer)}
        if self.x.grad is not None:
            results["x"] = joined(self.x.grad, x_dim)
        return results


def run(
    layer: nn.Module,
    x: torch.Tensor,
    output: int | str | None = None,
    call: Callable[..., Any] | None = None,
) -> Run:
    """Forward and backward of a loss that weighs every output with another number."""
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    out = layer(x) if call is None else call(layer, x)
    local = out.to_local() if isinstance(out, DTensor) else out
    shape = list(local.shape)
    ranks = torch.distributed.get_world_size()
    if isinstance(output, int):
        shape[output] *= ranks
    weights = whole_numbers(*shape, seed=9)
    weights = part(weights, output) if isinstance(output, int) else weights
    (local * weights).sum().backward()
    return Run(out, x, layer)


def placement(dim: int | str | None) -> Any:
    return Replicate() if dim is None else Partial() if dim == "partial" else Shard(dim)


def linear() -> nn.Linear:
    return with_whole_numbers(nn.Linear(8, 16))


def embedding(**options: Any) -> nn.Embedding:
    return with_whole_numbers(nn.Embedding(16, 8, **options))


def features() -> torch.Tensor:
    return whole_numbers(4, 8, 8)


def indices() -> torch.Tensor:
    return torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(3))


# --- Colwise and Rowwise


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layer", ["linear", "embedding"])
@pytest.mark.parametrize("given", ["default", None, 0, 1, -1])
@on_ranks(2)
def test_layouts_of_a_layer(
    ctx: RankContext, style: str, layer: str, given: int | str | None
) -> None:
    """Every input layout with every output layout, as local tensors and as DTensors."""
    make, whole_x = (linear, features()) if layer == "linear" else (embedding, indices())
    expected = run(make(), whole_x).whole(None, None)
    for wanted in ("default", None, 0, 1, -1, "partial"):
        if wanted == "partial" and (style, layer) != ("RowwiseParallel", "linear"):
            continue
        for local_output, async_op in [(True, True), (False, True), (True, False)]:
            options = {"use_local_output": local_output, "async_op": async_op}
            x_dim = -1 if style == "RowwiseParallel" and layer == "linear" else None
            out_dim = -1 if style == "ColwiseParallel" else None
            if given != "default":
                options["input_layouts"], x_dim = placement(given), given
            if wanted != "default":
                options["output_layouts"], out_dim = placement(wanted), wanted
            module = make()
            parallelize_module(module, ctx.mesh(), getattr(parallel_styles, style)(**options))
            result = run(module, part(whole_x, x_dim), out_dim)
            try:
                assert isinstance(result.out, DTensor) != local_output
                equal(result.whole(out_dim, x_dim), expected)
                if not local_output:
                    assert result.out.placements == (normal(placement(out_dim), 3),)
            except AssertionError as error:
                raise AssertionError(f"{options}: {error}") from error


def normal(layout: Any, ndim: int) -> Any:
    return Shard(layout.dim % ndim) if isinstance(layout, Shard) else layout


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layer", ["linear", "embedding"])
@on_ranks(2)
def test_dtensor_inputs_go_by_their_own_placement(ctx: RankContext, style: str, layer: str) -> None:
    """Whatever input_layouts says, which is about plain tensors."""
    make, whole_x = (linear, features()) if layer == "linear" else (embedding, indices())
    expected = run(make(), whole_x).whole(None, None)
    for given in (Replicate(), Shard(0), Shard(1), Shard(whole_x.ndim - 1)):
        for claimed in (Replicate(), Shard(0)):
            for hyper in (True, False):
                module = make()
                options = {"input_layouts": claimed, "output_layouts": Replicate()}
                parallelize_module(module, ctx.mesh(), getattr(parallel_styles, style)(**options))
                source = distribute_tensor(whole_x, ctx.mesh(), [given])
                if hyper:
                    source = HyperDTensor(source._local_tensor, source._spec, requires_grad=False)
                result = run(module, source)
                got = {"out": full(result.out), **gradients(module)}
                if result.x.grad is not None:
                    # As in torch: nothing redistributes a replicated DTensor, so nothing reduces.
                    if given == Replicate() and style == "ColwiseParallel":
                        assert result.x.grad.placements == (Partial(),)
                    else:
                        assert result.x.grad.placements == (given,)
                    got["x"] = full(result.x.grad)
                equal(got, expected)


@on_ranks(2, 4)
def test_row_embedding_given_replicated_indices_by_default(ctx: RankContext) -> None:
    """Torch takes them for shards: the token count is multiplied."""
    layer = parallelize_module(embedding(), ctx.mesh(), RowwiseParallel())
    assert torch.equal(full(layer(indices())), embedding()(indices()).detach())
    equal(run(layer, indices()).whole(None, None), run(embedding(), indices()).whole(None, None))
    theirs = torch_styles.parallelize_module(
        embedding(), ctx.mesh(), torch_styles.RowwiseParallel()
    )
    assert full(theirs(indices())).shape == (4, 8 * ctx.world_size, 8)


@pytest.mark.parametrize("style", STYLES)
@on_ranks(2)
def test_embedding_with_a_padding_index(ctx: RankContext, style: str) -> None:
    expected = run(embedding(padding_idx=int(indices()[0, 0])), indices()).whole(None, None)
    layer = embedding(padding_idx=int(indices()[0, 0]))
    options = {"output_layouts": Replicate()}
    parallelize_module(layer, ctx.mesh(), getattr(parallel_styles, style)(**options))
    equal(run(layer, indices()).whole(None, None), expected)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layer", ["linear", "embedding"])
@on_ranks(2)
def test_input_by_name(ctx: RankContext, style: str, layer: str) -> None:
    make, x = (linear, features()) if layer == "linear" else (embedding, indices())
    module = parallelize_module(
        make(),
        ctx.mesh(),
        getattr(parallel_styles, style)(input_layouts=Replicate(), output_layouts=Replicate()),
    )
    result = run(module, x, call=lambda layer, x: layer(input=x))
    equal(result.whole(None, None), run(make(), x).whole(None, None))


@on_ranks(2)
def test_a_layer_whose_input_has_another_name(ctx: RankContext) -> None:
    class Scaled(nn.Linear):
        def forward(self, hidden: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(hidden * scale)

    for call in (
        lambda layer, x: layer(x),
        lambda layer, x: layer(x, 2.0),
        lambda layer, x: layer(hidden=x, scale=2.0),
    ):
        make = lambda: with_whole_numbers(Scaled(8, 16))  # noqa: E731
        layer = parallelize_module(make(), ctx.mesh(), ColwiseParallel(output_layouts=Replicate()))
        result = run(layer, features(), call=call).whole(None, None)
        equal(result, run(make(), features(), call=call).whole(None, None))


@on_ranks(2)
def test_one_style_instance_for_many_modules(ctx: RankContext) -> None:
    """Rowwise wants other inputs of a Linear than of an Embedding; that must not get mixed up."""
    row = RowwiseParallel()
    modules = nn.ModuleDict({"a": linear(), "b": embedding(), "c": linear()})
    parallelize_module(modules, ctx.mesh(), {"*": row})
    for name in ("a", "c"):
        result = run(modules[name], part(features(), -1)).whole(None, -1)
        equal(result, run(linear(), features()).whole(None, None))
    result = run(modules["b"], indices()).whole(None, None)
    equal(result, run(embedding(), indices()).whole(None, None))


@on_ranks(2)
def test_under_torch_s_parallelize_module(ctx: RankContext) -> None:
    model = nn.Sequential(linear(), nn.ReLU(), with_whole_numbers(nn.Linear(16, 8)))
    plan = {"0": ColwiseParallel(input_layouts=Shard(1)), "2": RowwiseParallel()}
    torch_styles.parallelize_module(model, ctx.mesh(), plan)
    whole = nn.Sequential(linear(), nn.ReLU(), with_whole_numbers(nn.Linear(16, 8)))
    result = run(model, part(features(), 1))
    assert isinstance(result.out, PendingLocal)
    equal(result.whole(None, 1), run(whole, features()).whole(None, None))


@on_ranks(2)
def test_torch_s_styles_under_our_parallelize_module(ctx: RankContext) -> None:
    model = nn.Sequential(linear(), nn.ReLU(), with_whole_numbers(nn.Linear(16, 8)))
    plan = {"0": torch_styles.ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, ctx.mesh(), plan)
    whole = nn.Sequential(linear(), nn.ReLU(), with_whole_numbers(nn.Linear(16, 8)))
    result = run(model, features()).whole(None, None)
    equal(result, run(whole, features()).whole(None, None))


@on_ranks(2)
def test_arguments_and_defaults_are_torch_s(ctx: RankContext) -> None:
    import inspect

    for name in (
        "ColwiseParallel",
        "RowwiseParallel",
        "SequenceParallel",
        "PrepareModuleInput",
        "PrepareModuleOutput",
        "PrepareModuleInputOutput",
        "parallelize_module",
    ):
        ours, theirs = (
            inspect.signature(getattr(lib, name)).parameters
            for lib in (parallel_styles, torch_styles)
        )
        for argument, theirs_is in theirs.items():
            assert ours[argument].default == theirs_is.default, (name, argument)
            assert ours[argument].kind == theirs_is.kind, (name, argument)
        if name != "parallelize_module":
            assert issubclass(getattr(parallel_styles, name), getattr(torch_styles, name))
    for style in (ColwiseParallel(), RowwiseParallel(), SequenceParallel()):
        assert repr(style).endswith(", async_op=True)")
        assert repr(style).startswith(type(style).__name__)


# --- what models do with a layer's output


@on_ranks(2)
def test_residual_added_in_place(ctx: RankContext) -> None:
    whole, x = linear(), features()
    residual = whole_numbers(4, 8, 16, seed=5)

    def add_in_place(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        y += residual
        y.mul_(3)
        return y

    def add_to_residual(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = residual.clone()
        y += layer(x)
        return y

    for call in (add_in_place, add_to_residual):
        expected = run(whole, x, call=call).whole(None, None)
        whole.zero_grad()
        for options in ({}, {"async_op": False}):
            layer = parallelize_module(linear(), ctx.mesh(), RowwiseParallel(**options))
            result = run(layer, part(x, -1), call=call).whole(None, -1)
            equal(result, expected)
            layer = parallelize_module(
                linear(), ctx.mesh(), ColwiseParallel(output_layouts=Replicate(), **options)
            )
            equal(run(layer, x, call=call).whole(None, None), expected)


@on_ranks(2)
def test_column_output_changed_in_place(ctx: RankContext) -> None:
    """Nothing communicates there, and still it must not be a view that autograd protects."""

    def scale(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        y *= 2
        return y

    for module in (linear, embedding):
        x = features() if module is linear else indices()
        layer = parallelize_module(module(), ctx.mesh(), ColwiseParallel())
        result = run(layer, x, -1, call=scale).whole(-1, None)
        equal(result, run(module(), x, call=scale).whole(None, None))


@on_ranks(2)
def test_wait_is_the_identity_for_autograd(ctx: RankContext) -> None:
    def waited(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        if isinstance(y, PendingLocal):
            y = y.wait()
            assert type(y) is torch.Tensor
        return y

    layer = parallelize_module(linear(), ctx.mesh(), RowwiseParallel())
    result = run(layer, part(features(), -1), call=waited).whole(None, -1)
    equal(result, run(linear(), features(), call=waited).whole(None, None))


@on_ranks(2)
def test_split_of_which_one_part_enters_the_loss(ctx: RankContext) -> None:
    def first_part(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        a, _ = layer(x).split(4, 1)
        return a

    for local in (True, False):
        layer = parallelize_module(linear(), ctx.mesh(), RowwiseParallel(use_local_output=local))
        result = run(layer, part(features(), -1), call=first_part).whole(None, -1)
        equal(result, run(linear(), features(), call=first_part).whole(None, None))


@on_ranks(2)
def test_an_output_nobody_reads(ctx: RankContext) -> None:
    for layer, x in [
        (parallelize_module(linear(), ctx.mesh(), RowwiseParallel()), part(features(), -1)),
        (parallelize_module(embedding(), ctx.mesh(), RowwiseParallel()), indices()),
    ]:
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                out = layer(x)
            assert out.state is PendingState.IN_FLIGHT
            assert work_registry_size() == 1
            del out
            assert work_registry_size() == 0


@on_ranks(2)
def test_a_training_step_with_an_unused_output(ctx: RankContext) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = linear(), linear()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.unused(x)
            return self.used(x)

    model = parallelize_module(Model(), ctx.mesh(), {"*": RowwiseParallel()})
    result = run(model, part(features(), -1)).whole(None, -1)
    assert work_registry_size() == 0
    expected = run(linear(), features()).whole(None, None)
    equal(
        {name.removeprefix("used."): t for name, t in result.items() if "un" not in name}, expected
    )
    assert result["unused.weight"] is None


def test_exit_after_a_step_with_an_unused_output_is_silent() -> None:
    ends = run_script_on_ranks(
        """
        import torch
        from torch.distributed.tensor import init_device_mesh
        from parallel_styles import RowwiseParallel, parallelize_module
        from tests.common.script_on_ranks import join_default_group

        join_default_group()
        mesh = init_device_mesh("cpu", (2,))
        model = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])
        parallelize_module(model, mesh, {"*": RowwiseParallel()})
        x = torch.ones(4, 4, requires_grad=True)
        unused = model[0](x)
        model[1](x).sum().backward()
        kept_until_exit = model[0](x)
        torch.distributed.destroy_process_group()
        """,
        world_size=2,
    )
    assert [(end.exit_code, end.stdout, end.stderr) for end in ends] == [(0, "", "")] * 2


@on_ranks(2)
def test_save_of_a_pending_output(ctx: RankContext) -> None:
    layer = parallelize_module(linear(), ctx.mesh(), RowwiseParallel())
    expected = linear()(features()).detach()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            out = layer(part(features(), -1))
        assert out.state is PendingState.IN_FLIGHT
        file = io.BytesIO()
        torch.save({"out": out.detach()}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)["out"]
        assert type(loaded) is torch.Tensor
        assert torch.equal(loaded, expected)


# --- Sequence


@pytest.mark.parametrize("norm", ["layer_norm", "no_affine", "rms_norm"])
@pytest.mark.parametrize("dim", [0, 1, -2])
@pytest.mark.parametrize("local", [True, False], ids=["local", "dtensor"])
@on_ranks(2)
def test_sequence_parallel(ctx: RankContext, norm: str, dim: int, local: bool) -> None:
    def make() -> nn.Module:
        if norm == "rms_norm":
            return nn.RMSNorm(8, eps=1.0).double()
        return nn.LayerNorm(8, eps=1.0, elementwise_affine=norm == "layer_norm").double()

    x = features().double()
    expected = run(make(), x).whole(None, None)
    for options in ({}, {"async_op": False}):
        module = parallelize_module(
            make(),
            ctx.mesh(),
            SequenceParallel(sequence_dim=dim, use_local_output=local, **options),
        )
        result = run(module, part(x, dim), dim)
        assert isinstance(result.out, DTensor) != local
        # A sum over ranks instead of along the rows: float64, so a wrong one would show.
        torch.testing.assert_close(result.whole(dim, dim), expected, rtol=1e-12, atol=1e-12)
        for placements in ([Replicate()], [Shard(0)], [Shard(1)], [Shard(2)]):
            given = distribute_tensor(x, ctx.mesh(), placements).requires_grad_()
            out = module(given)
            out = (
                out
                if isinstance(out, DTensor)
                else HyperDTensor.from_local(out, ctx.mesh(), [Shard(dim)])
            )
            assert out.placements == (Shard(dim % 3),)
            torch.testing.assert_close(full(out), expected["out"], rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_sequence_parallel_keeps_frozen_parameters_frozen(ctx: RankContext) -> None:
    norm = nn.LayerNorm(8)
    norm.weight.requires_grad_(False)
    parallelize_module(norm, ctx.mesh(), SequenceParallel())
    assert [p.requires_grad for p in (norm.weight, norm.bias)] == [False, True]
    for parameter in norm.parameters():
        assert type(parameter) is not HyperDTensor
        assert parameter.placements == (Replicate(),)
    full(norm(part(features(), 1)).sum()).item()


@pytest.mark.parametrize("local", [True, False], ids=["local", "dtensor"])
@on_ranks(2)
def test_sequence_parallel_with_a_residual(ctx: RankContext, local: bool) -> None:
    """By position and by name; local or DTensor, like the first input or not."""
    x, residual = features(), whole_numbers(4, 8, 8, seed=8)
    expected = run(AddNorm(), x, call=lambda m, x: m(x, residual)).whole(None, None)
    module = parallelize_module(AddNorm(), ctx.mesh(), SequenceParallel(use_local_output=local))
    local_residual = part(residual, 1)
    as_dtensor = distribute_tensor(residual, ctx.mesh(), [Replicate()])
    for call in (
        lambda m, x: m(x, local_residual),
        lambda m, x: m(x, residual=local_residual),
        lambda m, x: m(x=x, residual=local_residual),
        lambda m, x: m(x, as_dtensor),
        lambda m, x: m(distribute_tensor(features(), ctx.mesh(), [Shard(1)]), local_residual),
        lambda m, x: m(x, residual=local_residual, scale=1),
        lambda m, x: m(x, local_residual, torch.ones(())),
    ):
        module.zero_grad()
        result = run(module, part(x, 1), 1, call=call).whole(1, 1)
        result.setdefault("x", expected["x"])
        equal(result, expected)


@pytest.mark.parametrize("structure", ["tuple", "dict"])
@pytest.mark.parametrize("local", [True, False], ids=["local", "dtensor"])
@on_ranks(2)
def test_sequence_parallel_keeps_the_structure_of_outputs(
    ctx: RankContext, structure: str, local: bool
) -> None:
    module = parallelize_module(
        AddNorm(structure), ctx.mesh(), SequenceParallel(use_local_output=local)
    )
    x, residual = (part(t, 1) for t in (features(), whole_numbers(4, 8, 8, seed=8)))
    result = module(x, residual)
    if structure == "tuple":
        assert type(result) is tuple
        out, total = result
    else:
        out, (total, nothing, three) = result["out"], result["rest"]
        assert (nothing, three) == (None, 3)
    for tensor in (out, total):
        assert isinstance(tensor, DTensor) != local
    expected = AddNorm()(features(), whole_numbers(4, 8, 8, seed=8))
    assert torch.equal(joined(full(out.to_local() if not local else out), 1), expected.detach())


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
@on_ranks(2)
def test_sequence_parallel_dropout(ctx: RankContext) -> None:
    for p in (0.0, 1.0, 0.5):
        dropout = parallelize_module(nn.Dropout(p), ctx.mesh(), SequenceParallel())
        x = part(torch.ones(4, 8, 64), 1).requires_grad_()
        out = dropout(x)
        assert isinstance(out, HyperDTensor)
        out.to_local().sum().backward()
        values = full(out)
        assert set(values.unique().tolist()) == {0.0: {1.0}, 1.0: {0.0}, 0.5: {0.0, 2.0}}[p]
        assert torch.equal(joined(x.grad, 1), values)
        dropout.eval()
        assert torch.equal(full(dropout(x)), torch.ones(4, 8, 64))


# --- PrepareModule*


@pytest.mark.parametrize("local", [True, False], ids=["local", "dtensor"])
@on_ranks(2)
def test_prepare_module_input(ctx: RankContext, local: bool) -> None:
    x, y, z = (whole_numbers(4, 8, 8, seed=seed) for seed in range(3))
    style = PrepareModuleInput(
        input_layouts=(Shard(0), None, Replicate()),
        desired_input_layouts=(Replicate(), None, Shard(1)),
        input_kwarg_layouts={"z": Shard(1)},
        desired_input_kwarg_layouts={"z": Shard(0)},
        use_local_output=local,
    )
    module = parallelize_module(Look(), ctx.mesh(), style)
    leaf = part(x, 0).requires_grad_()
    module(leaf, y, y, z=part(z, 1), other="as it is")
    first, second, third = module.args
    assert second is y
    assert module.kwargs["other"] == "as it is"
    prepared = {"x": (first, x, None), "y": (third, y, 1), "z": (module.kwargs["z"], z, 0)}
    for got, whole, dim in prepared.values():
        if local:
            assert type(got) is torch.Tensor  # not pending: PrepareModule* are synchronous
            assert torch.equal(got, part(whole, dim))
        else:
            assert isinstance(got, HyperDTensor)
            assert got.placements == (placement(dim),)
            assert type(got.to_local()) is torch.Tensor
            assert torch.equal(full(got), whole)
    weights = whole_numbers(4, 8, 8, seed=4)
    with record_overlap() as log:
        ((first.to_local() if not local else first) * weights).sum().backward()
    assert torch.equal(joined(leaf.grad, 0), weights)
    assert all(event.readable is not None for event in log.events)


@pytest.mark.parametrize("local", [True, False], ids=["local", "dtensor"])
@pytest.mark.parametrize("given", [0, 1, None])
@on_ranks(2)
def test_prepare_module_input_redistributes_by_the_real_placement(
    ctx: RankContext, local: bool, given: int | None
) -> None:
    x = features()
    for claimed, wanted in [(None, None), (0, None), (None, 1), (0, 0)]:
        style = PrepareModuleInput(
            input_layouts=placement(claimed),
            desired_input_layouts=placement(wanted),
            use_local_output=local,
        )
        module = parallelize_module(Look(), ctx.mesh(), style)
        module(distribute_tensor(x, ctx.mesh(), [placement(given)]))
        (got,) = module.args
        assert torch.equal(got if local else got.to_local(), part(x, wanted))


@pytest.mark.parametrize("local", [True, False], ids=["local", "dtensor"])
@pytest.mark.parametrize("both", [True, False], ids=["input_output", "output"])
@on_ranks(2)
def test_prepare_module_output(ctx: RankContext, local: bool, both: bool) -> None:
    x, y = features(), whole_numbers(4, 8, 8, seed=1)
    options = {
        "output_layouts": (Replicate(), None, Shard(0)),
        "desired_output_layouts": (Shard(1), None, Replicate()),
        "use_local_output": local,
    }
    style = (
        PrepareModuleInputOutput(
            input_layouts=(Shard(0), None, None),
            desired_input_layouts=(Replicate(), None, None),
            use_local_input=True,
            **options,
        )
        if both
        else PrepareModuleOutput(**options)
    )
    module = parallelize_module(Look(), ctx.mesh(), style)
    first, second, third = module(part(x, 0) if both else x, "as it is", part(y, 0))
    if both:
        assert torch.equal(module.args[0], x)
    assert second == "as it is"
    for got, whole, dim in ((first, x, 1), (third, y, None)):
        if local:
            assert type(got) is torch.Tensor
            assert torch.equal(got, part(whole, dim))
        else:
            assert isinstance(got, HyperDTensor)
            assert got.placements == (placement(dim),)
            assert torch.equal(full(got), whole)


@on_ranks(2)
def test_prepare_module_output_of_one_output(ctx: RankContext) -> None:
    for given, dim in [(None, 0), (0, None), (1, 1)]:
        style = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=placement(dim)
        )
        module = parallelize_module(Look(), ctx.mesh(), style)
        out = module(distribute_tensor(features(), ctx.mesh(), [placement(given)]))
        assert torch.equal(out, part(features(), dim))


# --- bad input


@on_ranks(2)
def test_what_is_no_tensor_is_refused(ctx: RankContext) -> None:
    with record_overlap() as log:
        for style, module in [
            (ColwiseParallel(), linear()),
            (RowwiseParallel(), linear()),
            (RowwiseParallel(), embedding()),
            (SequenceParallel(), nn.LayerNorm(8)),
        ]:
            parallelize_module(module, ctx.mesh(), style, src_data_rank=None)
            name = f"{type(style).__name__} on {type(module).__name__}"
            for wrong in ([1.0], None, 3, "x"):
                message = f"as first input, got {type(wrong).__name__} \\({name}"
                with pytest.raises(TypeError, match=message):
                    module(wrong)
            with pytest.raises(TypeError, match=f"got NoneType \\({name}"):
                module()
        for style in (
            PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)),
            PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)),
        ):
            module = parallelize_module(Look(), ctx.mesh(), style)
            with pytest.raises(TypeError, match=f"got str \\({type(style).__name__}"):
                module("text")
    assert log.events == []


@on_ranks(2)
def test_layouts_of_another_number(ctx: RankContext) -> None:
    both = (Replicate(), Replicate())
    for make in (
        lambda: PrepareModuleInput(input_layouts=both, desired_input_layouts=Replicate()),
        lambda: PrepareModuleInput(input_layouts=both),
        lambda: PrepareModuleInput(input_kwarg_layouts={"x": Replicate()}),
        lambda: PrepareModuleOutput(output_layouts=both, desired_output_layouts=Replicate()),
    ):
        with pytest.raises(AssertionError):  # torch's own
            make()
    module = parallelize_module(
        Look(),
        ctx.mesh(),
        PrepareModuleInput(input_layouts=both, desired_input_layouts=both),
    )
    with pytest.raises(
        ValueError, match="inputs and input_layouts should have same length! Expected 2 inputs"
    ):
        module(features())
    module = parallelize_module(
        Look(),
        ctx.mesh(),
        PrepareModuleOutput(output_layouts=both, desired_output_layouts=both),
    )
    with pytest.raises(
        ValueError, match="outputs and output_layouts should have same length! Expected 2 outputs"
    ):
        module(features())


@on_ranks(4)
def test_a_dtensor_on_another_mesh_is_refused(ctx: RankContext) -> None:
    mesh = ctx.mesh(2, 2)
    for other in (mesh["dp"], mesh, ctx.mesh()):
        x = distribute_tensor(features(), other, [Replicate()] * other.ndim)
        for style, module in [
            (ColwiseParallel(), linear()),
            (RowwiseParallel(), linear()),
            (SequenceParallel(), nn.LayerNorm(8)),
            (
                PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
                Look(),
            ),
        ]:
            parallelize_module(module, mesh["tp"], style)
            with (
                record_overlap() as log,
                pytest.raises(NotImplementedError, match="Expected the mesh"),
            ):
                module(x)
            assert log.events == []


@on_ranks(2)
def test_an_input_that_does_not_fit_its_layout(ctx: RankContext) -> None:
    layer = parallelize_module(linear(), ctx.mesh(), ColwiseParallel(input_layouts=Shard(3)))
    with record_overlap() as log, pytest.raises(ValueError, match="shard dim from -3 to 2"):
        layer(features())
    assert log.events == []
    layer = parallelize_module(linear(), ctx.mesh(), RowwiseParallel(output_layouts=Shard(5)))
    with pytest.raises(ValueError, match="shard dim from -3 to 2"):
        layer(part(features(), -1))


@on_ranks(2)
def test_a_row_embedding_whose_output_is_not_reduced(ctx: RankContext) -> None:
    """Torch keeps its mask for that, in a plan that all calls share, and refuses the next one."""
    mesh = ctx.mesh()
    layer = parallelize_module(embedding(), mesh, RowwiseParallel(output_layouts=Partial()))
    for tokens in (indices(), indices().flip(0)):
        unread = layer(tokens)
        summed = HyperDTensor.from_local(layer(tokens), mesh, [Partial()]).full_tensor()
        assert torch.equal(summed, embedding()(tokens).detach())
        del unread
    theirs = torch_styles.parallelize_module(
        embedding(), mesh, torch_styles.RowwiseParallel(input_layouts=Replicate())
    )
    theirs._forward_hooks.clear()
    unreduced = theirs(indices())
    with pytest.raises(RuntimeError, match="conflicting data"):
        theirs(indices().flip(0))
    unreduced.full_tensor()  # else it is refused in other tests, too


@on_ranks(2)
def test_outputs_are_torch_s_async_type(ctx: RankContext) -> None:
    """So isinstance checks in users' code, and torch's own, hold."""
    out = parallelize_module(linear(), ctx.mesh(), RowwiseParallel())(part(features(), -1))
    assert isinstance(out, AsyncCollectiveTensor)
    assert not isinstance(out, DTensor)
    assert torch.equal(out + 0, linear()(features()).detach())
