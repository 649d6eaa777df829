"""`HyperDTensor.redistribute` against torch's DTensor: values, placements, gradients, errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks
from tests.common.exact import by_name, same
from tests.common.late_ranks import ahead
from tests.common.script_on_ranks import run_script_on_ranks

if IN_RANK_PROCESS:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import (
        DeviceMesh,
        DTensor,
        Partial,
        Placement,
        Replicate,
        Shard,
        init_device_mesh,
    )
    from torch.distributed.tensor.debug import CommDebugMode

    from pending_dtensor import (
        HyperDTensor,
        PendingLocal,
        PendingState,
        distribute_tensor,
        record_overlap,
    )
    from pending_dtensor.torch_compat import work_registry_size


def parse(text: str) -> list[Placement]:
    """Placements by name, one for each mesh axis: ``"R"``, ``"S0 Psum"``."""
    return [
        Replicate()
        if name == "R"
        else Shard(int(name[1:]))
        if name[0] == "S"
        else Partial(name[1:])
        for name in text.split()
    ]


def local_part(
    ctx: RankContext, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> torch.Tensor:
    """This rank's part of small integers; the summands of a Partial differ over its axis."""
    part = torch.arange(float(torch.Size(shape).numel())).remainder(7).view(*shape)
    for axis, placement in enumerate(placements):
        rank, ranks = mesh.get_local_rank(axis), mesh.size(axis)
        if isinstance(placement, Shard):
            chunks = part.chunk(ranks, placement.dim)
            part = chunks[rank] if rank < len(chunks) else part.narrow(placement.dim, 0, 0)
        elif isinstance(placement, Partial):
            part = part * (rank + 1) * (ranks if placement.reduce_op == "avg" else 1)
    return part.contiguous()


def make(
    cls: type[DTensor],
    ctx: RankContext,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
) -> DTensor:
    """A tensor of ``cls`` without history."""
    local = local_part(ctx, mesh, placements, shape)
    stride = torch.empty(*shape, device="meta").stride()
    made = cls.from_local(
        local.to(dtype or torch.float32),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )
    return made.detach()


def description(tensor: DTensor) -> tuple[Any, ...]:
    local = tensor._local_tensor
    return tensor.placements, tensor.shape, tensor.stride(), tensor.dtype, local.shape, local.dtype


def equal_to_torchs(ours: DTensor, torchs: DTensor) -> None:
    assert description(ours) == description(torchs)
    local = ours._local_tensor
    assert torch.equal(local, torchs._local_tensor), (local, torchs._local_tensor)


def round_trip(
    cls: type[DTensor],
    ctx: RankContext,
    mesh: DeviceMesh,
    case: tuple[str, str, str, Sequence[int]],
    **options: Any,
) -> tuple[DTensor, DTensor, DTensor, dict[str, int]]:
    """Redistributes there and back: the result, the gradient that arrives, the leaf's gradient."""
    source, target, gradient, shape = case
    leaf = make(cls, ctx, mesh, parse(source), shape).requires_grad_()
    arrived: list[DTensor] = []
    inner = leaf * 1
    inner.register_hook(arrived.append)
    with CommDebugMode() as comm:
        out = inner.redistribute(placements=parse(target), **options)
        forward_comm = comm.get_total_counts()
        out.backward(make(cls, ctx, mesh, parse(gradient), shape))
        backward_comm = comm.get_total_counts() - forward_comm
    assert isinstance(leaf.grad, DTensor)
    return out.detach(), arrived[0], leaf.grad, {"out": forward_comm, "grad": backward_comm}


def compare_with_torch(
    ctx: RankContext, mesh: DeviceMesh, case: tuple[str, str, str, Sequence[int]]
) -> None:
    torchs = round_trip(DTensor, ctx, mesh, case)
    late = round_trip(HyperDTensor, ctx, mesh, case, async_op=True)
    sync = round_trip(HyperDTensor, ctx, mesh, case) if mesh.ndim == 1 else late
    for ours in sync, late:
        for got, expected in zip(ours[:3], torchs[:3], strict=True):
            equal_to_torchs(got, expected)
        assert type(ours[0]) is HyperDTensor
        assert type(ours[2]) is DTensor
        assert type(ours[2]._local_tensor) is torch.Tensor
    if sync is not late:
        assert [type(tensor._local_tensor) for tensor in sync[:2]] == [torch.Tensor] * 2
    for tensor, name in zip(late[:2], ("out", "grad"), strict=True):
        if not late[3][name]:
            assert not isinstance(tensor._local_tensor, PendingLocal) or tensor.numel() == 0
        elif not case[name == "grad"].startswith("P"):
            assert isinstance(tensor._local_tensor, PendingLocal)
    # Without NCCL torch has no all_to_all between shards and gathers instead. We do not send empty
    # tensors.
    if not (set(case[0]) & {"S"} and set(case[1] + case[2]) & {"S"}) and late[0].numel():
        assert sync[3] == late[3] == torchs[3]


