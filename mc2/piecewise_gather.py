"""An all-gather of rows, each piece multiplied when it has arrived.

Step j of R - 1 moves rows between neighbours at distance j: rank r receives from r + j and sends to
r - j (mod R). A rank multiplies its own rows first and each remote piece when it has arrived.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from mc2.kernel_ops import wait, wait_tensor, waiting_if_it_fails
from mc2.row_collectives import in_global_order, start_gather_rows
from mc2.row_exchange import RowExchange
from mc2.row_layout import Piece, RowLayout
from mc2.torch_compat import resolve_group

# Peers whose rows are on the way at once: the link has work while rows are multiplied, and the
# rows that are needed first do not share it with those needed last.
_PEERS_IN_FLIGHT = 2

# What is made of a piece: its rows, the layout that it is a piece of, who owns it there, and which.
_Multiply = Callable[[torch.Tensor, RowLayout, int, Piece], None]


class _Arrival(NamedTuple):
    """A piece that is on its way to this rank."""

    exchange: RowExchange
    rows: torch.Tensor
    piece: Piece | None


class _Product:
    """``gathered.T @ x``, added up piece by piece in the order in which they are used.

    That order is fixed, so the sum is deterministic. Of float16 and bfloat16 it is held in float32:
    as many roundings as there are pieces would cost accuracy.
    """

    def __init__(self, features: int, x: torch.Tensor) -> None:
        self._dtype = x.dtype
        self._half = x.dtype in (torch.float16, torch.bfloat16)
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


def gather_and_multiply(
    shard: torch.Tensor,
    weights: list[torch.Tensor],
    layout: RowLayout,
    gather_output: bool,
    group: str,
    chunks: int,
    one_step: bool,
    *,
    x: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """``[gathered, *outs]`` of `Kernel.all_gather_matmul`; with ``x``, the product before them.

    Args:
        shard: this rank's rows, ``(m_r, F)``.
        weights: what the gathered rows are multiplied by, each ``(F, N_i)``.
        layout: which rows are whose.
        gather_output: whether ``gathered`` is wanted; else it is empty.
        group: name of the process group.
        chunks: pieces that each rank's rows are cut into.
        one_step: one all-gather for all of it.
        x: ``(M, N)``; the product is ``gathered.T @ x``.
    """
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
    """In steps between neighbours; what it returns is empty unless ``gather_output``."""
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

    messages = [layout.messages(owner, chunks) for owner in range(layout.ranks)]
    started: list[RowExchange] = []

    def start(distance: int) -> list[_Arrival]:
        owner = (rank + distance) % layout.ranks
        arrivals = []
        for mine, theirs in zip(messages[rank], messages[owner], strict=True):
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
