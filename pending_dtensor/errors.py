"""Exceptions of pending_dtensor. Each derives from the built-in that says what went wrong."""


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


class FusedRuleConflictError(ValueError):
    """A (producer kind, consumer op) pair was registered a second time."""


class InconsistentRanksError(RuntimeError):
    """Ranks were about to start different collectives; found by `debug_consistency`."""


class PlacementError(ValueError):
    """Placements that do not fit the tensor or its mesh."""


class NotFusedError(AssertionError):
    """A test expected fused kernels, and something ran unfused, fell back or never ran."""
