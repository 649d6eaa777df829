"""The life of one rank process: start, join the group, run tasks until told to stop."""

from __future__ import annotations

import ast
import faulthandler
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import pickle
import queue
import random
import signal
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
from _pytest.assertion.rewrite import rewrite_asserts
from _pytest.config import apply_warning_filters

from tests.common.distributed_launcher import (
    RankConfig,
    RankContext,
    RankOutcome,
    Task,
    find_body,
)

# Exceptions that Python could only print: from __del__, weakref callbacks and threads.
_unraisable: list[str] = []


def serve(connection: Connection, config: RankConfig) -> None:
    """Serves tasks; ends when told to, or at once when the parent is gone."""
    os.setsid()  # Ctrl-C is the parent's to handle
    output = os.open(config.output_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    faulthandler.enable()
    stacks = open(config.stacks_path, "w")  # noqa: SIM115 - open as long as the process lives
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, tasks), daemon=True).start()
    sys.unraisablehook = _note_unraisable
    threading.excepthook = _note_thread_exception
    sys.meta_path.insert(0, _AssertRewriter())

    context = RankContext(config.rank, config.world_size)
    _reply(connection, _guarded(lambda: _join_group(config)))
    while message := tasks.get():
        outcome = _guarded(functools.partial(_run, message, context, config))
        if outcome.failed:
            outcome.reusable = _nothing_in_flight()
        sys.stdout.flush()
        _reply(connection, outcome)
    _leave_group()


def _receive(connection: Connection, tasks: queue.SimpleQueue[bytes]) -> None:
    """Reads tasks in a thread of its own, so that a busy rank too sees its parent's end."""
    while True:
        try:
            tasks.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)


def _reply(connection: Connection, outcome: RankOutcome) -> None:
    connection.send_bytes(pickle.dumps(outcome))


def _guarded(action: Callable[[], RankOutcome]) -> RankOutcome:
    """The outcome of ``action``, also where it raises."""
    try:
        return action()
    except pytest.skip.Exception as skip:
        return RankOutcome("skipped", summary=str(skip))
    except BaseException as error:
        trace = traceback.TracebackException.from_exception(error)
        trace.stack = traceback.StackSummary.from_list(
            [frame for frame in trace.stack if frame.filename != __file__] or trace.stack
        )
        summary = "".join(trace.format_exception_only()).strip()
        return RankOutcome("raised", summary=summary, details="".join(trace.format()))


def _join_group(config: RankConfig) -> RankOutcome:
    import torch
    import torch.distributed as dist

    from pending_dtensor import use_one_gloo_worker

    use_one_gloo_worker()  # two corrupt the heap in one of ten runs of test_pending_local
    torch.set_num_threads(1)
    torch.set_warn_always(True)  # else a warning fails the first test that meets it, and no other
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(config.store_path, config.world_size),
        rank=config.rank,
        world_size=config.world_size,
        timeout=timedelta(seconds=config.collective_timeout_s),
    )
    return RankOutcome("returned")


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _run(message: bytes, context: RankContext, config: RankConfig) -> RankOutcome:
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD
    _unraisable.clear()
    with warnings.catch_warnings():
        apply_warning_filters(config.warning_filters, ())
        task: Task = pickle.loads(message)
        module = _import(task.module)
        body = find_body(task)
        apply_warning_filters(_marked_filters(module, body), ())
        random.seed(0)
        torch.manual_seed(0)
        first = next(iter(inspect.signature(body).parameters), None)
        args = (context, *task.args) if first == "ctx" else task.args
        value = body(*args, **task.kwargs)
        _require_plain(value, task)
        unwaited = _check_left_behind(task)
    return RankOutcome(
        "returned", value, reusable=unwaited == 0 and dist.group.WORLD is group is not None
    )


def _import(name: str) -> types.ModuleType:
    if name not in sys.modules:
        importlib.import_module(name)
        _collect_and_freeze()
    return sys.modules[name]


def _collect_and_freeze() -> None:
    """Collects garbage; what is left is looked at by no later collection.

    It was made by imports, most of which torch does late, or kept on purpose, and lives on. The
    collection after each test takes a fifth of a second otherwise, and more than most examples of a
    property.
    """
    gc.collect()
    gc.freeze()


def _check_left_behind(task: Task) -> int:
    """Raises for what a body left behind; returns the number of collectives nobody waited for."""
    from torch._C._distributed_c10d import _get_work_registry_size

    _collect_and_freeze()
    if _unraisable:
        raise AssertionError("Expected no ignored exception, got:\n" + "\n".join(_unraisable))
    unwaited: int = _get_work_registry_size()
    if unwaited and not task.allow_unwaited:
        raise AssertionError(
            f"Expected every collective to be waited for, got {unwaited} left in torch's registry "
            f"({task.qualname}). Read or wait for the result, or pass allow_unwaited=True."
        )
    return unwaited


def _nothing_in_flight() -> bool:
    """Whether a body that raised left no collective behind that another task would meet."""
    from torch._C._distributed_c10d import _get_work_registry_size

    gc.collect()
    return not _get_work_registry_size() and not _unraisable


def _require_plain(value: Any, task: Task) -> None:
    """Refuses what the parent cannot read without importing more."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value:
            _require_plain(item, task)
    elif isinstance(value, dict):
        _require_plain([*value.keys(), *value.values()], task)
    elif type(value) not in (type(None), bool, int, float, complex, str, bytes):
        raise TypeError(
            f"Expected plain data, got {type(value).__name__} (result of {task.qualname}). Return "
            "numbers, strings, lists or dicts: x.tolist() for a tensor."
        )


def _marked_filters(module: types.ModuleType, body: Callable[..., Any]) -> Iterable[str]:
    """Filters of ``pytest.mark.filterwarnings``, those of the function last: they win."""
    for owner in (module, body):
        marks = getattr(owner, "pytestmark", [])
        for mark in marks if isinstance(marks, list) else [marks]:
            if mark.name == "filterwarnings":
                yield from reversed(mark.args)


def _note_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    error = traceback.format_exception(
        unraisable.exc_type, unraisable.exc_value, unraisable.exc_traceback
    )
    _unraisable.append(f"{unraisable.err_msg or 'in'} {unraisable.object!r}\n{''.join(error)}")


def _note_thread_exception(args: threading.ExceptHookArgs) -> None:
    error = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
    _unraisable.append(f"in {args.thread}\n{''.join(error)}")


class _AssertRewriter(importlib.abc.MetaPathFinder):
    """Gives the ranks pytest's assert messages, which show the values compared."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or not _is_test_file(spec.origin):
            return None
        spec.loader = _RewritingLoader(fullname, spec.origin)
        return spec


class _RewritingLoader(importlib.machinery.SourceFileLoader):
    def path_stats(self, path: str) -> Any:
        # No cached bytecode: the cache holds, and must hold, what other loaders made.
        raise OSError

    def source_to_code(  # type: ignore[override]
        self, data: Any, path: Any, *, _optimize: int = -1
    ) -> types.CodeType:
        tree = ast.parse(data, path)
        rewrite_asserts(tree, data, path)
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)


def _is_test_file(path: str) -> bool:
    return os.path.basename(path).startswith("test_")
