"""What works with torch's styles works with ours, and gives the same.

Each test runs a model parallelized by torch's styles and by ours and compares every bit.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks

if IN_RANK_PROCESS:
    import torch
    import torch.distributed.checkpoint as dcp
    import torch.distributed.tensor.parallel as torch_styles
    from torch import nn
    from torch.distributed._composable import checkpoint as composable_checkpoint
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.utils.checkpoint import checkpoint

    import parallel_styles
    from pending_dtensor import PendingLocal
    from pending_dtensor.torch_compat import work_registry_size
    from tests.common.sharded_models import MLP, equal, full, gradients, part

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.mlp = MLP()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.mlp(self.norm(x))

    class Model(nn.Module):
        """Token embedding, blocks, and a head: each style at work."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(16, 8)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.norm = nn.LayerNorm(8)
            self.head = nn.Linear(8, 16, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))


LIBRARIES = ("parallel_styles", "torch_styles")
plans = pytest.mark.parametrize("sp", [True, False], ids=["sp", "tp"])


def parallelized(lib: Any, mesh: Any, *, sp: bool, model: nn.Module | None = None) -> nn.Module:
    outside = Shard(1) if sp else Replicate()
    plan = {
        "embedding": lib.RowwiseParallel(input_layouts=Replicate(), output_layouts=outside),
        "blocks.*.mlp.w1": lib.ColwiseParallel(input_layouts=outside),
        "blocks.*.mlp.w2": lib.RowwiseParallel(output_layouts=outside),
        "head": lib.ColwiseParallel(input_layouts=outside, output_layouts=Replicate()),
    }
    if sp:
        norm = lib.SequenceParallel(use_local_output=True)
        plan |= {"norm": norm, "blocks.*.norm": norm}
    return lib.parallelize_module(model or Model(), mesh, plan)


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int = 0, **autocast: Any) -> torch.Tensor:
    batch = tokens(seed)
    with torch.autocast("cpu", enabled=bool(autocast), **autocast):
        logits = model(batch)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {f"parameter {name}": full(p).clone() for name, p in model.named_parameters()}


