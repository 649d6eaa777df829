"""What a pipelined step is made of: rows to one rank of the group, and rows from another.

[Note: receive first]
On gloo a rank tells its peer that it is ready to receive over the connection that carries its own
rows. Behind them, that word comes late, and the two directions of a link are used one after the
other: the fate of ``all_to_all_single`` whenever a rank comes a little later than its peer, with up
to twice the time. So a step is a receive and a send, in this order, which backends that must not
tell the two apart (NCCL, HCCL) are handed as one batch.

[Note: a thread that posts]
Gloo reads and writes in a thread of its own. Where a rank has one core, that thread interrupts one
that multiplies and just now posts a message, and then spins on the lock which that one holds: some
2 ms for each message. A thread that does nothing but post has slept until then, and is let finish.
So gloo's messages are posted by such a thread, one for all, as their order counts.

[Note: whom a message belongs to]
Messages between two ranks are matched by their order and, on gloo, by `_TAG`. So kernels have to be
called in the same order on every rank, as collectives have.
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from weakref import WeakSet

import torch
import torch.distributed as dist

from mc2.kernel_ops import note_launch
from mc2.row_layout import RowLayout
from mc2.torch_compat import gloo_timeout, is_profiled, register_wait

_TAG = 0x6D6332  # "mc2": a message that a user sends between the same ranks is another one

# Gloo groups in which a message did not come: what else is on its way in them is not waited for.
# Gloo fails most of it at once itself, but not a send over a connection that its peer has closed.
_failed: WeakSet[dist.ProcessGroup] = WeakSet()
_AN_INSTANT = timedelta(milliseconds=1)  # zero is no timeout


@functools.cache
def _poster() -> ThreadPoolExecutor:
    """The thread that posts (see the note on it)."""
    return ThreadPoolExecutor(1, thread_name_prefix="mc2-poster")


os.register_at_fork(after_in_child=_poster.cache_clear)  # threads do not survive in the child


def _post(messages: list[dist.P2POp], *, by_thread: bool) -> Future[list[dist.Work]]:
    """Hands messages to their process group: at once, or in the thread for it."""
    if by_thread and not is_profiled():
        return _poster().submit(_start, messages)
    if by_thread:  # a profiler sees this thread only; what was posted before goes first
        _poster().submit(int).result()
    posted: Future[list[dist.Work]] = Future()
    try:
        posted.set_result(_start(messages))
    except RuntimeError as error:
        posted.set_exception(error)
    return posted


def _start(messages: list[dist.P2POp]) -> list[dist.Work]:
    """Empties the list: a thread forgets its arguments a little after it is done with them."""
    try:
        return dist.batch_isend_irecv(messages) if messages else []
    finally:
        messages.clear()


class RowExchange:
    """A step that has been started: a message from the rank above, and one to the rank below.

    It has to be waited for: a message that is dropped on its way takes the group with it.
    """

    def __init__(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        distance: int,
        layout: RowLayout,
        group: dist.ProcessGroup,
    ) -> None:
        """Starts receiving from the rank ``distance`` above, and sending to the one below (mod R).

        Args:
            received: contiguous rows to fill; without elements, nothing is received.
            sent: contiguous rows; without elements, nothing is sent.
            distance: 1 to R - 1.
            layout: tells ranks and rank.
            group: the ranks.
        """
        note_launch()
        self._received = received
        self.above = (layout.rank + distance) % layout.ranks
        below = (layout.rank - distance) % layout.ranks
        # Gloo gives messages the timeout that the group was made with, not the one it has now.
        self._timeout: timedelta | None = gloo_timeout(group, received.device)
        self._group = group
        # As bytes, so that a dtype need not be known to the process group. Flattened first: one
        # feature may have any stride in what torch calls contiguous, and bytes need stride 1.
        messages = [
            dist.P2POp(call, rows.flatten().view(torch.uint8), None, group, _TAG, peer)
            for call, rows, peer in ((dist.irecv, received, self.above), (dist.isend, sent, below))
            if rows.numel()
        ]
        self._arriving = 1 if received.numel() else 0
        self._works: list[dist.Work] = []
        self._posted: Future[list[dist.Work]] | None = _post(
            messages, by_thread=bool(messages) and self._timeout is not None
        )

    def wait_for_rows(self) -> None:
        """Returns when ``received`` is filled.

        Raises:
            RuntimeError: as the process group tells it.
        """
        self._wait(len(self._under_way()) - self._arriving)

    def wait(self) -> None:
        """Returns when ``sent`` may be written to, too."""
        self._wait(0)

    def _wait(self, left: int) -> None:
        works = self._under_way()
        while len(works) > left:
            # A wait that was interrupted may have been at its end; gloo would wait for another
            # message then.
            if not works[0].is_completed():
                self._wait_for(works[0])
            del works[0]  # not before: an interrupted wait has to be made up for
            self._arriving = 0

    def _under_way(self) -> list[dist.Work]:
        """What has not been waited for."""
        if self._posted is not None:
            error = self._posted.exception()
            if error is not None:  # gloo knows at once of a peer that has gone
                _failed.add(self._group)
                # A new one each time: it would hold all that is held where it is raised, this too.
                raise RuntimeError(str(error)) from error
            self._works = self._posted.result()
            self._posted = None
        return self._works

    def _wait_for(self, work: dist.Work) -> None:
        if self._timeout is None:
            work.wait()
            return
        given_up = self._group in _failed
        try:
            work.wait(_AN_INSTANT if given_up else self._timeout)
        except RuntimeError as error:
            _failed.add(self._group)
            if given_up:
                raise RuntimeError(f"not waited for after another had failed: {error}") from error
            raise

    def register(self) -> None:
        """Makes ``wait_tensor(received)`` wait for the step."""
        register_wait(self._received, self.wait)