SOURCES_1D = ["R", "S0", "S1", "Psum", "Pavg", "Pmax", "Pmin"]
TARGETS_1D = ["R", "S0", "S1", "S-1"]


@on_ranks(2, 3)
def test_every_pair_on_one_axis(ctx: RankContext) -> None:
    ranks = ctx.world_size
    shapes = {
        "even": (2 * ranks, ranks, 2),
        "uneven": (2 * ranks - 1, ranks + 1),
        "one": (1, 1),
        "none": (0, 3),
    }
    cases = {
        f"{source} -> {target}, gradient {gradient}, {name}": (source, target, gradient, shape)
        for (name, shape), source, target in itertools.product(
            shapes.items(), SOURCES_1D, TARGETS_1D
        )
        for gradient in ({target, "R", "S0", "Psum"} if name == "uneven" else {target})
        # Torch turns no Partial into another.
        if gradient[0] != "P" or source in (*TARGETS_1D, "Psum")
    }
    mesh = ctx.mesh()
    by_name(cases, lambda name, case: compare_with_torch(ctx, mesh, case))


@on_ranks(4)
def test_every_pair_on_two_axes(ctx: RankContext) -> None:
    mesh = ctx.mesh(2, 2)
    sources = [" ".join(pair) for pair in itertools.product(["R", "S0", "S1", "Psum"], repeat=2)]
    sources += ["Pavg Pavg", "Pmax Pmax", "R Pmin", "S0 Pavg", "Pmax S1"]
    targets = [" ".join(pair) for pair in itertools.product(["R", "S0", "S1"], repeat=2)]
    cases = {
        f"{source} -> {target}, {shape}": (source, target, target, shape)
        for source, target, shape in itertools.product(sources, targets, [(5, 3)])
    }
    for source, target, gradient in [
        ("S0 S1", "R R", "Psum Psum"),
        ("S0 S0", "S1 S1", "R S0"),
        ("Psum R", "S0 S1", "S1 Psum"),
        ("R S1", "S1 R", "S1 S1"),
    ]:
        cases[f"{source} -> {target}, {gradient}"] = (source, target, gradient, (4, 4, 3))
    by_name(cases, lambda name, case: compare_with_torch(ctx, mesh, case))


