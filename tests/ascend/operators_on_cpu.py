"""torch_npu's two operators on CPU tensors over gloo, and a process group that seems to have HCCL.

In a rank process of the suite, inside `hccl_over_gloo`, the ``ascend`` kernel runs on CPU tensors
through the real schemas::

    with hccl_over_gloo() as calls:
        get_kernel("ascend").prepare(group)
        ...
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401 - defines the operators

from mc2.kernels import ascend, get_kernel
from mc2.torch_compat import resolve_group


@dataclass
class OperatorCall:
    """One call of an operator as it arrived."""

    name: str
    x: torch.Tensor
    x2: torch.Tensor
    options: dict[str, Any]


_calls: list[OperatorCall] = []


@torch.library.impl("npu::npu_all_gather_base_mm", "CPU")
def _all_gather_base_mm(
    x: torch.Tensor, x2: torch.Tensor, hcom: str, world_size: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    _calls.append(OperatorCall("npu_all_gather_base_mm", x, x2, options))
    group = _group(hcom, world_size)
    shards = [torch.empty_like(x) for _ in range(world_size)]
    dist.all_gather(shards, x, group=group)
    gathered = torch.cat(shards)
    out = (gathered.float() @ x2.float()).to(x.dtype)
    return out, gathered if options.get("gather_output", True) else x.new_empty(0)


@torch.library.impl("npu::npu_mm_reduce_scatter_base", "CPU")
def _mm_reduce_scatter_base(
    x: torch.Tensor, x2: torch.Tensor, hcom: str, world_size: int, **options: Any
) -> torch.Tensor:
    _calls.append(OperatorCall("npu_mm_reduce_scatter_base", x, x2, options))
    group = _group(hcom, world_size)
    partial = x.float() @ x2.float()
    dist.all_reduce(partial, group=group)
    return partial.chunk(world_size)[group.rank()].to(x.dtype)


def _group(hcom: str, world_size: int) -> dist.ProcessGroup:
    group = resolve_group(hcom.removeprefix("hccl-of-"))
    assert group.size() == world_size
    return group


class _Backend:
    """As much of a ProcessGroupHCCL as the kernel asks for."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def get_hccl_comm_name(self, rank: int) -> str:
        assert rank == dist.get_rank(), "it is the global rank"
        dist.barrier(self._group)  # the real one is collective too
        return f"hccl-of-{self._group.group_name}"


@contextmanager
def hccl_over_gloo() -> Iterator[list[OperatorCall]]:
    """Every process group seems to have HCCL; yields the calls of the operators as they arrive."""

    def group_backend(group: dist.ProcessGroup, device_type: str) -> _Backend:
        assert device_type == "npu"
        return _Backend(group)

    _calls.clear()
    fresh: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
    with (
        mock.patch.object(ascend, "group_backend", group_backend),
        mock.patch.object(get_kernel("ascend"), "_communicators", fresh),
    ):
        yield _calls
    _calls.clear()
