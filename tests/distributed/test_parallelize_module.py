"""`parallelize_module`: plans, ties between parameters, src_data_rank, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks
from tests.common.late_ranks import ahead

if IN_RANK_PROCESS:
    import torch
    import torch.distributed.tensor.parallel as torch_styles
    from torch import nn
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import ParallelStyle

    from parallel_styles import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )
    from pending_dtensor import record_overlap
    from tests.common.sharded_models import MLP, equal, full, gradients, with_whole_numbers

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.mlp = MLP()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.mlp(self.norm(x))

    class Blocks(nn.Module):
        def __init__(self, count: int = 2) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(count))

    class Tied(nn.Module):
        """A language model whose head has the embedding's weight."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 8)
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(tokens))


def state(module: nn.Module) -> Any:
    """What a refused plan must leave as it was."""
    return (
        [(name, id(p)) for name, p in module.named_parameters(remove_duplicate=False)],
        [(name, id(b)) for name, b in module.named_buffers()],
        [
            (
                name,
                list(m._forward_hooks),
                list(m._forward_pre_hooks),
                "_distribute" in str(vars(m)),
            )
            for name, m in module.named_modules()
        ],
    )


def placements(module: nn.Module) -> dict[str, Any]:
    return {
        name: parameter.placements[0] if isinstance(parameter, DTensor) else None
        for name, parameter in module.named_parameters()
    }


# --- plans


@on_ranks(2)
def test_wildcards(ctx: RankContext) -> None:
    model = Blocks(3)
    plan = {
        "layers.*.norm": SequenceParallel(),
        "layers.[01].mlp.w1": ColwiseParallel(input_layouts=Shard(1)),
        "layers.?.mlp.*2": RowwiseParallel(output_layouts=Shard(1)),
    }
    assert parallelize_module(model, ctx.mesh(), plan) is model
    got = placements(model)
    for i in range(3):
        assert got[f"layers.{i}.norm.weight"] == Replicate()
        assert got[f"layers.{i}.mlp.w1.weight"] == (Shard(0) if i < 2 else None)
        assert got[f"layers.{i}.mlp.w2.weight"] == Shard(1)
        assert got[f"layers.{i}.mlp.w2.bias"] == Replicate()


@on_ranks(2)
def test_the_same_result_as_torch_s_parallelize_module(ctx: RankContext) -> None:
    results = []
    for parallelize in (parallelize_module, torch_styles.parallelize_module):
        torch.manual_seed(0)
        model = Blocks()
        plan = {
            "layers.*.mlp.w1": ColwiseParallel(),
            "layers.*": PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
            ),
            "layers.*.mlp.w2": RowwiseParallel(),
        }
        parallelize(model, ctx.mesh(), plan)
        x = torch.ones(2, 4, 8)
        for layer in model.layers:
            x = layer(x[:, :2])
        x.sum().backward()
        results.append({"out": full(x), **gradients(model)})
        assert [name for name, _ in model.named_parameters()] == list(Blocks().state_dict())
    equal(*results)


@on_ranks(2)
def test_keys_of_the_module_itself(ctx: RankContext) -> None:
    for plan in (ColwiseParallel(), {"": ColwiseParallel()}):
        layer = parallelize_module(nn.Linear(8, 8), ctx.mesh(), plan)
        assert placements(layer) == {"weight": Shard(0), "bias": Shard(0)}
    model = parallelize_module(Block(), ctx.mesh(), {"norm.": SequenceParallel()})
    assert placements(model.norm) == {"weight": Replicate(), "bias": Replicate()}


@on_ranks(2)
def test_the_mesh_of_the_context(ctx: RankContext) -> None:
    with ctx.mesh():
        layer = parallelize_module(nn.Linear(8, 8), parallelize_plan=ColwiseParallel())
    assert layer.weight.device_mesh == ctx.mesh()


@on_ranks(2)
def test_keys_that_lead_nowhere_warn_as_in_torch(ctx: RankContext) -> None:
    for key in ("nothing", "layers.*.nothing", "layers.7", "layers.0.mlp.w1.more"):
        messages = []
        for parallelize in (parallelize_module, torch_styles.parallelize_module):
            model = Blocks()
            before = state(model)
            with pytest.warns(UserWarning, match="could not be resolved") as caught:
                parallelize(model, ctx.mesh(), {key: ColwiseParallel()})
            assert state(model) == before
            messages.append([str(warning.message) for warning in caught])
        assert messages[0] == messages[1]
    model = Blocks()
    with pytest.warns(UserWarning, match="'nothing' could not be resolved"):
        parallelize_module(
            model, ctx.mesh(), {"nothing": ColwiseParallel(), "*.*.mlp.w1": ColwiseParallel()}
        )
    assert placements(model)["layers.1.mlp.w1.weight"] == Shard(0)


