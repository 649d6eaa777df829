"""Which rows of a flattened, sequence-sharded activation belong to which rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Piece:
    """A part of one rank's rows, contiguous in that rank's local tensor.

    Attributes:
        outer_start: first outer index.
        outer_stop: one past the last outer index.
        start: first row inside the rank's segment of each of these outer indices.
        stop: one past the last row inside the segment.
    """

    outer_start: int
    outer_stop: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return (self.outer_stop - self.outer_start) * (self.stop - self.start)

    @property
    def is_one_segment(self) -> bool:
        """Whether it is contiguous in the global tensor too."""
        return self.outer_stop - self.outer_start == 1


@dataclass(frozen=True)
class RowLayout:
    """How the rows of an ``[..., sequence, ..., features]`` tensor are spread over ranks.

    A kernel sees activations flattened to rows x features. The global tensor
    ``[outer, sequence, inner, features]``, sharded on the sequence dim, flattens to M = outer *
    sequence * inner rows, of which a rank owns one *segment* of ``sizes[rank] * inner`` rows for
    each outer index. With ``[S, B, H]`` there is one segment (outer = 1, inner = B), and gathering
    is plain concatenation. With batch-first ``[B, S, H]`` there are B of them (outer = B,
    inner = 1): concatenating local tensors would permute the tokens.

    Attributes:
        outer: product of the dims before the sequence dim.
        sizes: size of the sequence dim on each rank; uneven and zero sizes are fine.
        inner: product of the dims between the sequence dim and the features.
        rank: this rank's place in the group.
    """

    outer: int
    sizes: tuple[int, ...]
    inner: int
    rank: int

    def __post_init__(self) -> None:
        if self.outer < 0 or self.inner < 0 or not self.sizes or min(self.sizes) < 0:
            raise ValueError(
                f"Expected sizes that are not negative and at least one rank, got {self}. "
                f"Derive the layout from a global shape with RowLayout.from_shape."
            )
        if not 0 <= self.rank < len(self.sizes):
            raise ValueError(
                f"Expected a rank in [0, {len(self.sizes)}), got {self.rank} ({self}). Pass the "
                f"rank inside the group, not the global one."
            )

    @classmethod
    def from_shape(
        cls, shape: Sequence[int], sequence_dim: int, sizes: Sequence[int], rank: int
    ) -> RowLayout:
        """The layout of a global or local activation, whose last dim is the features.

        Args:
            shape: shape of the activation; its size along ``sequence_dim`` is not used.
            sequence_dim: the sharded dim, may be negative; not the last.
            sizes: size along ``sequence_dim`` on each rank.
            rank: this rank's place in the group.
        """
        dim = sequence_dim + len(shape) if sequence_dim < 0 else sequence_dim
        if not 0 <= dim < len(shape) - 1:
            raise ValueError(
                f"Expected a sequence dim before the last of {len(shape)} dims, got "
                f"{sequence_dim} (shape {tuple(shape)}). Shard the sequence dim, not the features."
            )
        return cls(math.prod(shape[:dim]), tuple(sizes), math.prod(shape[dim + 1 : -1]), rank)

    @property
    def ranks(self) -> int:
        """Number of ranks R."""
        return len(self.sizes)

    @cached_property
    def rows(self) -> int:
        """Rows M of the global tensor."""
        return self.outer * sum(self.sizes) * self.inner

    @property
    def local_rows(self) -> int:
        """Rows of this rank."""
        return self.rows_of(self.rank)

    @cached_property
    def max_rows(self) -> int:
        """Rows of the rank that has most."""
        return self.outer * max(self.sizes) * self.inner

    @property
    def is_even(self) -> bool:
        """Whether every rank has the same number of rows."""
        return min(self.sizes) == max(self.sizes)

    @property
    def is_rank_major(self) -> bool:
        """Whether global row order is the concatenation of the ranks' rows."""
        return self.outer == 1 or self.ranks == 1

    def rows_of(self, rank: int) -> int:
        """Rows of one rank."""
        return self.outer * self.sizes[rank] * self.inner

    def around_rank(self) -> RowLayout:
        """The same rows on three ranks: those of the ranks below this one, its own, those above."""
        sizes, rank = self.sizes, self.rank
        around = (sum(sizes[:rank]), sizes[rank], sum(sizes[rank + 1 :]))
        return RowLayout(self.outer, around, self.inner, 1)

    def segments(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """View of a rank's rows in a global ``(M, F)`` tensor: ``(outer, rows a segment, F)``."""
        start = sum(self.sizes[:rank]) * self.inner
        stop = start + self.sizes[rank] * self.inner
        sequence_rows = sum(self.sizes) * self.inner
        return tensor.view(self.outer, sequence_rows, tensor.shape[1])[:, start:stop]

    def select(self, tensor: torch.Tensor, rank: int, piece: Piece) -> torch.Tensor:
        """View of one piece in a global ``(M, F)`` tensor.

        Returns:
            ``(rows, F)`` for a piece of one segment, else ``(outer indices, rows each, F)``.
        """
        view = self.segments(tensor, rank)[piece.outer_start : piece.outer_stop]
        view = view[:, piece.start : piece.stop]
        return view[0] if piece.is_one_segment else view

    def select_local(self, tensor: torch.Tensor, rank: int, piece: Piece) -> torch.Tensor:
        """View ``(rows, F)`` of one piece in the ``(m_r, F)`` tensor of the rank that owns it."""
        start = piece.outer_start * self.sizes[rank] * self.inner + piece.start
        return tensor[start : start + piece.rows]

    def pieces(self, rank: int, chunks: int) -> list[Piece]:
        """Cuts a rank's rows into at most ``chunks`` pieces of about equal size, in local order.

        Up to ``outer`` pieces are made of whole segments. Further cuts go inside the segments, so
        that from ``chunks == outer`` on every piece is contiguous in the global tensor too.
        """
        segment = self.sizes[rank] * self.inner
        if segment == 0 or self.outer == 0:
            return []
        if chunks <= self.outer:
            bounds = _cut(self.outer, chunks)
            return [Piece(first, last, 0, segment) for first, last in bounds]
        return [
            Piece(index, index + 1, start, stop)
            for index, (first, last) in enumerate(_cut(chunks, self.outer))
            for start, stop in _cut(segment, last - first)
        ]

    def messages(self, rank: int, chunks: int) -> list[Piece | None]:
        """A rank's `pieces`, followed by None up to as many as the rank with most rows has.

        So between any two ranks there are as many messages, in both directions, of which some
        carry nothing.
        """
        pieces = self.pieces(rank, chunks)
        most = len(self.pieces(self.sizes.index(max(self.sizes)), chunks))
        return [*pieces, *[None] * (most - len(pieces))]


def _cut(length: int, parts: int) -> list[tuple[int, int]]:
    """Bounds of ``parts`` consecutive ranges that cover ``length``, none of them empty."""
    parts = min(parts, length)
    return [(length * i // parts, length * (i + 1) // parts) for i in range(parts)]
