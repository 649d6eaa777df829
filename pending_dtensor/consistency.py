"""An opt-in check that the ranks of a group are about to start the same collective."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from pending_dtensor.errors import InconsistentRanksError
from pending_dtensor.torch_compat import describe_group, resolve_group


class _Check:
    """How many `debug_consistency` blocks are open; the environment opens one for a whole run."""

    depth = int(os.environ.get("PENDING_DTENSOR_CHECK", "0") not in ("", "0"))


@contextmanager
def debug_consistency() -> Iterator[None]:
    """Inside the block, ranks compare each collective before any of them starts it.

    Every rank of a group has to be inside. Where shapes, dtypes, kinds or their order differ, all
    ranks raise `InconsistentRanksError` with what each was about to do, and no data is sent. Costs
    an all_gather_object for each collective. ``PENDING_DTENSOR_CHECK=1`` in the environment does
    the same for a whole run.

    A rank that starts no collective at all is found by the group's timeout only; the error then
    says what this rank was about to do.
    """
    _Check.depth += 1
    try:
        yield
    finally:
        _Check.depth -= 1


def checking() -> bool:
    """Whether the check is on."""
    return _Check.depth > 0


def check_consistent(what: str, group: str, **facts: Any) -> None:
    """Compares what the ranks of a group are about to do. Does nothing unless the check is on.

    Args:
        what: the collective, or the boundary where values come in.
        group: name of the process group.
        facts: what must be the same on every rank.

    Raises:
        InconsistentRanksError: they differ, raised on every rank; or a rank did not come.
    """
    if not _Check.depth:
        return
    process_group = resolve_group(group)
    mine = f"{what} of " + ", ".join(f"{name} {value}" for name, value in facts.items())
    found: list[Any] = [None] * process_group.size()
    try:
        dist.all_gather_object(found, mine, group=process_group)
    except RuntimeError as error:
        raise InconsistentRanksError(
            f"Expected every rank of {describe_group(group)} to start the same collective, got "
            f"{type(error).__name__}: {error} (debug_consistency; this rank was about to do "
            f"{mine}). See on the other ranks what they did instead."
        ) from error
    if any(other != mine for other in found):
        listing = "\n".join(f"  rank {rank}: {other}" for rank, other in enumerate(found))
        raise InconsistentRanksError(
            f"Expected the same collective on every rank of group {group!r}, got\n{listing}\n"
            f"(debug_consistency; nothing was sent). Check that all ranks take the same path, and "
            f"that local shards are even, or go in with from_local(shape=..., stride=...)."
        )


def holds(size: int, planned: int) -> str:
    """A fact for `check_consistent`: whether this rank's part has the size that the spec says."""
    return "as planned" if size == planned else f"{size} long instead of {planned}"
