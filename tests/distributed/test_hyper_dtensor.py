"""`HyperDTensor` and its dispatcher: every op as torch's DTensor does it, and what ours adds."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks
from tests.common.exact import by_name, same
from tests.common.late_ranks import ahead

if IN_RANK_PROCESS:
    import torch
    import torch.nn.functional as F
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.utils.checkpoint import checkpoint

    from pending_dtensor import (
        HyperDTensor,
        PendingLocal,
        PendingState,
        full_gather_fallback,
        record_overlap,
    )
    from pending_dtensor.hyper_dtensor import as_hyper, dispatcher, take_local
    from pending_dtensor.torch_compat import work_registry_size

    aten = torch.ops.aten


# --- making tensors


def placements(text: str) -> list[Placement]:
    """``"R"``, ``"S0 Psum"``: one for each mesh axis."""
    return [
        Replicate()
        if name == "R"
        else Shard(int(name[1:]))
        if name[0] == "S"
        else Partial(name[1:])
        for name in text.split()
    ]


def ramp(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Small integers from -3 to 3, the same on every rank."""
    values = torch.arange(torch.Size(shape).numel()).remainder(7).sub(3).view(shape)
    return values.to(dtype or torch.float32)


def shard(
    cls: type[DTensor], value: torch.Tensor, mesh: DeviceMesh, text: str, *, grad: bool = False
) -> DTensor:
    """``value`` as a leaf of ``cls``; a Partial is the value on its first rank, else zero."""
    local = value.detach()
    for axis, placement in enumerate(placements(text)):
        rank, ranks = mesh.get_local_rank(axis), mesh.size(axis)
        if isinstance(placement, Shard):
            parts = local.chunk(ranks, placement.dim)
            local = parts[rank] if rank < len(parts) else local.narrow(placement.dim, 0, 0)
        elif isinstance(placement, Partial) and rank:
            local = torch.zeros_like(local)
    made = cls.from_local(
        local.contiguous(),
        mesh,
        placements(text),
        run_check=False,
        shape=value.shape,
        stride=value.contiguous().stride(),
    )
    return made.detach().requires_grad_(grad)


def pending_replica(ctx: RankContext, value: torch.Tensor, mesh: DeviceMesh) -> HyperDTensor:
    """``value``, replicated, with its local tensor in flight."""
    moved = shard(HyperDTensor, value, mesh, "S0").redistribute(
        placements=[Replicate()], async_op=True
    )
    assert isinstance(moved._local_tensor, PendingLocal)
    return moved


def equal(got: Any, expected: Any) -> None:
    """Ours against torch's: the same spec and the same bits, in any structure."""
    if isinstance(expected, DTensor):
        assert type(got) is HyperDTensor, type(got)
        equal_specs(got, expected)
        local = got._local_tensor
        local = local.materialize() if isinstance(local, PendingLocal) else local
        assert local.shape == expected._local_tensor.shape
        assert torch.equal(local, expected._local_tensor), (local, expected._local_tensor)
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            equal(one, other)
    elif expected is None or isinstance(expected, (bool, int, float, str, torch.Size)):
        assert got == expected
    else:
        same(got, expected)


def equal_specs(got: DTensor, expected: DTensor) -> None:
    assert got.placements == expected.placements
    assert (got.shape, got.stride(), got.dtype) == (
        expected.shape,
        expected.stride(),
        expected.dtype,
    )
    assert got.requires_grad == expected.requires_grad


# --- ops


def ops() -> dict[str, Callable[[Any, Any], Any]]:
    """On x and y, both (4, 6)."""
    return {
        "add": lambda x, y: x + y,
        "add scalar": lambda x, y: x + 1,
        "scalar minus": lambda x, y: 1.5 - x,
        "mul": lambda x, y: x * y,
        "div": lambda x, y: x / 2,
        "neg": lambda x, y: -x,
        "pow": lambda x, y: x**2,
        "relu": lambda x, y: F.relu(x),
        "silu": lambda x, y: F.silu(x),
        "gelu": lambda x, y: F.gelu(x, approximate="tanh"),
        "exp": lambda x, y: x.exp(),
        "compare": lambda x, y: x > y,
        "compare scalar": lambda x, y: x >= 1,
        "where": lambda x, y: torch.where(x > 0, x, y),
        "masked_fill": lambda x, y: x.masked_fill(x > 0, -1.0),
        "clamp": lambda x, y: x.clamp(min=0, max=2),
        "matmul": lambda x, y: x @ y.t(),
        "mm of transposed": lambda x, y: x.t() @ y,
        "bmm": lambda x, y: torch.bmm(x.view(2, 2, 6), y.view(2, 2, 6).transpose(1, 2)),
        "addmm": lambda x, y: torch.addmm(x, x @ y.t(), y),
        "sum": lambda x, y: x.sum(),
        "sum dim": lambda x, y: x.sum(1),
        "sum dim keepdim": lambda x, y: x.sum(0, keepdim=True),
        "mean": lambda x, y: x.mean(-1),
        "max": lambda x, y: x.max(),
        "max dim": lambda x, y: x.max(1),
        "amax": lambda x, y: x.amax(0),
        "argmax": lambda x, y: x.argmax(),
        "var": lambda x, y: x.var(1),
        "cumsum": lambda x, y: x.cumsum(1),
        "softmax": lambda x, y: x.softmax(-1),
        "log_softmax": lambda x, y: x.log_softmax(0),
        "layer_norm": lambda x, y: F.layer_norm(x, (6,)),
        "rms_norm": lambda x, y: F.rms_norm(x, (6,)),
        "norm": lambda x, y: torch.linalg.vector_norm(x),
        "view": lambda x, y: x.view(2, 2, 6),
        "reshape": lambda x, y: x.reshape(-1),
        "flatten": lambda x, y: x.unsqueeze(0).flatten(1),
        "transpose": lambda x, y: x.transpose(0, 1),
        "permute": lambda x, y: x.view(4, 2, 3).permute(2, 0, 1),
        "unsqueeze": lambda x, y: x.unsqueeze(1),
        "squeeze": lambda x, y: x.unsqueeze(1).squeeze(1),
        "expand": lambda x, y: x.unsqueeze(0).expand(3, 4, 6),
        "slice": lambda x, y: x[:, 1:5],
        "select": lambda x, y: x[1],
        "ellipsis": lambda x, y: x[..., None, 2],
        "split": lambda x, y: x.split(3, 1),
        "chunk": lambda x, y: x.chunk(2, 0),
        "unbind": lambda x, y: x.unbind(0),
        "narrow": lambda x, y: x.narrow(1, 0, 2),
        "cat": lambda x, y: torch.cat([x, y]),
        "cat dim": lambda x, y: torch.cat((x, y, x), -1),
        "stack": lambda x, y: torch.stack([x, y], 1),
        "index_select": lambda x, y: x.index_select(1, y.new_zeros(3).long()),
        "gather": lambda x, y: x.gather(1, y.abs().long()),
        "clone": lambda x, y: x.clone(),
        "contiguous": lambda x, y: x.t().contiguous(),
        "detach": lambda x, y: x.detach(),
        "double": lambda x, y: x.double(),
        "to int": lambda x, y: x.to(torch.int64),
        "type_as": lambda x, y: x.type_as(y.double()),
        "zeros_like": lambda x, y: torch.zeros_like(x),
        "ones_like dtype": lambda x, y: torch.ones_like(x, dtype=torch.int32),
        "full_like": lambda x, y: torch.full_like(x, 2.5),
        "new_zeros": lambda x, y: x.new_zeros(4, 6),
        "tril": lambda x, y: x.tril(1),
        "isnan": lambda x, y: x.isnan(),
        "logical": lambda x, y: (x > 0) & ~(y > 0),
        "foreach_add": lambda x, y: torch._foreach_add([x, y], 1.0),
        "foreach_mul lists": lambda x, y: torch._foreach_mul([x, y], [y, x]),
        "foreach scalars": lambda x, y: torch._foreach_add([x, y], [1.0, 2.0]),
        "foreach_norm": lambda x, y: torch._foreach_norm([x, y]),
        "lerp": lambda x, y: x.lerp(y, 0.5),
        "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
        "equal": lambda x, y: torch.equal(x, y) or "not equal",
        "cross_entropy": lambda x, y: F.cross_entropy(x, y.abs().long()[:, 0]),
        "embedding": lambda x, y: F.embedding(y.abs().long(), x.new_ones(5, 3)),
        "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
        "linear without a plan": lambda x, y: F.linear(x, y.view(4, 6)),
        "item": lambda x, y: x.abs().max().full_tensor().item(),
        "size": lambda x, y: (x.size(), x.numel(), x.dim(), x.is_contiguous()),
    }


