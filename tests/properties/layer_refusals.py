"""Which of the drawn models have to be refused."""

from __future__ import annotations

from collections.abc import Sequence

from tests.properties.layer_cases import Block, Case, Layer, Layout


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
        if _ascend_refuses(case, block, layout, ranks):
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
    return layer.mc2 and layer.kernel != "pipelined" and layer.chunks not in ("auto", 1)


def _ascend_refuses(case: Case, block: Block, layout: Layout, ranks: int) -> bool:
    """Whether docs/mc2.md says that the ``ascend`` layers of a block cannot run.

    Where columns and row are not sharded as they need it, others of the refusals hold.
    """
    features, hidden = case.shape[-1], _on_each(block.hidden_features, ranks)
    contractions: list[int] = []
    sequences: list[Layout] = []
    called = [block.columns[number] for number in block.calls]
    for column in block.columns:
        if column.is_ascend:
            contractions += [features, *(hidden if column.column_backward == "fused" else ())]
            sequences += [layout] if column in called else []
    if (
        block.told
        and called[0].column_backward == "fused"
        and all(column.is_ascend for column in called)
    ):
        contractions += [len(called) * each for each in hidden]
    if block.row.is_ascend:
        contractions += [*hidden, features]
        sequences.append(block.out)
    if not contractions:
        return False
    return (
        case.dtype not in ("float16", "bfloat16")
        or ranks not in (2, 4, 8)
        or not all(256 <= each < case.contraction_limit for each in contractions)
        or any(_is_uneven(case.shape, sequence, ranks) for sequence in sequences)
    )


def _on_each(features: int, ranks: int) -> list[int]:
    """How many of them each rank has."""
    most = -(-features // ranks)
    return [min(most, max(features - most * rank, 0)) for rank in range(ranks)]
