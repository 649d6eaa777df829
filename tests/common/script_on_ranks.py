"""Runs a script as N fresh rank processes: for tests of what happens when a process ends."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from tests.common.distributed_launcher import COLLECTIVE_TIMEOUT_S, rank_environment


@dataclass(frozen=True)
class FinishedRank:
    """How one rank's process ended; ``exit_code`` is minus the signal's number if killed."""

    exit_code: int
    stdout: str
    stderr: str


def run_script_on_ranks(
    script: str, world_size: int, *, timeout_s: float = 120.0
) -> list[FinishedRank]:
    """Runs ``script`` (dedented) in ``world_size`` new processes and returns their ends, by rank.

    A script that wants the process group calls `join_default_group`.

    Raises:
        TimeoutError: a rank ran longer than ``timeout_s``; the message has every rank's stack.
    """
    with tempfile.TemporaryDirectory(prefix="script_on_ranks_") as name:
        folder = Path(name)
        (folder / "script.py").write_text(textwrap.dedent(script))
        processes = [_start(folder, rank, world_size, timeout_s) for rank in range(world_size)]
        try:
            in_time = _wait(processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        finished = [
            FinishedRank(
                process.returncode,
                (folder / f"stdout_{rank}").read_text(errors="replace"),
                (folder / f"stderr_{rank}").read_text(errors="replace"),
            )
            for rank, process in enumerate(processes)
        ]
    if not in_time:
        report = "\n".join(
            f"----- rank {rank}: exit code {end.exit_code}\n{end.stdout}{end.stderr}"
            for rank, end in enumerate(finished)
        )
        raise TimeoutError(f"Expected every rank to end within {timeout_s} s.\n{report}")
    return finished


def join_default_group() -> tuple[int, int]:
    """In a script: joins all ranks in one gloo group; returns the rank and the world size."""
    import torch.distributed as dist

    from pending_dtensor import use_one_gloo_worker

    use_one_gloo_worker()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Ends a rank whose parent was killed and cannot end it.
    faulthandler.dump_traceback_later(float(os.environ["SCRIPT_TIMEOUT_S"]) + 30, exit=True)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(os.environ["SCRIPT_STORE"], world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    return rank, world_size


def _start(folder: Path, rank: int, world_size: int, timeout_s: float) -> subprocess.Popen[bytes]:
    environment = {
        **rank_environment(),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "SCRIPT_STORE": str(folder / "store"),
        "SCRIPT_TIMEOUT_S": str(timeout_s),
        "PYTHONFAULTHANDLER": "1",  # SIGABRT prints the stack
    }
    with (
        open(folder / f"stdout_{rank}", "wb") as stdout,
        open(folder / f"stderr_{rank}", "wb") as stderr,
    ):
        return subprocess.Popen(
            [sys.executable, str(folder / "script.py")],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> bool:
    """Whether all ended in time; those that did not are made to print their stack and end."""
    late = _still_running(processes, timeout_s)
    for process in late:
        process.send_signal(signal.SIGABRT)
    _still_running(late, timeout_s=5)
    return not late


def _still_running(
    processes: list[subprocess.Popen[bytes]], timeout_s: float
) -> list[subprocess.Popen[bytes]]:
    """The processes that have not ended ``timeout_s`` from now."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
    return [process for process in processes if process.poll() is None]
