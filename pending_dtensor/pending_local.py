"""`PendingLocal`: stands where a DTensor keeps its local tensor until that is there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from pending_dtensor.pending import Launch, Pending, PendingState, Recipe
from pending_dtensor.reshape_in_place import refuse_if_autograd_knows_views
from pending_dtensor.torch_compat import (
    AsyncCollectiveTensor,
    accumulating_gradient,
    forbid_raw_access,
    keep_compile_context,
    no_dispatch,
)

aten = torch.ops.aten

# One step from a pending value to a view of it.
ViewStep = Callable[[torch.Tensor], torch.Tensor]

# These look at the shape, dtype and device of their argument only: they never wait.
_METADATA_ONLY = {
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}

# (deferred producer kind, op) -> how a deferred value goes through the op and stays deferred.
_deferred_ops: dict[tuple[str, Any], Callable[..., Any]] = {}


def register_deferred_op(kind: str, op: Any, handler: Callable[..., Any]) -> None:
    """Lets deferred values of one kind pass through ``op`` without being computed.

    Args:
        kind: producer kind of the deferred value.
        op: the aten overload.
        handler: called with the op's arguments; returns the result or ``NotImplemented``.

    Raises:
        ValueError: the pair has a handler already.
    """
    if (kind, op) in _deferred_ops:
        raise ValueError(
            f"Expected one handler for ({kind}, {op}), got {handler} besides "
            f"{_deferred_ops[kind, op]} (register_deferred_op). Register each pair once."
        )
    _deferred_ops[kind, op] = handler


@functools.cache
def _is_view(op: torch._ops.OpOverload) -> bool:
    # A conjugate or negative view is marked by a bit that no wrapper can be given.
    return op._schema._is_view_op() and op not in (aten._conj.default, aten._neg_view.default)


@functools.cache
def _is_composite_view(op: torch._ops.OpOverload) -> bool:
    # In inference mode autograd does not take them apart on the way here. Whether they make a view,
    # or a copy as ``to`` and ``reshape`` may, only their parts tell.
    return op._schema._is_view_op() and op._can_decompose()


@functools.cache
def _is_mutable(op: torch._ops.OpOverload) -> bool:
    return op._schema.is_mutable


@functools.cache
def _changes_metadata(op: torch._ops.OpOverload) -> bool:
    return torch.Tag.inplace_view in op.tags or any(arg.is_out for arg in op._schema.arguments)


class _FlattenIfReadable:
    """``__tensor_flatten__``, torch's way to the inner tensors, which it calls on classes as well.

    A deferred value has no inner tensor: there the attribute is missing, by which torch tells that
    a tensor cannot be taken apart. `CommDebugMode` looks for fake tensors inside in every op: that
    must launch no deferred collective, and compute no deferred matmul.
    """

    def __get__(self, tensor: PendingLocal | None, cls: type) -> Callable[..., Any]:
        if tensor is None:
            return lambda tensor: self.__get__(tensor, cls)()
        if tensor.state is PendingState.DEFERRED:
            raise AttributeError("a deferred value has no inner tensor yet")
        return lambda: (["elem"], None)


class PendingLocal(AsyncCollectiveTensor):
    """A tensor whose value is deferred, in flight or ready; any read of it sees the finished value.

    It is an `AsyncCollectiveTensor`, so that torch's own ``isinstance`` checks hold, with the final
    shape, stride, dtype and device. Views share one `Pending`, and so one wait and one storage.

    Fields:
        pending: the shared life of the value.
        _steps: the view steps that lead from that value to this tensor.
        _value: this tensor's own view of it, once read.
        _was_viewed: whether autograd may know a view of this tensor [Note: views are replayed].
    """

    pending: Pending
    _steps: tuple[ViewStep, ...]
    _value: torch.Tensor | None
    _was_viewed: bool

    __slots__ = ("_steps", "_value", "_was_viewed", "pending")

    @staticmethod
    def __new__(
        cls: type[PendingLocal],
        pending: Pending,
        like: torch.Tensor,
        steps: tuple[ViewStep, ...] = (),
    ) -> PendingLocal:
        """Wraps ``pending``; ``like`` (on any device) tells the shape, stride and dtype to show."""
        return _wrap(
            cls,
            pending,
            like.size(),
            like.stride(),
            like.storage_offset(),
            like.dtype,
            like.device,
            steps,
        )

    @classmethod
    def in_flight(
        cls, launch: Launch, shape: torch.Size | tuple[int, ...], dtype: torch.dtype | None = None
    ) -> PendingLocal:
        """The contiguous value of ``shape`` that a launched collective is writing.

        Args:
            launch: the collective; its finish must give a contiguous tensor of ``shape``.
            shape: final shape on this rank.
            dtype: final dtype; None for that of the buffer.
        """
        buffer = launch.buffer
        return _wrap_contiguous(
            cls, Pending.in_flight(launch, shape), shape, dtype or buffer.dtype, buffer.device
        )

    @classmethod
    def deferred(
        cls,
        recipe: Recipe,
        shape: torch.Size | tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        group: str = "",
    ) -> PendingLocal:
        """The contiguous value of ``shape`` that ``recipe`` will make."""
        return _wrap_contiguous(cls, Pending.deferred(recipe, group), shape, dtype, device)

    @classmethod
    def ready(cls, value: torch.Tensor) -> PendingLocal:
        """A `PendingLocal` whose value is there."""
        pending = Pending("value")
        pending.complete(value)
        return cls(pending, value)

    # -- state ------------------------------------------------------------------------------------

    @property
    def state(self) -> PendingState:
        """Deferred, in flight or ready."""
        return self.pending.state

    @property
    def kind(self) -> str:
        """Name of what produces the value, such as ``all_gather``."""
        return self.pending.kind

    @property
    def is_view(self) -> bool:
        """Whether this is a view of the pending value rather than all of it."""
        return bool(self._steps)

    @property
    def recipe(self) -> Recipe | None:
        """The recipe while deferred; that of a collective also after a fused rule completed it."""
        return self.pending.recipe

    @property
    def completed(self) -> bool:
        """Whether a read would not wait; torch's class calls it so."""
        return self.pending.state is PendingState.READY

    @property
    def elem(self) -> torch.Tensor:
        """The finished plain tensor, by the name that torch unwraps its own class with."""
        return self.materialize()

    def start(self) -> None:
        """Launches a deferred collective unfused, on every rank of its group; else does nothing."""
        self.pending.start()

    def complete(self, value: torch.Tensor) -> None:
        """Makes a deferred value ready with what a fused kernel handed back."""
        self.pending.complete(value)

    def alias(self) -> PendingLocal:
        """A fresh tensor object for the same value: it shares the wait and the storage."""
        return type(self)(self.pending, self, self._steps)

    def after(
        self, step: ViewStep, shape: torch.Size | tuple[int, ...], dtype: torch.dtype | None = None
    ) -> PendingLocal:
        """What ``step`` makes of this value in flight, as a pending value of its own.

        Args:
            step: from the finished value to a new contiguous tensor of ``shape``.
            shape: shape after the step.
            dtype: dtype after the step; None if it does not change.
        """
        pending = Pending.after(self, self.kind, self.pending.group, step)
        self.pending.add_dependent(pending)
        return _wrap_contiguous(type(self), pending, shape, dtype or self.dtype, self.device)

    # -- reads that do not come through the dispatcher ---------------------------------------------

    def materialize(self, consumer: object = "a read") -> torch.Tensor:
        """The finished plain tensor, without autograd history; waits for it if need be.

        Raises:
            DeferredReadError: it is a deferred collective.
        """
        value = self._value
        if value is None:
            value = self.pending.materialize(consumer)
            if self._steps:
                # As in the dispatcher: the view of what autograd knows is no inference tensor.
                with torch.inference_mode(self.is_inference()), torch.no_grad():
                    value = _replay(value, self._steps)
            self._value = value
        return value

    _get_acs_underlying_tensor = materialize

    def wait(self) -> torch.Tensor:
        """The finished plain tensor. For autograd this is the identity."""
        if self.requires_grad and torch.is_grad_enabled():
            return _Wait.apply(self)
        # A tensor of its own: what the caller does to its shape or its flags is not done to ours.
        return self.materialize().detach()

    def trigger_wait(self) -> torch.Tensor:
        """As `wait`. torch.compile calls it on inputs of a graph, and traces with the result.

        With its history, without which no gradient would come back out of the graph.
        """
        finished = self.wait()
        keep_compile_context(self, finished)
        return finished

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """As `torch.Tensor.numpy`, of the finished value."""
        return self.wait().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        """As `torch.Tensor.tolist`, of the finished value."""
        return self.materialize().tolist()

    @property
    def data(self) -> torch.Tensor:
        """As `torch.Tensor.data`; still pending."""
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # Torch's own would give the wrapper another shape and leave the value behind.
        with torch.no_grad():
            self.set_(value)

    def data_ptr(self) -> int:
        """Address of the finished value."""
        return self.materialize().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Storage of the finished value."""
        return self.materialize().untyped_storage()

    def _typed_storage(self) -> Any:
        return self.materialize()._typed_storage()

    def storage(self) -> Any:
        """As `torch.Tensor.storage`, of the finished value."""
        return self.materialize().storage()

    def is_shared(self) -> bool:
        """Whether the finished value lies in shared memory."""
        return self.materialize().is_shared()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wait().__dlpack__(*args, **kwargs)

    def __format__(self, format_spec: str) -> str:
        return repr(self) if not format_spec else self.materialize().__format__(format_spec)

    def _finished_copy_source(self) -> torch.Tensor:
        return self.materialize().detach().requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._finished_copy_source().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = self.materialize().detach().clone()
        copy.requires_grad_(self.requires_grad and self.is_leaf)
        memo[id(self)] = copy
        return copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        # Metadata only: a repr that waited would change the state, and one rank printing a
        # deferred collective would launch it alone.
        group = f", group={self.pending.group!r}" if self.pending.group else ""
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"PendingLocal({self.kind}, {self.state}, shape={tuple(self.shape)}, "
            f"dtype={self.dtype}, device='{self.device}'{group}{grad})"
        )

    # -- torch.compile boundary --------------------------------------------------------------------

    __tensor_flatten__ = _FlattenIfReadable()

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, torch.Tensor], meta: None, outer_size: Any, outer_stride: Any
    ) -> PendingLocal:
        return PendingLocal.ready(inner_tensors["elem"])

    # -- the dispatcher ----------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(
        cls,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.is_same_size.default:
            return args[0].shape == args[1].shape
        first = args[0] if args else None
        if not isinstance(first, PendingLocal):
            return _read(func, args, kwargs)
        if _is_composite_view(func):
            return func.decompose(*args, **kwargs)
        is_view = _is_view(func)
        if is_view:
            if torch.is_inference_mode_enabled() and not first.is_inference():
                # In inference mode too a view of a tensor that autograd knows must be one.
                with torch.inference_mode(False):
                    return cls.__torch_dispatch__(func, types, args, kwargs)
            if func is not aten.detach.default:
                first._was_viewed = True
            if first.completed and first.recipe is not None:
                # A fused rule completed it, and another may ask for its recipe still.
                return _pending_view(func, first, args[1:], kwargs)
        if first._value is None:
            if func in _METADATA_ONLY:
                return _from_metadata(func, first, args[1:], kwargs)
            if is_view:
                # A leaf takes its gradient over by detaching it. It is read by people who know
                # nothing of us, so it is finished here.
                if func is aten.detach.default and accumulating_gradient():
                    return func(first.materialize(func))
                if not first.completed:
                    return _pending_view(func, first, args[1:], kwargs)
            if first.state is PendingState.DEFERRED:
                handler = _deferred_ops.get((first.kind, func))
                if handler is not None:
                    result = handler(*args, **kwargs)
                    if result is not NotImplemented:
                        return result
        return _read(func, args, kwargs)


def _wrap(
    cls: type[PendingLocal],
    pending: Pending,
    shape: torch.Size | tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
    steps: tuple[ViewStep, ...] = (),
) -> PendingLocal:
    self: PendingLocal = torch.Tensor._make_wrapper_subclass(
        cls, shape, strides=stride, storage_offset=offset, dtype=dtype, device=device
    )
    forbid_raw_access(self)
    self.pending = pending
    self._steps = steps
    self._value = None
    self._was_viewed = False
    return self


def _wrap_contiguous(
    cls: type[PendingLocal],
    pending: Pending,
    shape: torch.Size | tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> PendingLocal:
    stride = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return _wrap(cls, pending, shape, tuple(reversed(stride)), 0, dtype, device)


class _Wait(torch.autograd.Function):
    """Identity from a pending tensor to its finished value."""

    @staticmethod
    def forward(ctx: Any, pending: PendingLocal) -> torch.Tensor:
        # Detached rather than viewed: the output may then be written to in place.
        return pending.materialize().detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _replay(value: torch.Tensor, steps: tuple[ViewStep, ...]) -> torch.Tensor:
    for step in steps:
        value = step(value)
    return value


def _metadata_twin(tensor: torch.Tensor) -> torch.Tensor:
    size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
    twin = torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")
    # Bounds are not checked on meta, so no storage of the right size is needed.
    return twin.as_strided(size, stride, offset) if offset else twin


def _from_metadata(
    func: torch._ops.OpOverload,
    tensor: PendingLocal,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    if kwargs.get("device") is None:
        kwargs = {**kwargs, "device": tensor.device}
    return func(_metadata_twin(tensor), *args, **kwargs)


def _pending_view(
    func: torch._ops.OpOverload,
    tensor: PendingLocal,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """A view that stays pending: its steps are replayed on the value once that is there."""
    if func in (aten.detach.default, aten.alias.default):
        return tensor.alias()
    shapes = func(_metadata_twin(tensor), *args, **kwargs)
    if isinstance(shapes, torch.Tensor) and _shows_the_same(shapes, tensor):
        # Such as the view that a backward hook makes of a module's input: no step to replay, and
        # still all of the value to a fused rule.
        return tensor.alias()

    def wrap(like: torch.Tensor, step: ViewStep) -> PendingLocal:
        return _wrap(
            PendingLocal,
            tensor.pending,
            like.size(),
            like.stride(),
            like.storage_offset(),
            like.dtype,
            tensor.device,
            (*tensor._steps, step),
        )

    if isinstance(shapes, torch.Tensor):
        return wrap(shapes, lambda value: func(value, *args, **kwargs))

    def part(i: int) -> ViewStep:
        return lambda value: func(value, *args, **kwargs)[i]

    return type(shapes)(wrap(like, part(i)) for i, like in enumerate(shapes))


def _shows_the_same(like: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (
        like.dtype == tensor.dtype
        and like.size() == tensor.size()
        and like.stride() == tensor.stride()
        and like.storage_offset() == tensor.storage_offset()
    )


def _read(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs ``func`` on finished values.

    A result that is one of these is handed back as the pending tensor it is in. So ``x.add_(1) is
    x``, and everybody who holds that tensor sees the change. Ops that do not write may hand back
    what they were given too, such as ``type_as`` in inference mode.
    """
    owners: dict[int, PendingLocal] = {}
    if not _is_mutable(func):

        def finish(tensor: PendingLocal) -> torch.Tensor:
            value = tensor.materialize(func)
            owners[id(value)] = tensor
            return value

        result = func(
            *tree_map_only(PendingLocal, finish, args),
            **tree_map_only(PendingLocal, finish, kwargs),
        )
        return _as_given(result, owners)

    changes_metadata = _changes_metadata(func)
    changed = args[0] if torch.Tag.inplace_view in func.tags else None
    if isinstance(changed, PendingLocal):
        name = func._schema.name.removeprefix("aten::")
        refuse_if_autograd_knows_views(name, changed, changed._was_viewed)

    def finish_for_write(tensor: PendingLocal) -> torch.Tensor:
        value = tensor.materialize(func)
        tensor.pending.finish_dependents()
        if changes_metadata:
            # Other views share this tensor object; only ours may change its shape.
            value = tensor._value = aten.alias.default(value)
        owners[id(value)] = tensor
        return value

    result = func(
        *tree_map_only(PendingLocal, finish_for_write, args),
        **tree_map_only(PendingLocal, finish_for_write, kwargs),
    )
    _note_writes_to_lists(func, args)
    if changes_metadata:
        with no_dispatch():
            if torch.Tag.inplace_view in func.tags:
                func(*args, **kwargs)
            else:
                for owner in owners.values():
                    owner.resize_(owner.materialize().shape)
    return _as_given(result, owners)


def _as_given(result: Any, owners: dict[int, PendingLocal]) -> Any:
    if isinstance(result, torch.Tensor):
        return owners.get(id(result), result)
    return tree_map_only(torch.Tensor, lambda out: owners.get(id(out), out), result)


def _note_writes_to_lists(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
    """Tells autograd of what a foreach op wrote to, as its kernels do for plain tensors.

    Of single arguments it knows by itself.
    """
    for argument, given in zip(func._schema.arguments, args, strict=False):
        if argument.is_write and isinstance(given, (list, tuple)):
            for tensor in given:
                if isinstance(tensor, PendingLocal) and not tensor.is_inference():
                    torch.autograd.graph.increment_version(tensor)


def materialized(tensor: torch.Tensor, consumer: object = "a read") -> torch.Tensor:
    """``tensor`` itself, or the finished value if it is pending, by ours or by torch's class."""
    if isinstance(tensor, PendingLocal):
        return tensor.materialize(consumer)
    return tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
