"""Runs test bodies in rank processes that are kept between tests; the parent never imports torch.

    from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks

    if IN_RANK_PROCESS:
        import torch.distributed as dist

    @on_ranks(2, 4)
    def test_barrier(ctx: RankContext) -> None:
        dist.barrier()

Each world size has one pool of rank processes, joined in one gloo group over a FileStore (no port).
A task names its function by module and qualified name; every rank imports the module, runs the
function and sends back an outcome. After a failure of any kind the pool is replaced: ranks that
raised while others sit in a collective cannot be brought back into step. Replacing is cheap, since
ranks are forked from a server process that has imported torch and the packages, and has never run
any of it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import inspect
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

import pytest

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh

# True in the server that ranks are forked from, and so in the ranks. Taken out of the environment:
# what a rank starts is no rank.
IN_RANK_PROCESS = os.environ.pop("PENDING_DTENSOR_RANK_PROCESS", "") == "1"

TEST_TIMEOUT_S = 120.0
START_TIMEOUT_S = 120.0
COLLECTIVE_TIMEOUT_S = 60.0
# How long the others may go on once one rank has failed: most likely they wait for it for ever.
GRACE_AFTER_FAILURE_S = 5.0
MAX_POOLS = 4
OUTPUT_TAIL_CHARS = 6000


@dataclass(frozen=True)
class RankContext:
    """What a test body knows of the rank it runs on."""

    rank: int
    world_size: int
    _meshes: dict[tuple[Any, ...], DeviceMesh] = field(default_factory=dict, repr=False)

    def mesh(self, *shape: int, names: Sequence[str] | None = None) -> DeviceMesh:
        """A CPU mesh, made once per shape and names: all ranks when called without a shape.

        Names default to ``("tp",)`` and ``("dp", "tp")``.
        """
        from torch.distributed import init_device_mesh

        shape = shape or (self.world_size,)
        names = tuple(names) if names is not None else ("dp", "tp")[-len(shape) :]
        key = (shape, names)
        if key not in self._meshes:
            self._meshes[key] = init_device_mesh("cpu", shape, mesh_dim_names=names)
        return self._meshes[key]


@dataclass(frozen=True)
class RankConfig:
    """What a rank process is told at its start."""

    rank: int
    world_size: int
    store_path: str
    output_path: str
    stacks_path: str
    collective_timeout_s: float
    warning_filters: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """One call, made in every rank.

    Attributes:
        allow_unwaited: whether collectives nobody waited for are left to the test.
        keep_if_all_raise: whether ranks that all raised, and left nothing in flight, are kept. Only
            for bodies whose ranks communicate alike until they raise: examples of a property, since
            shrinking a failing one fails hundreds of times.
    """

    module: str
    qualname: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    allow_unwaited: bool = False
    keep_if_all_raise: bool = False


@dataclass
class RankOutcome:
    """How one rank ended a task.

    Attributes:
        summary: one line: the exception, the signal, the reason of a skip.
        details: the traceback, or the stack of a stuck rank.
        reusable: whether the process can run another task.
    """

    status: Literal["returned", "skipped", "raised", "stuck", "died"]
    value: Any = None
    summary: str = ""
    details: str = ""
    output: str = ""
    reusable: bool = True

    @property
    def failed(self) -> bool:
        return self.status not in ("returned", "skipped")


class RankFailure(Exception):
    """A task failed on at least one rank; the message shows every rank."""

    def __init__(self, name: str, outcomes: Sequence[RankOutcome]) -> None:
        self.outcomes = list(outcomes)
        super().__init__(_report(name, self.outcomes))


def _report(name: str, outcomes: Sequence[RankOutcome]) -> str:
    failed = [outcome for outcome in outcomes if outcome.failed]
    summaries = {f"{outcome.status} {outcome.summary}" for outcome in failed}
    if len(failed) == len(outcomes) and len(summaries) == 1:
        parts = [f"{name}: all {len(outcomes)} ranks {summaries.pop()}"]
    else:
        parts = [f"{name}: {len(failed)} of {len(outcomes)} ranks failed"]
    for rank, outcome in enumerate(outcomes):
        parts.append(f"----- rank {rank}: {outcome.status} {outcome.summary}".rstrip())
        parts += [text.rstrip() for text in (outcome.details,) if text]
        if outcome.output and outcome.failed:
            parts += [f"----- rank {rank}, output:", outcome.output.rstrip()]
    return "\n".join(parts)


class RankPool:
    """Rank processes of one world size, joined in one default process group.

    `pool` keeps one for each world size; tests that need other settings make their own and close
    it.
    """

    def __init__(
        self,
        world_size: int,
        *,
        collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.world_size = world_size
        self._dir = Path(tempfile.mkdtemp(prefix="rank_pool_"))
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []
        self._output_read: list[int] = [0] * world_size
        self.closed = False
        try:
            for rank in range(world_size):
                self._start(rank, collective_timeout_s)
            outcomes = self._collect(start_timeout_s)
        except BaseException:
            self.kill()
            raise
        if any(outcome.failed for outcome in outcomes):
            self.kill()
            raise RankFailure("start of the rank processes", outcomes)

    def _start(self, rank: int, collective_timeout_s: float) -> None:
        config = RankConfig(
            rank=rank,
            world_size=self.world_size,
            store_path=str(self._dir / "store"),
            output_path=str(self._output_path(rank)),
            stacks_path=str(self._stacks_path(rank)),
            collective_timeout_s=collective_timeout_s,
            warning_filters=_settings.warning_filters,
        )
        context = fork_server()
        ours, theirs = context.Pipe()
        with theirs:
            process = context.Process(target=_be_a_rank, args=(theirs, config))
            process.start()
        self._processes.append(process)
        self._connections.append(ours)

    @property
    def alive(self) -> bool:
        """Whether the pool can take another task."""
        return not self.closed and all(process.is_alive() for process in self._processes)

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [process.pid for process in self._processes if process.pid is not None]

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a module-level function in every rank and returns its results, by rank.

        A function whose first parameter is named ``ctx`` also gets the `RankContext`. Arguments are
        pickled; results must be plain data, since the parent has no torch to read others with.

        Raises:
            RankFailure: a rank raised, hung or died, or left something behind.
        """
        __tracebackhide__ = True
        return self.run_task(_task(function, args, kwargs))

    def run_task(self, task: Task, timeout_s: float = TEST_TIMEOUT_S) -> list[Any]:
        """As `run`, with the settings of ``task`` and a time limit."""
        __tracebackhide__ = True
        outcomes = self._run(task, timeout_s)
        skipped = [outcome for outcome in outcomes if outcome.status == "skipped"]
        if len(skipped) == len(outcomes):
            pytest.skip(skipped[0].summary)
        if skipped or any(outcome.failed for outcome in outcomes):
            raise RankFailure(f"{task.module}::{task.qualname}", outcomes)
        return [outcome.value for outcome in outcomes]

    def _run(self, task: Task, timeout_s: float) -> list[RankOutcome]:
        message = pickle.dumps(task)  # before anything is sent: all ranks get it or none
        for rank in range(self.world_size):
            self._output_read[rank] = self._output_path(rank).stat().st_size
        reusable = False
        try:
            for connection in self._connections:
                with contextlib.suppress(BrokenPipeError):  # _collect reports the dead rank
                    connection.send_bytes(message)
            outcomes = self._collect(timeout_s)
            in_step = not any(outcome.failed for outcome in outcomes) or (
                task.keep_if_all_raise and all(outcome.status == "raised" for outcome in outcomes)
            )
            reusable = in_step and all(outcome.reusable for outcome in outcomes)
        finally:
            if not reusable:
                self.kill()
        return outcomes

    def _collect(self, timeout_s: float) -> list[RankOutcome]:
        """One outcome of every rank: what it sent, or that it died, or that it is stuck."""
        started = time.monotonic()
        deadline = started + timeout_s
        outcomes: dict[int, RankOutcome] = {}
        while len(outcomes) < self.world_size and time.monotonic() < deadline:
            missing = [rank for rank in range(self.world_size) if rank not in outcomes]
            wait(
                [self._connections[rank] for rank in missing]
                + [self._processes[rank].sentinel for rank in missing],
                max(0.0, deadline - time.monotonic()),
            )
            for rank in missing:
                outcome = self._poll(rank)
                if outcome is None:
                    continue
                outcomes[rank] = outcome
                if outcome.failed:
                    deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE_S)
        stuck = [rank for rank in range(self.world_size) if rank not in outcomes]
        stuck_for_s = time.monotonic() - started
        for rank, stack in zip(stuck, self._stacks(stuck), strict=True):
            outcomes[rank] = RankOutcome("stuck", summary=f"for {stuck_for_s:.1f} s", details=stack)
        for rank, outcome in outcomes.items():
            if outcome.failed:
                outcome.output = self._new_output(rank)
        return [outcomes[rank] for rank in range(self.world_size)]

    def _poll(self, rank: int) -> RankOutcome | None:
        """What became of the task on ``rank``; None while it runs."""
        connection, process = self._connections[rank], self._processes[rank]
        ended = not process.is_alive()  # asked first: its last message may still be there
        try:
            if connection.poll():
                outcome: RankOutcome = pickle.loads(connection.recv_bytes())
                return outcome
        except (EOFError, ConnectionResetError):
            ended = True
        if not ended:
            return None
        process.join(timeout=5)
        code = process.exitcode
        if code is None:
            return RankOutcome("died", summary="(closed its pipe, but its process lives)")
        if code < 0:
            return RankOutcome("died", summary=f"(killed by {signal.Signals(-code).name})")
        return RankOutcome("died", summary=f"(exit code {code})")

    def _stacks(self, ranks: Sequence[int]) -> list[str]:
        """Python stacks of stuck ranks: faulthandler writes them without needing the GIL."""
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGUSR1)
        return [self._stack(rank) for rank in ranks]

    def _stack(self, rank: int) -> str:
        path = self._stacks_path(rank)
        text = ""
        for _ in range(20):
            time.sleep(0.1)
            latest = path.read_text(errors="replace") if path.exists() else ""
            if latest and latest == text:
                return text
            text = latest
        return text or "(no stack: the process did not answer SIGUSR1)"

    def _new_output(self, rank: int) -> str:
        with open(self._output_path(rank), "rb") as output:
            output.seek(self._output_read[rank])
            return output.read().decode(errors="replace")[-OUTPUT_TAIL_CHARS:]

    def _output_path(self, rank: int) -> Path:
        return self._dir / f"output_{rank}"

    def _stacks_path(self, rank: int) -> Path:
        return self._dir / f"stacks_{rank}"

    def close(self) -> None:
        """Asks the ranks to end, waits for them, and kills those that do not."""
        if self.closed:
            return
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):
                connection.send_bytes(b"")
        deadline = time.monotonic() + 10
        for process in self._processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Ends all ranks now."""
        if self.closed:
            return
        self.closed = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self._dir, ignore_errors=True)


def rank_environment() -> dict[str, str]:
    """Environment of a process that is a rank: one thread, and the modules that we find."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    if sys.platform == "linux":
        # Without it gloo looks the host's name up, which fails where there is no network.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def fork_server() -> multiprocessing.context.ForkServerContext:
    """Starts the server if it does not run; ranks get its environment and its modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.common.preloaded"])
    with mock.patch.dict(os.environ, rank_environment(), PENDING_DTENSOR_RANK_PROCESS="1"):
        multiprocessing.forkserver.ensure_running()
    return context


def _be_a_rank(connection: Connection, config: RankConfig) -> None:
    # By name: it imports this module.
    importlib.import_module("tests.common.rank_process").serve(connection, config)


@dataclass
class _Settings:
    warning_filters: tuple[str, ...] = ("error",)


_settings = _Settings()
_pools: dict[int, RankPool] = {}
_bodies: dict[tuple[str, str], Callable[..., Any]] = {}


def use_warning_filters(filters: Sequence[str]) -> None:
    """Sets the warning filters of ranks started from now on, in pytest's notation."""
    _settings.warning_filters = tuple(filters)


