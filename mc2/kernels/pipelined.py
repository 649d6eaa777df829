"""The ``pipelined`` kernel: rows travel while other rows are multiplied, on any process group.

How they travel is in `piecewise_gather` and `piecewise_scatter`; here is what they are called by,
and into how many pieces rows are cut.

[Note: decided alike on every rank]
A piece has to be cut in the same way by the rank that sends and the one that receives. So the
schedule depends on the layout and on the communicated features only: N of a gather and K of a
reduction are local, and differ between ranks where features do not divide evenly.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from mc2.cost_model import ONE_COLLECTIVE, cost_model
from mc2.kernel_interface import CallFacts, Chunks, Kernel, Operation, Schedule
from mc2.kernel_ops import (
    all_gather_matmul_op,
    all_gather_matmul_product_op,
    matmul_reduce_scatter_op,
    matmul_scatter_start_op,
    wait_tensor,
    waiting_if_it_fails,
)
from mc2.piecewise_gather import gather_and_multiply
from mc2.piecewise_scatter import block_shapes, start_blocks, sum_blocks
from mc2.row_layout import RowLayout

# Segments (see RowLayout) of this size travel one by one, which spares a copy of all that is sent.
_MIN_SEGMENT_BYTES = 1 << 18
# With more than two ranks and less than this a rank, R - 1 messages cost more than one collective,
# whatever the link's rate.
_ONE_STEP_BYTES = 1 << 17

_EXTRA_ARGS = "str group, int chunks, bool one_step"


def _gather(
    shard: torch.Tensor,
    weights: list[torch.Tensor],
    outer: int,
    sizes: list[int],
    inner: int,
    rank: int,
    *args: Any,
    x: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    layout = RowLayout(outer, tuple(sizes), inner, rank)
    return gather_and_multiply(shard, weights, layout, *args, x=x)


_all_gather_matmul = all_gather_matmul_op("pipelined_all_gather_matmul", _EXTRA_ARGS)(_gather)


@all_gather_matmul_product_op("pipelined_all_gather_matmul_product", _EXTRA_ARGS)
def _all_gather_matmul_product(x: torch.Tensor, *args: Any) -> list[torch.Tensor]:
    return _gather(*args, x=x)


@matmul_reduce_scatter_op("pipelined_matmul_reduce_scatter", _EXTRA_ARGS)
def _matmul_reduce_scatter(
    xs: list[torch.Tensor],
    weights: list[torch.Tensor],
    outer: int,
    sizes: list[int],
    inner: int,
    rank: int,
    group: str,
    chunks: int,
    one_step: bool,
) -> torch.Tensor:
    layout = RowLayout(outer, tuple(sizes), inner, rank)
    blocks = start_blocks(xs, weights, layout, group, chunks, one_step)
    with waiting_if_it_fails(blocks):
        return sum_blocks([wait_tensor(block) for block in blocks], layout, chunks, one_step)


def _block_shapes(
    features: int,
    outer: int,
    sizes: list[int],
    inner: int,
    rank: int,
    group: str,
    chunks: int,
    one_step: bool,
) -> list[tuple[int, int]]:
    layout = RowLayout(outer, tuple(sizes), inner, rank)
    return block_shapes(features, layout, chunks, one_step)


@matmul_scatter_start_op("pipelined_matmul_scatter_start", _EXTRA_ARGS, _block_shapes)
def _start_matmul_reduce_scatter(
    xs: list[torch.Tensor],
    weights: list[torch.Tensor],
    outer: int,
    sizes: list[int],
    inner: int,
    rank: int,
    group: str,
    chunks: int,
    one_step: bool,
) -> list[torch.Tensor]:
    layout = RowLayout(outer, tuple(sizes), inner, rank)
    return start_blocks(xs, weights, layout, group, chunks, one_step)


def _choose_chunks(
    op: Operation, layout: RowLayout, message: torch.Tensor, width: int | None, matmuls: int
) -> int:
    """As many pieces as `CostModel` says; or all segments apart, which spares copies."""
    rows, ranks = layout.max_rows, layout.ranks
    features = message.shape[-1]
    row_bytes = features * message.element_size()
    if ranks == 1:
        return 1
    if ranks > 2 and rows * row_bytes < _ONE_STEP_BYTES:
        return ONE_COLLECTIVE
    by_cost = cost_model(message.device.type).chunks(
        ranks,
        rows,
        features,
        features if width is None else width,
        message.element_size(),
        gathers=op == "all_gather_matmul",
        matmuls=matmuls,
    )
    if by_cost == ONE_COLLECTIVE:
        return ONE_COLLECTIVE
    segment_bytes = rows // max(layout.outer, 1) * row_bytes
    by_segments = layout.outer if segment_bytes >= _MIN_SEGMENT_BYTES else 1
    return max(by_cost, by_segments)


class PipelinedKernel(Kernel):
    """Overlaps the two operations piece by piece (`piecewise_gather`, `piecewise_scatter`).

    Any device and process group that can send and receive, any dtype, any number of ranks, uneven
    and empty rows. Deterministic: partial sums are added in rank order, those of float16 and
    bfloat16 in float32, rounded once.

    Communicates (R - 1) pieces of m_r rows a rank, as the unfused collective does. Memory: a gather
    receives straight into its result, or without ``gather_output`` into rows of three ranks;
    a reduction holds M x N elements of sent and as many of received partial sums. Pieces
    that span several segments (see `RowLayout`) are copied once; ``chunks >= outer`` avoids that.

    ``chunks="auto"`` cuts as `CostModel` says, alike on every rank. What is tiny, or not worth
    messages of its own, goes in one collective: beside that of a gather a rank multiplies its own
    rows, beside that of a reduction what comes next, grad_weight of a column. The report says so.
    """

    name = "pipelined"
    ops: Mapping[Operation, Any] = MappingProxyType(
        {
            "all_gather_matmul": _all_gather_matmul,
            "matmul_reduce_scatter": _matmul_reduce_scatter,
        }
    )

    def constraint_reasons(self, op: Operation, facts: CallFacts) -> list[str]:
        """None: it runs anything."""
        return []

    def schedule(
        self,
        op: Operation,
        layout: RowLayout,
        message: torch.Tensor,
        chunks: Chunks,
        width: int | None = None,
        matmuls: int = 1,
    ) -> Schedule:
        """Chooses the number of pieces from sizes (see the note on decisions)."""
        if chunks == "auto":
            chunks = _choose_chunks(op, layout, message, width, matmuls)
        if chunks == ONE_COLLECTIVE:
            cut, steps, extra_args = ONE_COLLECTIVE, 1, (1, True)
        else:
            between_peers = len(layout.messages(0, chunks))
            cut, steps = max(between_peers, 1), (layout.ranks - 1) * between_peers
            extra_args = (chunks, False)
        return Schedule(cut, steps if message.shape[-1] else 0, extra_args)

    @property
    def product_op(self) -> Any:
        """Each piece's part of the product is made when it has arrived."""
        return _all_gather_matmul_product

    @property
    def start_op(self) -> Any:
        """The matmuls, and the launch of each piece as it is made."""
        return _start_matmul_reduce_scatter

    def finish_scatter(
        self, layout: RowLayout, schedule: Schedule, *buffers: torch.Tensor
    ) -> torch.Tensor:
        """Adds up in rank order."""
        return sum_blocks(buffers, layout, *schedule.extra_args)

    def op_group(self, group: dist.ProcessGroup) -> str:
        """Its name."""
        return group.group_name
