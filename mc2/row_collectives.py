"""Gathering and reducing rows by one functional collective, whatever the layout."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mc2.kernel_ops import note_launch, wait_tensor
from mc2.row_layout import RowLayout

_functional = torch.ops._c10d_functional


def gather_rows(shard: torch.Tensor, layout: RowLayout, group_name: str) -> torch.Tensor:
    """All ranks' rows in global order, ``(m_r, F) -> (M, F)``, by one all-gather.

    Uneven rows are padded to those of the rank that has most. One copy, unless even and rank-major.
    """
    return in_global_order(wait_tensor(start_gather_rows(shard, layout, group_name)), layout)


def start_gather_rows(shard: torch.Tensor, layout: RowLayout, group_name: str) -> torch.Tensor:
    """Starts the all-gather of `gather_rows`; `in_global_order` makes the result of its buffer."""
    features = shard.shape[1]
    if layout.rows * features == 0:
        return shard.new_empty(layout.ranks * layout.max_rows, features)
    segment, longest = (
        size * layout.inner for size in (layout.sizes[layout.rank], max(layout.sizes))
    )
    padded = _pad(shard.view(layout.outer, segment, features), longest)
    note_launch()
    gathered: torch.Tensor = _functional.all_gather_into_tensor(
        padded.reshape(-1, features), layout.ranks, group_name
    )
    return gathered


def in_global_order(gathered: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """The rows ``(M, F)`` out of as many by rank as the rank with most has, padded by segment."""
    features = gathered.shape[1]
    if layout.rows * features == 0:
        return gathered.new_empty(layout.rows, features)
    if layout.is_even and layout.is_rank_major:
        return gathered
    by_rank = gathered.view(layout.ranks, layout.outer, -1, features)
    segments = [
        segments[:, : size * layout.inner]
        for segments, size in zip(by_rank, layout.sizes, strict=True)
    ]
    return torch.cat(segments, dim=1).view(layout.rows, features)


def reduce_rows(partial: torch.Tensor, layout: RowLayout, group_name: str) -> torch.Tensor:
    """This rank's rows of the sum over ranks, ``(M, F) -> (m_r, F)``, by one reduce-scatter.

    Uneven rows are padded to those of the rank that has most. One copy, unless even and rank-major.
    """
    return own_rows(wait_tensor(start_reduce_rows(partial, layout, group_name)), layout)


def start_reduce_rows(partial: torch.Tensor, layout: RowLayout, group_name: str) -> torch.Tensor:
    """Starts the reduce-scatter of `reduce_rows`; `own_rows` makes the result of what it fills."""
    features = partial.shape[1]
    if layout.rows * features == 0:
        return partial.new_empty(layout.max_rows, features)
    longest = max(layout.sizes) * layout.inner
    if layout.is_even and layout.is_rank_major:
        by_rank = partial
    else:
        segments = [_pad(layout.segments(partial, rank), longest) for rank in range(layout.ranks)]
        by_rank = torch.cat(segments).view(-1, features)
    note_launch()
    return _functional.reduce_scatter_tensor(by_rank, "sum", layout.ranks, group_name)


def own_rows(padded: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """This rank's rows ``(m_r, F)`` out of as many as the rank with most has, padded by segment."""
    if layout.is_even:
        return padded
    segment = layout.sizes[layout.rank] * layout.inner
    by_segment = padded.view(layout.outer, -1, padded.shape[1]) if layout.outer else padded[None]
    return by_segment[:, :segment].reshape(layout.local_rows, padded.shape[1])


def _pad(segments: torch.Tensor, rows: int) -> torch.Tensor:
    """Appends rows of zeros to each segment of ``(outer, rows, F)``."""
    missing = rows - segments.shape[1]
    return F.pad(segments, (0, 0, 0, missing)) if missing else segments
