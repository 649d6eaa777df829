"""Random parallelized models as plain data, and which of them have to be refused.

No torch here: the parent of the rank processes draws these. A layout is a tensor dim that is
sharded, counted from either end, or None for Replicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")
Layout = int | None

# What may be done to a tensor on its way, sharded or not, with exact gradients. Those that write in
# place come first, so that nothing saved for backward is written to.
IN_PLACE = ("relu_", "mul_")
CONSUMERS = ("relu", "double", "clamp", "turn", "read")


class Layer(NamedTuple):
    """A Linear and its style; what only some styles have is ignored by the others."""

    mc2: bool = False
    bias: bool = True
    async_op: bool = True
    kernel: str = "pipelined"
    chunks: int | Literal["auto"] = "auto"
    regather: bool = False
    column_backward: Literal["fused", "overlap"] = "fused"


class Norm(NamedTuple):
    """A module with SequenceParallel."""

    sequence_dim: int
    local: bool
    async_op: bool = True


class Block(NamedTuple):
    """``after(x + row(between(sum or product of columns(norm(x)))))``.

    Attributes:
        calls: which columns are called, in order: each once, more often, or not at all.
        told: whether `PrepareModuleInput` defers one gather for all columns.
        reads_gather: whether a plain op reads what was gathered, before or after the columns.
        hidden: layout between columns and row.
        out: layout after the row.
    """

    norm: Norm | None
    columns: tuple[Layer, ...]
    calls: tuple[int, ...]
    told: bool
    reads_gather: Literal["", "before", "after"]
    product: bool
    hidden_features: int
    hidden: Layout
    hidden_local: bool
    between: tuple[str, ...]
    row: Layer
    out: Layout
    out_local: bool
    after: tuple[str, ...]
    residual: bool


class Case(NamedTuple):
    """A chain of blocks, and how it is called.

    Attributes:
        shape: of the whole input, features last.
        source: its layout.
        kind: what is handed in: a local tensor, torch's DTensor or a HyperDTensor.
        leaf: whether it is the leaf itself.
        frozen: parameters without gradient, by their number.
        evaluated: whether a forward without gradients goes before the first step.
        refilled: whether the second step writes its input into the tensor of the first.
        checked: whether it runs in `debug_consistency`.
    """

    shape: tuple[int, ...]
    source: Layout
    kind: Literal["local", "dtensor", "hyper"]
    leaf: bool
    input_grad: bool
    blocks: tuple[Block, ...]
    frozen: tuple[int, ...]
    evaluated: bool
    refilled: bool
    checked: bool


# --- drawing


def rarely(chances: int = 8) -> st.SearchStrategy[bool]:
    """True once in so many; False is simplest."""
    # Ends of a range are drawn more often than what is between them.
    return st.integers(0, 8 * chances).map(lambda number: number % chances == chances // 2)


def layers(mc2: bool) -> st.SearchStrategy[Layer]:
    """Any Linear with an MC2 style or a plain one."""
    if not mc2:
        return st.builds(
            lambda bias, async_op: Layer(bias=bias, async_op=async_op), st.booleans(), st.booleans()
        )
    pieces: st.SearchStrategy[int | str] = st.sampled_from(["auto", 1, 2, 3, 100])
    kernels = st.one_of(
        st.tuples(st.just("pipelined"), pieces),
        st.tuples(st.just("decomposed"), st.sampled_from(["auto", 1])),
        st.tuples(st.just("decomposed"), pieces) if mc2 else st.nothing(),
    )
    return st.builds(
        lambda kernel, **rest: Layer(mc2=True, kernel=kernel[0], chunks=kernel[1], **rest),
        kernels,
        bias=st.booleans(),
        regather=st.booleans(),
        column_backward=st.sampled_from(["fused", "overlap"]),
    )


@st.composite
def siblings(draw: st.DrawFn, mc2: bool) -> tuple[Layer, ...]:
    """One to three columns, most often fused alike."""
    count = draw(st.integers(1, 3))
    first = draw(layers(mc2))
    columns = [first]
    for _ in range(count - 1):
        if draw(rarely()):
            columns.append(draw(layers(draw(st.booleans()))))
        else:
            columns.append(first._replace(bias=draw(st.booleans())))
    return tuple(columns)


def consumers() -> st.SearchStrategy[tuple[str, ...]]:
    """Up to one write in place, and ops after it."""
    return st.builds(
        lambda first, others: (*first, *others),
        st.lists(st.sampled_from(IN_PLACE), max_size=1),
        st.lists(st.sampled_from(CONSUMERS), max_size=2),
    )


def dims(ndim: int, *, features: bool) -> st.SearchStrategy[int]:
    """A tensor dim, counted from either end; the last only if ``features``."""
    last = ndim if features else ndim - 1
    return st.integers(0, last - 1).flatmap(lambda dim: st.sampled_from([dim, dim - ndim]))


@st.composite
def layouts(draw: st.DrawFn, ndim: int, chances: int = 8) -> Layout:
    """Mostly a sharded sequence; once in ``chances`` Replicate, or sharded features."""
    if draw(rarely(chances)):
        return draw(st.one_of(st.none(), dims(ndim, features=True)))
    return draw(dims(ndim, features=False))


@st.composite
def blocks(draw: st.DrawFn, ndim: int, source: Layout, local: bool, even: bool) -> Block:
    """A block for a stream of activations that comes in a given layout."""
    locals_ = st.booleans() if even else rarely()
    norm = None
    if draw(st.booleans()) and not (local and source is None):
        # A local tensor is in the layout that the style is told, and in no other.
        dim = source if local else draw(dims(ndim, features=False))
        assert dim is not None
        norm = Norm(dim, draw(locals_), draw(st.booleans()))
    gathered = norm.sequence_dim if norm is not None else source
    fusable = gathered is not None and gathered % ndim != ndim - 1
    columns = draw(siblings(draw(st.booleans()) if fusable else draw(rarely())))
    told = draw(st.booleans()) if columns[0].mc2 else draw(rarely())
    row_mc2 = draw(st.booleans())
    reads = rarely().flatmap(
        lambda early: st.just("before") if early else st.sampled_from(["", "after"])
    )
    return Block(
        norm=norm,
        columns=columns,
        calls=draw(
            st.one_of(
                st.just(tuple(range(len(columns)))),
                st.lists(st.integers(0, len(columns) - 1), min_size=1, max_size=3).map(tuple),
            )
        ),
        told=told,
        reads_gather=draw(reads) if told else "",
        product=draw(st.booleans()),
        hidden_features=12 if even else draw(st.integers(1, 8)),
        hidden=draw(layouts(ndim, 2)) if draw(rarely(3)) else -1,
        hidden_local=draw(locals_),
        between=draw(consumers()),
        row=draw(layers(row_mc2)),
        out=draw(layouts(ndim, 8 if row_mc2 else 3)),
        out_local=draw(locals_),
        after=draw(consumers()),
        residual=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any chain of one or two blocks. Local tensors are rarely uneven, which is refused."""
    ndim = draw(st.integers(2, 4))
    even = draw(st.booleans())
    size = st.just(12) if even else st.integers(0, 5)
    shape = (*draw(st.lists(size, min_size=ndim - 1, max_size=ndim - 1)), draw(st.integers(1, 6)))
    source = draw(layouts(ndim))
    local = draw(st.booleans() if even else rarely())
    kind: Literal["local", "dtensor", "hyper"]
    kind = "local" if local else draw(st.sampled_from(["hyper", "dtensor"]))
    chain: list[Block] = []
    layout = source
    for _ in range(draw(st.integers(1, 2))):
        chain.append(draw(blocks(ndim, layout, local, even)))
        layout, local = chain[-1].out, chain[-1].out_local
    return Case(
        shape=shape,
        source=source,
        kind=kind,
        leaf=draw(st.booleans()),
        input_grad=draw(st.booleans()),
        blocks=tuple(chain),
        frozen=tuple(draw(st.lists(st.integers(0, 12), max_size=4, unique=True))),
        evaluated=draw(st.booleans()),
        refilled=draw(st.booleans()),
        checked=draw(rarely(4)),
    )


