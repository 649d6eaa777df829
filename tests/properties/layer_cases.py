"""Random parallelized models as plain data.

No torch here: the parent of the rank processes draws these. A layout is a tensor dim that is
sharded, counted from either end, or None for Replicate.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")
Layout = int | None
Chunks = int | Literal["auto"]

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
    chunks: Chunks = "auto"
    regather: bool = False
    column_backward: Literal["fused", "overlap"] = "fused"

    @property
    def is_ascend(self) -> bool:
        return self.mc2 and self.kernel == "ascend"


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
        dtype: of everything.
        contraction_limit: what the ``ascend`` kernel has to keep each contraction below.
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
    dtype: str = "float64"
    contraction_limit: int = 65535

    @property
    def layers(self) -> list[Layer]:
        return [layer for block in self.blocks for layer in (*block.columns, block.row)]


def rarely(chances: int = 8) -> st.SearchStrategy[bool]:
    """True once in so many; False is simplest."""
    # Ends of a range are drawn more often than what is between them.
    return st.integers(0, 8 * chances).map(lambda number: number % chances == chances // 2)


class Domain(NamedTuple):
    """What sizes, dtypes and kernels are drawn from.

    Attributes:
        kernels: of an MC2 layer, with its chunks.
        even: size of a dim that all numbers of ranks divide; but the features.
        uneven: size of any other.
        features: of the layers' inputs and outputs.
        even_hidden: features between column and row that all numbers of ranks divide.
        uneven_hidden: any others.
        dtypes: of everything.
        contraction_limits: of the ``ascend`` kernel.
    """

    kernels: st.SearchStrategy[tuple[str, Chunks]]
    even: st.SearchStrategy[int]
    uneven: st.SearchStrategy[int]
    features: st.SearchStrategy[int]
    even_hidden: st.SearchStrategy[int]
    uneven_hidden: st.SearchStrategy[int]
    dtypes: st.SearchStrategy[str] = st.just("float64")
    contraction_limits: st.SearchStrategy[int] = st.just(65535)


def kernels(name: str, *chunks: Chunks) -> st.SearchStrategy[tuple[str, Chunks]]:
    return st.tuples(st.just(name), st.sampled_from(chunks))


def mostly(
    usual: st.SearchStrategy[T], odd: st.SearchStrategy[T], chances: int = 8
) -> st.SearchStrategy[T]:
    """Odd once in so many."""
    return rarely(chances).flatmap(lambda is_odd: odd if is_odd else usual)


ANY_DEVICE = Domain(
    kernels=st.one_of(
        kernels("pipelined", "auto", 1, 2, 3, 100),
        kernels("decomposed", "auto", 1),
        kernels("decomposed", "auto", 1, 2, 3, 100),
    ),
    even=st.just(12),
    uneven=st.integers(0, 5),
    features=st.integers(1, 6),
    even_hidden=st.just(12),
    uneven_hidden=st.integers(1, 8),
)
# Mostly what 2 and 4 ranks can run: 256 features on each of them.
ASCEND = Domain(
    kernels=mostly(
        kernels("ascend", "auto", 1), st.one_of(kernels("ascend", 2), kernels("pipelined", 2)), 16
    ),
    even=mostly(st.just(4), st.just(8)),
    uneven=mostly(st.just(4), st.integers(0, 5), 4),
    features=mostly(st.just(256), st.sampled_from([300, 255]), 16),
    even_hidden=mostly(st.just(1024), st.just(512)),
    uneven_hidden=st.sampled_from([1024, 1030, 1025, 513]),
    dtypes=mostly(st.sampled_from(["float16", "bfloat16"]), st.just("float32"), 32),
    # So low that siblings' grad_inputs are too much for one reduction.
    contraction_limits=mostly(st.just(65535), st.just(700), 4),
)


def layers(domain: Domain, mc2: bool) -> st.SearchStrategy[Layer]:
    """Any Linear with an MC2 style or a plain one."""
    if not mc2:
        return st.builds(
            lambda bias, async_op: Layer(bias=bias, async_op=async_op), st.booleans(), st.booleans()
        )
    return st.builds(
        lambda kernel, **rest: Layer(mc2=True, kernel=kernel[0], chunks=kernel[1], **rest),
        domain.kernels,
        bias=st.booleans(),
        regather=st.booleans(),
        column_backward=st.sampled_from(["fused", "overlap"]),
    )


@st.composite
def siblings(draw: st.DrawFn, domain: Domain, mc2: bool) -> tuple[Layer, ...]:
    """One to three columns, most often fused alike."""
    count = draw(st.integers(1, 3))
    first = draw(layers(domain, mc2))
    columns = [first]
    for _ in range(count - 1):
        if draw(rarely()):
            columns.append(draw(layers(domain, draw(st.booleans()))))
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
def blocks(
    draw: st.DrawFn, domain: Domain, ndim: int, source: Layout, local: bool, even: bool
) -> Block:
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
    columns = draw(siblings(domain, draw(st.booleans()) if fusable else draw(rarely())))
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
        hidden_features=draw(domain.even_hidden if even else domain.uneven_hidden),
        hidden=draw(layouts(ndim, 2)) if draw(rarely(3)) else -1,
        hidden_local=draw(locals_),
        between=draw(consumers()),
        row=draw(layers(domain, row_mc2)),
        out=draw(layouts(ndim, 8 if row_mc2 else 3)),
        out_local=draw(locals_),
        after=draw(consumers()),
        residual=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn, domain: Domain = ANY_DEVICE) -> Case:
    """Any chain of one or two blocks. Local tensors are rarely uneven, which is refused."""
    ndim = draw(st.integers(2, 4))
    even = draw(st.booleans())
    size = domain.even if even else domain.uneven
    shape = (*draw(st.lists(size, min_size=ndim - 1, max_size=ndim - 1)), draw(domain.features))
    source = draw(layouts(ndim))
    local = draw(st.booleans() if even else rarely())
    kind: Literal["local", "dtensor", "hyper"]
    kind = "local" if local else draw(st.sampled_from(["hyper", "dtensor"]))
    chain: list[Block] = []
    layout = source
    for _ in range(draw(st.integers(1, 2))):
        chain.append(draw(blocks(domain, ndim, layout, local, even)))
        layout, local = chain[-1].out, chain[-1].out_local
    input_grad = draw(st.booleans())
    return Case(
        shape=shape,
        source=source,
        kind=kind,
        leaf=draw(st.booleans()),
        input_grad=input_grad,
        blocks=tuple(chain),
        frozen=tuple(draw(st.lists(st.integers(0, 12), max_size=4, unique=True))),
        evaluated=draw(st.booleans()),
        refilled=draw(st.booleans()),
        checked=draw(rarely(4)),
        dtype=draw(domain.dtypes),
        # Without gradients siblings reduce nothing, and may go beyond it.
        contraction_limit=draw(domain.contraction_limits) if input_grad else 65535,
    )
