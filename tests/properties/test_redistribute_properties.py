"""Any redistribution: async equals sync equals torch's DTensor, to the last bit."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks
from tests.common.exact import same_bits
from tests.common.property_profiles import examples

if IN_RANK_PROCESS:
    import torch
    from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard

    from pending_dtensor import HyperDTensor, record_overlap
    from pending_dtensor.pending_local import materialized

    MODES = {
        "grad": torch.enable_grad,
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
    }


class Move(NamedTuple):
    """One redistribution of a chain; dtypes are of torch's arguments, "" for None."""

    target: tuple[str, ...]
    forward_dtype: str = ""
    backward_dtype: str = ""


class Case(NamedTuple):
    """A tensor, a chain of redistributions, and a gradient that comes back.

    Placements are named as in ``("S0", "Psum")``, one for each mesh axis.

    Attributes:
        layout: how the local tensor lies in memory.
        tell_shape: whether from_local is told the global shape, where it need not be.
        mode: of autograd, while the tensor is moved.
        leave: whether the chain ends in `to_local`, and the gradient starts there.
        gradient: placements of the gradient, if the chain ends in a DTensor.
    """

    source: tuple[str, ...]
    moves: tuple[Move, ...]
    shape: tuple[int, ...]
    dtype: str
    layout: str
    tell_shape: bool
    mode: str
    leave: bool
    gradient: tuple[str, ...]
    gradient_layout: str
    seed: int


LAYOUTS = ["contiguous", "transposed", "strided", "offset", "expanded"]
FLOATS = ["float32", "bfloat16", "float64", "float16"]
MODE_NAMES = [*["grad"] * 5, "no_grad", "inference", "inference, made in it"]
PARTIALS = ["Psum", "Pavg", "Pmax", "Pmin"]


@st.composite
def cases(draw: st.DrawFn, axes: int) -> Case:
    # 12 is even on each number of ranks; the others are uneven, or leave some ranks with nothing.
    sizes = st.sampled_from([12, 4, 3, 1, 5, 2, 7, 0])
    shape = tuple(draw(st.lists(sizes, min_size=0, max_size=3)))
    wholes = st.sampled_from(["R", *(f"S{dim}" for dim in range(-len(shape), len(shape)))])
    source = draw(sources(axes, wholes))
    moves: list[Move] = []
    current = source
    for _ in range(draw(st.integers(1, 3))):
        # A Partial may also stay what it is.
        target = tuple(
            draw(wholes | st.just(name) if name in PARTIALS else wholes) for name in current
        )
        dtypes = ("", "")
        if draw(st.integers(0, 4)) == 4:
            dtypes = draw(st.tuples(*[st.sampled_from(["", *FLOATS])] * 2))
        moves.append(Move(target, *dtypes))
        current = target
    # Gloo has no mean of integers.
    integers = [] if "Pavg" in source else ["int64", "int32"]
    dtype = draw(st.sampled_from([*FLOATS, *integers]))
    if not dtype.startswith(("float", "bfloat")):
        moves = [Move(move.target) for move in moves]
    on_the_way = {name for names in (source, *(m.target for m in moves)) for name in names}
    # Torch turns no Partial into another.
    gradients = wholes if on_the_way & set(PARTIALS[1:]) else wholes | st.just("Psum")
    # The division by the ranks rounds, and would be before or after the sum of an expansion.
    layouts = LAYOUTS[:-1] if "Pavg" in source else LAYOUTS
    return Case(
        source,
        tuple(moves),
        shape,
        dtype,
        layout=draw(st.sampled_from(layouts)),
        tell_shape=draw(st.booleans()),
        mode=draw(st.sampled_from(MODE_NAMES)),
        leave=draw(st.booleans()),
        gradient=tuple(draw(gradients) for _ in range(axes)),
        gradient_layout=draw(st.sampled_from(LAYOUTS)),
        seed=draw(st.integers(0, 99)),
    )


