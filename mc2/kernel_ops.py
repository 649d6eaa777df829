"""What kernels are made of: their ``torch.ops.mc2`` ops, timed waits, and sums of matmuls.

The ops take plain local tensors, ints and the name of a group, so that FakeTensor, make_fx, the
profiler and FlopCounterMode see one op with shapes and FLOPs, and nothing of what is inside.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.flop_counter import register_flop_formula

from pending_dtensor.errors import collective_failed
from pending_dtensor.events import Interval, named_in_profile

_Started = TypeVar("_Started")


class BlockedTime(threading.local):
    """What this thread did in a kernel since `blocked_time` was entered.

    Attributes:
        began: when that was [s].
        launched: when the first message was sent [s], or None.
        waits: when it waited for one.
    """

    began: float = 0.0
    launched: float | None = None
    waits: tuple[Interval, ...] = ()


_blocked = BlockedTime()


@contextmanager
def blocked_time(
    kernel: str, op: str, shape: tuple[int, ...], dtype: torch.dtype, group: dist.ProcessGroup
) -> Iterator[BlockedTime]:
    """Notes launches and waits inside the block. Does not nest.

    Args:
        kernel: name of the kernel that runs in the block.
        op: the operation.
        shape: of what is gathered, or reduced.
        dtype: of that.
        group: the ranks.

    Raises:
        CollectiveFailedError: a wait inside the block failed.
    """
    _blocked.began, _blocked.launched, _blocked.waits = time.perf_counter(), None, ()
    try:
        yield _blocked
    except WaitFailedError as failed:
        reason = failed.__cause__
        assert reason is not None
        raise collective_failed(
            f"{kernel} {op}", shape, dtype, group.group_name, str(failed), reason
        ) from reason


def note_launch() -> None:
    """To be called before a message is sent: the first is noted."""
    if _blocked.launched is None:
        _blocked.launched = time.perf_counter()


class WaitFailedError(RuntimeError):
    """A wait inside a kernel's op failed; `blocked_time` knows what to call it."""


def wait(until: Callable[[], object], awaited: str) -> None:
    """Waits for a message and counts the time as exposed.

    Args:
        until: returns when it is there, or is gone.
        awaited: what is waited for, for the error message.

    Raises:
        WaitFailedError: it did not come; raised from what the process group says.
    """
    began = time.perf_counter()
    try:
        with named_in_profile("wait", "piece"):
            until()
    except RuntimeError as error:
        raise WaitFailedError(f"waited for {awaited}") from error
    _blocked.waits += (Interval(began, time.perf_counter()),)


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """`wait` for what a functional collective returned."""
    began = time.perf_counter()
    try:
        with named_in_profile("wait", "rows"):
            tensor = torch.ops._c10d_functional.wait_tensor(tensor)
    except RuntimeError as error:
        raise WaitFailedError("waited for rows of the other ranks") from error
    _blocked.waits += (Interval(began, time.perf_counter()),)
    return tensor


@contextmanager
def waiting_if_it_fails(
    started: Sequence[_Started],
    wait_for: Callable[[_Started], object] = torch.ops._c10d_functional.wait_tensor,
) -> Iterator[None]:
    """If the block raises, waits for what was started, as nobody else will.

    Args:
        started: buffers that collectives fill, or whatever ``wait_for`` takes.
        wait_for: waits for one of them.
    """
    try:
        yield
    except BaseException:
        for one in started:
            with contextlib.suppress(Exception):
                wait_for(one)
        raise


def sum_of_matmuls(
    terms: Sequence[tuple[torch.Tensor, torch.Tensor]], out: torch.Tensor | None = None
) -> torch.Tensor:
    """``sum(x @ weight for x, weight in terms)`` without a buffer for each term.

    Each term is added in the precision of the matmul and the sum rounded to the dtype of ``out``:
    no less accurate than autograd's adding up of the same matmuls.
    """
    (x, weight), *rest = terms
    out = torch.mm(x, weight, out=out) if out is not None else torch.mm(x, weight)
    for x, weight in rest:
        out.addmm_(x, weight)
    return out


_LAYOUT_ARGS = "SymInt outer, SymInt[] sizes, SymInt inner, SymInt rank"


def all_gather_matmul_op(name: str, extra_args: str) -> Callable[[Callable[..., Any]], Any]:
    """Defines ``torch.ops.mc2.<name>``, with fake implementation and FLOP formula.

    The op returns ``[gathered, *outs]``; gathered is of shape (0,) unless ``gather_output``.

    Args:
        name: of the op.
        extra_args: schema of the arguments after ``gather_output``.
    """
    schema = (
        f"(Tensor shard, Tensor[] weights, {_LAYOUT_ARGS}, bool gather_output, {extra_args})"
        f" -> Tensor[]"
    )
    return _define_op(name, schema, _gather_fake, _gather_flops)


