r"""`Pending`: the life of one value that is not there yet, shared by all its views.

    deferred --start / fuse--> in flight --wait--> ready
        \\------ compute / complete -----------------/

A deferred value is a recipe that nothing has run. An in-flight value is a buffer that a collective
is filling, and a finish (unpad, re-concatenate, scale, cast) that runs once, after the wait.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch

from pending_dtensor.errors import (
    DeferredReadError,
    ForkedPendingError,
    InFlightInputModifiedError,
    collective_failed,
)
from pending_dtensor.events import OverlapEvent, computing, named_in_profile
from pending_dtensor.torch_compat import below_autograd, in_backward

Finish = Callable[..., torch.Tensor]


class PendingState(str, Enum):
    """Where a pending value is in its life."""

    DEFERRED = "deferred"  # a recipe; nothing was launched, nothing is owed
    IN_FLIGHT = "in flight"  # launched; the buffer may not be read before the wait
    READY = "ready"  # the value is there

    def __str__(self) -> str:
        return self.value


class Launch(NamedTuple):
    """A collective that has been started.

    Attributes:
        kind: the collective's name.
        group: name of its process group.
        buffer: output of a functional collective, not waited for.
        finish: turns the filled buffer into the value; None if the buffer is the value.
        source: the tensor the collective reads from, if a caller could still write to it.
        event: its line in the overlap log.
        more: further outputs of the same launch, waited for with ``buffer`` and handed to
            ``finish`` after it.
    """

    kind: str
    group: str
    buffer: torch.Tensor
    finish: Finish | None = None
    source: torch.Tensor | None = None
    event: OverlapEvent | None = None
    more: tuple[torch.Tensor, ...] = ()


class Recipe(Protocol):
    """What a deferred value will be made of.

    Attributes:
        kind: the producer's name in the fused rules, such as ``all_gather`` or ``linear``.
        is_local: whether `compute` needs no other rank. Only then may a plain read run it.
    """

    kind: str
    is_local: bool

    def compute(self) -> torch.Tensor:
        """Runs a local recipe."""
        ...

    def start(self) -> Readable:
        """Launches a collective recipe unfused."""
        ...


class Readable(Protocol):
    """Another pending tensor, as far as a value that comes after it needs to know."""

    def materialize(self, consumer: object = ...) -> torch.Tensor:
        """The finished value."""
        ...


class Pending:
    """One value that is deferred, in flight or ready.

    Fields: ``kind`` names the producer; ``_recipe`` is set while deferred; while in flight
    ``_buffer`` (of our own launch, with ``_more``, ``_source`` and ``_source_version``) or
    ``_parent`` (of another's), and ``_finish``; ``_value`` when ready; ``_error`` once a wait or a
    finish has failed, and then every read raises it again. ``_shape`` is for error messages.
    ``_dependents`` are made from this value when they are read.
    """

    __slots__ = (
        "__weakref__",
        "_buffer",
        "_dependents",
        "_error",
        "_event",
        "_finish",
        "_inference",
        "_lock",
        "_more",
        "_parent",
        "_recipe",
        "_shape",
        "_source",
        "_source_version",
        "_value",
        "group",
        "kind",
        "state",
    )

    def __init__(self, kind: str, group: str = "") -> None:
        self.kind = kind
        self.group = group
        self.state = PendingState.READY
        self._recipe: Recipe | None = None
        self._parent: Readable | None = None
        self._shape: Sequence[int] | None = None
        self._buffer: torch.Tensor | None = None
        self._more: tuple[torch.Tensor, ...] = ()
        self._finish: Finish | None = None
        self._source: torch.Tensor | None = None
        self._source_version = 0
        self._value: torch.Tensor | None = None
        self._error: BaseException | None = None
        self._event: OverlapEvent | None = None
        self._dependents: list[weakref.ref[Pending]] = []
        self._inference = torch.is_inference_mode_enabled()
        self._lock = threading.RLock()

    @classmethod
    def deferred(cls, recipe: Recipe, group: str = "") -> Pending:
        """A value that is only a recipe so far."""
        self = cls(recipe.kind, group)
        self.state = PendingState.DEFERRED
        self._recipe = recipe
        return self

    @classmethod
    def in_flight(cls, launch: Launch, shape: Sequence[int] | None = None) -> Pending:
        """A value of ``shape`` that a launched collective is writing."""
        self = cls(launch.kind, launch.group)
        self._shape = shape
        self._take_off(launch)
        return self

    def _take_off(self, launch: Launch) -> None:
        self.state = PendingState.IN_FLIGHT
        self._recipe = None
        self._buffer = launch.buffer
        self._more = launch.more
        self._finish = launch.finish
        self._event = launch.event
        if launch.source is not None and not launch.source.is_inference():
            self._source = launch.source
            self._source_version = launch.source._version
        _in_flight.add(self)

    @classmethod
    def after(cls, parent: Readable, kind: str, group: str, step: Finish) -> Pending:
        """What ``step`` makes of another value in flight, once somebody reads it."""
        self = cls(kind, group)
        self.state = PendingState.IN_FLIGHT
        self._parent = parent
        self._finish = step
        return self

    def add_dependent(self, dependent: Pending) -> None:
        """Notes a value that will be made from this one, so that it is made before a write."""
        self._dependents.append(weakref.ref(dependent))

    def finish_dependents(self) -> None:
        """Makes what is made from this value, which is about to be written to."""
        for reference in self._dependents:
            dependent = reference()
            if dependent is not None:
                dependent.materialize()
        self._dependents.clear()

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of a deferred value, and of a collective that a fused rule completed."""
        return self._recipe

    def start(self) -> None:
        """Launches a deferred collective as it is, unfused. Every rank of its group must do so."""
        with self._lock:
            if self.state is not PendingState.DEFERRED:
                return
            recipe = self._recipe
            assert recipe is not None
            if recipe.is_local:
                self.complete(recipe.compute())
            else:
                self._parent = recipe.start()
                self._recipe = None
                self.state = PendingState.IN_FLIGHT

    def complete(self, value: torch.Tensor) -> None:
        """Makes a deferred value ready with what a fused kernel, or its recipe, produced."""
        with self._lock:
            self._value = value
            if self._recipe is not None and self._recipe.is_local:
                self._recipe = None
            self.state = PendingState.READY

    def materialize(self, consumer: object = "a read") -> torch.Tensor:
        """The value, waiting for it or computing it first.

        Args:
            consumer: who reads, for the error message.

        Raises:
            DeferredReadError: a deferred collective was read; nothing is launched.
            InFlightInputModifiedError: its input was written to while in flight.
            ForkedPendingError: it was launched before this process was forked.
            CollectiveFailedError: the collective failed; raised from what the process group says.
        """
        if self.state is PendingState.READY:
            assert self._value is not None
            return self._value
        with self._lock:
            if self._error is not None:
                raise _again(self._error)
            if self.state is PendingState.IN_FLIGHT:
                self._finish_wait(consumer)
            elif self.state is PendingState.DEFERRED:
                recipe = self._recipe
                assert recipe is not None
                if not recipe.is_local:
                    of_gradient = (
                        " In backward it is the gradient of a sum that a fused layer reduces: "
                        "nothing else may read that sum before it is reduced."
                        if in_backward()
                        else ""
                    )
                    raise DeferredReadError(
                        f"Expected a deferred {self.kind} to be read by an operation that a fused "
                        f"rule covers, got {consumer} (group {self.group!r}). Use it in the layer "
                        f"it was deferred for, redistribute with async_op=True instead of "
                        f"deferring, or call .start() on it on every rank to run it unfused."
                        f"{of_gradient}"
                    )
                with torch.no_grad(), self._mode_of_creation():
                    self.complete(recipe.compute())
            assert self._value is not None
            return self._value

    def _finish_wait(self, consumer: object) -> None:
        filled = None
        try:
            # Collectives write below autograd, so nothing here may be recorded.
            with torch.no_grad(), self._mode_of_creation(), below_autograd():
                filled = self._filled_buffers(consumer)
                if self._finish is None:
                    value = filled[0]
                else:
                    with computing("finish"):
                        value = self._finish(*filled)
        except BaseException as error:
            # A wait that Ctrl-C ended can be taken up again. A finish may work in place, so it
            # cannot be run twice.
            if isinstance(error, Exception) or filled is not None:
                self._land(error=_again(error))
            raise
        self._land(value)

    def _land(self, value: torch.Tensor | None = None, error: Exception | None = None) -> None:
        self._value, self._error = value, error
        if error is None:
            self.state = PendingState.READY
        self._buffer = self._parent = self._finish = self._source = None
        self._more = ()
        _in_flight.discard(self)

    def _mode_of_creation(self) -> AbstractContextManager[Any]:
        """A first read in inference mode must not make a tensor that autograd refuses later."""
        if torch.is_inference_mode_enabled() == self._inference:
            return contextlib.nullcontext()
        return torch.inference_mode(self._inference)

    def _filled_buffers(self, consumer: object) -> list[torch.Tensor]:
        if self._parent is not None:
            return [self._parent.materialize(consumer)]
        event = self._event
        if event is not None:
            event.begin_wait()
        buffers: list[torch.Tensor | None] = [self._buffer, *self._more]
        try:
            with named_in_profile("wait", self.kind):
                filled = [torch.ops._c10d_functional.wait_tensor(buffer) for buffer in buffers]
        except Exception as error:
            wait_quietly(buffers)
            dtype = self._buffer.dtype if self._buffer is not None else None
            raise collective_failed(
                self.kind, self._shape, dtype, self.group, f"waited for by {consumer}", error
            ) from error
        finally:
            if event is not None:
                event.end_wait()
        if self._source is not None and self._source._version != self._source_version:
            raise InFlightInputModifiedError(
                f"Expected the input of {self.kind} to stay as it was while in flight, got an "
                f"in-place write to it (shape {tuple(self._source.shape)}, group {self.group!r}). "
                f"Read the result first, or write to a copy."
            )
        return filled

    def release(self) -> None:
        """Waits for a launch whose value nobody wants, and frees its buffer. Never raises."""
        # An interrupted constructor leaves slots unset.
        buffer = getattr(self, "_buffer", None)
        if buffer is None or self._error is not None:
            return
        buffers = (buffer, *self._more)
        self._buffer = self._finish = self._source = None
        self._more = ()
        self._error = RuntimeError(f"this {self.kind} was released unread")
        wait_quietly(buffers)

    def __del__(self) -> None:
        self.release()


_in_flight: weakref.WeakSet[Pending] = weakref.WeakSet()


def wait_quietly(buffers: Iterable[torch.Tensor | None]) -> None:
    """Waits for what nobody is going to read: there is no one to report a failure to."""
    for buffer in buffers:
        with contextlib.suppress(Exception):
            torch.ops._c10d_functional.wait_tensor(buffer)


def _again(error: BaseException) -> Exception:
    """An error to raise at a later read.

    Not the same object: its traceback keeps the frames of the failed step, and so that step's other
    values, for as long as this one.
    """
    if isinstance(error, Exception):
        with contextlib.suppress(TypeError):  # of a class that cannot be made from its args
            return copy.copy(error)
    return RuntimeError(f"{type(error).__name__}: {error}")


def release_all() -> None:
    """Waits for everything in flight here. Runs at exit, before torch counts leftovers."""
    for pending in list(_in_flight):
        pending.release()


def _disown_after_fork() -> None:
    # The threads that would finish these launches live in the parent only: a wait would hang.
    for pending in list(_in_flight):
        pending._error = ForkedPendingError(
            f"Expected to read an in-flight {pending.kind} in the process that launched it, got a "
            f"read in a forked child. Read it before forking, or start workers with spawn."
        )
    _in_flight.clear()


atexit.register(release_all)
os.register_at_fork(after_in_child=_disown_after_fork)