@on_ranks(2)
def test_no_plan(ctx: RankContext) -> None:
    model = MLP()
    before = state(model)
    with pytest.warns(UserWarning, match="No parallelize_plan is provided"):
        assert parallelize_module(model, ctx.mesh()) is model
    assert parallelize_module(model, ctx.mesh(), {}) is model
    assert state(model) == before


# --- src_data_rank


def of_rank(module: nn.Module, rank: int) -> nn.Module:
    """Parameters and buffers that differ on every rank."""
    with torch.no_grad():
        for number, tensor in enumerate((*module.parameters(), *module.buffers())):
            tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) + 1000 * rank + number)
    return module


def linear_with_buffer() -> nn.Linear:
    layer = nn.Linear(8, 8)
    layer.register_buffer("scale", torch.zeros(3))
    return layer


@pytest.mark.parametrize("key", ["", "0", "*"])
@pytest.mark.parametrize("style", ["ColwiseParallel", "RowwiseParallel"])
@on_ranks(2)
def test_each_rank_s_own_data_without_communication(ctx: RankContext, key: str, style: str) -> None:
    """Rank 0 is done before rank 1 begins, so nothing can have been sent between them."""
    styles = {"ColwiseParallel": ColwiseParallel(), "RowwiseParallel": RowwiseParallel()}
    layer = of_rank(linear_with_buffer(), ctx.rank)
    model = nn.Sequential(layer) if key else layer
    ctx.mesh()  # making it communicates
    ahead(
        ctx,
        lambda: parallelize_module(model, ctx.mesh(), {key: styles[style]}, src_data_rank=None),
    )
    own = of_rank(linear_with_buffer(), ctx.rank)
    dim = 0 if style == "ColwiseParallel" else 1
    assert torch.equal(layer.weight.to_local(), own.weight.chunk(2, dim)[ctx.rank])
    bias = own.bias.chunk(2)[ctx.rank] if dim == 0 else own.bias
    assert torch.equal(layer.bias.to_local(), bias)
    assert torch.equal(layer.scale.to_local(), own.scale)


@pytest.mark.parametrize("source", [0, 1])
@pytest.mark.parametrize("key", ["", "0"])
@on_ranks(2)
def test_data_of_one_rank_for_all(ctx: RankContext, source: int, key: str) -> None:
    for style in (ColwiseParallel(), RowwiseParallel()):
        layer = of_rank(linear_with_buffer(), ctx.rank)
        model = nn.Sequential(layer) if key else layer
        parallelize_module(model, ctx.mesh(), {key: style}, src_data_rank=source)
        wanted = of_rank(linear_with_buffer(), source)
        for name, tensor in wanted.state_dict().items():
            assert torch.equal(full(layer.state_dict()[name]), tensor), name


@on_ranks(2)
def test_by_default_the_first_rank_s_data(ctx: RankContext) -> None:
    layer = parallelize_module(
        of_rank(linear_with_buffer(), ctx.rank), ctx.mesh(), {"": ColwiseParallel()}
    )
    assert torch.equal(full(layer.weight), of_rank(linear_with_buffer(), 0).weight.detach())


@on_ranks(2)
def test_sequence_parallel_keeps_each_rank_s_own_parameters(ctx: RankContext) -> None:
    """As torch does, whose norms all begin as ones, and without communication."""
    norm = nn.LayerNorm(8)
    of_rank(norm, ctx.rank)
    ctx.mesh()
    ahead(ctx, lambda: parallelize_module(norm, ctx.mesh(), SequenceParallel()))
    assert torch.equal(norm.weight.to_local(), of_rank(nn.LayerNorm(8), ctx.rank).weight)


# --- ties


def tied_plan(embedding: ParallelStyle | None, head: ParallelStyle | None) -> dict[str, Any]:
    plan = {"embedding": embedding, "head": head}
    return {path: style for path, style in plan.items() if style is not None}


