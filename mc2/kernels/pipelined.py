"""The ``pipelined`` kernel: rows travel while other rows are multiplied, on any process group.

[Note: schedule]
Step j of R - 1 moves rows between neighbours at distance j: rank r sends to r - j and receives from
r + j (mod R). Gathering, a rank multiplies its own rows first and each remote piece when it has
arrived. Scattering, it multiplies the rows of rank r - 1, then r - 2, ..., its own last, and sends
each piece as soon as it is made. With `chunks` > 1 every rank's rows travel as that many pieces.

[Note: decided alike on every rank]
A piece has to be cut in the same way by the rank that sends and the one that receives. So the
schedule depends on the layout and on the communicated features only: N of a gather and K of a
reduction are local, and differ between ranks where features do not divide evenly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mc2.cost_model import ONE_COLLECTIVE, cost_model
from mc2.kernel_interface import CallFacts, Chunks, Kernel, Operation, Schedule
from mc2.kernel_ops import (
    all_gather_matmul_op,
    all_gather_matmul_product_op,
    matmul_reduce_scatter_op,
    matmul_scatter_start_op,
    note_launch,
    sum_of_matmuls,
    wait,
    wait_tensor,
    waiting_if_it_fails,
)
from mc2.row_collectives import in_global_order, start_gather_rows
from mc2.row_exchange import RowExchange
from mc2.row_layout import Piece, RowLayout
from mc2.torch_compat import resolve_group

_HALF = (torch.float16, torch.bfloat16)

# Segments (see RowLayout) of this size travel one by one, which spares a copy of all that is sent.
_MIN_SEGMENT_BYTES = 1 << 18
# With more than two ranks and less than this a rank, R - 1 messages cost more than one collective,
# whatever the link's rate.
_ONE_STEP_BYTES = 1 << 17
# Peers whose rows are on the way at once: the link has work while rows are multiplied, and the
# rows that are needed first do not share it with those needed last.
_PEERS_IN_FLIGHT = 2


class _Arrival(NamedTuple):
    """A piece that is on its way to this rank."""

    exchange: RowExchange
    rows: torch.Tensor
    piece: Piece | None


_EXTRA_ARGS = "str group, int chunks, bool one_step"


class _Product:
    """``gathered.T @ x``, added up piece by piece in the order in which they are used.

    That order is fixed, so the sum is deterministic. Of float16 and bfloat16 it is held in float32:
    as many roundings as there are pieces would cost accuracy.
    """

    def __init__(self, features: int, x: torch.Tensor) -> None:
        self._dtype = x.dtype
        self._half = x.dtype in _HALF
        dtype = torch.float32 if self._half else x.dtype
        self._sum = x.new_zeros(features, x.shape[1], dtype=dtype)

    def add(self, rows: torch.Tensor, x: torch.Tensor) -> None:
        """Adds the part of some rows."""
        if self._half:
            self._sum += rows.t().mm(x)
        else:
            self._sum.addmm_(rows.t(), x)

    def finished(self) -> torch.Tensor:
        """The product."""
        return self._sum.to(self._dtype)


def _gather(
    shard: torch.Tensor,
    weights: list[torch.Tensor],
    outer: int,
    sizes: list[int],
    inner: int,
    rank: int,
    gather_output: bool,
    group: str,
    chunks: int,
    one_step: bool,
    *,
    x: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """``[gathered, *outs]`` of `Kernel.all_gather_matmul`; with ``x``, the product before them."""
    layout = RowLayout(outer, tuple(sizes), inner, rank)
    features = shard.shape[1]
    outs = [shard.new_empty(layout.rows, weight.shape[1]) for weight in weights]
    product = None if x is None else _Product(features, x)

    def multiply(rows: torch.Tensor, by: RowLayout, owner: int, piece: Piece) -> None:
        """Puts what is made of the rows of a piece in its place."""
        for out, weight in zip(outs, weights, strict=True):
            place = by.select(out, owner, piece)
            if piece.is_one_segment:
                torch.mm(rows, weight, out=place)
            else:
                place.copy_(torch.mm(rows, weight).view(place.shape))
        if product is not None:
            assert x is not None
            product.add(rows, by.select(x, owner, piece).reshape(piece.rows, -1))

    process_group = resolve_group(group)
    if one_step:
        gathered = _gather_at_once(shard, layout, process_group, multiply)
    else:
        gathered = _gather_by_piece(shard, layout, process_group, chunks, multiply, gather_output)
    made = [] if product is None else [product.finished()]
    return [*made, gathered if gather_output else shard.new_empty(0), *outs]


_Multiply = Callable[[torch.Tensor, RowLayout, int, Piece], None]


def _gather_at_once(
    shard: torch.Tensor, layout: RowLayout, group: dist.ProcessGroup, multiply: _Multiply
) -> torch.Tensor:
    """One all-gather, beside which this rank multiplies its own rows; then those of the others."""
    below, own, above = range(3)
    around = layout.around_rank()
    buffer = start_gather_rows(shard, layout, group.group_name)
    with waiting_if_it_fails([buffer]):
        for piece in around.pieces(own, 1):
            multiply(shard, around, own, piece)
        gathered = in_global_order(wait_tensor(buffer), layout)
    for others in (below, above):
        for piece in around.pieces(others, 1):
            rows = around.select(gathered, others, piece).reshape(piece.rows, -1)
            multiply(rows, around, others, piece)
    return gathered


def _gather_by_piece(
    shard: torch.Tensor,
    layout: RowLayout,
    group: dist.ProcessGroup,
    chunks: int,
    multiply: _Multiply,
    gather_output: bool,
) -> torch.Tensor:
    """The schedule of the note; what it returns is empty unless ``gather_output``."""
    rank, features = layout.rank, shard.shape[1]
    gathered = shard.new_empty(layout.rows, features) if gather_output else None

    def destination(owner: int, piece: Piece | None) -> torch.Tensor:
        """Where to receive: in the result itself where the piece is contiguous there."""
        if piece is not None and gathered is not None and piece.is_one_segment:
            return layout.select(gathered, owner, piece)
        return shard.new_empty(0 if piece is None else piece.rows, features)

    def use(rows: torch.Tensor, owner: int, piece: Piece) -> None:
        """Puts arrived rows, and their products, in their place."""
        if gathered is not None:
            place = layout.select(gathered, owner, piece)
            if place.data_ptr() != rows.data_ptr():
                place.copy_(rows.view(place.shape))
        multiply(rows, layout, owner, piece)

    pieces = [layout.pieces(owner, chunks) for owner in range(layout.ranks)]
    started: list[RowExchange] = []

    def start(distance: int) -> list[_Arrival]:
        owner = (rank + distance) % layout.ranks
        arrivals = []
        for index in range(_steps_between_peers(layout, chunks)):
            mine, theirs = _at(pieces[rank], index), _at(pieces[owner], index)
            sent = shard[:0] if mine is None else layout.select_local(shard, rank, mine)
            received = destination(owner, theirs)
            exchange = RowExchange(received, sent, distance, layout, group)
            started.append(exchange)
            arrivals.append(_Arrival(exchange, received, theirs))
        return arrivals

    distances = range(1, layout.ranks)
    with waiting_if_it_fails(started, lambda exchange: exchange.wait()):
        in_flight = [start(distance) for distance in distances[:_PEERS_IN_FLIGHT]]
        for own in layout.pieces(rank, min(chunks, layout.outer)):
            use(layout.select_local(shard, rank, own), rank, own)
        later = iter(distances[_PEERS_IN_FLIGHT:])
        while in_flight:
            arriving = in_flight.pop(0)
            for number, (exchange, rows, piece) in enumerate(arriving, 1):
                if piece is not None:
                    wait(exchange.wait_for_rows, f"rows of rank {exchange.above} of the group")
                # Before the last piece is multiplied, so that the link has work meanwhile.
                if number == len(arriving):
                    in_flight += [start(distance) for distance in itertools.islice(later, 1)]
                if piece is not None:
                    use(rows, exchange.above, piece)
        for exchange in started:
            wait(exchange.wait, "the others to take its rows")
    return shard.new_empty(0) if gathered is None else gathered


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
    blocks = _start_blocks(xs, weights, layout, group, chunks, one_step)
    with waiting_if_it_fails(blocks):
        return _sum_blocks([wait_tensor(block) for block in blocks], layout, chunks, one_step)


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
    """Shapes of what `_start_blocks` returns."""
    layout = RowLayout(outer, tuple(sizes), inner, rank)
    if one_step or layout.rows * features == 0:
        return [(layout.ranks * layout.local_rows, features)]
    mine = layout.pieces(rank, chunks)
    steps = _steps_between_peers(layout, chunks)
    received = [_at(mine, index) for _ in range(1, layout.ranks) for index in range(steps)]
    rows = [0 if piece is None else piece.rows for piece in (*mine, *received)]
    return [(count, features) for count in rows]


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
    return _start_blocks(xs, weights, layout, group, chunks, one_step)


def _start_blocks(
    xs: list[torch.Tensor],
    weights: list[torch.Tensor],
    layout: RowLayout,
    group: str,
    chunks: int,
    one_step: bool,
) -> list[torch.Tensor]:
    """All ranks' summands of this rank's rows: its own pieces first, then those on their way.

    In one step they are one tensor, the ranks' in order.
    """
    rank, features = layout.rank, weights[0].shape[1]
    if layout.rows * features == 0:
        return [xs[0].new_empty(layout.ranks * layout.local_rows, features)]
    if one_step:
        partial = sum_of_matmuls(list(zip(xs, weights, strict=True)))
        return [_start_one_step(partial, layout, group)]

    def block(owner: int, piece: Piece | None) -> torch.Tensor:
        """This rank's summand of a piece."""
        if piece is None:
            return xs[0].new_empty(0, features)
        terms = [
            (layout.select(x, owner, piece).reshape(piece.rows, -1), weight)
            for x, weight in zip(xs, weights, strict=True)
        ]
        return sum_of_matmuls(terms)

    mine = layout.pieces(rank, chunks)
    process_group = resolve_group(group)
    received: list[torch.Tensor] = []
    with waiting_if_it_fails(received):
        for distance in range(1, layout.ranks):
            to = (rank - distance) % layout.ranks
            theirs = layout.pieces(to, chunks)
            for index in range(_steps_between_peers(layout, chunks)):
                sent = block(to, _at(theirs, index))
                piece = _at(mine, index)
                rows = sent.new_empty(0 if piece is None else piece.rows, features)
                exchange = RowExchange(rows, sent, distance, layout, process_group)
                exchange.register()
                received.append(rows)
        return [*(block(rank, piece) for piece in mine), *received]