@on_ranks(4)
def test_axes_that_torch_merges(ctx: RankContext) -> None:
    """Once a flattened mesh exists, torch makes one hop of two on its axes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    cases = {
        f"{source} -> {target}": (source, target, target, shape)
        for source, target, shape in [
            ("Psum Psum", "R R", (3, 5)),
            ("Pavg Pavg", "R R", (3, 5)),
            ("Psum Pavg", "R R", (3, 5)),
            ("Pmax Pmax", "R R", (3, 5)),
            ("Psum Psum", "S0 S0", (5, 3)),
            ("Psum Pavg", "S0 S0", (8, 3)),
            ("S0 S0", "R R", (5, 3)),
            ("S0 S0", "R R", (8, 3)),
            ("S1 S1", "R R", (3, 5)),
            ("S0 S0", "S1 S1", (5, 6)),
            ("R R", "S0 S0", (5, 3)),
        ]
    }
    by_name(cases, lambda name, case: compare_with_torch(ctx, mesh, case))
    mesh["outer", "inner"]._flatten("both")
    by_name(cases, lambda name, case: compare_with_torch(ctx, mesh, case))
    with record_overlap() as log:
        tensor = make(HyperDTensor, ctx, mesh, parse("Psum Psum"), (3, 5))
        moved = tensor.redistribute(placements=parse("R R"), async_op=True)
    assert [event.kind for event in log.events] == ["all_reduce"]
    same(moved.full_tensor(), local_part(ctx, mesh, parse("R R"), (3, 5)) * 9)


@on_ranks(4)
def test_three_axes(ctx: RankContext) -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    for source, target in [
        ("S0 R S1", "R R R"),
        ("S0 S0 S0", "S1 R R"),
        ("Psum S0 Psum", "S0 S0 S1"),
        ("R Psum S2", "S2 R S0"),
    ]:
        compare_with_torch(ctx, mesh, (source, target, target, (5, 3, 4)))


@on_ranks(2)
def test_the_comparison_would_see_a_difference(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    one = make(HyperDTensor, ctx, mesh, [Replicate()], (2, 3))
    with pytest.raises(AssertionError):
        equal_to_torchs(one + 1, make(DTensor, ctx, mesh, [Replicate()], (2, 3)))
    with pytest.raises(AssertionError):
        equal_to_torchs(one, make(DTensor, ctx, mesh, [Shard(0)], (2, 3)))


@on_ranks(2)
def test_an_axis_of_one_rank(ctx: RankContext) -> None:
    mesh = ctx.mesh(1, 2)
    for source, target in [("S0 S1", "R S1"), ("Psum R", "S1 R"), ("S0 R", "S1 R")]:
        compare_with_torch(ctx, mesh, (source, target, target, (3, 4)))
        with record_overlap() as log:
            tensor = make(HyperDTensor, ctx, mesh, parse(source), (3, 4))
            tensor.redistribute(placements=parse(target), async_op=True)
        assert log.events == []


# --- returns at once


@on_ranks(2, 4)
def test_forward_returns_at_once(ctx: RankContext) -> None:
    """The rows of the bug table, for which torch waits inside redistribute, and the others."""
    mesh = ctx.mesh()
    shape = (3, 4 * ctx.world_size, 6)
    kinds = {"R": "all_gather", "S": "all_to_all"}
    cases = {
        "S1 -> R": "all_gather",
        "S-1 -> R": "all_gather",
        "S0 -> S1": "all_to_all",
        "S1 -> S2": "all_to_all",
        "S0 -> R": "all_gather",
        "S2 -> S0": "all_to_all",
        "Psum -> R": "all_reduce",
        "Pavg -> S1": "reduce_scatter",
        "Pmax -> S-1": "reduce_scatter",
    }
    assert set(kinds.values()) < set(cases.values())
    tensors = {
        name: make(HyperDTensor, ctx, mesh, parse(name.split(" -> ")[0]), shape) for name in cases
    }

    def start() -> dict[str, HyperDTensor]:
        return {
            name: tensor.redistribute(placements=parse(name.split(" -> ")[1]), async_op=True)
            for name, tensor in tensors.items()
        }

    def in_flight(name: str, moved: HyperDTensor) -> None:
        local = moved.to_local()
        assert isinstance(local, PendingLocal)
        assert local.state is PendingState.IN_FLIGHT
        assert local.kind == cases[name]

    moved = ahead(ctx, start, lambda moved: by_name(moved, in_flight))
    by_name(
        moved,
        lambda name, tensor: same(
            tensor.to_local(),
            tensors[name].redistribute(placements=tensor.placements).to_local(),
        ),
    )


@on_ranks(2, 4)
def test_backward_returns_at_once(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    shape = (3, 4 * ctx.world_size, 6)
    cases = {
        "Psum -> S1": "all_gather",
        "S0 -> S1": "all_to_all",
        "S1 -> R, gradient Psum": "reduce_scatter",
        "R -> S1": "all_gather",
        "R -> R, gradient Psum": "all_reduce",
    }
    outputs: dict[str, tuple[HyperDTensor, HyperDTensor, HyperDTensor]] = {}
    for name in cases:
        move, _, gradient = name.partition(", gradient ")
        source, target = move.split(" -> ")
        tensor = make(HyperDTensor, ctx, mesh, parse(source), shape).requires_grad_() * 1
        out = tensor.redistribute(placements=parse(target), async_op=True)
        out._local_tensor.wait() if isinstance(out._local_tensor, PendingLocal) else None
        outputs[name] = tensor, out, make(HyperDTensor, ctx, mesh, parse(gradient or target), shape)

    def start() -> dict[str, HyperDTensor]:
        return {
            name: torch.autograd.grad(out, tensor, grad, retain_graph=True)[0]
            for name, (tensor, out, grad) in outputs.items()
        }

    def in_flight(name: str, grad: HyperDTensor) -> None:
        local = grad._local_tensor
        assert isinstance(local, PendingLocal)
        assert local.state is PendingState.IN_FLIGHT
        assert local.kind == cases[name]

    grads = ahead(ctx, start, lambda grads: by_name(grads, in_flight))
    for name, grad in grads.items():
        _, _, upstream = outputs[name]
        expected = upstream.redistribute(placements=grad.placements)
        same(grad._local_tensor, expected._local_tensor)


@on_ranks(4)
def test_only_the_last_of_several_hops_is_in_flight(ctx: RankContext) -> None:
    mesh = ctx.mesh(2, 2)
    with record_overlap() as log:
        tensor = make(HyperDTensor, ctx, mesh, parse("S0 S1"), (5, 3))
        moved = tensor.redistribute(placements=parse("R R"), async_op=True)
        waited = [event.wait_began is not None for event in log.events]
        assert waited == [True, False]
        split = moved.redistribute(placements=parse("S1 R"), async_op=True)
        # A local step after a hop in flight is done at the read.
        assert len(log.events) == 2
        assert isinstance(split._local_tensor, PendingLocal)
        assert split._local_tensor.state is PendingState.IN_FLIGHT
    same(split.full_tensor(), moved.full_tensor())


# --- gradients


@on_ranks(2)
def test_differentiable_twice_and_three_times(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    cases = {
        f"{source} -> {target}, {async_op}": (source, target, async_op)
        for source, target, async_op in itertools.product(
            ["R", "S0", "S1", "Psum"], ["R", "S0", "S1"], [False, True]
        )
    }

    def check(name: str, case: tuple[str, str, bool]) -> None:
        source, target, async_op = case

        def gradients(cls: type[DTensor], **options: Any) -> list[DTensor]:
            leaf = make(cls, ctx, mesh, parse(source), (3, 4)).requires_grad_()
            out = leaf.redistribute(placements=parse(target), **options)
            out = (out * out * out).redistribute(placements=[Replicate()], **options)
            grads = []
            loss = out.sum()
            for _ in range(2):
                (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
                grads.append(grad)
                loss = (grad * grad).sum().redistribute(placements=[Replicate()])
            return grads

        ours = gradients(HyperDTensor, async_op=async_op)
        for got, expected in zip(ours, gradients(DTensor), strict=True):
            equal_to_torchs(got, expected)

        leaf = make(HyperDTensor, ctx, mesh, parse(source), (3, 4)).requires_grad_()
        whole = leaf.detach().full_tensor().requires_grad_()
        value = leaf.redistribute(placements=parse(target), async_op=async_op)
        third, plain = (value**4).sum().redistribute(placements=[Replicate()]), (whole**4).sum()
        for _ in range(3):
            (third,) = torch.autograd.grad(third.sum(), leaf, create_graph=True)
            (plain,) = torch.autograd.grad(plain.sum(), whole, create_graph=True)
        same(third.detach().full_tensor(), plain.detach())

    by_name(cases, check)


@on_ranks(2)
def test_double_backward_to_a_plain_leaf(ctx: RankContext) -> None:
    """The gradient of a plain leaf is finished, and yet has the history that gradgrad needs."""
    mesh = ctx.mesh()
    for source, async_op in itertools.product(["S0", "R", "Psum", "Pavg"], [False, True]):
        leaf = local_part(ctx, mesh, parse(source), (4, 3)).requires_grad_()
        moved = HyperDTensor.from_local(leaf, mesh, parse(source)).redistribute(
            placements=[Replicate() if source[0] != "R" else Shard(0)], async_op=async_op
        )
        loss = (moved**3).sum().redistribute(placements=[Replicate()])
        (grad,) = torch.autograd.grad(loss.to_local(), leaf, create_graph=True)
        assert type(grad) is torch.Tensor
        assert grad.requires_grad, (source, async_op)
        (second,) = torch.autograd.grad(grad.sum(), leaf)

        whole = moved.detach().full_tensor()
        # d(sum of m ** 3)/dx = 3 m ** 2 w and once more 6 m w ** 2, where dm/dx = w on each rank.
        weight = 1 / ctx.world_size if source == "Pavg" else 1.0
        first, again = 3 * whole**2 * weight, 6 * whole * weight**2
        if source == "S0":
            first, again = (t.chunk(ctx.world_size)[ctx.rank] for t in (first, again))
        torch.testing.assert_close(grad.detach(), first)
        torch.testing.assert_close(second, again)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@on_ranks(2)
def test_a_gradient_with_create_graph_reaches_leaves_finished(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    leaf = local_part(ctx, mesh, parse("S0"), (4, 3)).requires_grad_()
    moved = HyperDTensor.from_local(leaf, mesh, parse("S0")).redistribute(
        placements=[Replicate()], async_op=True
    )
    moved.sum().backward(create_graph=True)
    assert type(leaf.grad) is torch.Tensor
    same(leaf.grad.detach(), torch.ones(2, 3))
    leaf.grad = None


# --- dtypes


@on_ranks(2)
def test_forward_and_backward_dtype(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    choices = [None, torch.bfloat16, torch.float64]
    cases = {
        f"{source} -> {target}, {forward}, {backward}": (source, target, forward, backward)
        for (source, target), forward, backward in itertools.product(
            [("S0", "R"), ("Psum", "S1"), ("R", "S0"), ("R", "R"), ("S0", "S1")],
            choices,
            choices,
        )
    }

    def check(name: str, case: tuple[Any, ...]) -> None:
        source, target, forward, backward = case
        results = []
        for cls, async_op in [(DTensor, False), (HyperDTensor, False), (HyperDTensor, True)]:
            leaf = make(cls, ctx, mesh, parse(source), (5, 3)).requires_grad_()
            arrived: list[DTensor] = []
            inner = leaf * 1
            inner.register_hook(arrived.append)
            with record_overlap() as log:
                out = inner.redistribute(
                    placements=parse(target),
                    async_op=async_op,
                    forward_dtype=forward,
                    backward_dtype=backward,
                )
                sent = len(log.events)
                out.backward(torch.ones_like(out))
            assert leaf.grad is not None
            results.append([out.detach(), arrived[0], leaf.grad])
            for number, event in enumerate(log.events):
                wanted = forward if number < sent else backward
                assert event.dtype == (wanted or torch.float32)
        for ours in results[1:]:
            for got, expected in zip(ours, results[0], strict=True):
                equal_to_torchs(got, expected)
        assert results[0][0].dtype == (forward or torch.float32)

    by_name(cases, check)


@on_ranks(2)
def test_a_cast_of_a_value_in_flight_waits_for_the_read(ctx: RankContext) -> None:
    mesh = ctx.mesh()

    def start() -> HyperDTensor:
        tensor = make(HyperDTensor, ctx, mesh, parse("S0"), (5, 3))
        moved = tensor.redistribute(placements=[Replicate()], async_op=True)
        return moved.redistribute(placements=[Shard(1)], async_op=True, forward_dtype=torch.float64)

    def in_flight(moved: HyperDTensor) -> None:
        assert isinstance(moved._local_tensor, PendingLocal)
        assert moved._local_tensor.state is PendingState.IN_FLIGHT
        assert moved.dtype == moved._local_tensor.dtype == torch.float64

    moved = ahead(ctx, start, in_flight)
    same(moved.to_local(), local_part(ctx, mesh, parse("S1"), (5, 3)).double())


# --- values in flight as input


@on_ranks(2)
def test_a_value_in_flight_can_be_redistributed_again(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    leaf = make(HyperDTensor, ctx, mesh, parse("S0"), (5, 3)).requires_grad_()
    moved: Any = leaf
    path = ["R", "S1", "S0", "R", "S0", "S1"]
    for target in path:
        moved = moved.redistribute(placements=parse(target), async_op=True)
    same(moved.detach().to_local(), local_part(ctx, mesh, parse("S1"), (5, 3)))
    moved.backward(make(HyperDTensor, ctx, mesh, parse("S1"), (5, 3)))
    assert leaf.grad is not None
    same(leaf.grad.to_local(), local_part(ctx, mesh, parse("S0"), (5, 3)))


@on_ranks(2)
def test_async_op_false_of_a_value_in_flight_is_finished(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    tensor = make(HyperDTensor, ctx, mesh, parse("S0"), (5, 3))
    moved = tensor.redistribute(placements=[Replicate()], async_op=True)
    for target in ("R", "S0"):
        sync = moved.redistribute(placements=parse(target))
        assert type(sync._local_tensor) is torch.Tensor
        same(sync.to_local(), local_part(ctx, mesh, parse(target), (5, 3)))


@on_ranks(2)
def test_full_tensor(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    for source in SOURCES_1D:
        ours = make(HyperDTensor, ctx, mesh, parse(source), (5, 3)).requires_grad_()
        torchs = make(DTensor, ctx, mesh, parse(source), (5, 3)).requires_grad_()
        for grad_placements in (None, [Replicate()], [Partial()])[: 2 if source[0] == "P" else 3]:
            whole, expected = (
                t.full_tensor(grad_placements=grad_placements) for t in (ours, torchs)
            )
            assert type(whole) is torch.Tensor
            same(whole.detach(), expected.detach())
            grads = [
                torch.autograd.grad(w.sum(), t)[0] for w, t in ((whole, ours), (expected, torchs))
            ]
            equal_to_torchs(grads[0], grads[1])


# --- bad input


def outcome(action: Callable[[], Any]) -> tuple[str, str]:
    """Type and message of what ``action`` raises, and nothing communicated by it."""
    with CommDebugMode() as comm, record_overlap() as log, pytest.raises(Exception) as raised:  # noqa: PT011
        action()
    assert comm.get_total_counts() == 0
    assert log.events == []
    assert work_registry_size() == 0
    error = raised.value
    kinds = [
        kind
        for kind in (TypeError, ValueError, NotImplementedError, RuntimeError)
        if isinstance(error, kind)
    ]
    assert kinds, repr(error)
    return kinds[0].__name__, str(error)


def bad_redistributions(ctx: RankContext) -> dict[str, tuple[str, str, Callable[[], Any]]]:
    """Name -> (type, a word of the message, what is wrong)."""
    mesh = ctx.mesh()
    tensor = make(HyperDTensor, ctx, mesh, parse("S0"), (5, 3))
    scalar = HyperDTensor.from_local(torch.tensor(1.0), mesh, [Replicate()])
    maximum = make(HyperDTensor, ctx, mesh, parse("Pmax"), (5, 3))
    other_mesh = ctx.mesh(1, ctx.world_size)

    def to(
        placements: Any, mesh: Any = None, what: Any = tensor, **options: Any
    ) -> Callable[[], Any]:
        return lambda: what.redistribute(mesh, placements, **options)

    return {
        "no placements": ("ValueError", "got None", to(None)),
        "empty": ("ValueError", "Expected 1 placements", to([])),
        "too many": ("ValueError", "got 2", to([Replicate(), Replicate()])),
        "dim too large": ("ValueError", "from -2 to 1", to([Shard(2)])),
        "dim too small": ("ValueError", "from -2 to 1", to((Shard(-3),))),
        "shard of a scalar": ("ValueError", "Shard", to([Shard(0)], what=scalar)),
        "to Partial": ("ValueError", "Partial", to([Partial()])),
        "to Partial, async": ("ValueError", "Partial", to([Partial()], async_op=True)),
        "to another Partial": ("ValueError", "Partial", to([Partial()], what=maximum)),
        "another mesh": ("NotImplementedError", "mesh", to([Replicate()] * 2, other_mesh)),
        "a bare placement": ("TypeError", "sequence of Placement", to(Replicate())),
        "a string": ("TypeError", "Placement", to("R")),
        "strings": ("TypeError", "Placement", to(["R"])),
        "a class": ("TypeError", "Placement", to([Replicate])),
        "a number": ("TypeError", "Placement", to(0)),
        "nested": ("TypeError", "Placement", to([[Replicate()]])),
        "nested in a tuple": ("TypeError", "Placement", to(([Replicate()],))),
        "a dict": ("TypeError", "Placement", to({"tp": Replicate()})),
        "an int as mesh": ("TypeError", "DeviceMesh", to([Replicate()], 0)),
        "a string as dtype": ("TypeError", "dtype", to([Replicate()], forward_dtype="float64")),
        "a string as backward dtype": (
            "TypeError",
            "dtype",
            to([Replicate()], backward_dtype="float64"),
        ),
    }


@on_ranks(2)
def test_bad_redistributions(ctx: RankContext) -> None:
    refused_alike(ctx, bad_redistributions(ctx))
    tensor = make(HyperDTensor, ctx, ctx.mesh(), parse("S0"), (5, 3))
    moved = tensor.redistribute(ctx.mesh(), (p for p in [Replicate()]), async_op=True)
    same(moved.to_local(), local_part(ctx, ctx.mesh(), parse("R"), (5, 3)))


def refused_alike(ctx: RankContext, cases: dict[str, tuple[str, str, Callable[[], Any]]]) -> None:
    def check(name: str, case: tuple[str, str, Callable[[], Any]]) -> None:
        kind, word, action = case
        got_kind, message = outcome(action)
        messages[name] = f"{got_kind}: {message}"
        assert got_kind == kind, message
        assert word in message, message
        assert message.startswith("Expected "), message
        assert ", got " in message, message

    messages: dict[str, str] = {}
    by_name(cases, check)
    of_ranks: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(of_ranks, messages)
    assert of_ranks == [messages] * ctx.world_size


@on_ranks(2)
def test_bad_inputs_of_from_local(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    part = torch.ones(2, 3)
    hyper = HyperDTensor.from_local(part, mesh, [Shard(0)])

    def make_from(*args: Any, **options: Any) -> Callable[[], Any]:
        return lambda: HyperDTensor.from_local(*args, **options)

    refused_alike(
        ctx,
        {
            "a list": ("TypeError", "torch.Tensor", make_from([1.0], mesh, [Shard(0)])),
            "None": ("TypeError", "torch.Tensor", make_from(None, mesh, [Shard(0)])),
            "a DTensor": ("TypeError", "to_local", make_from(hyper, mesh, [Shard(0)])),
            "too many": ("ValueError", "1 placements", make_from(part, mesh, [Shard(0)] * 2)),
            "strings": ("TypeError", "Placement", make_from(part, mesh, ["S"])),
            "dim": ("ValueError", "from -2 to 1", make_from(part, mesh, [Shard(2)])),
            "shape only": ("ValueError", "stride", make_from(part, mesh, [Shard(0)], shape=(4, 3))),
            "stride only": (
                "ValueError",
                "shape",
                make_from(part, mesh, [Shard(0)], stride=(3, 1)),
            ),
            "grad_placements": (
                "ValueError",
                "1 placements",
                make_from(part, mesh, [Shard(0)], grad_placements=[Shard(0)] * 2),
            ),
            "grad dim": (
                "ValueError",
                "from -2 to 1",
                make_from(part, mesh, [Shard(0)], grad_placements=[Shard(2)]),
            ),
            "to_local": (
                "ValueError",
                "1 placements",
                lambda: hyper.to_local(grad_placements=[Replicate()] * 2),
            ),
            "full_tensor": (
                "ValueError",
                "1 placements",
                lambda: hyper.full_tensor(grad_placements=[]),
            ),
        },
    )


@on_ranks(4)
def test_mixed_kinds_of_partial(ctx: RankContext) -> None:
    mesh = ctx.mesh(2, 2)
    mixed = [Partial(), Partial("max")]
    for action in (
        lambda: HyperDTensor.from_local(torch.ones(2), mesh, mixed),
        lambda: HyperDTensor.from_local(
            torch.ones(2), mesh, [Replicate()] * 2, grad_placements=mixed
        ),
    ):
        kind, message = outcome(action)
        assert kind == "ValueError"
        assert message.startswith("Expected reductions that may be done in any order, got (")
    HyperDTensor.from_local(torch.ones(2), mesh, [Partial(), Partial("avg")])


@on_ranks(2, 4)
def test_parts_that_disagree_are_refused_on_every_rank(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    last = ctx.rank == ctx.world_size - 1
    cases = {
        "shape": torch.ones(2 - last, 3),
        "dtype": torch.ones(2, 3, dtype=torch.float64 if last else torch.float32),
        "stride": torch.ones(3, 2).t() if last else torch.ones(2, 3),
        "ndim": torch.ones(6) if last else torch.ones(2, 3),
    }
    messages = []
    for name, part in cases.items():
        with record_overlap() as log, pytest.raises(ValueError, match="on every rank") as raised:
            HyperDTensor.from_local(part, mesh, [Shard(0)], run_check=True)
        assert log.events == [], name
        assert f"rank {ctx.world_size - 1}" in str(raised.value)
        messages.append(str(raised.value))
    of_ranks: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(of_ranks, messages)
    assert of_ranks == [messages] * ctx.world_size

    # Uneven shards are fine if the shape is told, and then gather.
    checked = HyperDTensor.from_local(
        torch.ones(2 - last, 3),
        mesh,
        [Shard(0)],
        run_check=True,
        shape=(2 * ctx.world_size - 1, 3),
        stride=(3, 1),
    )
    same(checked.full_tensor(), torch.ones(2 * ctx.world_size - 1, 3))
    # Replicated data is taken from the first rank.
    replicated = HyperDTensor.from_local(
        torch.full((2,), float(ctx.rank)), mesh, [Replicate()], run_check=True
    )
    same(replicated.to_local(), torch.zeros(2))


@on_ranks(2)
def test_distribute_tensor(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    whole = torch.arange(15.0).view(5, 3) if ctx.rank == 0 else torch.zeros(5, 3)
    from_first = distribute_tensor(whole, mesh, [Shard(0)])
    assert type(from_first) is HyperDTensor
    same(from_first.full_tensor(), torch.arange(15.0).view(5, 3))
    with CommDebugMode() as comm:
        own = distribute_tensor(whole.requires_grad_(), mesh, [Shard(1)], src_data_rank=None)
    assert comm.get_total_counts() == 0
    assert own.requires_grad
    assert own.is_leaf
    same(own.detach().to_local(), whole.detach().chunk(2, 1)[ctx.rank].contiguous())
    refused_alike(
        ctx,
        {
            "too many": (
                "ValueError",
                "1 placements",
                lambda: distribute_tensor(whole, mesh, [Shard(0)] * 2),
            ),
            "dim": (
                "ValueError",
                "from -2 to 1",
                lambda: distribute_tensor(whole, mesh, [Shard(2)]),
            ),
            "a list": (
                "TypeError",
                "torch.Tensor",
                lambda: distribute_tensor([1.0], mesh, [Shard(0)]),
            ),
            "strings": ("TypeError", "Placement", lambda: distribute_tensor(whole, mesh, ["S"])),
        },
    )


@on_ranks(2)
def test_from_local_on_the_current_mesh(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    with mesh:
        tensor = HyperDTensor.from_local(torch.ones(2))
        shared = distribute_tensor(torch.ones(2))
    assert (tensor.device_mesh, tensor.placements) == (mesh, (Replicate(),))
    assert (shared.device_mesh, shared.placements) == (mesh, (Replicate(),))
    with pytest.raises(RuntimeError):
        HyperDTensor.from_local(torch.ones(2))


DESTROYED = """
    import os

    import torch
    import torch.distributed as dist
    from torch.distributed import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard

    from pending_dtensor import HyperDTensor, record_overlap
    from pending_dtensor.errors import ProcessGroupGoneError

    def join(name):
        dist.init_process_group(
            "gloo", store=dist.FileStore(os.environ["SCRIPT_STORE"] + name, 2),
            rank=int(os.environ["RANK"]), world_size=2,
        )
        return init_device_mesh("cpu", (2,))

    mesh = join("1")
    shard = HyperDTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    partial = HyperDTensor.from_local(torch.ones(2, 3), mesh, [Partial()])
    cached = HyperDTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)])
    moved = shard.redistribute(placements=[Replicate()], async_op=True)
    dist.destroy_process_group()

    def refused(action):
        try:
            action()
        except ProcessGroupGoneError as error:
            assert str(error).startswith("Expected a process group to be alive, got"), error
            assert "init_process_group" in str(error)
        else:
            raise AssertionError("not refused")

    for async_op in False, True:
        refused(lambda: shard.redistribute(placements=[Replicate()], async_op=async_op))
        refused(lambda: shard.redistribute(placements=[Shard(1)], async_op=async_op))
        refused(lambda: partial.redistribute(placements=[Replicate()], async_op=async_op))
        refused(lambda: partial.redistribute(placements=[Shard(0)], async_op=async_op))
    refused(lambda: cached.full_tensor())
    assert (shard + 1).to_local().sum().item() == 12
    assert "HyperDTensor" in repr(shard)
    assert moved.to_local().sum().item() == 12

    mesh = join("2")
    again = HyperDTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    assert again.redistribute(placements=[Replicate()], async_op=True).to_local().sum().item() == 12
    dist.destroy_process_group()
    print("done")
"""


def test_use_after_destroy_process_group() -> None:
    for end in run_script_on_ranks(DESTROYED, 2):
        assert (end.exit_code, end.stdout, end.stderr) == (0, "done\n", "")