def all_gather_matmul_product_op(name: str, extra_args: str) -> Callable[[Callable[..., Any]], Any]:
    """As `all_gather_matmul_op`, of an op that makes one more product with the gathered rows.

    Its first argument is ``x`` (M, F), and the first that it returns ``gathered.T @ x``.
    """
    schema = (
        f"(Tensor x, Tensor shard, Tensor[] weights, {_LAYOUT_ARGS}, bool gather_output, "
        f"{extra_args}) -> Tensor[]"
    )

    def fake(x: torch.Tensor, shard: torch.Tensor, *args: Any) -> list[torch.Tensor]:
        return [x.new_empty(shard.shape[1], x.shape[1]), *_gather_fake(shard, *args)]

    def flops(x: Sequence[int], shard: Sequence[int], *args: Any, **kwargs: Any) -> int:
        return 2 * math.prod(x) * shard[1] + _gather_flops(shard, *args, **kwargs)

    return _define_op(name, schema, fake, flops)


def _gather_fake(
    shard: torch.Tensor,
    weights: Sequence[torch.Tensor],
    outer: int,
    sizes: Sequence[int],
    inner: int,
    rank: int,
    gather_output: bool,
    *_: object,
) -> list[torch.Tensor]:
    rows = outer * sum(sizes) * inner
    gathered = shard.new_empty((rows, shard.shape[1]) if gather_output else (0,))
    return [gathered, *(shard.new_empty(rows, weight.shape[1]) for weight in weights)]


def _gather_flops(
    shard: Sequence[int],
    weights: Sequence[Sequence[int]],
    outer: int,
    sizes: Sequence[int],
    inner: int,
    *_: object,
    **__: object,
) -> int:
    rows = outer * sum(sizes) * inner
    return 2 * rows * sum(math.prod(weight) for weight in weights)


def matmul_reduce_scatter_op(name: str, extra_args: str) -> Callable[[Callable[..., Any]], Any]:
    """Defines ``torch.ops.mc2.<name>``, with fake implementation and FLOP formula.

    Args:
        name: of the op.
        extra_args: schema of the arguments after ``rank``.
    """
    schema = f"(Tensor[] xs, Tensor[] weights, {_LAYOUT_ARGS}, {extra_args}) -> Tensor"

    def fake(
        xs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        outer: int,
        sizes: Sequence[int],
        inner: int,
        rank: int,
        *_: object,
    ) -> torch.Tensor:
        return xs[0].new_empty(outer * sizes[rank] * inner, weights[0].shape[1])

    return _define_op(name, schema, fake, _scatter_flops)


def matmul_scatter_start_op(
    name: str, extra_args: str, buffer_shapes: Callable[..., list[tuple[int, int]]]
) -> Callable[[Callable[..., Any]], Any]:
    """Defines ``torch.ops.mc2.<name>``: a matmul_reduce_scatter whose result is in flight.

    The op returns the buffers that its collectives are filling, which have to be waited for.

    Args:
        name: of the op.
        extra_args: schema of the arguments after ``rank``.
        buffer_shapes: shapes of these buffers; called with the features N and the arguments of the
            op from ``outer`` on.
    """
    schema = f"(Tensor[] xs, Tensor[] weights, {_LAYOUT_ARGS}, {extra_args}) -> Tensor[]"

    def fake(
        xs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], *args: Any
    ) -> list[torch.Tensor]:
        return [xs[0].new_empty(shape) for shape in buffer_shapes(weights[0].shape[1], *args)]

    return _define_op(name, schema, fake, _scatter_flops)


def _scatter_flops(
    xs: Sequence[Sequence[int]], weights: Sequence[Sequence[int]], *_: object, **__: object
) -> int:
    return 2 * xs[0][0] * sum(math.prod(weight) for weight in weights)


def _define_op(
    name: str, schema: str, fake: Callable[..., Any], flops: Callable[..., int]
) -> Callable[[Callable[..., Any]], Any]:
    # torch.library.custom_op would also do, at some 90 us a call: four times what this costs.
    qualified = f"mc2::{name}"

    def decorate(implementation: Callable[..., Any]) -> Any:
        torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(qualified, "default", implementation)
        torch.library.register_fake(qualified, fake)
        packet = getattr(torch.ops.mc2, name)
        register_flop_formula(packet)(flops)
        return packet.default

    return decorate
