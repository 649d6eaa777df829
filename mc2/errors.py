"""Exceptions of mc2."""


class MC2ConstraintError(ValueError):
    """Something asked of a fused kernel that it cannot do. The message has every reason at once.

    Raised from global facts only, so on every rank alike, and before any communication.
    """


class KernelConflictError(ValueError):
    """A kernel was registered under a name that is taken."""