def gradients(result: Any, leaves: Sequence[DTensor]) -> list[DTensor | None]:
    """Gradients of the sum of all differentiable results."""
    results = [r for r in as_list(result) if isinstance(r, torch.Tensor) and r.requires_grad]
    for leaf in leaves:
        leaf.grad = None
    if results:
        ones = [torch.ones_like(r) for r in results]
        torch.autograd.backward(results, ones, inputs=leaves)
    return [leaf.grad for leaf in leaves]


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


# Seen raised by torch for placements that an op cannot take.
REFUSALS = (RuntimeError, NotImplementedError, ValueError, AssertionError, IndexError)


@pytest.mark.parametrize("where", ["R R", "S0 S1", "S1 R", "Psum S0"])
@on_ranks(2)
def test_ops_are_those_of_dtensor(ctx: RankContext, where: str) -> None:
    mesh = ctx.mesh()
    first, second = where.split()

    def run(cls: type[DTensor], op: Callable[..., Any]) -> tuple[Any, list[DTensor | None]]:
        torch.manual_seed(0)
        x = shard(cls, ramp(4, 6), mesh, first, grad=True)
        y = shard(cls, ramp(6, 4).t().contiguous(), mesh, second, grad=True)
        result = op(x, y)
        return result, gradients(result, [x, y])

    def check(name: str, op: Callable[..., Any]) -> None:
        try:
            expected, expected_grads = run(DTensor, op)
        except REFUSALS as error:
            with pytest.raises(type(error)):
                run(HyperDTensor, op)
            refused.append(name)
            return
        for _ in range(2):  # the second time from the remembered plans
            got, grads = run(HyperDTensor, op)
            equal(got, expected)
            for grad, expected_grad in zip(grads, expected_grads, strict=True):
                assert type(grad) is type(expected_grad), (type(grad), type(expected_grad))
                if expected_grad is not None:
                    equal_specs(grad, expected_grad)
                    same(grad._local_tensor, expected_grad._local_tensor)

    refused: list[str] = []
    by_name(ops(), check)
    assert len(refused) < 12, refused


