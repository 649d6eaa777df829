"""One worker thread for each gloo group: with two, torch 2.13 corrupts its heap now and then.

[Note: two gloo workers]
A gloo group of torch runs its collectives in two threads. When one has run, its thread moves the
collective's name into one ``std::string`` that both share, without a lock
(``ProcessGroupGloo::runLoop``, ``pgStatus_->lastCompletedWorkName``). An all-gather's name,
``ALLGATHER_COALESCED``, is too long to be kept inside the string, so two collectives that end at
the same moment, one of them an all-gather, free one buffer twice. The process dies later, at any
allocation: ``malloc(): unaligned tcache chunk detected``, or a segmentation fault. AddressSanitizer
shows it for 90 all-gathers in flight and a peer that comes late, without a line of this package.
Torch's own styles wait for most collectives at once and so hardly have two; we launch more.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from pending_dtensor.torch_compat import ProcessGroupGloo, one_worker_options


def use_one_gloo_worker() -> None:
    """Gives each gloo group that this process makes from now on one worker thread instead of two.

    Collectives of one group then run one after another, in the order in which they were launched.
    Sends and receives, which the ``pipelined`` kernel uses, need no worker and run as before.
    Groups of other backends are not touched. Calling it twice does no harm.

    Raises:
        RuntimeError: a process group exists already, which keeps the workers it was made with.
    """
    if ProcessGroupGloo is None or ProcessGroupGloo.__init__ is _init_with_one_worker:
        return
    if dist.is_initialized():
        raise RuntimeError(
            "Expected no process group yet, got one, which keeps the workers it was made with "
            "(use_one_gloo_worker). Call it before init_process_group."
        )
    ProcessGroupGloo.__init__ = _init_with_one_worker


_init: Any = object.__init__ if ProcessGroupGloo is None else ProcessGroupGloo.__init__


@functools.wraps(_init)
def _init_with_one_worker(
    self: Any,
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta | Any = default_pg_timeout,
    *,
    options: Any = None,
) -> None:
    if isinstance(timeout, ProcessGroupGloo._Options):
        options = timeout
    if options is None:
        options = one_worker_options(timeout)
    else:
        # The caller's keep their devices and their timeout.
        options._threads = 1
    _init(self, store, rank, size, options)
