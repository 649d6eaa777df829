"""Families of rank processes that may be killed, stopped and hung, forked from one that cannot be.

A test runs a body in a `RankPool` of one process, `nursery`. That body forks a family of ranks for
each case, which costs next to nothing as everything is imported, and tells how each rank ended. The
ranks have a short timeout and a group of their own; whatever they do, none of them is left.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, RankPool

if TYPE_CHECKING or IN_RANK_PROCESS:
    import torch.distributed as dist

    from pending_dtensor import use_one_gloo_worker

# Of the step that goes wrong; all that has to go right gets the time that a busy machine needs.
TIMEOUT_S = 3.0
LIMIT_S = 60.0
# For the other ranks, once one has raised: most likely they wait for it.
GRACE_S = 5.0
AT_ONCE = 6


def nursery(body: Callable[..., Any], *args: Any) -> Any:
    """Runs ``body`` in a process of its own that has no process group, and returns its result."""
    own = RankPool(1)
    try:
        return own.run(body, *args)[0]
    finally:
        own.close()


@dataclass
class Ending:
    """How one rank ended: with a value, with an exception (its traceback), or by a signal."""

    value: Any = None
    raised: str = ""
    signal: int = 0

    @property
    def failed(self) -> bool:
        return bool(self.raised or self.signal)


def values(endings: Sequence[Ending], *, but: int | None = None) -> list[Any]:
    """What the ranks returned, all ``but`` one; fails with every other end."""
    others = [ending for rank, ending in enumerate(endings) if rank != but]
    bad = [ending.raised or f"signal {ending.signal}" for ending in others if ending.failed]
    assert not bad, "\n".join(bad)
    return [ending.value for ending in others]


class Family:
    """Ranks that run ``body(ctx, *args)``; a context manager that leaves none of them alive.

    Args:
        ranks: how many.
        body: what they run; it returns plain data.
        args: further arguments.
    """

    def __init__(self, ranks: int, body: Callable[..., Any], *args: Any) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()  # its threads would not be there in the children
        self._folder = tempfile.TemporaryDirectory(prefix="family_")
        self.pids: list[int] = []
        self._pipes: list[int] = []
        for rank in range(ranks):
            read_end, write_end = os.pipe()
            pid = os.fork()
            if pid == 0:
                _be_a_rank(rank, ranks, Path(self._folder.name), body, args, write_end)
            os.close(write_end)
            self.pids.append(pid)
            self._pipes.append(read_end)

    def endings(self) -> list[Ending]:
        """Waits for all of them to end, for at most `LIMIT_S`; those that do not are killed."""
        answers = [bytearray() for _ in self.pids]
        open_pipes = dict(zip(self._pipes, answers, strict=True))
        deadline = time.monotonic() + LIMIT_S
        while open_pipes and time.monotonic() < deadline:
            for pipe in select.select(list(open_pipes), [], [], 0.1)[0]:
                read = os.read(pipe, 1 << 16)
                open_pipes[pipe].extend(read)
                if not read:
                    answer = open_pipes.pop(pipe)
                    if answer and pickle.loads(answer).raised:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        self._kill()
        endings = []
        for pid, answer in zip(self.pids, answers, strict=True):
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if answer:
                endings.append(pickle.loads(answer))
            elif code < 0:
                endings.append(Ending(signal=-code))
            else:  # `faulthandler` did: its stack is in the output of the nursery
                endings.append(Ending(raised=f"no answer within {LIMIT_S} s"))
        self.pids = []
        return endings

    def _kill(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)  # one that has ended is still ours to wait for

    def __enter__(self) -> Family:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._kill()
        for pid in self.pids:
            os.waitpid(pid, 0)
        for pipe in self._pipes:
            os.close(pipe)
        self._folder.cleanup()


def endings(ranks: int, body: Callable[..., Any], *args: Any) -> list[Ending]:
    """How the ranks of a family end that run ``body(ctx, *args)``."""
    with Family(ranks, body, *args) as family:
        return family.endings()


def endings_of_each(
    ranks: int,
    body: Callable[..., Any],
    cases: Iterable[Sequence[Any]],
    *,
    at_once: int = AT_ONCE,
) -> list[list[Ending]]:
    """`endings` for the arguments of each case; ``at_once`` families at a time, as most wait.

    Many more than that would be late on a machine with few cores.
    """
    remaining = iter(cases)
    found = []
    while some := list(itertools.islice(remaining, at_once)):
        with contextlib.ExitStack() as stack:
            families = [stack.enter_context(Family(ranks, body, *case)) for case in some]
            found += [family.endings() for family in families]
    return found


def _be_a_rank(
    rank: int,
    ranks: int,
    folder: Path,
    body: Callable[..., Any],
    args: Sequence[Any],
    answer: int,
) -> None:
    """In the child: joins the group, runs the body, answers, and ends without any clean-up."""
    global _folder
    _folder = folder
    faulthandler.dump_traceback_later(LIMIT_S - 2, exit=True)
    ignored: list[str] = []
    sys.unraisablehook = lambda unraisable: ignored.append(repr(unraisable))
    ending = Ending()
    try:
        join(rank, ranks)
        ending.value = body(RankContext(rank, ranks), *args)
        gc.collect()
        assert not ignored, ignored
    except BaseException:
        ending.raised = f"rank {rank}: {traceback.format_exc()}"
    finally:
        with open(answer, "wb") as pipe:
            pickle.dump(ending, pipe)
        os._exit(0)


_folder = Path()
_names = itertools.count()


def _next_store(ranks: int) -> Any:
    """A store that ranks meet at which call this equally often."""
    return dist.FileStore(str(_folder / f"store_{next(_names)}"), ranks)


def join(rank: int, ranks: int) -> None:
    """In a rank: makes a default group of ``ranks``, with time enough."""
    use_one_gloo_worker()
    dist.init_process_group(
        "gloo",
        store=_next_store(ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=LIMIT_S),
    )


def regroup(rank: int, ranks: int) -> None:
    """Leaves the default group for a new one of ``ranks``."""
    dist.destroy_process_group()
    join(rank, ranks)


def meet(
    ctx: RankContext, saying: str = "", *, last: Callable[[int], object] | None = None
) -> list[str]:
    """Waits for all ranks, without a collective; returns what each of them says.

    Calls ``last`` again and again with the rank that is the only one missing.
    """
    store = _next_store(ctx.world_size)
    store.set(str(ctx.rank), saying)
    ranks = range(ctx.world_size)
    deadline = time.monotonic() + LIMIT_S
    while missing := [rank for rank in ranks if not store.check([str(rank)])]:
        assert time.monotonic() < deadline, f"ranks {missing} did not come"
        if last is not None and len(missing) == 1:
            last(missing[0])
        time.sleep(0.01)
    return [store.get(str(rank)).decode() for rank in ranks]


def be_impatient(timeout_s: float = TIMEOUT_S) -> None:
    """From now on, collectives of the default group fail after ``timeout_s``."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), dist.group.WORLD)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fails if the block takes longer."""
    began = time.monotonic()
    yield
    took_s = time.monotonic() - began
    assert took_s < seconds, f"{took_s:.1f} s"