def pool(world_size: int) -> RankPool:
    """The kept pool of ``world_size`` ranks; a new one if there is none or it was lost."""
    kept = _pools.pop(world_size, None)
    if kept is None or not kept.alive:
        if kept is not None:
            kept.kill()
        while len(_pools) >= MAX_POOLS:
            _pools.pop(next(iter(_pools))).close()  # the one used least recently
        kept = RankPool(world_size)
    _pools[world_size] = kept
    return kept


@atexit.register
def shut_down_pools() -> None:
    """Ends every kept rank process."""
    while _pools:
        _pools.popitem()[1].close()


def on_ranks(
    *world_sizes: int,
    timeout_s: float = TEST_TIMEOUT_S,
    allow_unwaited: bool = False,
    keep_if_all_raise: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a module-level function a test whose body runs in every rank, once per world size.

    The test passes if the body returns on every rank within ``timeout_s``, with nothing left
    behind: no warning, no exception in a ``__del__``, and, unless ``allow_unwaited``, no collective
    that was launched and not waited for. Parameters other than ``ctx`` are fixtures and
    parametrized values of the parent: they are pickled. ``keep_if_all_raise`` is that of `Task`.
    """
    if not world_sizes or any(size < 1 for size in world_sizes):
        raise ValueError(f"Expected world sizes of at least 1, got {world_sizes} (on_ranks).")

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        if IN_RANK_PROCESS:
            # By name, since other decorators may cover it in its module.
            _bodies[function.__module__, function.__qualname__] = function
            return function

        body_signature = inspect.signature(function)
        parameters = [p for name, p in body_signature.parameters.items() if name != "ctx"]
        size = inspect.Parameter("world_size", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = body_signature.replace(parameters=[size, *parameters])

        @functools.wraps(function)
        def in_every_rank(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            values = signature.bind(*args, **kwargs).arguments
            world_size = values.pop("world_size")
            task = _task(function, (), values)
            task = replace(task, allow_unwaited=allow_unwaited, keep_if_all_raise=keep_if_all_raise)
            pool(world_size).run_task(task, timeout_s)

        in_every_rank.__signature__ = signature  # type: ignore[attr-defined]
        ids = [f"{size}ranks" for size in world_sizes]
        return pytest.mark.parametrize("world_size", world_sizes, ids=ids)(in_every_rank)

    return decorate


def _task(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Task:
    module, qualname = function.__module__, function.__qualname__
    if module == "__main__" or "." in qualname:
        raise TypeError(
            f"Expected a module-level function of an importable module, got {qualname} of {module} "
            "(a task for rank processes). Move it to the top level of a test module."
        )
    return Task(module, qualname, args, dict(kwargs))


def find_body(task: Task) -> Callable[..., Any]:
    """The function of a task, in a rank whose module is imported."""
    key = (task.module, task.qualname)
    return _bodies.get(key) or getattr(sys.modules[task.module], task.qualname)
