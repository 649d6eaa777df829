"""One deferred gather for all layers that read the same sequence-sharded tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement

from pending_dtensor.hyper_dtensor import HyperDTensor, redistribute_deferred

_ATTRIBUTE = "_mc2_shared_gather"


def shared_deferred_gather(
    source: torch.Tensor,
    placements: Sequence[Placement],
    as_shard: Callable[[], HyperDTensor],
) -> HyperDTensor:
    """The deferred gather of a tensor; the same one for every layer that is handed that tensor.

    wq, wk and wv called on one tensor object so make one gather in forward, and autograd adds their
    grad_inputs before one reduction. Under autocast the shard is cast before it is gathered.

    Args:
        source: the tensor object that the layers share: a sequence-sharded local tensor or DTensor.
        placements: placements after the gather.
        as_shard: makes the sequence-sharded HyperDTensor of ``source``.
    """
    version = None if source.is_inference() else source._version
    key = (tuple(placements), version, torch.is_grad_enabled(), _autocast_dtype(source))
    known = getattr(source, _ATTRIBUTE, None)
    if known is not None and known[0] == key:
        gather = known[1]()
        if gather is not None:
            return gather
    shard = as_shard()
    dtype = key[-1]
    if dtype is not None and shard.is_floating_point() and shard.dtype != torch.float64:
        shard = shard.to(dtype)
    gather = redistribute_deferred(shard, placements)
    setattr(source, _ATTRIBUTE, (key, _reference(source, gather)))
    return gather


def _autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    device_type = tensor.device.type
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _reference(source: torch.Tensor, gather: HyperDTensor) -> Callable[[], Any]:
    # The graph of a gather leads to the AccumulateGrad of a leaf, which holds the leaf: a strong
    # reference from there would be a cycle that no garbage collector sees.
    if gather.requires_grad and source.is_leaf:
        return weakref.ref(gather)
    return lambda: gather
