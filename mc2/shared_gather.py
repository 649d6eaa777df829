"""One deferred gather for the layers that are handed the same sequence-sharded tensor.

[Note: what is shared, and for how long]
A gather is remembered for the tensor object that it gathers, so that wq, wk and wv called on one
tensor make one gather, and autograd adds their grad_inputs before one reduction. Whether two calls
share decides whether a collective is launched, so it has to be decided alike on every rank, and
what is remembered has to be forgotten before it can be stale:

- only the latest gather is remembered, as long as its source lives and no MC2 backward has begun;
- what columns with ``regather=True`` share, until a row runs: they want its memory back;
- a layer that has used it already gathers anew: this is another pass, and the source may have been
  filled again by what autograd's version counter does not see (NumPy, or ``dist.recv``);
- a tensor made in inference mode, which has no version counter, is not shared at all.

``PrepareModuleInput(defer=True)`` shares without any of this: the layers are handed the gather.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from mc2.autocast import as_autocast, autocast_dtype
from pending_dtensor.hyper_dtensor import HyperDTensor, redistribute_deferred


class _Shared(NamedTuple):
    source: weakref.ref[torch.Tensor]
    key: Hashable
    gather: HyperDTensor
    users: weakref.WeakSet[nn.Module]
    until_row: bool


class _Latest(threading.local):
    """The gather that this thread's next layer may share."""

    shared: _Shared | None = None


_latest = _Latest()


def deferred_gather(shard: HyperDTensor, placements: Sequence[Placement]) -> HyperDTensor:
    """The gather of a shard, left to a fused layer; under autocast of the shard as it casts it."""
    return redistribute_deferred(as_autocast(shard), placements)


def shared_deferred_gather(
    source: torch.Tensor,
    user: nn.Module,
    boundary: Hashable,
    make: Callable[[], HyperDTensor],
    joins: Callable[[HyperDTensor], bool],
    *,
    until_row: bool,
) -> HyperDTensor:
    """The deferred gather of a tensor; the same one for every layer that is handed that tensor.

    Args:
        source: the tensor object that the layers share: a sequence-sharded local tensor or DTensor.
        user: the layer. It gets a gather of its own if it has used the shared one before.
        boundary: what else decides the result of ``make``: mesh and placements.
        make: makes the `deferred_gather` of ``source``.
        joins: whether the layer can read a gather besides those that have read it.
        until_row: whether a gather made here is forgotten when an MC2 row runs.
    """
    local = source._local_tensor if isinstance(source, DTensor) else source
    if source.is_inference() or local.is_inference():
        return make()
    key = (
        boundary,
        (source._version, local._version),
        source.requires_grad,
        torch.is_grad_enabled(),
        autocast_dtype(source),
    )
    shared = _latest.shared
    if (
        shared is None
        or shared.source() is not source
        or shared.key != key
        or user in shared.users
        or not joins(shared.gather)
    ):
        users: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        shared = _Shared(weakref.ref(source, _forget), key, make(), users, until_row)
        _latest.shared = shared
    shared.users.add(user)
    return shared.gather


def forget_shared_gather() -> None:
    """Lets go of the latest gather: no layer is going to share it."""
    _latest.shared = None


def a_row_runs() -> None:
    """Lets go of the latest gather if its columns gather again in backward."""
    if _latest.shared is not None and _latest.shared.until_row:
        _latest.shared = None


def _forget(source: weakref.ref[torch.Tensor]) -> None:
    shared = _latest.shared
    if shared is not None and shared.source is source:
        _latest.shared = None