# --- what has to be refused


def refusals(case: Case, ranks: int) -> set[str]:
    """Names of the errors of which one has to be raised; none if the case has to run."""
    found: set[str] = set()
    shape, layout, local = case.shape, case.source, case.kind == "local"
    for block in case.blocks:
        if local and _is_uneven(shape, layout, ranks):
            found.add("InconsistentRanksError")
        if block.norm is not None:
            layout, local = block.norm.sequence_dim, block.norm.local
            if local and _is_uneven(shape, layout, ranks):
                found.add("InconsistentRanksError")
        found |= _refusals_of_columns(block, len(shape), layout)
        hidden = (*shape[:-1], block.hidden_features)
        if block.hidden_local and _is_uneven(hidden, block.hidden, ranks):
            found.add("InconsistentRanksError")
        if block.row.mc2 and not _is_sequence(len(shape), block.out):
            found.add("MC2ConstraintError")
        if any(_chunks_are_refused(layer) for layer in (*block.columns, block.row)):
            found.add("MC2ConstraintError")
        layout, local = block.out, block.out_local
    return found


def _refusals_of_columns(block: Block, ndim: int, layout: Layout) -> set[str]:
    found: set[str] = set()
    if not _is_sequence(ndim, layout) and any(column.mc2 for column in block.columns):
        found.add("MC2ConstraintError")
    if not block.told or layout is None:
        return found
    if block.reads_gather == "before":
        found.add("DeferredReadError")
    called: Sequence[Layer] = [block.columns[number] for number in block.calls]
    if not called[0].mc2:
        found.add("MC2ConstraintError")  # nobody has gathered for it
    fused = {(column.kernel, column.column_backward) for column in called if column.mc2}
    if len(fused) > 1:
        found.add("MC2ConstraintError")
    return found


def _is_sequence(ndim: int, layout: Layout) -> bool:
    return layout is not None and layout % ndim != ndim - 1


def _is_uneven(shape: Sequence[int], layout: Layout, ranks: int) -> bool:
    return layout is not None and shape[layout] % ranks != 0


def _chunks_are_refused(layer: Layer) -> bool:
    return layer.mc2 and layer.kernel == "decomposed" and layer.chunks not in ("auto", 1)
