"""A matmul whose rows are summed over ranks and scattered, each piece sent when it is made.

Step j of R - 1 moves rows between neighbours at distance j: rank r sends to r - j and receives from
r + j (mod R). A rank multiplies the rows of rank r - 1, then r - 2, ..., its own last.

A *block* is one rank's summand of a piece of this rank's rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mc2.kernel_ops import note_launch, sum_of_matmuls, waiting_if_it_fails
from mc2.row_exchange import RowExchange
from mc2.row_layout import Piece, RowLayout
from mc2.torch_compat import resolve_group


def block_shapes(
    features: int, layout: RowLayout, chunks: int, one_step: bool
) -> list[tuple[int, int]]:
    """Shapes of what `start_blocks` returns."""
    if one_step or layout.rows * features == 0:
        return [(layout.ranks * layout.local_rows, features)]
    own = [piece.rows for piece in layout.pieces(layout.rank, chunks)]
    received = [
        0 if piece is None else piece.rows for piece in layout.messages(layout.rank, chunks)
    ]
    return [(rows, features) for rows in own + received * (layout.ranks - 1)]


def start_blocks(
    xs: list[torch.Tensor],
    weights: list[torch.Tensor],
    layout: RowLayout,
    group: str,
    chunks: int,
    one_step: bool,
) -> list[torch.Tensor]:
    """All ranks' summands of this rank's rows: its own pieces first, then those on their way.

    In one step they are one tensor, the ranks' in order.

    Args:
        xs: all rows of this rank's features, each ``(M, K_i)``.
        weights: each ``(K_i, N)``; the summand is the sum of ``x @ weight``.
        layout: which rows are whose.
        group: name of the process group.
        chunks: pieces that each rank's rows are cut into.
        one_step: all rows travel at once.
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

    arriving = layout.messages(rank, chunks)
    process_group = resolve_group(group)
    received: list[torch.Tensor] = []
    with waiting_if_it_fails(received):
        for distance in range(1, layout.ranks):
            to = (rank - distance) % layout.ranks
            for theirs, mine in zip(layout.messages(to, chunks), arriving, strict=True):
                sent = block(to, theirs)
                rows = sent.new_empty(0 if mine is None else mine.rows, features)
                exchange = RowExchange(rows, sent, distance, layout, process_group)
                exchange.register()
                received.append(rows)
        return [*(block(rank, piece) for piece in layout.pieces(rank, chunks)), *received]


def sum_blocks(
    blocks: Sequence[torch.Tensor], layout: RowLayout, chunks: int, one_step: bool
) -> torch.Tensor:
    """This rank's rows of the sum over ranks, of what `start_blocks` returned, waited for."""
    features = blocks[0].shape[1]
    if one_step or layout.rows * features == 0:
        out = blocks[0].new_empty(layout.local_rows, features)
        _sum_into(out, list(blocks[0].view(layout.ranks, layout.local_rows, features)))
        return out
    mine = layout.pieces(layout.rank, chunks)
    steps = len(layout.messages(layout.rank, chunks))
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
    half = out.dtype in (torch.float16, torch.bfloat16)
    total = summands[0].float() if half and len(summands) > 1 else out.copy_(summands[0])
    for summand in summands[1:]:
        total += summand
    if total is not out:
        out.copy_(total)
