"""The ``decomposed`` kernel: a collective, then a matmul. The reference that others must equal."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from mc2.kernel_interface import CallFacts, Chunks, Kernel, Operation, Schedule
from mc2.kernel_ops import (
    all_gather_matmul_op,
    matmul_reduce_scatter_op,
    matmul_scatter_start_op,
    sum_of_matmuls,
)
from mc2.row_collectives import gather_rows, own_rows, reduce_rows, start_reduce_rows
from mc2.row_layout import RowLayout


@all_gather_matmul_op("decomposed_all_gather_matmul", "str group")
def _all_gather_matmul(
    shard: torch.Tensor,
    weights: list[torch.Tensor],
    outer: int,
    sizes: list[int],
    inner: int,
    rank: int,
    gather_output: bool,
    group: str,
) -> list[torch.Tensor]:
    gathered = gather_rows(shard, RowLayout(outer, tuple(sizes), inner, rank), group)
    outs = [torch.mm(gathered, weight) for weight in weights]
    return [gathered if gather_output else shard.new_empty(0), *outs]


@matmul_reduce_scatter_op("decomposed_matmul_reduce_scatter", "str group")
def _matmul_reduce_scatter(
    xs: list[torch.Tensor],
    weights: list[torch.Tensor],
    outer: int,
    sizes: list[int],
    inner: int,
    rank: int,
    group: str,
) -> torch.Tensor:
    partial = sum_of_matmuls(list(zip(xs, weights, strict=True)))
    return reduce_rows(partial, RowLayout(outer, tuple(sizes), inner, rank), group)


def _buffer_shapes(
    features: int, outer: int, sizes: list[int], inner: int, rank: int, group: str
) -> list[tuple[int, int]]:
    return [(outer * max(sizes) * inner, features)]


@matmul_scatter_start_op("decomposed_matmul_scatter_start", "str group", _buffer_shapes)
def _start_matmul_reduce_scatter(
    xs: list[torch.Tensor],
    weights: list[torch.Tensor],
    outer: int,
    sizes: list[int],
    inner: int,
    rank: int,
    group: str,
) -> list[torch.Tensor]:
    partial = sum_of_matmuls(list(zip(xs, weights, strict=True)))
    return [start_reduce_rows(partial, RowLayout(outer, tuple(sizes), inner, rank), group)]


class DecomposedKernel(Kernel):
    """The collective and the matmul one after the other: nothing overlaps.

    Any device, process group and dtype that has the collectives; uneven and empty rows by padding.
    Partial sums are added in the order and the precision of the process group's reduce-scatter.
    """

    name = "decomposed"
    ops: Mapping[Operation, Any] = MappingProxyType(
        {
            "all_gather_matmul": _all_gather_matmul,
            "matmul_reduce_scatter": _matmul_reduce_scatter,
        }
    )

    def constraint_reasons(self, op: Operation, facts: CallFacts) -> list[str]:
        """It cannot cut."""
        if facts.chunks in ("auto", 1):
            return []
        return [
            f'Expected chunks "auto" or 1, as {self.name!r} does not cut, got {facts.chunks!r}.'
        ]

    def schedule(
        self,
        op: Operation,
        layout: RowLayout,
        message: torch.Tensor,
        chunks: Chunks,
        width: int | None = None,
        matmuls: int = 1,
    ) -> Schedule:
        """One collective."""
        return Schedule(chunks=1, steps=1)

    @property
    def start_op(self) -> Any:
        """The matmul, and the launch of its reduce-scatter."""
        return _start_matmul_reduce_scatter

    def finish_scatter(
        self, layout: RowLayout, schedule: Schedule, *buffers: torch.Tensor
    ) -> torch.Tensor:
        """Takes the padding off."""
        return own_rows(buffers[0], layout)

    def op_group(self, group: dist.ProcessGroup) -> str:
        """Its name."""
        return group.group_name