def train(
    model: nn.Module,
    *,
    steps: int = 3,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[..., torch.Tensor] = loss_of,
    first: int = 0,
) -> dict[str, Any]:
    """A few steps with clipping and AdamW: losses, norms, gradients and parameters."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    results: dict[str, Any] = {}
    for number in range(first, first + steps):
        optimizer.zero_grad()
        value = loss(model, number)
        value.backward()
        for place, group in on_each_mesh(model).items():
            norm = nn.utils.clip_grad_norm_(group, 0.5)
            results[f"norm {number} {place}"] = full(norm)
        results[f"loss {number}"] = full(value)
        optimizer.step()
    return {**results, **gradients(model), **parameters(model)}


def on_each_mesh(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Parameters that can be clipped together: not DTensors with others, nor of two meshes."""
    groups: dict[str, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        place = str(parameter.device_mesh) if isinstance(parameter, DTensor) else "plain"
        groups.setdefault(place, []).append(parameter)
    return groups


def both(make: Callable[[Any], nn.Module], **options: Any) -> dict[str, Any]:
    """What our styles make of a training, which is what torch's make of it."""
    ours = train(make(parallel_styles), **options)
    assert work_registry_size() == 0
    with warnings.catch_warnings():
        # Torch's layers hand out views, which FSDP2 warns of.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        equal(ours, train(make(torch_styles), **options))
    return ours


@plans
@on_ranks(2)
def test_clipping_and_adamw(ctx: RankContext, sp: bool) -> None:
    ours = both(lambda lib: parallelized(lib, ctx.mesh(), sp=sp))
    assert ours["loss 2"] < ours["loss 0"]
    if sp:  # all parameters are DTensors, so all are clipped together, as on one device
        one_device = train(Model())
        # Single precision, and AdamW divides by the root of squared gradients, some near 0.
        for number in range(3):
            name = f"loss {number}"
            torch.testing.assert_close(ours[name], one_device[name], rtol=1e-4, atol=0)


@plans
@on_ranks(4)
def test_fsdp2_over_a_mesh_of_two_axes(ctx: RankContext, sp: bool) -> None:
    mesh = ctx.mesh(2, 2)

    def make(lib: Any) -> nn.Module:
        model = parallelized(lib, mesh["tp"], sp=sp)
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    dp_rank = mesh.get_local_rank("dp")
    both(make, loss=lambda model, seed: loss_of(model, 2 * seed + dp_rank))


@on_ranks(4)
def test_fsdp2_around_each_layer(ctx: RankContext) -> None:
    """Its node in front of a layer reduces the gradients: they must all have arrived by then."""
    mesh = ctx.mesh(2, 2)
    for sp in (True, False):

        def make(lib: Any, sp: bool = sp) -> nn.Module:
            model = parallelized(lib, mesh["tp"], sp=sp)
            for block in model.blocks:
                fully_shard(block.mlp.w1, mesh=mesh["dp"])
                fully_shard(block.mlp.w2, mesh=mesh["dp"])
            fully_shard(model.head, mesh=mesh["dp"])
            return fully_shard(model, mesh=mesh["dp"])

        both(make)


@on_ranks(4)
def test_fsdp2_with_mixed_precision(ctx: RankContext) -> None:
    mesh = ctx.mesh(2, 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def make(lib: Any) -> nn.Module:
        model = parallelized(lib, mesh["tp"], sp=True)
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
        return fully_shard(model, mesh=mesh["dp"], mp_policy=policy)

    both(make)


@plans
@on_ranks(2)
@pytest.mark.filterwarnings("default")  # compiling warns of much that is not ours
def test_compile_with_aot_eager(ctx: RankContext, sp: bool) -> None:
    torch._dynamo.reset()

    def make(lib: Any) -> nn.Module:
        return torch.compile(parallelized(lib, ctx.mesh(), sp=sp), backend="aot_eager")

    both(make)


@plans
@on_ranks(2)
@pytest.mark.filterwarnings("default")
def test_compile_of_some_modules(ctx: RankContext, sp: bool) -> None:
    """Each block compiled, between eager layers whose outputs are pending.

    The reference is eager: torch's styles fail here in backward.
    """
    torch._dynamo.reset()
    model = parallelized(parallel_styles, ctx.mesh(), sp=sp)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    equal(train(model), train(parallelized(torch_styles, ctx.mesh(), sp=sp)))


@pytest.mark.parametrize("dynamic", [False, None, True])
@on_ranks(2)
@pytest.mark.filterwarnings("default")
def test_gradient_out_of_a_compiled_function_of_a_pending_value(
    ctx: RankContext, dynamic: bool | None
) -> None:
    torch._dynamo.reset()
    layer = nn.Linear(8, 8)
    parallel_styles.parallelize_module(layer, ctx.mesh(), parallel_styles.RowwiseParallel())
    compiled = torch.compile(lambda x: x.relu() * 2, backend="aot_eager", dynamic=dynamic)
    for rows in (4, 6):
        x = part(torch.randn(rows, 8), -1).requires_grad_()
        results = []
        for function in (compiled, lambda x: x.relu() * 2):
            pending = layer(x)
            assert isinstance(pending, PendingLocal)
            out = function(pending)
            assert out.requires_grad
            results.append((out.detach(), *torch.autograd.grad(out.sum(), (x, layer.weight))))
        for got, expected in zip(*results, strict=True):
            assert torch.equal(full(got), full(expected))


@plans
@pytest.mark.parametrize("kind", ["reentrant", "not_reentrant", "wrapper", "composable"])
@on_ranks(2)
def test_activation_checkpointing(ctx: RankContext, sp: bool, kind: str) -> None:
    plain = train(parallelized(parallel_styles, ctx.mesh(), sp=sp))

    def make(lib: Any) -> nn.Module:
        model = parallelized(lib, ctx.mesh(), sp=sp)
        if kind == "wrapper":
            apply_activation_checkpointing(
                model,
                checkpoint_wrapper_fn=lambda m: checkpoint_wrapper(
                    m, checkpoint_impl=CheckpointImpl.NO_REENTRANT
                ),
                check_fn=lambda m: isinstance(m, Block),
            )
            return model
        for block in model.blocks:
            if kind == "composable":
                composable_checkpoint(block)
                continue
            forward = block.forward
            block.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=kind == "reentrant")
        return model

    ours = train(make(parallel_styles))
    ours = {name.replace("_checkpoint_wrapped_module.", ""): t for name, t in ours.items()}
    equal(ours, plain)
    assert work_registry_size() == 0


@plans
@on_ranks(2)
def test_distributed_checkpoint(ctx: RankContext, sp: bool, tmp_path: Path) -> None:
    """Saved by either library, loaded by either; training goes on as if nothing had happened."""
    libraries = {"ours": parallel_styles, "theirs": torch_styles}
    going_on = {}
    for saver, lib in libraries.items():
        model = parallelized(lib, ctx.mesh(), sp=sp)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        train(model, optimizer=optimizer)
        state = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
        dcp.save(state, checkpoint_id=tmp_path / saver, no_dist=False)
        going_on[saver] = train(model, optimizer=optimizer, first=3)
    equal(going_on["ours"], going_on["theirs"])
    for saver in libraries:
        for lib in libraries.values():
            model = parallelized(lib, ctx.mesh(), sp=sp)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            state = {
                "model": get_model_state_dict(model),
                "optimizer": get_optimizer_state_dict(model, optimizer),
            }
            dcp.load(state, checkpoint_id=tmp_path / saver)
            set_model_state_dict(model, state["model"])
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
            equal(train(model, optimizer=optimizer, first=3), going_on["ours"])


@plans
@on_ranks(2)
def test_autocast(ctx: RankContext, sp: bool) -> None:
    def loss(model: nn.Module, seed: int) -> torch.Tensor:
        return loss_of(model, seed, dtype=torch.bfloat16)

    ours = both(lambda lib: parallelized(lib, ctx.mesh(), sp=sp), loss=loss)
    assert all(t.dtype == torch.float32 for name, t in ours.items() if "parameter" in name)
    model = parallelized(parallel_styles, ctx.mesh(), sp=sp)
    dtypes = []
    model.blocks[0].mlp.w1.register_forward_hook(lambda _, args, out: dtypes.append(out.dtype))
    loss(model, 0).backward()
    assert dtypes == [torch.bfloat16]


@plans
@on_ranks(2)
def test_bfloat16_parameters(ctx: RankContext, sp: bool) -> None:
    both(lambda lib: parallelized(lib, ctx.mesh(), sp=sp).bfloat16())


@plans
@on_ranks(2)
def test_state_dict_keys_and_gradient_types(ctx: RankContext, sp: bool) -> None:
    plain = Model()
    types = {}
    for lib in (parallel_styles, torch_styles):
        model = parallelized(lib, ctx.mesh(), sp=sp)
        loss_of(model).backward()
        assert list(model.state_dict()) == list(plain.state_dict())
        assert [name for name, _ in model.named_parameters()] == [
            name for name, _ in plain.named_parameters()
        ]
        types[lib] = {
            name: (type(p), type(p.grad), p.grad.placements, type(p.grad._local_tensor))
            if isinstance(p, DTensor)
            else (type(p), type(p.grad))
            for name, p in model.named_parameters()
        }
        for tensor in model.state_dict().values():
            assert not isinstance(tensor, PendingLocal)
            assert type(tensor) in (torch.Tensor, DTensor)
    assert types[parallel_styles] == types[torch_styles]


@plans
@on_ranks(2)
def test_deepcopy_of_a_parallelized_model(ctx: RankContext, sp: bool) -> None:
    model = parallelized(parallel_styles, ctx.mesh(), sp=sp)
    twin = copy.deepcopy(model)
    before = parameters(model)
    result = train(twin)
    equal(parameters(model), before)
    equal(train(model), result)


@plans
@on_ranks(2)
def test_save_and_load_of_a_state_dict(ctx: RankContext, sp: bool, tmp_path: Path) -> None:
    model = parallelized(parallel_styles, ctx.mesh(), sp=sp)
    train(model)
    path = tmp_path / f"rank_{ctx.rank}"
    torch.save(model.state_dict(), path)
    other = parallelized(torch_styles, ctx.mesh(), sp=sp)
    other.load_state_dict(torch.load(path, weights_only=False))
    equal(parameters(other), parameters(model))


@plans
@on_ranks(2)
def test_inference(ctx: RankContext, sp: bool) -> None:
    outputs = []
    for lib in (parallel_styles, torch_styles):
        model = parallelized(lib, ctx.mesh(), sp=sp).eval()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                outputs.append(full(model(tokens())).clone())
    for other in outputs[1:]:
        assert torch.equal(other, outputs[0])
    assert work_registry_size() == 0


@on_ranks(2)
def test_module_hooks_and_full_backward_hooks(ctx: RankContext) -> None:
    """Hooks of users on a layer, registered before and after it is parallelized."""
    calls: dict[Any, list[Any]] = {}
    for lib in (parallel_styles, torch_styles):
        seen = calls[lib] = []
        layer = nn.Linear(8, 16)
        nn.init.ones_(layer.weight)
        layer.register_forward_hook(lambda m, a, o, s=seen: s.append(("before", tuple(o.shape))))
        lib.parallelize_module(layer, ctx.mesh(), lib.ColwiseParallel(input_layouts=Shard(0)))
        layer.register_forward_hook(lambda m, a, o, s=seen: s.append(("after", tuple(o.shape))))
        layer.register_full_backward_hook(
            lambda m, gi, go, s=seen: s.append(("backward", full(gi[0]), full(go[0])))
        )
        x = part(torch.ones(4, 8), 0).requires_grad_()
        layer(x).sum().backward()
        seen.append(("x", full(x.grad)))
    ours, theirs = calls.values()
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one[0] == other[0]
        for got, expected in zip(one[1:], other[1:], strict=True):
            if isinstance(expected, torch.Tensor):
                assert torch.equal(got, expected), one[0]
            else:
                assert got == expected
