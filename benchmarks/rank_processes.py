"""Rank processes on a `slow_link.Link`: one core each, kept for many calls, gone with their parent.

with rank_processes(link, 2) as ranks:
    results = ranks.call(function, argument=1)  # [result on rank 0, result on rank 1]
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.slow_link import Link

COLLECTIVE_TIMEOUT_S = 300
REPOSITORY = Path(__file__).parents[1]


class RankFailedError(RuntimeError):
    """A rank raised, or ended; the message has its traceback."""


class Ranks:
    """Rank processes that wait for calls."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = list(connections)

    def call(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Runs a module-level function on every rank at once; its results, by rank.

        Raises:
            RankFailedError: as soon as one rank fails; the others are of no use any more then.
        """
        for connection in self._connections:
            connection.send((*_address(function), arguments))
        results: dict[int, Any] = {}
        pending = dict(enumerate(self._connections))
        while pending:
            ready = wait(list(pending.values()))
            for rank in [rank for rank, conn in pending.items() if conn in ready]:
                try:
                    succeeded, value = pending.pop(rank).recv()
                except (EOFError, OSError):
                    succeeded, value = False, "its process ended"
                if not succeeded:
                    raise RankFailedError(f"rank {rank}: {value}")
                results[rank] = value
        return [results[rank] for rank in range(len(self._connections))]


@contextmanager
def rank_processes(link: Link, count: int) -> Iterator[Ranks]:
    """Starts ``count`` ranks, joined in one gloo group over ``link``."""
    folder = tempfile.mkdtemp(prefix="benchmark_ranks_")
    processes: list[subprocess.Popen[bytes]] = []
    connections: list[Connection] = []
    try:
        for rank in range(count):
            ours, theirs = Pipe()
            arguments = [rank, count, theirs.fileno(), folder, link.interface]
            processes.append(
                subprocess.Popen(
                    [*link.inside(rank), sys.executable, "-m", __name__, *map(str, arguments)],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    cwd=REPOSITORY,
                    start_new_session=True,
                )
            )
            theirs.close()
            connections.append(ours)
        ranks = Ranks(connections)
        ranks.call(_ready)
        yield ranks
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _address(function: Callable[..., Any]) -> tuple[str, str]:
    """Module and name by which a rank finds a function, also one of the script that is run."""
    module = function.__module__
    if module == "__main__":
        module = sys.modules[module].__spec__.name  # type: ignore[union-attr]
    return module, function.__qualname__


def _ready() -> None:
    """Answered by a rank that has joined the group."""


def _serve(rank: int, count: int, descriptor: int, folder: str, interface: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    calls: list[Any] = []
    arrived = threading.Condition()
    connection = Connection(descriptor)

    def receive() -> None:
        # In a thread, so that a rank that computes sees the end of its parent too.
        while True:
            try:
                message = connection.recv()
            except (EOFError, OSError):
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(1)
            with arrived:
                calls.append(message)
                arrived.notify()

    threading.Thread(target=receive, daemon=True).start()
    _join_group(rank, count, folder)
    while True:
        with arrived:
            arrived.wait_for(lambda: calls)
            module, name, arguments = calls.pop()
        try:
            outcome = True, getattr(importlib.import_module(module), name)(**arguments)
        except Exception:
            outcome = False, traceback.format_exc()
        connection.send(outcome)


def _join_group(rank: int, count: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(os.path.join(folder, "store"), count),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