@on_ranks(2)
def test_a_tie_of_the_same_shard_dim_stays_one_parameter(ctx: RankContext) -> None:
    tokens = torch.arange(8).view(2, 4)
    expected = with_whole_numbers(Tied())
    loss = expected(tokens).square().sum()
    loss.backward()
    for plan, kept in [
        (
            tied_plan(RowwiseParallel(), ColwiseParallel(output_layouts=Replicate())),
            Shard(0),
        ),
        (
            tied_plan(
                ColwiseParallel(output_layouts=Replicate()),
                RowwiseParallel(input_layouts=Replicate()),
            ),
            Shard(1),
        ),
    ]:
        model = parallelize_module(with_whole_numbers(Tied()), ctx.mesh(), plan)
        assert model.head.weight is model.embedding.weight
        assert [name for name, _ in model.named_parameters()] == ["embedding.weight"]
        assert model.head.weight.placements == (kept,)
        sharded_loss = model(tokens).square().sum()
        sharded_loss.backward()
        assert torch.equal(full(sharded_loss), loss.detach())
        equal(gradients(model), gradients(expected))
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        assert torch.equal(full(model.head.weight), full(model.embedding.weight))


@on_ranks(2)
def test_a_tie_of_different_shard_dims_is_refused(ctx: RankContext) -> None:
    for plan in (
        tied_plan(ColwiseParallel(), ColwiseParallel()),
        tied_plan(RowwiseParallel(), RowwiseParallel()),
    ):
        model = Tied()
        before = state(model)
        with record_overlap() as log, pytest.raises(ValueError, match="sharded alike") as caught:
            parallelize_module(model, ctx.mesh(), plan)
        assert "embedding.weight: S(" in str(caught.value)
        assert "head.weight: S(" in str(caught.value)
        assert state(model) == before
        assert log.events == []


@on_ranks(2)
def test_a_tie_of_which_one_module_is_in_the_plan(ctx: RankContext) -> None:
    """One parameter, and a warning that the other module cannot run as it is.

    Torch's own Transformer example parallelizes its output in a second call.
    """
    tokens = torch.arange(8).view(2, 4)
    expected = with_whole_numbers(Tied())
    expected(tokens).sum().backward()
    embedding, head = RowwiseParallel(), ColwiseParallel(output_layouts=Replicate())
    for plans in (
        [{"embedding": embedding}, {"head": head}],
        [{"head": head}, {"embedding": embedding}],
    ):
        model = with_whole_numbers(Tied())
        with pytest.warns(UserWarning, match="weight: not in the plan"):
            parallelize_module(model, ctx.mesh(), plans[0])
        assert model.head.weight is model.embedding.weight
        assert isinstance(model.head.weight, DTensor)
        (path, style) = next(iter(plans[1].items()))
        parallelize_module(model.get_submodule(path), ctx.mesh(), style)
        assert model.head.weight is model.embedding.weight
        model(tokens).sum().backward()
        equal(gradients(model), gradients(expected))


@on_ranks(2)
def test_with_warnings_as_errors_half_a_tie_is_refused(ctx: RankContext) -> None:
    model = Tied()
    before = state(model)
    with pytest.raises(UserWarning, match="Expected a style for all modules that share"):
        parallelize_module(model, ctx.mesh(), {"embedding": RowwiseParallel()})
    assert state(model) == before


@on_ranks(2)
def test_half_a_tie_then_another_shard_dim_is_refused(ctx: RankContext) -> None:
    model = Tied()
    with pytest.warns(UserWarning, match="not in the plan"):
        parallelize_module(model, ctx.mesh(), {"embedding": RowwiseParallel()})
    with pytest.raises(ValueError, match="Cannot distribute a DTensor"):
        parallelize_module(model.head, ctx.mesh(), RowwiseParallel())
    assert model.head.weight is model.embedding.weight


@on_ranks(2)
def test_a_tie_outside_the_plan_is_no_matter(ctx: RankContext) -> None:
    model = nn.ModuleDict({"tied": Tied(), "mlp": MLP()})
    parallelize_module(model, ctx.mesh(), {"mlp.w1": ColwiseParallel()})
    assert model.tied.head.weight is model.tied.embedding.weight
    assert not isinstance(model.tied.head.weight, DTensor)


@on_ranks(2)
def test_ties_between_more_than_two_and_of_biases(ctx: RankContext) -> None:
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    for layer in model[1:]:
        layer.weight, layer.bias = model[0].weight, model[0].bias
    parallelize_module(model, ctx.mesh(), {"*": ColwiseParallel()})
    assert len(list(model.parameters())) == 2
    norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
    norms[1].weight = norms[0].weight
    parallelize_module(norms, ctx.mesh(), {"*": SequenceParallel()})
    assert norms[1].weight is norms[0].weight
    assert norms[1].bias is not norms[0].bias


