"""What the ``ascend`` kernel accepts and refuses, where the real torch_npu is."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch

from mc2.kernel_interface import OPERATIONS, Operation
from mc2.kernels import ascend, available_kernels, reasons_not_supported
from mc2.row_layout import RowLayout

for_both = pytest.mark.parametrize("op", OPERATIONS)


@for_both
def test_the_wheel_makes_it_available(op: Operation) -> None:
    assert available_kernels() == ["ascend", "pipelined", "decomposed"]
    assert reasons_not_supported("ascend", op) == []


@for_both
@pytest.mark.parametrize(
    ("contraction", "accepted"),
    [(0, False), (255, False), (256, True), (65534, True), (65535, False), (1 << 20, False)],
)
def test_contraction(op: Operation, contraction: int, accepted: bool) -> None:
    reasons = reasons_not_supported("ascend", op, contractions=[1024, contraction])
    assert (reasons == []) is accepted
    assert accepted or f"256 <= K < 65535, got {contraction}" in reasons[0]


@for_both
@pytest.mark.parametrize(
    ("ranks", "accepted"),
    [(1, False), (2, True), (3, False), (4, True), (6, False), (8, True), (16, False)],
)
def test_ranks(op: Operation, ranks: int, accepted: bool) -> None:
    layout = RowLayout(1, (2,) * ranks, 1, 0)
    for reasons in (
        reasons_not_supported("ascend", op, ranks=ranks),
        reasons_not_supported("ascend", op, layout=layout),
    ):
        assert (reasons == []) is accepted
        assert accepted or f"2, 4 or 8 ranks, got {ranks}" in reasons[0]


@for_both
@pytest.mark.parametrize(
    ("dtypes", "accepted"),
    [
        ([torch.float16], True),
        ([torch.bfloat16, torch.bfloat16], True),
        ([torch.float32], False),
        ([torch.float64], False),
        ([torch.int8], False),
        ([torch.float16, torch.bfloat16], False),
    ],
)
def test_dtypes(op: Operation, dtypes: Sequence[torch.dtype], accepted: bool) -> None:
    reasons = reasons_not_supported("ascend", op, dtypes=dtypes)
    assert (reasons == []) is accepted
    assert accepted or "dtype" in reasons[0]


@for_both
@pytest.mark.parametrize(
    ("outer", "sizes", "accepted"),
    [(1, (3, 3), True), (1, (4, 3), False), (2, (2, 1), False), (8, (2, 2, 2, 0), False)],
)
def test_rows(op: Operation, outer: int, sizes: tuple[int, ...], accepted: bool) -> None:
    """Also where M divides by the ranks, but the sequence does not: (2, 1) twice are 6 rows."""
    reasons = reasons_not_supported("ascend", op, layout=RowLayout(outer, sizes, 1, 0))
    assert (reasons == []) is accepted
    assert accepted or "divide evenly" in reasons[0]


def test_a_wheel_without_the_operators() -> None:
    with mock.patch.object(ascend, "_NPU_OPS", ("npu_mm_reduce_scatter_base", "npu_not_there")):
        assert available_kernels() == ["pipelined", "decomposed"]
        (reason,) = reasons_not_supported("ascend", "all_gather_matmul")
    assert "to have npu_not_there" in reason


def test_a_torch_npu_that_does_not_load() -> None:
    with mock.patch.dict("sys.modules", {"torch_npu": None}):
        (reason,) = reasons_not_supported("ascend", "all_gather_matmul")
    assert "Expected torch_npu with CANN" in reason