def _sum_blocks(
    blocks: Sequence[torch.Tensor], layout: RowLayout, chunks: int, one_step: bool
) -> torch.Tensor:
    """This rank's rows of the sum over ranks, of what `_start_blocks` returned, waited for."""
    features = blocks[0].shape[1]
    if one_step or layout.rows * features == 0:
        out = blocks[0].new_empty(layout.local_rows, features)
        _sum_into(out, list(blocks[0].view(layout.ranks, layout.local_rows, features)))
        return out
    mine = layout.pieces(layout.rank, chunks)
    steps = _steps_between_peers(layout, chunks)
    out = blocks[0].new_empty(layout.local_rows, features)
    for index, piece in enumerate(mine):
        summands = {layout.rank: blocks[index]}
        for distance in range(1, layout.ranks):
            source = (layout.rank + distance) % layout.ranks
            summands[source] = blocks[len(mine) + (distance - 1) * steps + index]
        in_rank_order = [summands[source] for source in range(layout.ranks)]
        _sum_into(layout.select_local(out, layout.rank, piece), in_rank_order)
    return out


def _start_one_step(partial: torch.Tensor, layout: RowLayout, group: str) -> torch.Tensor:
    """Sends every rank its rows of ``partial`` at once; what comes are all ranks' rows for this."""
    if not layout.is_rank_major:
        parts = [layout.segments(partial, rank) for rank in range(layout.ranks)]
        partial = torch.cat([part.reshape(-1, partial.shape[1]) for part in parts])
    outgoing = [layout.rows_of(rank) for rank in range(layout.ranks)]
    incoming = [layout.local_rows] * layout.ranks
    note_launch()
    # As bytes, so that a dtype need not be known to the process group.
    received = torch.ops._c10d_functional.all_to_all_single(
        partial.view(torch.uint8), incoming, outgoing, group
    )
    return received.view(partial.dtype)