@on_ranks(2)
def test_ops_on_a_value_in_flight(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    torchs_x = shard(DTensor, ramp(4, 6), mesh, "R", grad=True)
    torchs_y = shard(DTensor, ramp(6, 4).t().contiguous(), mesh, "R")
    y = shard(HyperDTensor, ramp(6, 4).t().contiguous(), mesh, "R")
    names = list(ops())
    leaves = {name: shard(HyperDTensor, ramp(4, 6), mesh, "S0", grad=True) for name in names}

    def start() -> dict[str, HyperDTensor]:
        return {
            name: leaf.redistribute(placements=[Replicate()], async_op=True)
            for name, leaf in leaves.items()
        }

    pending = ahead(ctx, start)

    def check(name: str, op: Callable[..., Any]) -> None:
        expected = op(torchs_x, torchs_y)
        got = op(pending[name], y)
        equal(got, expected)
        (grad,) = gradients(got, [leaves[name]])
        (expected_grad,) = gradients(expected, [torchs_x])
        assert (grad is None) == (expected_grad is None)
        if grad is not None:
            same(grad.full_tensor(), expected_grad.full_tensor())

    by_name(ops(), check)


@on_ranks(2)
def test_an_op_does_not_wait_for_what_it_does_not_read(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    views: dict[str, Callable[[Any], Any]] = {
        "view": lambda x: x.view(2, 2, 6),
        "transpose": lambda x: x.transpose(0, 1),
        "unsqueeze": lambda x: x.unsqueeze(0),
        "slice": lambda x: x[1:, 2:],
        "split": lambda x: x.split(2, 1)[1],
        "detach": lambda x: x.detach(),
        "to_local": lambda x: x.to_local(),
        "zeros_like": lambda x: (torch.zeros_like(x), x)[1],
        "repr": lambda x: (repr(x), str(x), f"{x}", x)[-1],
        "shape": lambda x: (x.shape, x.dtype, x.placements, x.size(), x)[-1],
        "as a local": lambda x: HyperDTensor.from_local(x.to_local(), mesh, [Replicate()]),
        "as hyper": lambda x: as_hyper(DTensor(x._local_tensor, x._spec, requires_grad=False)),
    }

    def start() -> dict[str, Any]:
        return {name: view(pending_replica(ctx, ramp(4, 6), mesh)) for name, view in views.items()}

    def in_flight(name: str, tensor: Any) -> None:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        assert isinstance(local, PendingLocal)
        assert local.state is PendingState.IN_FLIGHT

    started = ahead(ctx, start, lambda started: by_name(started, in_flight))

    def finished(name: str, view: Callable[[Any], Any]) -> None:
        got = started[name]
        same(
            got.full_tensor() if isinstance(got, DTensor) else got.wait(),
            torch.Tensor.contiguous(expected)
            if not isinstance(expected := view(shard(HyperDTensor, ramp(4, 6), mesh, "R")), DTensor)
            else expected.full_tensor(),
        )

    by_name(views, finished)


# --- mixing


@on_ranks(2)
def test_mixing_with_plain_dtensors(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    for first, second in itertools.product(["R", "S0", "S1"], repeat=2):
        plain = shard(DTensor, ramp(4, 6), mesh, second, grad=True)
        other = shard(DTensor, ramp(4, 6), mesh, first, grad=True)
        hyper = shard(HyperDTensor, ramp(4, 6), mesh, first, grad=True)
        for op in (
            lambda x, y: x * y,
            lambda x, y: y * x,
            lambda x, y: torch.cat([x, y]),
            lambda x, y: torch.stack([y, x]).sum(0),
            lambda x, y: y @ x.t(),
        ):
            got, expected = op(hyper, plain), op(other, plain)
            equal(got, expected)
            ours = gradients(got, [hyper, plain])
            torchs = gradients(expected, [other, plain])
            for grad, expected_grad in zip(ours, torchs, strict=True):
                assert type(grad) is DTensor
                assert expected_grad is not None
                equal_specs(grad, expected_grad)
                assert type(grad._local_tensor) is torch.Tensor
                same(grad._local_tensor, expected_grad._local_tensor)


@on_ranks(2)
def test_mixing_with_plain_tensors_is_refused_as_in_torch(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    for cls in DTensor, HyperDTensor:
        x = shard(cls, ramp(4, 6), mesh, "S0")
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            x + torch.ones(4, 6)
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            torch.ones(4, 6) * x
        equal_plain = (x * torch.tensor(2.0)).full_tensor()  # a scalar counts as replicated
        same(equal_plain, ramp(4, 6) * 2)


@on_ranks(2)
def test_as_hyper(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    plain = shard(DTensor, ramp(4, 6), mesh, "S0", grad=True)
    hyper = as_hyper(plain)
    assert type(hyper) is HyperDTensor
    assert as_hyper(hyper) is hyper
    (hyper * 3).sum().backward()
    assert type(plain.grad) is DTensor
    other = shard(DTensor, ramp(4, 6), mesh, "S0", grad=True)
    (other * 3).sum().backward()
    assert other.grad is not None
    equal_specs(plain.grad, other.grad)
    same(plain.grad.full_tensor(), torch.full((4, 6), 3.0))


# --- local tensors


@on_ranks(2)
def test_to_local_gives_the_local_tensor_as_it_is(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    leaf = shard(HyperDTensor, ramp(4, 6), mesh, "S0", grad=True)

    def start() -> list[torch.Tensor]:
        moved = leaf.redistribute(placements=[Replicate()], async_op=True)
        with torch.no_grad():
            without = moved.to_local()
        assert without is moved._local_tensor
        return [moved.to_local(), without, moved.detach().to_local()]

    def in_flight(locals_: list[torch.Tensor]) -> None:
        for local, has_grad in zip(locals_, [True, False, False], strict=True):
            assert isinstance(local, PendingLocal)
            assert local.state is PendingState.IN_FLIGHT
            assert local.requires_grad == has_grad

    local, *_ = ahead(ctx, start, in_flight)
    local.sum().backward()
    assert leaf.grad is not None
    same(leaf.grad.to_local(), torch.ones(2, 6))

    plain = shard(HyperDTensor, ramp(4, 6), mesh, "S0")
    assert type(plain.to_local()) is torch.Tensor
    for text, grads in [("R", "Psum"), ("R", "S1"), ("S0", "R"), ("Psum", "R")]:
        results = []
        for cls in DTensor, HyperDTensor:
            leaf = shard(cls, ramp(4, 6), mesh, text, grad=True)
            local = leaf.to_local(grad_placements=placements(grads))
            if grads == "S1":
                local = local.chunk(2, 1)[ctx.rank]
            grad = torch.full(local.shape, 2.0)
            if grads == "S1":
                continue
            local.backward(grad)
            results.append(leaf.grad)
        if results:
            equal_specs(results[1], results[0])
            same(results[1]._local_tensor, results[0]._local_tensor)


@on_ranks(2, 4)
def test_the_gradient_of_a_mean_over_ranks(ctx: RankContext) -> None:
    """The row of the bug table: torch's gradient is R times too large."""
    mesh = ctx.mesh()
    for async_op in False, True:
        summand = torch.full((3,), float(ctx.rank), requires_grad=True)
        mean = HyperDTensor.from_local(summand, mesh, [Partial("avg")]).redistribute(
            placements=[Replicate()], async_op=async_op
        )
        same(mean.detach().to_local(), torch.full((3,), (ctx.world_size - 1) / 2))
        mean.to_local().sum().backward()
        assert summand.grad is not None
        same(summand.grad, torch.full((3,), 1 / ctx.world_size))

        # The same by finite differences of the whole computation.
        summand.grad = None
        moved = HyperDTensor.from_local(summand, mesh, [Partial("avg")]).redistribute(
            placements=[Shard(0)]
        )
        (moved * moved).sum().backward()
        same(summand.grad, 2 * mean.detach().to_local() / ctx.world_size)


@on_ranks(4)
def test_the_gradient_of_a_mean_over_one_of_two_axes(ctx: RankContext) -> None:
    mesh = ctx.mesh(2, 2)
    summand = torch.ones(4, requires_grad=True)
    made = HyperDTensor.from_local(summand, mesh, [Shard(0), Partial("avg")])
    made.full_tensor().sum().backward()
    assert summand.grad is not None
    same(summand.grad, torch.full((4,), 0.5))


@on_ranks(2)
def test_the_residual_may_be_added_in_place(ctx: RankContext) -> None:
    """What a style hands out may be written to, as on one device: y = rowwise(x); y += x."""
    mesh = ctx.mesh()
    for pending in False, True:
        x = torch.ones(4, 6, requires_grad=True)
        partial = HyperDTensor.from_local(x * 2, mesh, [Partial()])
        y = take_local(partial.redistribute(placements=[Replicate()], async_op=pending))
        y += x
        same(y.detach() + 0, torch.full((4, 6), 5.0))
        y.sum().backward()
        assert x.grad is not None
        same(x.grad, torch.full((4, 6), 3.0))


@on_ranks(2)
def test_a_local_tensor_that_torch_left_in_flight(ctx: RankContext) -> None:
    """Torch's own asynchronous class is as good a local tensor as ours, and is finished as well."""
    mesh = ctx.mesh()

    def torchs() -> DTensor:
        plain = shard(DTensor, ramp(4, 6), mesh, "S0")
        moved = plain.redistribute(placements=[Replicate()], async_op=True)
        assert isinstance(moved._local_tensor, AsyncCollectiveTensor)
        return moved

    same((as_hyper(torchs()) + 1).to_local(), ramp(4, 6) + 1)
    for text in "R", "S0", "S1":
        sync = as_hyper(torchs()).redistribute(placements=placements(text))
        assert type(sync._local_tensor) is torch.Tensor
        same(sync.full_tensor(), ramp(4, 6))
    partial = HyperDTensor.from_local(torchs().to_local(), mesh, [Partial()])
    same(partial.redistribute(placements=[Shard(1)], async_op=True).full_tensor(), ramp(4, 6) * 2)
    loaded = pickle.loads(pickle.dumps(as_hyper(torchs())))
    assert type(loaded._local_tensor) is torch.Tensor
    same(loaded.to_local(), ramp(4, 6))


@on_ranks(2)
def test_hooks_on_saved_tensors(ctx: RankContext) -> None:
    """What moves saved tensors away gets finished values, and gradients stay right."""
    mesh = ctx.mesh()
    kinds: list[type] = []

    def pack(tensor: torch.Tensor) -> Any:
        kinds.append(type(tensor))
        return tensor.to(torch.float64)

    for hooks in (
        torch.autograd.graph.save_on_cpu(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.to(torch.float32)),
    ):
        leaf = shard(HyperDTensor, ramp(4, 6), mesh, "S0", grad=True)
        w = shard(DTensor, ramp(2, 6), mesh, "S0", grad=True)
        with hooks:
            moved = leaf.redistribute(placements=[Replicate()], async_op=True)
            out = F.linear(moved * moved, w)
        out.sum().redistribute(placements=[Replicate()]).backward()
        whole_x, whole_w = ramp(4, 6).requires_grad_(), ramp(2, 6).requires_grad_()
        F.linear(whole_x * whole_x, whole_w).sum().backward()
        for tensor, whole in ((leaf, whole_x), (w, whole_w)):
            assert tensor.grad is not None
            assert whole.grad is not None
            same(tensor.grad.full_tensor(), whole.grad)
    assert kinds


# --- gradients that some part does not have


@on_ranks(2)
def test_parts_that_get_no_gradient(ctx: RankContext) -> None:
    """The row of the bug table: a, b = split; only a enters the loss."""
    mesh = ctx.mesh()
    takes: dict[str, Callable[[Any], Any]] = {
        "split": lambda x: x.split(4, 0)[0],
        "split last": lambda x: x.split(4, 0)[1],
        "split sizes": lambda x: x.split([1, 2, 5], 0)[1],
        "chunk": lambda x: x.chunk(2, 1)[1],
        "unbind": lambda x: x.unbind(1)[0],
        "unbind of three": lambda x: x.unbind(0)[2] + x.unbind(0)[5],
        "tensor_split": lambda x: x.tensor_split(3, 1)[0],
    }
    cases = {
        f"{name}, {text}, {async_op}": (take, text, async_op)
        for (name, take), text, async_op in itertools.product(
            takes.items(), ["S0", "S1", "Psum"], [False, True]
        )
    }

    def check(name: str, case: tuple[Callable[[Any], Any], str, bool]) -> None:
        take, text, async_op = case
        leaf = shard(HyperDTensor, ramp(8, 6), mesh, text, grad=True)
        moved = leaf.redistribute(placements=[Replicate()], async_op=async_op)
        (take(moved) * 2).sum().backward()
        whole = ramp(8, 6).requires_grad_()
        (take(whole) * 2).sum().backward()
        assert leaf.grad is not None
        assert whole.grad is not None
        same(leaf.grad.full_tensor(), whole.grad)

    by_name(cases, check)


@on_ranks(2)
def test_an_output_that_enters_no_loss(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    leaf = shard(HyperDTensor, ramp(4, 6), mesh, "S0", grad=True)
    used, unused = (leaf.redistribute(placements=[Replicate()], async_op=True) for _ in range(2))
    used.sum().backward()
    del used, unused
    assert work_registry_size() == 0
    assert leaf.grad is not None
    same(leaf.grad.full_tensor(), torch.ones(4, 6))


# --- writes


@on_ranks(2)
def test_writes_on_a_hyper_dtensor(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    writes: dict[str, Callable[[Any, Any], Any]] = {
        "add_": lambda x, y: x.add_(y),
        "add_ scalar": lambda x, y: x.add_(1),
        "iadd": lambda x, y: x.__iadd__(y),
        "mul_": lambda x, y: x.mul_(2),
        "copy_": lambda x, y: x.copy_(y),
        "zero_": lambda x, y: x.zero_(),
        "fill_": lambda x, y: x.fill_(2),
        "relu_": lambda x, y: x.relu_(),
        "clamp_": lambda x, y: x.clamp_(0),
        "masked_fill_": lambda x, y: x.masked_fill_(y > 0, 5),
        "addcmul_": lambda x, y: x.addcmul_(y, y),
        "lerp_": lambda x, y: x.lerp_(y, 0.5),
        "out": lambda x, y: torch.mul(x, y, out=x),
        "t_": lambda x, y: x.t_(),
        "transpose_": lambda x, y: x.transpose_(0, 1),
        "unsqueeze_": lambda x, y: x.unsqueeze_(0),
        "squeeze_": lambda x, y: x.unsqueeze_(1).squeeze_(1),
        "setitem": lambda x, y: (x.__setitem__((slice(None), 1), 7.0), x)[1],
        "view write": lambda x, y: (x.view(2, 2, 6)[:, :, 1:3].mul_(3), x)[1],
        "transposed write": lambda x, y: (x.t().add_(1), x)[1],
        "foreach_add_": lambda x, y: (torch._foreach_add_([x, x], [y, y]), x)[1],
        "foreach_mul_": lambda x, y: (torch._foreach_mul_([x], 2.0), x)[1],
    }
    refused: list[str] = []
    for text in "R", "S0", "S1":

        def check(name: str, write: Callable[[Any, Any], Any], text: str = text) -> None:
            expected = shard(DTensor, ramp(4, 6), mesh, text)
            try:
                write(expected, shard(DTensor, ramp(4, 6) * 2, mesh, text))
            except REFUSALS as error:
                with pytest.raises(type(error)):
                    write(
                        shard(HyperDTensor, ramp(4, 6), mesh, text),
                        shard(HyperDTensor, ramp(4, 6) * 2, mesh, text),
                    )
                refused.append(name)
                return
            variants = [shard(HyperDTensor, ramp(4, 6), mesh, text)]
            if text == "R":
                variants.append(pending_replica(ctx, ramp(4, 6), mesh))
            for x in variants:
                result = write(x, shard(HyperDTensor, ramp(4, 6) * 2, mesh, text))
                assert result is x
                equal(x, expected)
                equal(x + 1, expected + 1)
            plain = shard(DTensor, ramp(4, 6), mesh, text)
            assert write(plain, shard(HyperDTensor, ramp(4, 6) * 2, mesh, text)) is plain
            equal_specs(plain, expected)
            assert torch.equal(plain._local_tensor, expected._local_tensor)

        refused.clear()
        by_name(writes, check)
        assert len(refused) <= 5, refused


@on_ranks(2)
def test_squeeze_in_place_changes_the_global_shape(ctx: RankContext) -> None:
    """Torch's DTensor keeps the old one, for which F.linear of one vector fails in backward."""
    mesh = ctx.mesh()
    for text, squeezed in [("R", "R"), ("S1", "S0")]:
        leaf = shard(HyperDTensor, ramp(1, 6), mesh, text, grad=True)
        x = leaf * 1
        assert x.squeeze_(0) is x
        assert (x.shape, x.stride()) == ((6,), (1,))
        assert list(x.placements) == placements(squeezed)
        same((x * 2).detach().full_tensor(), ramp(6) * 2)
        x.redistribute(placements=[Replicate()]).sum().backward()
        assert leaf.grad is not None
        same(leaf.grad.full_tensor(), torch.ones(1, 6))


@on_ranks(2)
def test_squeeze_in_place_of_what_has_views_is_refused(ctx: RankContext) -> None:
    """Autograd would repeat the view's ops on the new shape, as it does for torch's DTensor."""
    leaf = shard(HyperDTensor, ramp(1, 4, 4, 4), ctx.mesh(), "S3", grad=True)
    x = leaf * 1
    view = x.transpose(1, 2)
    for what in x, view:
        with pytest.raises(RuntimeError, match="Expected a tensor without views"):
            what.squeeze_(0)
    del what, view
    assert x.squeeze_(0).shape == (4, 4, 4)
    x.transpose(0, 1).sum().backward()
    assert leaf.grad is not None
    same(leaf.grad.full_tensor(), torch.ones(1, 4, 4, 4))


@on_ranks(2)
def test_writes_under_autograd(ctx: RankContext) -> None:
    mesh = ctx.mesh()

    def written(x: Any) -> Any:
        x = x * 1
        x.mul_(2)
        x[:, 1].zero_()
        x += x.detach()
        return (x * x).sum()

    whole = ramp(4, 6).requires_grad_()
    (expected,) = torch.autograd.grad(written(whole), whole)
    for text in "R", "S0":
        leaf = shard(HyperDTensor, ramp(4, 6), mesh, text, grad=True)
        moved = leaf.redistribute(placements=[Replicate()], async_op=True)
        (grad,) = torch.autograd.grad(written(moved), leaf)
        same(grad.full_tensor(), expected)
    leaf = shard(HyperDTensor, ramp(4, 6), mesh, "R", grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        leaf.add_(1)
    squared = leaf * 2
    square = squared * squared
    squared.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


# --- random ops


@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")
@on_ranks(2)
def test_random_ops_are_those_of_dtensor(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    draws: dict[str, Callable[[Any], Any]] = {
        "dropout": lambda x: F.dropout(x, 0.5),
        "rand_like": lambda x: torch.rand_like(x),  # noqa: PLW0108
        "randn_like": lambda x: torch.randn_like(x),  # noqa: PLW0108
        "bernoulli": lambda x: (x.abs() / 4).bernoulli(),
        "uniform_": lambda x: x.clone().uniform_(),
        "normal_": lambda x: x.clone().normal_(),
        "dropout of a view": lambda x: F.dropout(x.view(2, 2, 6), 0.5),
    }
    for text in "R", "S0", "S1":

        def check(name: str, draw: Callable[[Any], Any], text: str = text) -> None:
            results = []
            for cls in DTensor, HyperDTensor:
                torch.manual_seed(7)
                results.append(draw(shard(cls, ramp(4, 6), mesh, text)))
                results.append(draw(shard(cls, ramp(4, 6), mesh, text)))
            equal(results[2], results[0])
            equal(results[3], results[1])

        by_name(draws, check)
    torch.manual_seed(7)
    dropped = F.dropout(pending_replica(ctx, ramp(4, 6), mesh), 0.5)
    torch.manual_seed(7)
    same(dropped.to_local(), F.dropout(shard(DTensor, ramp(4, 6), mesh, "R"), 0.5).to_local())
    leaf = shard(HyperDTensor, torch.ones(4, 6), mesh, "S0", grad=True)
    out = F.dropout(leaf, 0.5)
    out.sum().backward()
    assert leaf.grad is not None
    same(leaf.grad.to_local(), out.detach().to_local())


# --- copies


@on_ranks(2)
def test_copies(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    tensors = {
        "shard": shard(HyperDTensor, ramp(4, 6), mesh, "S0"),
        "uneven": shard(HyperDTensor, ramp(5, 6), mesh, "S0"),
        "leaf": shard(HyperDTensor, ramp(4, 6), mesh, "S1", grad=True),
        "pending": pending_replica(ctx, ramp(4, 6), mesh),
        "view": pending_replica(ctx, ramp(4, 6), mesh).t(),
    }
    for name, tensor in tensors.items():
        file = io.BytesIO()
        torch.save({"x": tensor}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)["x"]
        pickled = pickle.loads(pickle.dumps(tensor))
        for copied in loaded, pickled:
            assert type(copied) is DTensor, name
            assert type(copied._local_tensor) is torch.Tensor
            equal_specs(copied, tensor)
            same(copied.detach()._local_tensor, materialized_local(tensor))
        deep = copy.deepcopy(tensor)
        equal_specs(deep, tensor)
        same(deep.detach().full_tensor(), tensor.detach().full_tensor())
        with torch.no_grad():
            deep.add_(1)
        assert not torch.equal(deep.full_tensor(), tensor.full_tensor())
        same(copy.copy(tensor).detach().full_tensor(), tensor.detach().full_tensor())


def materialized_local(tensor: DTensor) -> torch.Tensor:
    local = tensor.detach()._local_tensor
    return local.materialize() if isinstance(local, PendingLocal) else local


@on_ranks(2)
def test_a_parameter(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    for tensor in (
        shard(HyperDTensor, ramp(4, 6), mesh, "S0"),
        pending_replica(ctx, ramp(4, 6), mesh),
    ):
        parameter = torch.nn.Parameter(tensor)
        assert isinstance(parameter, torch.nn.Parameter)
        assert isinstance(parameter, HyperDTensor)
        module = torch.nn.Module()
        module.weight = parameter
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.5, weight_decay=0.0)
        (module.weight * module.weight).sum().backward()
        assert type(parameter.grad) is DTensor
        assert type(parameter.grad._local_tensor) is torch.Tensor
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1e9)
        # Shards' norms are squared and summed: the last bit may differ.
        torch.testing.assert_close(
            norm.full_tensor(), torch.linalg.vector_norm(2 * ramp(4, 6)), rtol=1e-6, atol=0
        )
        optimizer.step()
        whole = torch.nn.Parameter(ramp(4, 6))
        whole.grad = 2 * ramp(4, 6)
        torch.optim.AdamW([whole], lr=0.5, weight_decay=0.0).step()
        same(parameter.detach().full_tensor(), whole.detach())
        state = module.state_dict()
        module.load_state_dict({name: value + 1 for name, value in state.items()})
        same(parameter.detach().full_tensor(), whole.detach() + 1)


# --- gradients at leaves


@on_ranks(2)
def test_gradients_of_leaves_are_plain(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    cases = {
        f"{leaf}, {text}, {async_op}": (leaf, text, async_op)
        for leaf, text, async_op in itertools.product(
            ["local", "plain", "hyper", "parameter"], ["S0", "S1", "R", "Psum"], [False, True]
        )
    }

    def check(name: str, case: tuple[str, str, bool]) -> None:
        kind, text, async_op = case
        made = shard(HyperDTensor if kind == "hyper" else DTensor, ramp(4, 6), mesh, text)
        leaf = made.to_local() if kind == "local" else made
        leaf = torch.nn.Parameter(leaf) if kind == "parameter" else leaf.requires_grad_()
        seen: list[Any] = []
        leaf.register_hook(seen.append)
        leaf.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad))
        for _ in range(2):  # the second adds to the first
            if kind == "local":
                hyper = HyperDTensor.from_local(leaf, mesh, placements(text))
            else:
                hyper = as_hyper(leaf)
            target = "R" if text != "R" else "S1"
            moved = hyper.redistribute(placements=placements(target), async_op=async_op)
            moved.sum().backward()
        grad = leaf.grad
        assert type(grad) is (torch.Tensor if kind == "local" else DTensor)
        local = grad if kind == "local" else grad._local_tensor
        assert type(local) is torch.Tensor
        assert torch.equal(local, torch.full_like(local, 2.0))
        assert type(seen[1]) is type(grad)
        assert len(seen) == 4

    by_name(cases, check)


@on_ranks(2)
def test_autograd_grad_retain_grad_and_hooks(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    leaf = shard(HyperDTensor, ramp(4, 6), mesh, "S0", grad=True)
    inner = leaf * 2
    inner.retain_grad()
    moved = inner.redistribute(placements=[Replicate()], async_op=True)
    moved.register_hook(lambda grad: grad * 3)
    out = (moved * moved).sum()
    (from_grad,) = torch.autograd.grad(out, leaf, retain_graph=True)
    same(from_grad.full_tensor(), 3 * 8 * ramp(4, 6))
    out.backward()
    assert inner.grad is not None
    assert inner.grad.placements == (Shard(0),)
    # Both passes leave a gradient there, as on one device.
    same(inner.grad.full_tensor(), 2 * 3 * 4 * ramp(4, 6))
    assert leaf.grad is not None
    same(leaf.grad.full_tensor(), 3 * 8 * ramp(4, 6))
    replaced = leaf * 1
    replaced.register_hook(lambda grad: shard(DTensor, torch.ones(4, 6), mesh, "S0"))
    (grad,) = torch.autograd.grad(replaced.sum(), leaf)
    same(grad.full_tensor(), torch.ones(4, 6))


@on_ranks(2)
def test_gradgrad(ctx: RankContext) -> None:
    mesh = ctx.mesh()

    def penalty(x: Any, w: Any, move: Callable[[Any], Any]) -> Any:
        out = (move(F.linear(move(x), w)) ** 2).sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        return (grad * grad).sum()

    whole_x, whole_w = ramp(4, 6).requires_grad_(), ramp(2, 6).requires_grad_()
    expected = torch.autograd.grad(penalty(whole_x, whole_w, lambda t: t), (whole_x, whole_w))
    for text, weight, async_op in itertools.product(["S0", "R", "S1"], ["R", "S0"], [False, True]):
        x = shard(HyperDTensor, ramp(4, 6), mesh, text, grad=True)
        w = shard(DTensor, ramp(2, 6), mesh, weight, grad=True)
        grads = torch.autograd.grad(
            penalty(
                x,
                w,
                lambda t, a=async_op: t.redistribute(placements=[Replicate()], async_op=a),
            ),
            (x, w),
        )
        for grad, whole in zip(grads, expected, strict=True):
            same(grad.full_tensor(), whole)


@on_ranks(2)
def test_checkpoint(ctx: RankContext) -> None:
    """Reentrant or not: the same gradients, and no collective is left after the step."""
    mesh = ctx.mesh()

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        hyper = HyperDTensor.from_local(x, mesh, [Shard(0)])
        moved = hyper.redistribute(placements=[Replicate()], async_op=True)
        out = F.linear(moved, w).redistribute(placements=[Shard(0)], async_op=True)
        return take_local(out)

    whole_x, whole_w = ramp(4, 6).requires_grad_(), ramp(2, 6).requires_grad_()
    expected = torch.autograd.grad((F.linear(whole_x, whole_w) ** 2).sum(), (whole_x, whole_w))
    for reentrant in False, True:
        for weight in "R", "S0":
            x = shard(DTensor, ramp(4, 6), mesh, "S0").to_local().clone().requires_grad_()
            w = shard(DTensor, ramp(2, 6), mesh, weight, grad=True)
            out = checkpoint(block, x, w, use_reentrant=reentrant)
            (out**2).sum().backward()
            del out
            assert work_registry_size() == 0
            assert type(x.grad) is torch.Tensor
            same(x.grad, expected[0].chunk(2)[ctx.rank])
            assert w.grad is not None
            same(w.grad.full_tensor(), expected[1])


@on_ranks(2)
def test_grad_modes(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    leaf = shard(HyperDTensor, ramp(4, 6), mesh, "S0", grad=True)
    for mode in torch.inference_mode, torch.no_grad:
        with mode():
            moved = leaf.redistribute(placements=[Replicate()], async_op=True)
            assert isinstance(moved.to_local(), PendingLocal)
            out = F.linear(moved, shard(DTensor, ramp(2, 6), mesh, "S0"))
            assert type(out) is HyperDTensor
            assert not out.requires_grad
            same(out.full_tensor(), ramp(4, 6) @ ramp(2, 6).t())
            both = torch.cat([moved, moved]).view(2, 4, 6).sum(0)
            same(both.full_tensor(), 2 * ramp(4, 6))
            made = HyperDTensor.from_local(torch.ones(2), mesh, [Shard(0)])
            same(made.full_tensor(), torch.ones(4))
            same(F.relu(moved).reshape(-1).full_tensor(), ramp(4, 6).relu().view(-1))


# --- ops without a rule

if IN_RANK_PROCESS:

    @torch.library.custom_op("hyper_dtensor_tests::flip_rows", mutates_args=())
    def flip_rows(x: torch.Tensor) -> torch.Tensor:
        return x.flip(0).clone()

    @flip_rows.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    flip_rows.register_autograd(lambda ctx, grad: flip_rows(grad))

    @torch.library.custom_op("hyper_dtensor_tests::sums", mutates_args=())
    def sums(xs: Sequence[torch.Tensor], scale: float = 1.0) -> list[torch.Tensor]:
        return [x.sum(0) * scale for x in xs]

    @sums.register_fake
    def _(xs: Sequence[torch.Tensor], scale: float = 1.0) -> list[torch.Tensor]:
        return [x.new_empty(x.shape[1:]) for x in xs]

    @torch.library.custom_op("hyper_dtensor_tests::zero_first_", mutates_args=("x",))
    def zero_first_(x: torch.Tensor) -> None:
        x[0] = 0


@on_ranks(2)
def test_an_op_without_a_rule_raises_as_in_torch(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    messages = []
    for cls in DTensor, HyperDTensor:
        with pytest.raises(NotImplementedError, match="hyper_dtensor_tests") as raised:
            flip_rows(shard(cls, ramp(4, 6), mesh, "S0"))
        messages.append(str(raised.value).splitlines()[0])
    assert messages[0] == messages[1]


@on_ranks(2)
def test_full_gather_fallback(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    dispatcher_forgets_warnings()
    for text in "S0", "S1", "R", "Psum":
        leaf = shard(HyperDTensor, ramp(4, 6), mesh, text, grad=True)
        with record_overlap() as log, full_gather_fallback():
            if text == "S0":
                with pytest.warns(UserWarning, match=r"flip_rows\.default.*no DTensor sharding"):
                    flipped = flip_rows(leaf)
            else:
                flipped = flip_rows(leaf)  # said once
            assert type(flipped) is HyperDTensor
            assert flipped.placements == (Replicate(),)
            same(flipped.detach().to_local(), ramp(4, 6).flip(0))
            (event,) = log.fallbacks
            assert event.kind == "fallback"
            assert "flip_rows" in event.detail
            assert event.shape == (4, 6)
            assert len(log.collectives) == (text != "R")
            # Its gradient is in that op too.
            (flipped * ramp_like(flipped)).sum().backward()
            assert len(log.fallbacks) == 2
        assert leaf.grad is not None
        same(leaf.grad.full_tensor(), ramp(4, 6).flip(0))

    leaf = shard(HyperDTensor, ramp(4, 6), mesh, "S0", grad=True)
    with full_gather_fallback():
        flipped = flip_rows(leaf)
    with pytest.raises(NotImplementedError, match="flip_rows"):
        flipped.sum().backward()


def ramp_like(tensor: DTensor) -> DTensor:
    return shard(HyperDTensor, ramp(*tensor.shape), tensor.device_mesh, "R")


def dispatcher_forgets_warnings() -> None:
    from pending_dtensor.dispatch import _Fallback

    _Fallback.warned.clear()


@on_ranks(2)
def test_full_gather_fallback_of_lists_and_mixtures(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    dispatcher_forgets_warnings()
    hyper = shard(HyperDTensor, ramp(4, 6), mesh, "S0")
    plain = shard(DTensor, ramp(4, 6), mesh, "S1")
    pending = pending_replica(ctx, ramp(4, 6), mesh)
    with full_gather_fallback(), pytest.warns(UserWarning, match="sums"):
        results = sums([hyper, plain, pending], scale=2.0)
    assert [type(result) for result in results] == [HyperDTensor] * 3
    for result in results:
        assert result.placements == (Replicate(),)
        same(result.to_local(), ramp(4, 6).sum(0) * 2)
    # A write would be lost on the gathered copy.
    with full_gather_fallback(), pytest.raises(NotImplementedError, match="zero_first_"):
        zero_first_(hyper)
    # An op that has a rule is not gathered.
    with record_overlap() as log, full_gather_fallback():
        hyper + 1
    assert log.events == []
    # Blocks nest, and end.
    with full_gather_fallback():
        with full_gather_fallback():
            pass
        flip_rows(hyper) if ctx.rank < 0 else None
        sums([hyper])
    with pytest.raises(NotImplementedError):
        sums([hyper])


# --- remembered plans


@on_ranks(2)
def test_plans_are_kept_apart(ctx: RankContext) -> None:
    """Arguments that are equal in Python but not to an op, and all that decides a plan."""
    mesh = ctx.mesh()
    integers = shard(HyperDTensor, ramp(4, 6, dtype=torch.int64), mesh, "S0")
    other = shard(DTensor, ramp(4, 6, dtype=torch.int64), mesh, "S0")
    for scalar in (1, 1.0, True, 1, 1.0, True):
        equal(integers + scalar, other + scalar)
        equal(integers * scalar, other * scalar)
        equal(
            torch._foreach_mul([integers, integers], [scalar, scalar]),
            torch._foreach_mul([other, other], [scalar, scalar]),
        )
        equal(torch.full_like(integers, scalar), torch.full_like(other, scalar))
    for dim, keepdim in itertools.product([0, 1, -1, (0, 1), (0,)], [False, True]):
        equal(integers.sum(dim, keepdim), other.sum(dim, keepdim))
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bool):
        equal(integers.to(dtype), other.to(dtype))
        equal(torch.zeros_like(integers, dtype=dtype), torch.zeros_like(other, dtype=dtype))
        equal(integers.sum(0, dtype=torch.float64), other.sum(0, dtype=torch.float64))
    for text in ("R", "S0", "S1", "Psum"):
        for dtype in (torch.float32, torch.int64):
            x = shard(HyperDTensor, ramp(4, 6, dtype=dtype), mesh, text)
            y = shard(DTensor, ramp(4, 6, dtype=dtype), mesh, text)
            equal(x + x, y + y)
            equal(x.t(), y.t())
            equal(x.t() + 1, y.t() + 1)
    for shape in ((4, 6), (6, 4), (24,), (2, 12)):
        x = shard(HyperDTensor, ramp(*shape), mesh, "S0")
        y = shard(DTensor, ramp(*shape), mesh, "S0")
        equal(x * 2, y * 2)
        equal(x.reshape(4, 6), y.reshape(4, 6))
        equal(x.reshape(2, 2, 6), y.reshape(2, 2, 6))
    for value in (0.0, -0.0, float("inf"), float("nan")):
        got, expected = integers + value, other + value
        assert torch.equal(torch.signbit(got.to_local()), torch.signbit(expected.to_local()))
        assert torch.allclose(got.to_local(), expected.to_local(), equal_nan=True)
    x = shard(HyperDTensor, ramp(4, 6), mesh, "S0")
    y = shard(DTensor, ramp(4, 6), mesh, "S0")
    for order in (1.0, 2.0, 3.0, float("inf"), 2):  # a number that decides the placement
        equal(torch.linalg.vector_norm(x, order), torch.linalg.vector_norm(y, order))
        equal(torch._foreach_norm([x], order), torch._foreach_norm([y], order))
    x, y = (shard(cls, ramp(4, 6), mesh, "Pmax") for cls in (HyperDTensor, DTensor))
    for factor in (2.0, -2.0, 0.5, -0.5):  # a sign that decides what stays partial
        equal(x * factor, y * factor)


@on_ranks(2)
def test_numbers_that_change_each_step_are_not_planned_anew(ctx: RankContext) -> None:
    x = shard(HyperDTensor, ramp(4, 6), ctx.mesh(), "S0")
    same((x * 0.5).full_tensor(), ramp(4, 6) * 0.5)
    torch._foreach_mul([x, x], [1.0, 2.0])
    x.add(x, alpha=1.0)
    before = len(dispatcher._remembered)
    for step in range(2, 20):
        same((x * (0.5 / step)).full_tensor(), ramp(4, 6) * (0.5 / step))
        same((x * (0.25 * step)).to_local(), x.to_local() * (0.25 * step))
        x * float("nan")
        scaled = torch._foreach_mul([x, x], [0.5 * step, float("nan")])[0]
        same(scaled.to_local(), x.to_local() * (0.5 * step))
        same(x.add(x, alpha=0.5 * step).to_local(), x.to_local() * (1 + 0.5 * step))
    assert len(dispatcher._remembered) == before


@on_ranks(2)
def test_plans_of_two_meshes(ctx: RankContext) -> None:
    for mesh in (ctx.mesh(), ctx.mesh(names=("other",)), ctx.mesh(1, 2), ctx.mesh(2, 1)):
        text = "S0" if mesh.ndim == 1 else "S0 S1"
        x, y = (shard(cls, ramp(4, 6), mesh, text) for cls in (HyperDTensor, DTensor))
        for _ in range(2):
            got = x + 1
            equal(got, y + 1)
            assert got.device_mesh == mesh
            assert got.device_mesh.mesh_dim_names == mesh.mesh_dim_names
            same(got.full_tensor(), ramp(4, 6) + 1)


@on_ranks(2)
def test_a_handler_is_registered_once(ctx: RankContext) -> None:
    with pytest.raises(ValueError, match="Expected one handler for") as raised:
        dispatcher.register_function(F.linear, print)
    assert "linear" in str(raised.value)
    assert "print" in str(raised.value)


# --- linear

LINEAR_PLANS = {
    "column": ("R", "S0", "S0"),
    "row": ("S-1", "S1", "R"),
    "batch": ("S0", "R", "R"),
    "replicate": ("R", "R", "R"),
    "row, sequence input": ("S0", "S1", "R"),
    "column, sequence input": ("S0", "S0", "S0"),
    "partial input": ("Psum", "R", "R"),
    "weight of another kind": ("S-1", "S0", "S0"),
    "bias of another kind": ("R", "S0", "R"),
}


@pytest.mark.parametrize("features", [(6, 4), (5, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("shape", [(), (4,), (2, 1, 3), (0,)], ids=str)
@on_ranks(2)
def test_linear(ctx: RankContext, shape: tuple[int, ...], features: tuple[int, int]) -> None:
    """Against the unsharded layer: value and gradients, for every plan and what falls outside."""
    mesh = ctx.mesh()
    inputs, outputs = features
    whole = [ramp(*shape, inputs), ramp(outputs, inputs), ramp(outputs)]
    cases = {
        f"{name}, bias {bias}, {async_op}": (texts, bias, async_op)
        for (name, texts), bias, async_op in itertools.product(
            LINEAR_PLANS.items(), [False, True], [False, True]
        )
    }

    def check(name: str, case: tuple[tuple[str, str, str], bool, bool]) -> None:
        texts, has_bias, async_op = case
        if not shape and texts[0] == "S0":
            texts = ("R", *texts[1:])
        leaves = [shard(HyperDTensor, whole[0], mesh, texts[0], grad=True)]
        leaves += [
            shard(DTensor, value, mesh, text, grad=True)
            for value, text in zip(whole[1:], texts[1:], strict=True)
        ][: 1 + has_bias]
        x = leaves[0].redistribute(placements=leaves[0].placements, async_op=async_op)
        plain = [value.clone().requires_grad_() for value in whole[: 2 + has_bias]]
        out, expected = F.linear(x, *leaves[1:]), F.linear(*plain)
        assert type(out) is HyperDTensor
        same(out.detach().full_tensor(), expected.detach())
        upstream = ramp(*expected.shape)
        expected.backward(upstream)
        gathered = out.redistribute(placements=[Replicate()], async_op=async_op)
        gathered.backward(shard(HyperDTensor, upstream, mesh, "R"))
        for leaf, value in zip(leaves, plain, strict=True):
            assert type(leaf.grad) is DTensor
            assert type(leaf.grad._local_tensor) is torch.Tensor
            assert value.grad is not None
            # Torch gathers an empty gradient with strides of its own.
            assert leaf.grad.shape == value.grad.shape
            assert torch.equal(leaf.grad.full_tensor(), value.grad)

    by_name(cases, check)


@on_ranks(2)
def test_linear_plans_do_not_communicate(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    for name in ("column", "row", "batch", "replicate"):
        texts = LINEAR_PLANS[name]
        x, w, b = (
            shard(cls, value, mesh, text, grad=True)
            for cls, value, text in zip(
                (HyperDTensor, DTensor, DTensor),
                (ramp(4, 2, 6), ramp(4, 6), ramp(4)),
                texts,
                strict=True,
            )
        )
        with CommDebugMode() as comm:
            out = F.linear(x, w, b)
            out.backward(
                shard(HyperDTensor, ramp(4, 2, 4), mesh, "S2" if name == "column" else texts[0])
                if name != "row"
                else shard(HyperDTensor, ramp(4, 2, 4), mesh, "R")
            )
        assert comm.get_total_counts() == 0, name


@on_ranks(2)
def test_linear_dtypes_and_autocast(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        x = shard(HyperDTensor, ramp(4, 6, dtype=dtype), mesh, "R", grad=True)
        w = shard(DTensor, ramp(4, 6, dtype=dtype), mesh, "S0", grad=True)
        out = F.linear(x, w)
        assert out.dtype == dtype
        same(out.detach().full_tensor(), F.linear(ramp(4, 6, dtype=dtype), ramp(4, 6, dtype=dtype)))
        out.sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        assert x.grad.dtype == w.grad.dtype == dtype

    for name, texts in LINEAR_PLANS.items():
        whole = [ramp(4, 6), ramp(4, 6), ramp(4)]
        leaves = [
            shard(cls, value, mesh, text, grad=True)
            for cls, value, text in zip((HyperDTensor, DTensor, DTensor), whole, texts, strict=True)
        ]
        plain = [value.clone().requires_grad_() for value in whole]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = leaves[0].redistribute(placements=leaves[0].placements, async_op=True)
            out, expected = F.linear(x, *leaves[1:]), F.linear(*plain)
            assert out.dtype == expected.dtype == torch.bfloat16, name
            doubled = F.linear(
                shard(HyperDTensor, ramp(4, 6).double(), mesh, "R"),
                shard(DTensor, ramp(4, 6).double(), mesh, "S0"),
            )
            assert doubled.dtype == torch.float64
        same(out.detach().full_tensor(), expected.detach())
        out.float().sum().redistribute(placements=[Replicate()]).backward()
        expected.float().sum().backward()
        for leaf, value in zip(leaves, plain, strict=True):
            assert leaf.grad is not None
            assert value.grad is not None
            assert leaf.grad.dtype == torch.float32
            same(leaf.grad.full_tensor(), value.grad)
    with pytest.raises(RuntimeError, match="dtype"):
        F.linear(
            shard(HyperDTensor, ramp(4, 6), mesh, "R"),
            shard(DTensor, ramp(4, 6).double(), mesh, "S0"),
        )


@on_ranks(2)
def test_linear_of_what_is_wrong_raises_as_torch_does(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    x = shard(HyperDTensor, ramp(4, 6), mesh, "R")
    w = shard(DTensor, ramp(4, 6), mesh, "S0")
    for bad in (
        lambda: F.linear(x, shard(DTensor, ramp(4, 5), mesh, "S0")),
        lambda: F.linear(x, torch.ones(4, 6)),
        lambda: F.linear(x, w, torch.ones(4)),
        lambda: F.linear(torch.ones(4, 6), as_hyper(w)),
        lambda: F.linear(x, shard(DTensor, ramp(4, 6), ctx.mesh(1, 2), "R S0")),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            bad()


@on_ranks(2)
def test_linear_with_what_needs_no_gradient(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    for needs in itertools.product([False, True], repeat=3):
        if not any(needs):
            continue
        for async_op, texts in itertools.product(
            [False, True], [("R", "S0", "S0"), ("S1", "S1", "R")]
        ):
            whole = [ramp(4, 6), ramp(4, 6), ramp(4)]
            leaves = [
                shard(cls, value, mesh, text, grad=need)
                for cls, value, text, need in zip(
                    (HyperDTensor, DTensor, DTensor), whole, texts, needs, strict=True
                )
            ]
            plain = [v.clone().requires_grad_(n) for v, n in zip(whole, needs, strict=True)]
            source = "S0" if texts[0] == "R" else "S1"
            x = leaves[0].redistribute(placements=placements(source), async_op=async_op)
            x = x.redistribute(placements=placements(texts[0]), async_op=async_op)
            out = F.linear(x, *leaves[1:])
            F.linear(*plain).sum().backward()
            out.sum().redistribute(placements=[Replicate()]).backward()
            for leaf, value in zip(leaves, plain, strict=True):
                assert (leaf.grad is None) == (value.grad is None)
                if value.grad is not None:
                    assert leaf.grad is not None
                    same(leaf.grad.full_tensor(), value.grad)


@on_ranks(2)
def test_the_weight_may_change_between_forwards(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    w = shard(DTensor, ramp(4, 6), mesh, "S0", grad=True)
    x = shard(HyperDTensor, ramp(4, 6), mesh, "R", grad=True)
    first = F.linear(x, w)
    with torch.no_grad():
        w.mul_(2)
    same(F.linear(x, w).detach().full_tensor(), ramp(4, 6) @ ramp(4, 6).t() * 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


@on_ranks(2)
def test_the_reduction_of_grad_input_is_launched_before_grad_weight(ctx: RankContext) -> None:
    """For one linear, and for three that share what was gathered."""
    mesh = ctx.mesh()
    for siblings in (1, 3):
        leaf = ramp(4, 6).chunk(2)[ctx.rank].clone().requires_grad_()
        weights = [shard(DTensor, ramp(4, 6), mesh, "S0", grad=True) for _ in range(siblings)]
        order: list[str] = []
        for weight in weights:
            weight.register_post_accumulate_grad_hook(
                lambda _, order=order: order.append("AccumulateGrad")
            )
        x = HyperDTensor.from_local(leaf, mesh, [Shard(0)])
        gathered = x.redistribute(placements=[Replicate()], async_op=True)
        outs = [F.linear(gathered, weight) for weight in weights]
        loss = sum((out.sum() for out in outs[1:]), outs[0].sum())
        with Ops(order):
            loss.backward()
        steps = [step for step in order if step in ("mm", "reduce", "wait", "AccumulateGrad")]
        launch = steps.index("reduce")
        assert steps[:launch] == ["mm"] * siblings
        assert steps[launch + 1 : steps.index("wait")].count("mm") == siblings
        assert steps.count("AccumulateGrad") == siblings
        assert steps[-1] == "wait"
        expected = torch.ones(4, 4) @ ramp(4, 6) * siblings
        assert leaf.grad is not None
        same(leaf.grad, expected.chunk(2)[ctx.rank])
        for weight in weights:
            assert weight.grad is not None
            same(weight.grad.full_tensor(), torch.ones(4, 4) @ ramp(4, 6))


if IN_RANK_PROCESS:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Ops(TorchDispatchMode):
        """Writes down what runs on local tensors."""

        names: ClassVar = {
            aten.mm.default: "mm",
            torch.ops._c10d_functional.reduce_scatter_tensor.default: "reduce",
            torch.ops._c10d_functional.wait_tensor.default: "wait",
        }

        def __init__(self, order: list[str]) -> None:
            super().__init__()
            self.order = order

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if not any(issubclass(kind, DTensor) for kind in types):
                self.order.append(self.names.get(func, "other"))
            return func(*args, **(kwargs or {}))


# --- meshes of two axes


@on_ranks(4)
def test_two_axes(ctx: RankContext) -> None:
    mesh = ctx.mesh(2, 2)
    whole_x, whole_w = ramp(4, 6).requires_grad_(), ramp(4, 6).requires_grad_()
    loss = F.linear(whole_x * 2, whole_w).relu().sum()
    expected = torch.autograd.grad(loss, (whole_x, whole_w))
    for source, target, weight in [
        ("S0 S1", "S0 R", "R S0"),
        ("S0 S0", "S0 R", "R S0"),
        ("S0 R", "S0 S1", "R S1"),
        ("R S0", "R R", "S0 S1"),
        ("S1 R", "R S0", "R R"),
        ("Psum S0", "S0 R", "R S0"),
    ]:
        for async_op in False, True:
            x = shard(HyperDTensor, ramp(4, 6), mesh, source, grad=True)
            w = shard(DTensor, ramp(4, 6), mesh, weight, grad=True)
            moved = (x * 2).redistribute(placements=placements(target), async_op=async_op)
            out = F.linear(moved, w).redistribute(placements=placements("S0 R"), async_op=async_op)
            result = out.relu().sum().full_tensor()
            same(result.detach(), loss.detach())
            result.backward()
            for leaf, grad in zip((x, w), expected, strict=True):
                assert type(leaf.grad) is DTensor
                same(leaf.grad.full_tensor(), grad)
