"""The MC2 styles and `MC2Linear` on fake process groups: what is kept, fused, and refused."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_parallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import mc2
import parallel_styles
from mc2 import MC2ConstraintError, MC2Linear, kernels
from mc2.kernel_interface import GatheredMatmul, StartedScatter
from mc2.kernels.ascend import AscendKernel
from mc2.kernels.decomposed import DecomposedKernel
from mc2.shared_gather import deferred_gather
from parallel_styles import MC2ColwiseParallel, MC2RowwiseParallel, parallelize_module
from pending_dtensor import HyperDTensor, record_overlap
from pending_dtensor.collectives import chunk_sizes


@contextlib.contextmanager
def fake_ranks(ranks: int, rank: int = 0) -> Iterator[DeviceMesh]:
    """A 1-D mesh of ``ranks`` ranks of which this process is one; nothing is communicated."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def nothing_launched() -> Iterator[None]:
    with record_overlap() as log, CommDebugMode() as comm:
        yield
    assert log.events == []
    assert comm.get_total_counts() == 0


def column(**options: Any) -> MC2ColwiseParallel:
    return MC2ColwiseParallel(**{"input_layouts": Shard(1), "kernel": "decomposed", **options})


def row(**options: Any) -> MC2RowwiseParallel:
    return MC2RowwiseParallel(**{"output_layouts": Shard(1), "kernel": "decomposed", **options})


def snapshot(module: nn.Module) -> Any:
    """All of a module that a style could change."""
    return [
        (
            path,
            type(part),
            id(part),
            {name: id(parameter) for name, parameter in part._parameters.items()},
            {name: len(value) for name, value in vars(part).items() if "_hooks" in name},
            sorted(name for name in vars(part) if "_hooks" not in name),
        )
        for path, part in module.named_modules()
    ]


# --- what is kept, and what becomes of a Linear


def test_public_names() -> None:
    assert sorted(mc2.__all__) == [
        "CostModel",
        "MC2ConstraintError",
        "MC2Linear",
        "assert_fused",
        "available_kernels",
        "measure_cost_model",
        "reasons_not_supported",
        "use_cost_model",
    ]
    for name in ("MC2ColwiseParallel", "MC2RowwiseParallel"):
        assert name in parallel_styles.__all__
    assert issubclass(MC2ColwiseParallel, parallel_styles.ColwiseParallel)
    assert issubclass(MC2RowwiseParallel, parallel_styles.RowwiseParallel)
    assert issubclass(MC2Linear, nn.Linear)
    assert issubclass(MC2ConstraintError, ValueError)


@pytest.mark.parametrize("bias", [True, False])
def test_from_linear_keeps_the_object_and_everything_in_it(bias: bool) -> None:
    linear = nn.Linear(8, 6, bias=bias)
    linear.note = "kept"
    linear.eval()
    linear.weight.requires_grad_(False)
    linear.register_buffer("scale", torch.ones(1))
    called = []
    linear.register_forward_pre_hook(lambda *_: called.append("pre"))
    linear.register_forward_hook(lambda *_: called.append("post"))
    before = snapshot(linear)
    parameters, state = dict(linear.named_parameters()), linear.state_dict()
    fused = MC2Linear.from_linear(linear)
    assert fused is linear
    assert type(fused) is MC2Linear
    assert dict(fused.named_parameters()) == parameters
    assert list(fused.state_dict()) == list(state)
    assert fused.note == "kept"
    assert not fused.training
    assert not fused.weight.requires_grad
    assert [part[2:] for part in snapshot(fused)] == [part[2:] for part in before]
    assert MC2Linear.from_linear(fused) is fused


def test_a_state_dict_goes_from_one_kind_to_the_other() -> None:
    linear = nn.Linear(8, 6)
    fused = MC2Linear(8, 6)
    fused.load_state_dict(linear.state_dict())
    linear.load_state_dict(fused.state_dict())
    assert torch.equal(linear.weight, fused.weight)


class SubLinear(nn.Linear):
    pass


class SubFused(MC2Linear):
    pass