def sources(axes: int, wholes: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[str, ...]]:
    """Placements whose reductions, if several, may be done in any order."""
    kinds = [["Pavg"], ["Psum", "Pavg"], ["Psum"], ["Pmax"], ["Pmin"]]
    return st.sampled_from(kinds).flatmap(
        lambda partials: st.tuples(*[wholes | st.sampled_from(partials)] * axes)
    )


@examples(120)
@given(case=cases(axes=1))
@on_ranks(2, 3, 4, keep_if_all_raise=True)
def test_one_axis(ctx: RankContext, case: Case) -> None:
    compare_with_torch(ctx.mesh(), case)


@examples(120)
@given(case=cases(axes=2))
@on_ranks(4, keep_if_all_raise=True)
def test_two_axes(ctx: RankContext, case: Case) -> None:
    compare_with_torch(ctx.mesh(2, 2), case)


def compare_with_torch(mesh: DeviceMesh, case: Case) -> None:
    with warnings.catch_warnings():
        # Torch's redistribute makes outputs that require a gradient also where there is no graph,
        # and then warns of them.
        warnings.filterwarnings("ignore", "To construct DTensor from")
        expected = outcome(DTensor, mesh, case)
    for axis, name in enumerate(case.source):
        # Torch forgets that each rank enters a mean with weight 1 / R.
        if name == "Pavg" and "leaf gradient" in expected:
            expected["leaf gradient"] = expected["leaf gradient"] * (1 / mesh.size(axis))
    kinds = []
    for async_op in False, True:
        with record_overlap() as log:
            got = outcome(HyperDTensor, mesh, case, async_op=async_op)
        assert got.keys() == expected.keys(), f"got {got}, expected {expected}"
        for name, value in got.items():
            equal(name, value, expected[name], graph=case.mode == "grad" or name == "made")
        assert "error" in got or all(event.readable is not None for event in log.events)
        kinds.append([(event.kind, event.shape, event.group) for event in log.events])
    assert kinds[0] == kinds[1]


def outcome(cls: type[DTensor], mesh: DeviceMesh, case: Case, **options: Any) -> dict[str, Any]:
    """What `done` gives, all of it read, or the error that it or the reading raises."""
    try:
        seen = done(cls, mesh, case, **options)
        for value in seen.values():
            materialized(value._local_tensor if isinstance(value, DTensor) else value)
    except Exception as error:
        return {"error": error}
    return seen


def equal(name: str, got: Any, expected: Any, graph: bool) -> None:
    """Asserts equality: in every bit, and of placements, shapes, strides and dtypes."""
    if isinstance(expected, Exception):
        assert isinstance(got, type(expected)), f"got {got!r}, expected {expected!r}"
        return
    assert got.requires_grad == (expected.requires_grad and graph), name
    described, wanted = ((t.shape, t.dtype) for t in (got, expected))
    assert described == wanted, f"{name}: got {described}, expected {wanted}"
    if isinstance(expected, DTensor):
        described, wanted = ((t.placements, t.stride()) for t in (got, expected))
        assert described == wanted, f"{name}: got {described}, expected {wanted}"
        got, expected = got._local_tensor, expected._local_tensor
    same_bits(materialized(got), materialized(expected), name)