def _sum_into(out: torch.Tensor, summands: Sequence[torch.Tensor]) -> None:
    """Adds up in the given order, half precision in float32."""
    half = out.dtype in _HALF
    total = summands[0].float() if half and len(summands) > 1 else out.copy_(summands[0])
    for summand in summands[1:]:
        total += summand
    if total is not out:
        out.copy_(total)


def _at(pieces: Sequence[Piece], index: int) -> Piece | None:
    return pieces[index] if index < len(pieces) else None


def _steps_between_peers(layout: RowLayout, chunks: int) -> int:
    """Messages from one rank to another: the pieces of the rank with most rows, all take part."""
    return len(layout.pieces(layout.sizes.index(max(layout.sizes)), chunks))


def _choose_chunks(
    op: Operation, layout: RowLayout, message: torch.Tensor, width: int | None
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
    )
    if by_cost == ONE_COLLECTIVE:
        return ONE_COLLECTIVE
    segment_bytes = rows // max(layout.outer, 1) * row_bytes
    by_segments = layout.outer if segment_bytes >= _MIN_SEGMENT_BYTES else 1
    return max(by_cost, by_segments)


class PipelinedKernel(Kernel):
    """Overlaps the two operations piece by piece (see the note on the schedule).

    Any device and process group that can send and receive, any dtype, any number of ranks, uneven
    and empty rows. Deterministic: partial sums are added in rank order, those of float16 and
    bfloat16 in float32, rounded once.

    Communicates (R - 1) pieces of m_r rows a rank, as the unfused collective does. Memory: a gather
    receives straight into its result, or without ``gather_output`` into rows of three ranks;
    a reduction holds M x N elements of sent and as many of received partial sums. Pieces
    that span several segments (see `RowLayout`) are copied once; ``chunks >= outer`` avoids that.

    ``chunks="auto"`` cuts as `CostModel` says, alike on every rank. What is tiny, or not worth
    messages of its own, goes in one collective: beside that of a gather a rank multiplies its own
    rows, beside that of a reduction nothing. The report says so.
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
    ) -> Schedule:
        """Chooses the number of pieces from sizes (see the note on decisions)."""
        wanted = _choose_chunks(op, layout, message, width) if chunks == "auto" else chunks
        if wanted == ONE_COLLECTIVE:
            cut, steps, extra_args = ONE_COLLECTIVE, 1, (1, True)
        else:
            between_peers = _steps_between_peers(layout, wanted)
            cut, steps = max(between_peers, 1), (layout.ranks - 1) * between_peers
            extra_args = (wanted, False)
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
        return _sum_blocks(buffers, layout, *schedule.extra_args)

    def op_group(self, group: dist.ProcessGroup) -> str:
        """Its name."""
        return group.group_name