@pytest.mark.parametrize(
    "module", [SubLinear(4, 4), nn.Embedding(4, 4), nn.LayerNorm(4), nn.Conv1d(4, 4, 1), None]
)
def test_from_linear_takes_exactly_a_linear(module: Any) -> None:
    with pytest.raises(TypeError, match=f"Expected an nn.Linear, got {type(module).__name__}"):
        MC2Linear.from_linear(module)


class Block(nn.Module):
    def __init__(self, features: int = 8, hidden: int = 16, **options: Any) -> None:
        super().__init__()
        self.w1 = nn.Linear(features, hidden, **options)
        self.w2 = nn.Linear(hidden, features, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(torch.relu(self.w1(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))


@pytest.mark.parametrize(
    "parallelize", [parallelize_module, torch_parallel.parallelize_module], ids=["ours", "torch's"]
)
def test_a_plan_replaces_linears_in_place(parallelize: Any) -> None:
    with fake_ranks(4) as mesh:
        model = Model()
        model.layers[0].w1.register_forward_hook(lambda *_: None)
        model.layers[1].w2.weight.requires_grad_(False)
        names, keys = [name for name, _ in model.named_parameters()], list(model.state_dict())
        linears = [layer for block in model.layers for layer in block.children()]
        plan = {"layers.*.w1": column(), "layers.*.w[2]": row()}
        assert parallelize(model, mesh, plan) is model
        assert [layer for block in model.layers for layer in block.children()] == linears
        assert {type(linear) for linear in linears} == {MC2Linear}
        assert [name for name, _ in model.named_parameters()] == names
        assert list(model.state_dict()) == keys
        assert len(model.layers[0].w1._forward_hooks) == len(model.layers[1].w1._forward_hooks) + 1
        assert [p.requires_grad for p in model.layers[1].w2.parameters()] == [False, True]
        for block in model.layers:
            assert "mode=all_gather, kernel=decomposed, ranks=4" in block.w1.extra_repr()
            assert "mode=reduce_scatter, kernel=decomposed, ranks=4" in block.w2.extra_repr()
            placements = [p.placements for p in block.parameters() if type(p.data) is DTensor]
            column_bias, row_bias = (Shard(0),), (Replicate(),)
            assert placements == [(Shard(0),), column_bias, (Shard(1),), row_bias]


def test_a_style_applied_to_the_module_itself() -> None:
    with fake_ranks(2) as mesh:
        linear = nn.Linear(8, 8)
        assert parallelize_module(linear, mesh, column()) is linear
        assert type(linear) is MC2Linear


def test_repr_shows_mode_kernel_and_ranks() -> None:
    assert repr(MC2Linear(8, 6)) == (
        "MC2Linear(in_features=8, out_features=6, bias=True, mode=None)"
    )
    with fake_ranks(2) as mesh:
        block = Block(bias=False)
        parallelize_module(
            block,
            mesh,
            {
                "w1": column(
                    kernel="pipelined", regather=True, column_backward="overlap", chunks=3
                ),
                "w2": row(),
            },
        )
        assert repr(block.w1) == (
            "MC2Linear(in_features=8, out_features=16, bias=False, mode=all_gather, "
            "kernel=pipelined, ranks=2, chunks=3, regather=True, column_backward=overlap)"
        )
        assert repr(block.w2) == (
            "MC2Linear(in_features=16, out_features=8, bias=False, mode=reduce_scatter, "
            "kernel=decomposed, ranks=2)"
        )
    assert "kernel='pipelined'" in repr(column(kernel="pipelined"))
    assert "chunks='auto'" in repr(row())


def test_existing_styles_leave_a_linear_a_linear() -> None:
    with fake_ranks(2) as mesh:
        block = Block()
        plan = {
            "w1": parallel_styles.ColwiseParallel(input_layouts=Shard(1)),
            "w2": parallel_styles.RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
        assert type(block.w1) is type(block.w2) is nn.Linear


# --- configure_mc2


def sharded(linear: nn.Linear, mesh: DeviceMesh, dim: int) -> MC2Linear:
    """An unconfigured layer whose parameters are distributed as a column or a row."""
    weight = distribute_tensor(linear.weight.detach(), mesh, [Shard(dim)])
    linear.weight = nn.Parameter(weight)
    bias = distribute_tensor(linear.bias.detach(), mesh, [Replicate() if dim else Shard(0)])
    linear.bias = nn.Parameter(bias)
    return MC2Linear.from_linear(linear)


def test_configured_by_mesh_or_by_group() -> None:
    with fake_ranks(2) as mesh:
        for how in ({"device_mesh": mesh}, {"group": mesh.get_group()}):
            layer = sharded(nn.Linear(8, 8), mesh, 0)
            assert layer.configure_mc2("all_gather", kernel="decomposed", **how) is layer
            assert "mode=all_gather, kernel=decomposed, ranks=2" in repr(layer)
        layer = sharded(nn.Linear(8, 8), mesh, 0)
        for how in ({}, {"device_mesh": mesh, "group": mesh.get_group()}):
            with pytest.raises(TypeError, match="either device_mesh or group"):
                layer.configure_mc2("all_gather", kernel="decomposed", **how)
        with pytest.raises(ValueError, match="got 'broadcast'"):
            layer.configure_mc2("broadcast", mesh, kernel="decomposed")
        assert "mode=None" in repr(layer)


def test_a_weight_that_is_not_sharded_so_is_refused() -> None:
    with fake_ranks(4) as mesh:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for layer, mode, found in (
            (MC2Linear(8, 8), "all_gather", "a plain tensor"),
            (sharded(nn.Linear(8, 8), mesh, 0), "reduce_scatter", r"Shard\(dim=0\)"),
            (sharded(nn.Linear(8, 8), mesh, 1), "all_gather", r"Shard\(dim=1\)"),
        ):
            with pytest.raises(MC2ConstraintError, match=f"DTensor weight that is .*{found}"):
                layer.configure_mc2(mode, mesh, kernel="decomposed")
        layer = sharded(nn.Linear(8, 8), mesh, 0)
        with pytest.raises(MC2ConstraintError, match=r"DTensor weight that is .* over the group"):
            layer.configure_mc2("all_gather", grid["tp"], kernel="decomposed")
        with pytest.raises(MC2ConstraintError, match=r'1-D mesh, got .* Pass .* mesh\["tp"\]'):
            layer.configure_mc2("all_gather", grid, kernel="decomposed")


def test_unconfigured_it_runs_nothing() -> None:
    layer = MC2Linear(8, 8)
    for x in (torch.ones(2, 8), None):
        with pytest.raises(MC2ConstraintError, match=r"a configured MC2Linear.*Call configure_mc2"):
            layer(x)


def test_a_plain_tensor_is_refused() -> None:
    with fake_ranks(2) as mesh:
        for dim, mode in ((0, "all_gather"), (1, "reduce_scatter")):
            layer = sharded(nn.Linear(8, 8), mesh, dim)
            layer.configure_mc2(mode, mesh, kernel="decomposed")
            with nothing_launched(), pytest.raises(TypeError, match="Expected a DTensor, got Ten"):
                layer(torch.ones(2, 4, 8))


# --- the path that each direction takes


class Recording(DecomposedKernel):
    """The reference, which notes what it is called for."""

    name = "recording"

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []  # op and number of terms or weights

    def all_gather_matmul(self, shard: Any, weights: Any, *args: Any, **kw: Any) -> GatheredMatmul:
        self.seen.append(("all_gather_matmul", len(weights)))
        return super().all_gather_matmul(shard, weights, *args, **kw)

    def start_matmul_reduce_scatter(self, terms: Any, *args: Any, **kwargs: Any) -> StartedScatter:
        self.seen.append(("matmul_reduce_scatter", len(terms)))
        return super().start_matmul_reduce_scatter(terms, *args, **kwargs)


AG, RS = ("all_gather_matmul", 1), ("matmul_reduce_scatter", 1)


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    kernel = Recording()
    with mock.patch.dict(kernels._kernels, {kernel.name: kernel}):
        yield kernel


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
def test_four_kernel_calls_forward_and_backward(ranks: int) -> None:
    with fake_ranks(ranks) as mesh, recording() as kernel:
        block = Block(hidden=48)
        plan = {"w1": column(kernel="recording"), "w2": row(kernel="recording")}
        parallelize_module(block, mesh, plan)
        out = block(torch.ones(2, 3, 8, requires_grad=True))
        assert kernel.seen == [AG, RS]
        out.sum().backward()
        assert kernel.seen == [AG, RS, AG, RS]
        assert out.shape == (2, 3, 8)
        with torch.no_grad():
            block(torch.ones(2, 3, 8))
        assert kernel.seen[4:] == [AG, RS]


def test_overlap_makes_grad_input_outside_of_the_kernel() -> None:
    with fake_ranks(2) as mesh, recording() as kernel, record_overlap() as log:
        layer = nn.Linear(8, 8)
        parallelize_module(layer, mesh, column(kernel="recording", column_backward="overlap"))
        layer(torch.ones(2, 3, 8, requires_grad=True)).sum().backward()
        assert kernel.seen == [AG]
        assert [(event.kind, event.kernel) for event in log.events] == [
            ("all_gather", "recording"),
            ("reduce_scatter", "unfused"),
        ]


def test_siblings_call_the_kernel_once_a_direction() -> None:
    with fake_ranks(2) as mesh, recording() as kernel:
        layers = [nn.Linear(8, 8) for _ in range(3)]
        for layer in layers:
            parallelize_module(layer, mesh, column(kernel="recording"))
        x = torch.ones(2, 3, 8, requires_grad=True)
        sum(layer(x).sum() for layer in layers).backward()
        assert kernel.seen == [AG, ("matmul_reduce_scatter", 3)]


# --- refused when a style is made


NO_SEQUENCE = [None, Replicate(), Partial(), Shard(-1)]


@pytest.mark.parametrize("layout", NO_SEQUENCE)
def test_layouts_without_a_sequence_shard(layout: Any) -> None:
    with pytest.raises(MC2ConstraintError, match=r"input_layouts .* got .*use ColwiseParallel"):
        MC2ColwiseParallel(input_layouts=layout)
    with pytest.raises(MC2ConstraintError, match=r"output_layouts .* got .*use RowwiseParallel"):
        MC2RowwiseParallel(output_layouts=layout)


def test_the_sequence_layout_has_no_default() -> None:
    with pytest.raises(TypeError, match="input_layouts"):
        MC2ColwiseParallel()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="output_layouts"):
        MC2RowwiseParallel()  # type: ignore[call-arg]


@pytest.mark.parametrize("chunks", [0, -1, 1.5, "many", None])
def test_chunks_below_one(chunks: Any) -> None:
    for style in (column, row):
        with pytest.raises(MC2ConstraintError, match="chunks to be 'auto' or at least 1, got"):
            style(chunks=chunks)


def test_every_reason_against_the_options_at_once() -> None:
    with pytest.raises(MC2ConstraintError, match=r"chunks to be .*column_backward to be one of"):
        column(chunks=0, column_backward="both")


# --- refused when a style is applied


def refused(style: Any, module: nn.Module, mesh: DeviceMesh, match: str, error: Any = None) -> str:
    """Asserts that a style is refused by every way of applying it, and that nothing changed."""
    before, message = snapshot(module), ""
    holder = nn.ModuleDict({"inside": module})
    for apply in (
        lambda: parallelize_module(module, mesh, style),
        lambda: parallelize_module(holder, mesh, {"inside": style}),
        lambda: torch_parallel.parallelize_module(module, mesh, style),
    ):
        with nothing_launched(), pytest.raises(error or MC2ConstraintError, match=match) as caught:
            apply()
        message = message or str(caught.value)
    assert snapshot(module) == before
    return message


@pytest.mark.parametrize("style", [column, row])
def test_an_unknown_kernel_and_auto_on_cpu(style: Any) -> None:
    with fake_ranks(2) as mesh:
        linear = nn.Linear(8, 8)
        known = "'ascend', 'pipelined', 'decomposed', got 'fastest'"
        refused(style(kernel="fastest"), linear, mesh, f"Expected a kernel out of {known}")
        could_run = "'pipelined', 'decomposed', such as kernel=\"pipelined\""
        refused(style(kernel="auto"), linear, mesh, f'npu for kernel="auto".*{could_run}')


@pytest.mark.parametrize("style", [column, row])
@pytest.mark.parametrize(
    "module",
    [
        nn.Embedding(8, 8),
        nn.LayerNorm(8),
        SubLinear(8, 8),
        SubFused(8, 8),
        nn.MultiheadAttention(8, 2).out_proj,
        nn.Sequential(nn.Linear(8, 8)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_is_not_exactly_a_linear(style: Any, module: nn.Module) -> None:
    with fake_ranks(2) as mesh:
        match = f"Expected an nn.Linear, got {type(module).__name__}"
        refused(style(), copy.deepcopy(module), mesh, match, TypeError)


@pytest.mark.parametrize("style", [column, row])
def test_a_second_style(style: Any) -> None:
    with fake_ranks(2) as mesh:
        linear = nn.Linear(8, 8)
        parallelize_module(linear, mesh, parallel_styles.ColwiseParallel())
        refused(style(), linear, mesh, "that has one already", RuntimeError)
        fused = parallelize_module(nn.Linear(8, 8), mesh, column())
        refused(style(), fused, mesh, "Expected an nn.Linear, got MC2Linear", TypeError)


def test_a_mesh_of_two_axes() -> None:
    with fake_ranks(4):
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        linear = nn.Linear(8, 8)
        with nothing_launched(), pytest.raises(MC2ConstraintError, match="Expected a 1-D mesh"):
            parallelize_module(linear, grid, column())
        assert type(linear) is nn.Linear


def test_chunks_that_a_kernel_does_not_cut() -> None:
    with fake_ranks(2) as mesh:
        refused(column(chunks=2), nn.Linear(8, 8), mesh, 'chunks "auto" or 1, as .* does not cut')


def test_one_layer_that_cannot_be_fused_keeps_a_plan_from_all() -> None:
    with fake_ranks(2) as mesh:
        model = Model()
        before = snapshot(model)
        plan = {"layers.0.w1": column(), "layers.*.w2": row(kernel="fastest")}
        with nothing_launched(), pytest.raises(MC2ConstraintError) as caught:
            parallelize_module(model, mesh, plan)
        assert snapshot(model) == before
        message = str(caught.value)
        assert "Module 'layers.0.w2'" in message
        assert "Module 'layers.1.w2'" in message


# --- the limits of ascend


@contextlib.contextmanager
def npu_of_our_own() -> Iterator[None]:
    """The kernel as if torch_npu and HCCL were there, up to the call of the operator."""
    with (
        mock.patch.object(AscendKernel, "environment_reasons", return_value=[]),
        mock.patch.object(AscendKernel, "_group_reasons", return_value=[]),
        mock.patch.object(AscendKernel, "prepare"),
    ):
        yield


def ascend(style: Any, **options: Any) -> Any:
    return style(kernel="ascend", **options)


HALF = {"dtype": torch.bfloat16, "bias": False}


def linear_on_meta(features_in: int, features_out: int, **options: Any) -> nn.Linear:
    """Checks look at sizes only; on meta the largest cost nothing."""
    return nn.Linear(features_in, features_out, device="meta", **{**HALF, **options})


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rank", [0, -1])
def test_contractions_of_ascend(ranks: int, rank: int) -> None:
    """Forward and backward: K and N / R of a column, K / R and N of a row."""
    fits = 256 * ranks
    too_many = 65535 * ranks
    cases = {
        # (in_features, out_features, accepted) of a column; a row is the other way round.
        "least": (256, fits, True),
        "most": (65534, 65534 * ranks, True),
        "K below": (255, fits, False),
        "K above": (65535, fits, False),
        "N / R below": (256, fits - ranks, False),
        "N / R below on the last rank": (256, fits - 1, False),
        "N / R above": (256, too_many, False),
        "N / R above on the first rank": (256, 65534 * ranks + 1, False),
    }
    with fake_ranks(ranks, rank % ranks) as mesh, npu_of_our_own():
        for name, (inner, outer, accepted) in cases.items():
            for style, sizes in ((column, (inner, outer)), (row, (outer, inner))):
                linear = linear_on_meta(*sizes)
                if accepted:
                    ascend(style).check(linear, mesh)
                    continue
                refused(ascend(style), linear, mesh, "contraction K of 256 <= K < 65535, got")
                assert type(linear) is nn.Linear, name


@pytest.mark.parametrize("ranks", [1, 3, 5, 6, 16])
@pytest.mark.parametrize("style", [column, row])
def test_ranks_of_ascend(ranks: int, style: Any) -> None:
    messages = set()
    for rank in {0, ranks - 1}:
        with fake_ranks(ranks, rank) as mesh, npu_of_our_own():
            linear = linear_on_meta(256 * ranks, 256 * ranks)
            match = f"Expected 2, 4 or 8 ranks, got {ranks}"
            messages.add(refused(ascend(style), linear, mesh, match))
    assert len(messages) == 1  # the same on every rank


@pytest.mark.parametrize("style", [column, row])
def test_dtypes_of_ascend(style: Any) -> None:
    with fake_ranks(2) as mesh, npu_of_our_own():
        for dtype in (torch.float16, torch.bfloat16):
            ascend(style).check(linear_on_meta(512, 512, dtype=dtype), mesh)
        for dtype in (torch.float32, torch.float64):
            linear = linear_on_meta(512, 512, dtype=dtype)
            refused(ascend(style), linear, mesh, f"float16 or bfloat16, got {dtype}")
        linear = linear_on_meta(512, 512, bias=True)
        linear.bias = nn.Parameter(linear.bias.half())
        refused(ascend(style), linear, mesh, "one dtype, got torch.bfloat16, torch.float16")
        linear = linear_on_meta(512, 512)
        refused(ascend(style, chunks=2), linear, mesh, 'chunks "auto" or 1, as the operators')


def test_overlap_asks_nothing_of_the_kernel_for_grad_input() -> None:
    with fake_ranks(2) as mesh, npu_of_our_own():
        linear = linear_on_meta(256, 256)
        refused(ascend(column), linear, mesh, "got 128")
        ascend(column, column_backward="overlap").check(linear, mesh)


@pytest.mark.parametrize("style", [column, row])
def test_every_reason_at_once_and_the_same_on_every_rank(style: Any) -> None:
    """Here torch_npu and HCCL are missing too."""
    messages = set()
    for rank in range(3):
        with fake_ranks(3, rank) as mesh:
            linear = nn.Linear(30, 30)
            linear.bias = nn.Parameter(linear.bias.detach().half())
            messages.add(refused(ascend(style), linear, mesh, "Kernel 'ascend' cannot run"))
    (message,) = messages
    for reason in (
        "cannot run all_gather_matmul",
        "cannot run matmul_reduce_scatter",
        "Expected torch_npu with CANN, got ModuleNotFoundError",
        "Expected operands of one dtype, got torch.float32, torch.float16",
        "Expected dtype float16 or bfloat16, got torch.float32",
        "< 65535, got 30",
        "< 65535, got 10",
        "Expected 2, 4 or 8 ranks, got 3",
        "Expected a process group with HCCL",
    ):
        assert reason in message


def on_this_rank(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> HyperDTensor:
    """A DTensor as it is on one rank of a fake group."""
    local = x.split(chunk_sizes(x.shape[dim], mesh.size()), dim)[mesh.get_local_rank()].clone()
    return HyperDTensor.from_local(local, mesh, [Shard(dim)], shape=x.shape, stride=x.stride())


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("rank", [0, 3])
def test_ascend_refuses_at_the_call_what_the_style_could_not_know(grad: bool, rank: int) -> None:
    with fake_ranks(4, rank) as mesh, npu_of_our_own():
        block = Block(256, 1024, **HALF)
        parallelize_module(block, mesh, {"w1": ascend(column), "w2": ascend(row)})
        # A batch of its own for each rank: torch remembers local shapes for a whole process.
        batch = 2 + rank
        even, uneven = torch.ones(batch, 8, 1024), torch.ones(batch, 6, 1024)
        rows = f"rows that divide evenly over 4 ranks, got M = {6 * batch}"
        # A column's input is sharded on dim 1; what a row gives is, and its input on dim 2.
        for layer, dim, features in ((block.w1, 1, 256), (block.w2, 2, 1024)):

            def given(
                x: torch.Tensor, dtype: torch.dtype, features: int = features, dim: int = dim
            ) -> HyperDTensor:
                x = x[..., :features].to(dtype).contiguous()
                return on_this_rank(x, mesh, dim).requires_grad_(grad)

            ragged, half = given(uneven, torch.bfloat16), given(even, torch.float16)
            with nothing_launched(), pytest.raises(MC2ConstraintError, match=rows):
                layer(ragged)
            with (
                nothing_launched(),
                pytest.raises(MC2ConstraintError, match=r"got torch\.float16, torch\.bfloat16"),
            ):
                layer(half)
            single = given(uneven, torch.float32)
            with nothing_launched(), pytest.raises(MC2ConstraintError, match=rows) as caught:
                layer(single)
            message = str(caught.value)
            assert "float16 or bfloat16, got torch.float32" in message
            assert "one dtype, got torch.float32, torch.bfloat16" in message
            assert ("cannot run all_gather_matmul" in message) == (grad or layer is block.w1)
            assert ("cannot run matmul_reduce_scatter" in message) == (grad or layer is block.w2)


@pytest.mark.parametrize("told", [True, False])
def test_siblings_that_fit_alone_but_not_together(told: bool) -> None:
    """Their grad_inputs would be one contraction: found at the call, not in backward."""
    limits = mock.patch.multiple(
        Recording,
        create=True,
        constraint_reasons=AscendKernel.constraint_reasons,
        _group_reasons=lambda self, group: [],
    )
    with fake_ranks(2) as mesh, npu_of_our_own(), recording() as kernel, limits:
        pair = nn.ModuleList(nn.Linear(256, 2 * 40000, **HALF) for _ in range(2))
        parallelize_module(pair, mesh, {"*": column(kernel="recording")})
        x = torch.ones(1, 2, 256, dtype=torch.bfloat16, requires_grad=True)
        if not told:
            sum(layer(x).sum() for layer in pair).backward()
            assert kernel.seen == [AG, AG, RS, RS]  # each for itself
            return
        gather = deferred_gather(HyperDTensor.from_local(x, mesh, [Shard(1)]), [Replicate()])
        pair[0](gather)
        with nothing_launched(), pytest.raises(MC2ConstraintError, match="got 80000"):
            pair[1](gather)
        with torch.no_grad():
            for layer in pair:  # without backward there is no sum
                layer(gather)


def test_a_group_without_hccl() -> None:
    with (
        fake_ranks(2) as mesh,
        mock.patch.object(AscendKernel, "environment_reasons", return_value=[]),
    ):
        for style in (column, row):
            linear = linear_on_meta(512, 512)
            refused(ascend(style), linear, mesh, "Expected a process group with HCCL, got")


@pytest.mark.parametrize("style", [column, row])
def test_auto_on_an_npu_is_ascend_and_no_other(style: Any) -> None:
    """Although others could run there."""
    with fake_ranks(2) as mesh, mock.patch.object(DeviceMesh, "device_type", "npu"):
        with pytest.raises(MC2ConstraintError, match="Kernel 'ascend' cannot run"):
            style(kernel="auto").check(nn.Linear(8, 8), mesh)
        with npu_of_our_own():
            style(kernel="auto").check(linear_on_meta(512, 512), mesh)
        style(kernel="pipelined").check(nn.Linear(8, 8), mesh)


# --- the kinds of layouts that only a call can refuse


@pytest.mark.parametrize("dim", [2, -1, 3, -4])
def test_a_sequence_dim_that_is_none_of_the_input(dim: int) -> None:
    with fake_ranks(2) as mesh:
        for index, mode in ((0, "all_gather"), (1, "reduce_scatter")):
            layer = sharded(nn.Linear(8, 8), mesh, index)
            layer.configure_mc2(mode, mesh, sequence_dim=dim, kernel="decomposed")
            x = distribute_tensor(torch.ones(4, 4, 8), mesh, [Shard(2)])
            with (
                nothing_launched(),
                pytest.raises(MC2ConstraintError, match=f"sequence dim before .* got {dim}"),
            ):
                layer(x)