def done(cls: type[DTensor], mesh: DeviceMesh, case: Case, **options: Any) -> dict[str, Any]:
    """Everything there is to see after the chain of ``case``, forward and backward, by name."""
    with torch.inference_mode(case.mode == "inference, made in it"):
        dtype = getattr(torch, case.dtype)
        plain = part(mesh, case.source, case.shape, dtype, case.seed)
        leaf = memory(plain, case.layout)
        if not leaf.is_inference():
            leaf.requires_grad_(dtype.is_floating_point)
        local = laid_out(leaf, plain.shape, case.layout)
        told = case.tell_shape or not even(mesh, case.source, case.shape)
        tensor = cls.from_local(
            local, mesh, placements(case.source), **(whole(case) if told else {})
        )
    seen: dict[str, Any] = {"made": tensor}
    arrived: dict[str, DTensor] = {}
    with MODES[case.mode.partition(",")[0]]():
        for index, move in enumerate(case.moves):
            if tensor.requires_grad:
                tensor.register_hook(lambda g, i=index: arrived.update({f"gradient {i}": g}))
            tensor = tensor.redistribute(
                placements=placements(move.target),
                forward_dtype=getattr(torch, move.forward_dtype, None),
                backward_dtype=getattr(torch, move.backward_dtype, None),
                **options,
            )
            seen[f"moved {index}"] = tensor
        if case.leave:
            seen["left"] = tensor.to_local()
    if case.mode == "grad" and tensor.requires_grad:
        names = tuple("R" if name in PARTIALS else name for name in case.moves[-1].target)
        names = names if case.leave else case.gradient
        plain = part(mesh, names, case.shape, tensor.dtype, case.seed + 1)
        grad = laid_out(memory(plain, case.gradient_layout), plain.shape, case.gradient_layout)
        if case.leave:
            seen["left"].backward(grad)
        else:
            tensor.backward(cls.from_local(grad, mesh, placements(names), **whole(case)))
        assert type(leaf.grad) is torch.Tensor
        seen |= arrived | {"leaf gradient": leaf.grad}
    return seen


# --- tensors of a case


def placements(names: Sequence[str]) -> list[Placement]:
    return [
        Replicate()
        if name == "R"
        else Shard(int(name[1:]))
        if name[0] == "S"
        else Partial(name[1:])
        for name in names
    ]


def even(mesh: DeviceMesh, names: Sequence[str], shape: Sequence[int]) -> bool:
    """Whether every rank has a part of the same shape, so that the whole's can be told from it."""
    sizes = list(shape)
    for axis, placement in enumerate(placements(names)):
        if isinstance(placement, Shard):
            sizes[placement.dim], left = divmod(sizes[placement.dim], mesh.size(axis))
            if left:
                return False
    return True


def whole(case: Case) -> dict[str, Any]:
    stride = torch.empty(case.shape, device="meta").stride()
    return {"shape": torch.Size(case.shape), "stride": stride}


def part(
    mesh: DeviceMesh, names: Sequence[str], shape: Sequence[int], dtype: torch.dtype, seed: int
) -> torch.Tensor:
    """This rank's part of random numbers; the summands of a Partial differ over its axis."""
    where = placements(names)
    ranks = [
        mesh.get_local_rank(axis) for axis, placement in enumerate(where) if placement.is_partial()
    ]
    generator = torch.Generator().manual_seed(seed * 100 + sum(10 * rank for rank in ranks))
    numbers = torch.randn(tuple(shape), generator=generator) * 8
    for axis, placement in enumerate(where):
        if isinstance(placement, Shard):
            chunks = numbers.chunk(mesh.size(axis), placement.dim)
            rank = mesh.get_local_rank(axis)
            nothing = numbers.narrow(placement.dim, 0, 0)
            numbers = chunks[rank] if rank < len(chunks) else nothing
    return numbers.to(dtype).contiguous()


def memory(values: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor of which `laid_out` is ``values`` (their first column, repeated, if expanded)."""
    if values.ndim == 0:
        return values.clone()
    if layout == "transposed":
        return values.transpose(0, -1).contiguous()
    if layout == "strided":
        return values.repeat_interleave(2, -1)
    if layout == "offset":
        return torch.cat([values.new_zeros(1, *values.shape[1:]), values])
    if layout == "expanded":
        return values[..., :1].clone()
    return values.clone()


def laid_out(leaf: torch.Tensor, shape: torch.Size, layout: str) -> torch.Tensor:
    """A view of ``leaf`` that has ``shape``, and is laid out in memory as told."""
    if leaf.ndim == 0:
        return leaf
    if layout == "transposed":
        return leaf.transpose(0, -1)
    if layout == "strided":
        return leaf[..., ::2]
    if layout == "offset":
        return leaf[1:]
    if layout == "expanded":
        return leaf.expand(shape)
    return leaf
