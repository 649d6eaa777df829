"""The ``ascend`` kernel: torch_npu's fused operators. The one file that imports torch_npu.

[Note: row order]
The operators gather rank by rank, and scatter in equal consecutive parts. Where a rank owns several
segments (batch-first: one for each batch index) that is not the global row order. Then gathering
costs a copy of the first result and of the gathered tensor, scattering a copy of each x.

[Note: several weights, several terms]
The operators take one weight. Weights that share a gather are not concatenated, which would copy
them at each call: the first is fused, the others multiply the gathered tensor. Terms of a reduction
are concatenated along the contraction (a copy of each x and weight), as one reduction is worth
more than the copies; their summed K has to keep to the limits.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from mc2.errors import MC2ConstraintError
from mc2.kernel_interface import CallFacts, Chunks, Kernel, Operation, Schedule
from mc2.kernel_ops import all_gather_matmul_op, matmul_reduce_scatter_op
from mc2.row_layout import RowLayout
from mc2.torch_compat import group_backend

_DTYPES = (torch.float16, torch.bfloat16)
_RANKS = (2, 4, 8)
_MIN_CONTRACTION, _CONTRACTION_LIMIT = 256, 65535
_NPU_OPS = ("npu_all_gather_base_mm", "npu_mm_reduce_scatter_base")


@all_gather_matmul_op("ascend_all_gather_matmul", "str communicator")
def _all_gather_matmul(
    shard: torch.Tensor,
    weights: list[torch.Tensor],
    outer: int,
    sizes: list[int],
    inner: int,
    rank: int,
    gather_output: bool,
    communicator: str,
) -> list[torch.Tensor]:
    layout = RowLayout(outer, tuple(sizes), inner, rank)
    first, *siblings = weights
    # Only what differs from the defaults is passed: older wheels know fewer arguments.
    options = {} if gather_output or siblings else {"gather_output": False}
    out, gathered = torch.ops.npu.npu_all_gather_base_mm(
        shard, first, communicator, layout.ranks, **options
    )
    out = _in_global_order(out, layout)
    if options:
        return [shard.new_empty(0), out]
    gathered = _in_global_order(gathered, layout)
    outs = [out, *(torch.mm(gathered, weight) for weight in siblings)]
    return [gathered if gather_output else shard.new_empty(0), *outs]


@matmul_reduce_scatter_op("ascend_matmul_reduce_scatter", "str communicator")
def _matmul_reduce_scatter(
    xs: list[torch.Tensor],
    weights: list[torch.Tensor],
    outer: int,
    sizes: list[int],
    inner: int,
    rank: int,
    communicator: str,
) -> torch.Tensor:
    layout = RowLayout(outer, tuple(sizes), inner, rank)
    x = _in_rank_order(xs[0] if len(xs) == 1 else torch.cat(xs, dim=1), layout)
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return torch.ops.npu.npu_mm_reduce_scatter_base(x, weight, communicator, layout.ranks)


def _in_global_order(tensor: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """Rows of even ranks from rank by rank to global order."""
    if layout.is_rank_major:
        return tensor
    segment = layout.sizes[0] * layout.inner  # not -1, which an empty batch leaves open
    by_rank = tensor.view(layout.ranks, layout.outer, segment, tensor.shape[1])
    return by_rank.transpose(0, 1).reshape(tensor.shape)


def _in_rank_order(tensor: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """Rows of even ranks from global order to rank by rank."""
    if layout.is_rank_major:
        return tensor
    segment = layout.sizes[0] * layout.inner
    by_outer = tensor.view(layout.outer, layout.ranks, segment, tensor.shape[1])
    return by_outer.transpose(0, 1).reshape(tensor.shape)


def hccl_communicator_name(group: dist.ProcessGroup) -> str:
    """Name of the HCCL communicator of ``group``. The first call is collective: it makes it."""
    return group_backend(group, "npu").get_hccl_comm_name(dist.get_rank())


class AscendKernel(Kernel):
    """torch_npu's ``npu_all_gather_base_mm`` and ``npu_mm_reduce_scatter_base``.

    Overlap happens inside the operators, on the current NPU stream. They need no other work of the
    same or an overlapping group to be in flight, and never run two at once. The reduction is
    deterministic only under ``torch.use_deterministic_algorithms(True)``. Activations that are not
    contiguous are copied first; the ``.t()`` of a contiguous weight is not.

    Source: torch_npu 2.13.0, operator schemas and public operator documents.
    """

    name = "ascend"
    ops: Mapping[Operation, Any] = MappingProxyType(
        {
            "all_gather_matmul": _all_gather_matmul,
            "matmul_reduce_scatter": _matmul_reduce_scatter,
        }
    )

    def __init__(self) -> None:
        self._communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = (
            weakref.WeakKeyDictionary()
        )

    def prepare(self, group: dist.ProcessGroup) -> None:
        """Looks up the HCCL communicator, once per group. Collective.

        Raises:
            MC2ConstraintError: the group has no HCCL.
        """
        reasons = self._group_reasons(group)
        if reasons:
            raise MC2ConstraintError(" ".join(reasons))
        if group not in self._communicators:
            self._communicators[group] = hccl_communicator_name(group)

    def op_group(self, group: dist.ProcessGroup) -> str:
        """The name of its HCCL communicator."""
        name = self._communicators.get(group)
        if name is None:
            raise RuntimeError(
                f"Expected a prepared process group, got {group.group_name!r} (kernel "
                f"{self.name!r}). Call prepare(group) on every rank when the layer is set up."
            )
        return name

    def schedule(
        self,
        op: Operation,
        layout: RowLayout,
        message: torch.Tensor,
        chunks: Chunks,
        width: int | None = None,
        matmuls: int = 1,
    ) -> Schedule:
        """One operator."""
        return Schedule(chunks=1, steps=1)

    def environment_reasons(self) -> list[str]:
        """torch_npu missing, broken, or without one of the operators."""
        try:
            import torch_npu  # noqa: F401 - registers the operators
        except (ImportError, OSError, RuntimeError) as error:
            return [
                f"Expected torch_npu with CANN, got {type(error).__name__}: {error}. Install the "
                f"torch_npu of this torch release."
            ]
        missing = [name for name in _NPU_OPS if not hasattr(torch.ops.npu, name)]
        if missing:
            return [
                f"Expected torch_npu to have {', '.join(missing)}, got a release without. Install "
                f"torch_npu 2.5.1 or newer."
            ]
        return []

    def constraint_reasons(self, op: Operation, facts: CallFacts) -> list[str]:
        """What the operators need and do not check themselves."""
        reasons = []
        for dtype in dict.fromkeys(facts.dtypes):
            if dtype not in _DTYPES:
                reasons.append(f"Expected dtype float16 or bfloat16, got {dtype}.")
        for contraction in facts.contractions:
            if not _MIN_CONTRACTION <= contraction < _CONTRACTION_LIMIT:
                reasons.append(
                    f"Expected a contraction K of {_MIN_CONTRACTION} <= K < {_CONTRACTION_LIMIT}, "
                    f"got {contraction}."
                )
        if facts.ranks is not None and facts.ranks not in _RANKS:
            reasons.append(f"Expected 2, 4 or 8 ranks, got {facts.ranks}.")
        if facts.layout is not None and not facts.layout.is_even:
            layout = facts.layout
            reasons.append(
                f"Expected rows that divide evenly over {layout.ranks} ranks, got M = {layout.rows}"
                f" with {layout.sizes} of the sequence dim on each."
            )
        if facts.chunks not in ("auto", 1):
            reasons.append(
                f'Expected chunks "auto" or 1, as the operators cut by themselves, got '
                f"{facts.chunks!r}."
            )
        if facts.group is not None:
            reasons += self._group_reasons(facts.group)
        return reasons

    def _group_reasons(self, group: dist.ProcessGroup) -> list[str]:
        if group in self._communicators:
            return []
        if hasattr(group_backend(group, "npu"), "get_hccl_comm_name"):
            return []
        return [
            f"Expected a process group with HCCL, got {group.group_name!r} without. Initialize it "
            f'with backend "hccl" or "cpu:gloo,npu:hccl".'
        ]

    def operand_reasons(self, x: torch.Tensor, weight: torch.Tensor) -> list[str]:
        """The weight has to be contiguous, or to become so by a transpose."""
        if weight.is_contiguous() or weight.t().is_contiguous():
            return []
        return [
            f"Expected a weight that is contiguous or the .t() of a contiguous one, got shape "
            f"{tuple(weight.shape)} with strides {weight.stride()}."
        ]