@on_ranks(2)
def test_a_module_found_by_two_paths_is_parallelized_once(ctx: RankContext) -> None:
    model = nn.ModuleDict({"a": nn.ModuleDict(), "b": nn.ModuleDict()})
    model["a"]["layer"] = model["b"]["layer"] = with_whole_numbers(nn.Linear(8, 8))
    parallelize_module(model, ctx.mesh(), {"*.layer": ColwiseParallel(output_layouts=Replicate())})
    assert model["a"]["layer"] is model["b"]["layer"]
    x = torch.ones(2, 8)
    expected = with_whole_numbers(nn.Linear(8, 8))(x).detach()
    assert torch.equal(full(model["b"]["layer"](x)), expected)


@on_ranks(2)
def test_styles_of_others_in_the_plan(ctx: RankContext) -> None:
    """Nobody can tell what they do to a parameter, so they are let do it."""

    class Leave(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            self.applied = module
            return module

    leave = Leave()
    model = Tied()
    parallelize_module(model, ctx.mesh(), tied_plan(RowwiseParallel(), leave))
    assert leave.applied is model.head
    assert leave.src_data_rank == 0
    assert isinstance(model.embedding.weight, DTensor)
    assert not isinstance(model.head.weight, DTensor)


# --- what is refused, before anything is changed


@on_ranks(2)
def test_a_module_that_a_style_does_not_fit(ctx: RankContext) -> None:
    for style in (ColwiseParallel(), RowwiseParallel()):
        model = nn.ModuleDict({"mlp": MLP(), "conv": nn.ModuleList([nn.Conv1d(8, 8, 1)])})
        before = state(model)
        name = type(style).__name__
        with pytest.raises(NotImplementedError) as caught:
            parallelize_module(model, ctx.mesh(), {"mlp.w1": ColwiseParallel(), "conv.*": style})
        message = str(caught.value)
        for part in ("nn.Linear or nn.Embedding", "Conv1d", name, "'conv.0'"):
            assert part in message
        assert state(model) == before
        with pytest.raises(NotImplementedError, match="got Conv1d"):
            parallelize_module(nn.Conv1d(8, 8, 1), ctx.mesh(), style)
        with pytest.raises(NotImplementedError, match="got Conv1d"):
            torch_styles.parallelize_module(nn.Conv1d(8, 8, 1), ctx.mesh(), style)


@on_ranks(2)
def test_a_style_applied_twice(ctx: RankContext) -> None:
    for style, module in [
        (ColwiseParallel(), nn.Linear(8, 8)),
        (RowwiseParallel(), nn.Embedding(8, 8)),
        (SequenceParallel(), nn.LayerNorm(8)),
    ]:
        model = nn.ModuleDict({"mlp": MLP(), "layer": module})
        parallelize_module(model, ctx.mesh(), {"layer": style})
        before = state(model)
        with pytest.raises(RuntimeError, match=r"'layer'.*Give each module one style, once"):
            parallelize_module(model, ctx.mesh(), {"mlp.w1": ColwiseParallel(), "layer": style})
        assert state(model) == before


@on_ranks(2)
def test_two_styles_for_one_module(ctx: RankContext) -> None:
    model = MLP()
    before = state(model)
    with pytest.raises(RuntimeError, match="'w1', got ColwiseParallel and RowwiseParallel"):
        parallelize_module(model, ctx.mesh(), {"w1": ColwiseParallel(), "w*": RowwiseParallel()})
    assert state(model) == before
    prepare = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0))
    parallelize_module(model, ctx.mesh(), {"": prepare, "w*": ColwiseParallel()})


@on_ranks(4)
def test_a_mesh_of_several_axes(ctx: RankContext) -> None:
    model = MLP()
    before = state(model)
    mesh = ctx.mesh(2, 2)
    for plan in (
        {"": PrepareModuleInput(), "w1": ColwiseParallel()},
        {"w1": ColwiseParallel()},
        {"w2": SequenceParallel()},
    ):
        with pytest.raises(ValueError, match="Expected a 1-D mesh"):
            parallelize_module(model, mesh, plan)
    assert state(model) == before
    parallelize_module(model, mesh["tp"], {"w1": ColwiseParallel()})
    assert model.w1.weight.to_local().shape == (12, 8)


@on_ranks(2)
def test_plans_of_the_wrong_kind(ctx: RankContext) -> None:
    model = MLP()
    before = state(model)
    with pytest.raises(TypeError, match="Expected a ParallelStyle for 'w2', got <class"):
        parallelize_module(model, ctx.mesh(), {"w1": ColwiseParallel(), "w2": RowwiseParallel})
    with pytest.raises(TypeError, match="list"):
        parallelize_module(model, ctx.mesh(), [ColwiseParallel()])
    assert state(model) == before
