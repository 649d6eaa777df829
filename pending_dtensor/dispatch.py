"""`OpDispatcher`: runs an op on HyperDTensors without waiting for their local tensors early.

The locals go into the op as they are; a `PendingLocal` waits only if the op reads it. What torch's
sharding rules say of an op is remembered, so that most calls need no planning at all.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from pending_dtensor.events import record_event
from pending_dtensor.pending_local import materialized
from pending_dtensor.redistribute import redistribute_local, with_placements
from pending_dtensor.torch_compat import (
    DTensorSpec,
    OutputSharding,
    TensorMeta,
    accumulating_gradient,
    in_backward,
    is_mask_partial,
    is_tracing,
    no_dispatch,
    plain_dtensor,
)

aten = torch.ops.aten

_MAX_REMEMBERED = 8192


# By these a leaf takes its gradient over or adds to it. It then holds what torch would give it.
_TAKES_GRADIENT_OVER = {
    aten.detach.default,
    aten.clone.default,
    aten.new_empty_strided.default,
    aten.add.Tensor,
}


class _Fallback:
    """Whether `full_gather_fallback` is on, and which ops have been warned about."""

    depth = 0
    warned: ClassVar[set[Any]] = set()


@contextmanager
def full_gather_fallback() -> Iterator[None]:
    """Inside the block, an op that DTensor has no sharding rule for runs on gathered tensors.

    Each sharded argument is gathered on every rank, the op runs replicated and its result is
    Replicate. Costs the gather's communication and the full tensor's memory on every rank; said
    once per op in a warning and each time as a ``fallback`` event. Backward ops that have no rule
    need the block around ``backward`` too.

    Outside the block such an op raises ``NotImplementedError``, as torch does.
    """
    _Fallback.depth += 1
    try:
        yield
    finally:
        _Fallback.depth -= 1


class _Remembered(NamedTuple):
    """What the sharding rules said for one op and one set of specs: it runs on the locals as is."""

    output_spec: Any  # DTensorSpec, a sequence of them and None, or None


class OpDispatcher:
    """Dispatches ops for one DTensor subclass.

    Fields: ``_wrap`` makes a tensor of the subclass from a local tensor and a spec; ``_functions``
    are the whole functions seen in ``__torch_function__``; ``_remembered`` maps (op, specs, other
    arguments) to the sharding rules' answer.
    """

    def __init__(self) -> None:
        self._wrap: Callable[[torch.Tensor, DTensorSpec], torch.Tensor]
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._remembered: dict[Any, _Remembered] = {}

    def set_wrapper(self, wrap: Callable[[torch.Tensor, DTensorSpec], torch.Tensor]) -> None:
        """Tells how to make a tensor of the subclass from a local tensor and its spec."""
        self._wrap = wrap

    def register_function(self, function: Any, handler: Callable[..., Any]) -> None:
        """Hands ``function``, seen whole before it is taken apart into ops, to ``handler``.

        Args:
            function: as ``__torch_function__`` gets it, such as ``torch.nn.functional.linear``.
            handler: called with its arguments; ``NotImplemented`` leaves it to torch.

        Raises:
            ValueError: the function has a handler already.
        """
        if function in self._functions:
            raise ValueError(
                f"Expected one handler for {function}, got {handler} besides "
                f"{self._functions[function]} (register_function). Register each function once."
            )
        self._functions[function] = handler

    def call_function(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        """Runs ``function`` by its handler, or by torch."""
        handler = self._functions.get(function)
        if handler is not None:
            result = handler(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def dispatch(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs one aten op on DTensors, at least one of them of the subclass.

        Raises:
            NotImplementedError: DTensor has no sharding rule for the op.
        """
        if op in _TAKES_GRADIENT_OVER and accumulating_gradient():
            return op(*map(_finished, args), **kwargs)
        key, local_args = _key_and_locals(op, args, kwargs)
        if key is None:
            return self._through_torch(op, args, kwargs)
        known = self._remembered.get(key)
        if known is None:
            known = self._remember(key, op, args, kwargs)
            if known is None:
                return self._through_torch(op, args, kwargs)
        return self._wrap_result(op(*local_args, **kwargs), known.output_spec)

    def _wrap_result(self, result: Any, spec: Any) -> Any:
        if isinstance(result, torch.Tensor):
            return result if spec is None else self._wrap(result, spec)
        if isinstance(result, (list, tuple)):
            specs = spec if isinstance(spec, (list, tuple)) else [spec] * len(result)
            return type(result)(self._wrap_result(r, s) for r, s in zip(result, specs, strict=True))
        return result

    def _remember(
        self, key: Any, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Remembered | None:
        """Asks torch's sharding rules; None if the op is more than a call on the locals."""
        torch_dispatcher = DTensor._op_dispatcher
        if (
            op in torch_dispatcher._random_ops
            or op in torch_dispatcher._custom_op_handlers
            or op._schema.is_mutable
            or op is aten.equal.default
            or is_tracing()
        ):
            return None
        info = torch_dispatcher.unwrap_to_op_info(op, args, kwargs)
        if not info.compute_mesh._is_current_rank_part_of_mesh():
            return None
        try:
            sharding = torch_dispatcher.sharding_propagator.propagate_op_sharding(info.schema)
        except Exception:
            return None  # torch's own path raises it again, with torch's message
        if not isinstance(sharding, OutputSharding) or sharding.needs_redistribute:
            return None
        if len(self._remembered) >= _MAX_REMEMBERED:
            self._remembered.clear()
        known = self._remembered[key] = _Remembered(sharding.output_spec)
        return known

    def _through_torch(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Lets torch's DTensor run the op on the same locals, and wraps what comes back."""
        owners: dict[int, tuple[DTensor, Any]] = {}
        zeros_spec = _spec_for_missing_gradients(op, args)

        def unwrap(arg: Any) -> Any:
            if isinstance(arg, DTensor):
                if type(arg) is DTensor:
                    return arg
                plain = DTensor(arg._local_tensor, arg._spec, requires_grad=arg.requires_grad)
                owners[id(plain)] = (plain, arg)
                return plain
            if isinstance(arg, (list, tuple)):
                return type(arg)(unwrap(item) for item in arg)
            if zeros_spec is not None and isinstance(arg, torch.Tensor) and not arg.any():
                return plain_dtensor(arg, _replicated_spec(arg, zeros_spec))
            return arg

        torch_args = tuple(unwrap(arg) for arg in args)
        torch_kwargs = {name: unwrap(value) for name, value in kwargs.items()}
        try:
            result = op(*torch_args, **torch_kwargs)
        except NotImplementedError:
            if not _Fallback.depth or op._schema.is_mutable:
                raise
            return self._gathered(op, torch_args, torch_kwargs)

        if op._schema.is_mutable:
            for plain, owner in owners.values():
                owner._spec = plain._spec
            if torch.Tag.inplace_view in op.tags:
                # Torch leaves the shape of the wrapper, and mostly of its spec, as it was.
                with no_dispatch():
                    op(*args, **kwargs)
                tensor = args[0]
                meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
                tensor._spec = with_placements(tensor._spec, tensor._spec.placements, meta)

        def wrap(out: Any) -> Any:
            if isinstance(out, (list, tuple)):
                return type(out)(wrap(item) for item in out)
            if id(out) in owners:
                return owners[id(out)][1]
            if type(out) is DTensor and not any(out is arg for arg in torch_args):
                return self._wrap(out._local_tensor, _with_masks_applied(out, args))
            return out

        return wrap(result)

    def _gathered(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs an op without a sharding rule on gathered arguments."""
        if op not in _Fallback.warned:
            _Fallback.warned.add(op)
            warnings.warn(
                f"{op} has no DTensor sharding rule: full_gather_fallback() gathers its arguments "
                f"on every rank and runs it replicated.",
                stacklevel=2,
            )
        specs: list[DTensorSpec] = []

        def gather(arg: Any) -> Any:
            if isinstance(arg, DTensor):
                specs.append(arg._spec)
                whole = with_placements(arg._spec, (Replicate(),) * arg.device_mesh.ndim)
                return redistribute_local(arg._local_tensor, arg._spec, whole, async_op=False)
            if isinstance(arg, (list, tuple)):
                return type(arg)(gather(item) for item in arg)
            return arg

        whole_args = tuple(gather(arg) for arg in args)
        whole_kwargs = {name: gather(value) for name, value in kwargs.items()}
        record_event(
            "fallback",
            kernel="full_gather",
            shape=tuple(specs[0].shape),
            dtype=None,
            message_elements=0,
            group="",
            detail=f"{op} has no sharding rule",
        )

        def wrap(out: Any) -> Any:
            if isinstance(out, (list, tuple)):
                return type(out)(wrap(item) for item in out)
            if isinstance(out, torch.Tensor):
                return self._wrap(out, _replicated_spec(out, specs[0]))
            return out

        return wrap(op(*whole_args, **whole_kwargs))


def _with_masks_applied(out: DTensor, args: tuple[Any, ...]) -> DTensorSpec:
    """The spec of an op's output, which is an ordinary Partial if the op made a masked one.

    An embedding sharded by rows looks up something for the indices of other ranks' rows. Torch
    zeroes that when the output is reduced, and until then keeps the mask in the plan that all its
    calls share: after an output that was dropped unreduced, by an error say, every other would be
    refused. So it is zeroed here.
    """
    spec = out._spec
    made = not any(isinstance(arg, DTensor) and _masks(arg._spec) for arg in args)
    masks = _masks(spec) if made and not is_tracing() else []
    for placement in masks:
        placement.mask_buffer.apply_mask(out._local_tensor)
        placement.mask_buffer.release_mask()
    if not masks:
        return spec
    plain = tuple(Partial(p.reduce_op) if p in masks else p for p in spec.placements)
    return with_placements(spec, plain)


def _masks(spec: DTensorSpec) -> list[Any]:
    return [placement for placement in spec.placements if is_mask_partial(placement)]


def _finished(arg: Any) -> Any:
    """A DTensor of any kind as torch's own, with a finished local tensor; else ``arg`` itself."""
    if not isinstance(arg, DTensor):
        return arg
    return plain_dtensor(materialized(arg._local_tensor), arg._spec)


def _key_and_locals(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """The key under which the op's plan is remembered, and its arguments with locals put in.

    (None, None) if an argument is a plain tensor or cannot be hashed.
    """
    key: list[Any] = [op]
    local_args: list[Any] = []
    for position, arg in enumerate(args):
        if isinstance(arg, DTensor):
            key.append(arg._spec)
            local_args.append(arg._local_tensor)
        elif isinstance(arg, (list, tuple)):
            if any(isinstance(item, torch.Tensor) for item in arg):
                if not all(isinstance(item, DTensor) for item in arg):
                    return None, None
                key.append(tuple(item._spec for item in arg))
                local_args.append([item._local_tensor for item in arg])
            else:
                key.append(tuple(_key_of_value(op, args, position, item) for item in arg))
                local_args.append(arg)
        elif isinstance(arg, torch.Tensor):
            return None, None
        else:
            key.append(_key_of_value(op, args, position, arg))
            local_args.append(arg)
    for name, value in kwargs.items():
        if isinstance(value, (torch.Tensor, list, tuple)):
            return None, None
        key.append((name, _key_of_value(op, args, name, value)))
    hashable = tuple(key)
    try:
        hash(hashable)
    except TypeError:
        return None, None
    return hashable, local_args


def _key_of_value(
    op: torch._ops.OpOverload, args: tuple[Any, ...], place: int | str, value: Any
) -> Any:
    kind = type(value)
    if kind is float and not _decides_sharding(op, args, place):
        # A learning rate or a loss scale changes each step, and would be planned anew each time.
        return kind
    # 1, 1.0 and True are equal as keys, but not as arguments.
    return kind, value


def _decides_sharding(op: torch._ops.OpOverload, args: tuple[Any, ...], place: int | str) -> bool:
    """Whether torch's sharding rule looks at a number, such as the order of a norm."""
    if torch.Tag.pointwise in op.tags:
        # It looks at signs, and only to tell what keeps a Partial partial.
        specs = (arg._spec for arg in args if isinstance(arg, DTensor))
        return any(placement.is_partial() for spec in specs for placement in spec.placements)
    return _is_static(op, place)


@functools.cache
def _is_static(op: torch._ops.OpOverload, place: int | str) -> bool:
    propagator = DTensor._op_dispatcher.sharding_propagator
    info = propagator.op_to_schema_info.get(op)
    info = info or propagator.op_to_schema_info_for_single_dim_strategy.get(op)
    if info is None:
        return True  # torch does not say
    if isinstance(place, str):
        return place in (info.static_kwargkey or ())
    return place >= info.static_argnum


def _spec_for_missing_gradients(
    op: torch._ops.OpOverload, args: tuple[Any, ...]
) -> DTensorSpec | None:
    """A spec on the right mesh if autograd may have put plain zeros beside DTensors, else None.

    The backward of split and unbind stands zeros in for the parts that got no gradient, and makes
    them plain tensors, the same on each rank.
    """
    if op not in (aten.cat.default, aten.stack.default):
        return None
    if not in_backward():
        return None
    return next((arg._spec for arg in args[0] if isinstance(arg, DTensor)), None)


def _replicated_spec(tensor: torch.Tensor, like: DTensorSpec) -> DTensorSpec:
    meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    return with_placements(like, (Replicate(),) * like.mesh.ndim, meta)
