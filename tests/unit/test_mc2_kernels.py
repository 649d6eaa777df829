"""The kernel registry, row layouts, and how the pipelined kernel decides: all without ranks."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mc2 import CostModel, kernels, use_cost_model
from mc2.cost_model import ONE_COLLECTIVE
from mc2.errors import KernelConflictError, MC2ConstraintError
from mc2.kernel_interface import OPERATIONS, Chunks, Operation
from mc2.kernels import (
    available_kernels,
    get_kernel,
    reasons_not_supported,
    register_kernel,
    resolve_kernel,
)
from mc2.kernels.decomposed import DecomposedKernel
from mc2.kernels.pipelined import PipelinedKernel
from mc2.row_layout import RowLayout

# --- registry


def test_three_kernels_of_which_two_run_anywhere() -> None:
    assert available_kernels() == ["pipelined", "decomposed"]
    assert get_kernel("ascend").name == "ascend"


@pytest.mark.parametrize("op", OPERATIONS)
def test_ascend_says_what_is_missing_here(op: Operation) -> None:
    reasons = reasons_not_supported("ascend", op, ranks=3, contractions=[255])
    assert len(reasons) == 3
    assert "Expected torch_npu with CANN, got ModuleNotFoundError" in reasons[0]


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("kernel", ["pipelined", "decomposed"])
def test_portable_kernels_run_any_sizes(kernel: str, op: Operation) -> None:
    assert not reasons_not_supported(
        kernel,
        op,
        contractions=[0, 1, 1 << 20],
        dtypes=[torch.float64],
        layout=RowLayout(3, (1, 0, 7), 2, 1),
    )


def test_a_name_is_registered_once() -> None:
    class Another(DecomposedKernel):
        pass

    with pytest.raises(KernelConflictError, match=r"decomposed.*Another.*DecomposedKernel"):
        register_kernel(Another())
    assert type(get_kernel("decomposed")) is DecomposedKernel


def test_auto_is_no_name_for_a_kernel() -> None:
    with (
        mock.patch.object(DecomposedKernel, "name", "auto"),
        pytest.raises(KernelConflictError, match="auto"),
    ):
        register_kernel(DecomposedKernel())


def test_a_new_kernel_is_found() -> None:
    class Mine(DecomposedKernel):
        name = "mine"

    with mock.patch.dict(kernels._kernels):
        register_kernel(Mine())
        assert resolve_kernel("mine", "cpu").name == "mine"
        assert "mine" in available_kernels()


def test_an_unknown_name_lists_the_known() -> None:
    for known in ("ascend", "pipelined", "decomposed"):
        with pytest.raises(MC2ConstraintError, match=rf"{known}.*got 'fast'"):
            get_kernel("fast")
    (reason,) = reasons_not_supported("fast", "all_gather_matmul")
    assert "'pipelined'" in reason
    assert issubclass(MC2ConstraintError, ValueError)


def test_auto_is_ascend_on_npu_and_an_error_elsewhere() -> None:
    assert resolve_kernel("auto", "npu").name == "ascend"
    with pytest.raises(MC2ConstraintError) as error:
        resolve_kernel("auto", "cpu")
    assert "'pipelined', 'decomposed'" in str(error.value)
    assert 'kernel="pipelined"' in str(error.value)
    assert resolve_kernel("pipelined", "npu").name == "pipelined"


@pytest.mark.parametrize("chunks", [0, -1, 1.5, "many", True, None])
@pytest.mark.parametrize("kernel", ["pipelined", "decomposed"])
def test_chunks_that_make_no_sense(kernel: str, chunks: Any) -> None:
    reasons = reasons_not_supported(kernel, "all_gather_matmul", chunks=chunks)
    assert 'Expected chunks "auto" or an int >= 1' in reasons[0]


def test_only_pipelined_cuts() -> None:
    assert not reasons_not_supported("pipelined", "all_gather_matmul", chunks=2)
    (reason,) = reasons_not_supported("decomposed", "all_gather_matmul", chunks=2)
    assert "does not cut" in reason


def test_reasons_are_given_all_at_once() -> None:
    reasons = reasons_not_supported(
        "decomposed",
        "all_reduce_matmul",  # type: ignore[arg-type]
        dtypes=[torch.float32, torch.float16],
        chunks=0,
    )
    text = "\n".join(reasons)
    for part in ("an operation out of", "one dtype", ">= 1"):
        assert part in text


# --- row layouts

layouts = st.builds(
    RowLayout,
    outer=st.integers(0, 4),
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple),
    inner=st.integers(0, 3),
    rank=st.just(0),
)


@given(layouts, st.integers(1, 9))
def test_pieces_are_a_ranks_rows_in_local_order(layout: RowLayout, chunks: int) -> None:
    """Against cutting the global tensor [outer, sequence, inner] along the sequence."""
    whole = torch.arange(layout.rows).view(-1, 1)
    by_sequence = whole.view(layout.outer, sum(layout.sizes), layout.inner)
    for rank, part in enumerate(by_sequence.split(list(layout.sizes), dim=1)):
        local = part.reshape(layout.rows_of(rank), 1)
        pieces = layout.pieces(rank, chunks)
        assert len(pieces) == min(chunks, layout.rows_of(rank))
        for piece in pieces:
            globally = layout.select(whole, rank, piece)
            locally = layout.select_local(local, rank, piece)
            assert piece.rows > 0
            assert torch.equal(globally.reshape(-1, 1), locally)
            assert not piece.is_one_segment or globally.is_contiguous()
            assert locally.is_contiguous()
            if chunks >= layout.outer:
                assert piece.is_one_segment
        parts = [layout.select_local(local, rank, piece) for piece in pieces]
        assert torch.equal(torch.cat([local[:0], *parts]), local)
        if pieces:
            segment = layout.sizes[rank] * layout.inner
            sizes = [piece.rows for piece in pieces]
            assert max(sizes) - min(sizes) <= max(segment, 1)


@given(layouts, st.integers(1, 9))
def test_every_rank_sends_as_many_messages(layout: RowLayout, chunks: int) -> None:
    """Else a receive would wait for a message that nobody sends."""
    messages = [layout.messages(rank, chunks) for rank in range(layout.ranks)]
    for rank, own in enumerate(messages):
        pieces = layout.pieces(rank, chunks)
        assert own == [*pieces, *[None] * (len(own) - len(pieces))]
        assert len(own) == max(len(layout.pieces(other, chunks)) for other in range(layout.ranks))


@pytest.mark.parametrize(
    ("dim", "outer", "inner"), [(0, 1, 15), (1, 2, 5), (-2, 6, 1), (-4, 1, 15)]
)
def test_layout_of_a_shape(dim: int, outer: int, inner: int) -> None:
    layout = RowLayout.from_shape((2, 3, 5, 7), dim, (4, 1), 1)
    assert (layout.outer, layout.inner) == (outer, inner)
    assert (layout.ranks, layout.rows) == (2, outer * 5 * inner)
    assert (layout.local_rows, layout.max_rows) == (outer * inner, outer * 4 * inner)
    assert not layout.is_even


@pytest.mark.parametrize("dim", [3, -1, 4, -5])
def test_the_features_are_no_sequence_dim(dim: int) -> None:
    with pytest.raises(ValueError, match="before the last of 4 dims"):
        RowLayout.from_shape((2, 3, 5, 7), dim, (4, 1), 1)


def test_layouts_that_make_no_sense() -> None:
    for sizes, rank in (((1, -1), 0), ((), 0), ((1, 1), 2), ((1, 1), -1)):
        with pytest.raises(ValueError, match="Expected"):
            RowLayout(1, sizes, 1, rank)


# --- decisions of the pipelined kernel


def schedule(
    layout: RowLayout,
    features: int,
    chunks: Chunks = "auto",
    width: int | None = None,
    op: Operation = "matmul_reduce_scatter",
) -> tuple[int, int]:
    message = torch.empty(0, features)
    decided = PipelinedKernel().schedule(op, layout, message, chunks, width)
    return decided.chunks, decided.steps


def test_small_rows_are_not_cut() -> None:
    assert schedule(RowLayout(1, (8, 8), 1, 0), 64) == (1, 1)
    # More than two ranks and tiny: one collective. Not tiny: a message for each peer.
    assert schedule(RowLayout(1, (8,) * 8, 1, 0), 64) == (ONE_COLLECTIVE, 1)
    assert schedule(RowLayout(1, (32,) * 8, 1, 0), 1024) == (1, 7)
    # But a gather of the same size overlaps enough in one.
    assert schedule(RowLayout(1, (32,) * 8, 1, 0), 1024, op="all_gather_matmul")[0] == 0
    assert schedule(RowLayout(1, (8,), 1, 0), 64, op="all_gather_matmul") == (1, 0)


def test_large_rows_are_cut_so_that_pieces_stay_large() -> None:
    for op in OPERATIONS:
        assert schedule(RowLayout(1, (1024, 1024), 1, 0), 1024, width=2048, op=op) == (4, 4)
        assert schedule(RowLayout(1, (1024, 1024), 1, 0), 256, width=512, op=op) == (2, 2)
        assert schedule(RowLayout(1, (1 << 16,) * 4, 1, 0), 1024, op=op) == (8, 24)
        # Few and long rows: multiplying single rows would be slow.
        assert schedule(RowLayout(1, (256, 256), 1, 0), 1 << 20, op=op) == (2, 2)


def test_a_known_rate_decides() -> None:
    layout, sizes = RowLayout(1, (512, 512), 1, 0), {"features": 256, "width": 512}
    try:
        chosen = []
        for rate in (20e6, 50e6, 80e6, 1e9):
            use_cost_model(CostModel(bytes_per_s=rate))
            chosen.append(schedule(layout, **sizes)[0])
        # Slow, cut it; fast, the collective is over before the first message would be posted.
        assert chosen == [4, 2, 1, ONE_COLLECTIVE]
        assert schedule(layout, **sizes, chunks=1) == (1, 1)
    finally:
        use_cost_model(None)
    assert schedule(layout, **sizes)[0] == 1


def test_batch_first_travels_by_segment_if_that_spares_a_copy() -> None:
    assert schedule(RowLayout(16, (256, 256), 1, 0), 1024) == (16, 16)
    assert schedule(RowLayout(512, (1, 1), 1, 0), 64)[0] == 1


def test_a_number_is_obeyed_and_never_one_collective() -> None:
    assert schedule(RowLayout(1, (8,) * 4, 1, 0), 4, chunks=3) == (3, 9)
    assert schedule(RowLayout(1, (2, 1), 1, 0), 4, chunks=3) == (2, 2)
    assert schedule(RowLayout(1, (0, 0), 1, 0), 4, chunks=3) == (1, 0)


@given(
    st.sampled_from(OPERATIONS),
    layouts,
    st.sampled_from(["auto", 1, 2, 5]),
    st.integers(0, 1 << 12),
)
def test_every_rank_decides_alike(
    op: Operation, layout: RowLayout, chunks: Chunks, features: int
) -> None:
    """Else a message would be cut in one way where it is sent and in another where received."""
    decisions = {
        PipelinedKernel().schedule(
            op,
            RowLayout(layout.outer, layout.sizes, layout.inner, rank),
            torch.empty(rows, features),  # of a reduction: K x N, and K may differ
            chunks,
        )
        for rank, rows in itertools.product(range(layout.ranks), (0, 3))
    }
    assert len(decisions) == 1
