"""Exceptions of pending_dtensor. Each derives from the built-in that says what went wrong."""

from __future__ import annotations

from collections.abc import Sequence

from pending_dtensor.torch_compat import describe_group


class DeferredReadError(RuntimeError):
    """A deferred collective was read by an operation that no fused rule covers.

    Raised instead of silently launching the collective: one rank reading (a ``print``, a debugger)
    would launch it alone and hang, and an unfused run must never pass for a fused one.
    """


class InFlightInputModifiedError(RuntimeError):
    """The input of a collective was modified in place while it was in flight."""


class ForkedPendingError(RuntimeError):
    """A value launched before a fork was read in the child, which cannot wait for it."""


class ProcessGroupGoneError(RuntimeError):
    """A collective was asked for on a process group that has been destroyed."""


class CollectiveFailedError(RuntimeError):
    """A collective that was started did not complete: a rank died, is stuck, or went another way.

    Raised from what the process group said.
    """


def collective_failed(
    what: str,
    shape: Sequence[int] | None,
    dtype: object,
    group: str,
    waited_for: str,
    error: BaseException,
) -> CollectiveFailedError:
    """The error to raise from ``error``, which a wait gave. Nothing is communicated.

    Args:
        what: the collective or kernel.
        shape: of the value on this rank, if known.
        dtype: that was sent.
        group: name of the process group.
        waited_for: what had to arrive, or who wanted to read it.
        error: what the process group said.
    """
    of_shape = "" if shape is None else f"{tuple(shape)} "
    return CollectiveFailedError(
        f"Expected the {what} of {of_shape}{str(dtype).removeprefix('torch.')} over "
        f"{describe_group(group)} to complete, got {type(error).__name__}: {error} ({waited_for}). "
        f"See on the other ranks which died, is stuck or went another way; if one is only late, "
        f"give the group a longer timeout. Go on with new process groups."
    )


class FusedRuleConflictError(ValueError):
    """A (producer kind, consumer op) pair was registered a second time."""


class InconsistentRanksError(RuntimeError):
    """Ranks were about to start different collectives; found by `debug_consistency`."""


class PlacementError(ValueError):
    """Placements that do not fit the tensor or its mesh."""


class NotFusedError(AssertionError):
    """A test expected fused kernels, and something ran unfused, fell back or never ran."""
