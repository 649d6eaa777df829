"""Puts rank 0 ahead of the others, so that what it launched is certainly not finished."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from tests.common.distributed_launcher import RankContext

T = TypeVar("T")

READ_HEAD_START_S = 0.1
_keys = (f"rank_0_is_ahead/{number}" for number in itertools.count())


def ahead(ctx: RankContext, start: Callable[[], T], check: Callable[[T], None] | None = None) -> T:
    """Calls ``start`` on every rank, on the others only after rank 0 has returned from it.

    Args:
        ctx: the rank.
        start: launches collectives and must not wait for them: rank 0 would wait for ever.
        check: called on rank 0 with what ``start`` gave, before the others start. It must not wait
            either.

    Returns:
        What ``start`` gave. The other ranks start a moment after rank 0 returns, so that a read
        there begins before the value is there.
    """
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    key = next(_keys)
    if ctx.rank == 0:
        try:
            started = start()
            if check is not None:
                check(started)
        finally:
            store.set(key, "1")
        return started
    store.wait([key], timedelta(seconds=60))
    time.sleep(READ_HEAD_START_S)
    return start()
