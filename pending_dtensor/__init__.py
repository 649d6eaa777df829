"""Async redistribution for DTensor: collectives that are waited for when their result is read."""

from pending_dtensor import linear as _linear  # noqa: F401 - registers F.linear
from pending_dtensor.consistency import debug_consistency
from pending_dtensor.dispatch import full_gather_fallback
from pending_dtensor.errors import NotFusedError
from pending_dtensor.events import OverlapEvent
from pending_dtensor.fused_rules import register_fused_rule
from pending_dtensor.gloo_workers import use_one_gloo_worker
from pending_dtensor.hyper_dtensor import HyperDTensor, distribute_tensor
from pending_dtensor.overlap_log import OverlapLog, record_overlap
from pending_dtensor.pending import PendingState
from pending_dtensor.pending_local import PendingLocal

__all__ = [
    "HyperDTensor",
    "NotFusedError",
    "OverlapEvent",
    "OverlapLog",
    "PendingLocal",
    "PendingState",
    "debug_consistency",
    "distribute_tensor",
    "full_gather_fallback",
    "record_overlap",
    "register_fused_rule",
    "use_one_gloo_worker",
]
