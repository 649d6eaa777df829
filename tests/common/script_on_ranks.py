"""Runs a script as N rank processes of its own: for tests of what happens when a process ends.

They are forked from the launcher's server, so that they need not import torch, and end as a process
does that was started by itself.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import tempfile
import textwrap
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.common.distributed_launcher import COLLECTIVE_TIMEOUT_S, fork_server


@dataclass(frozen=True)
class FinishedRank:
    """How one rank's process ended; ``exit_code`` is minus the signal's number if killed."""

    exit_code: int
    stdout: str
    stderr: str


def run_script_on_ranks(
    script: str, world_size: int, *, timeout_s: float = 120.0
) -> list[FinishedRank]:
    """Runs ``script`` (dedented) in ``world_size`` processes and returns their ends, by rank.

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
                process.join()
        finished = [
            FinishedRank(
                _exit_code(process),
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


def _start(folder: Path, rank: int, world_size: int, timeout_s: float) -> BaseProcess:
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "SCRIPT_STORE": str(folder / "store"),
        "SCRIPT_TIMEOUT_S": str(timeout_s),
    }
    process = fork_server().Process(target=_be_the_script, args=(folder, rank, variables))
    process.start()
    return process


def _be_the_script(folder: Path, rank: int, variables: dict[str, str]) -> None:
    """In the new process: runs the script as the main module, and ends as Python itself does."""
    os.setsid()
    os.environ.update(variables)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        output = os.open(folder / f"{name}_{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, descriptor)
        os.close(output)
    faulthandler.enable()  # SIGABRT prints the stack
    sys.modules["__main__"] = types.ModuleType("__main__")
    path = folder / "script.py"
    run = f"exec(compile({path.read_text()!r}, {str(path)!r}, 'exec'))"
    # Ends the process itself where the script calls sys.exit, and prints what the script raises.
    failed = ctypes.pythonapi.PyRun_SimpleString(run.encode())
    ctypes.pythonapi.Py_Exit(1 if failed else 0)


def _exit_code(process: BaseProcess) -> int:
    assert process.exitcode is not None
    return process.exitcode


def _wait(processes: Sequence[BaseProcess], timeout_s: float) -> bool:
    """Whether all ended in time; those that did not are made to print their stack and end."""
    late = _still_running(processes, timeout_s)
    for process in late:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGABRT)
    _still_running(late, timeout_s=5)
    return not late


def _still_running(processes: Sequence[BaseProcess], timeout_s: float) -> list[BaseProcess]:
    """The processes that have not ended ``timeout_s`` from now."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [process for process in processes if process.exitcode is None]
