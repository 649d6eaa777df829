"""`PendingLocal`: every way to look at its data sees the finished value, and nothing else waits."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import operator
import os
import pickle
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks
from tests.common.exact import by_name, same
from tests.common.late_ranks import ahead
from tests.common.script_on_ranks import run_script_on_ranks

if IN_RANK_PROCESS:
    import numpy as np
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor, Partial, Replicate

    from pending_dtensor import HyperDTensor, PendingLocal, PendingState, record_overlap
    from pending_dtensor.collectives import all_gather, all_reduce, chunk_sizes, mesh_axis
    from pending_dtensor.errors import (
        DeferredReadError,
        ForkedPendingError,
        InFlightInputModifiedError,
    )
    from pending_dtensor.hyper_dtensor import take_local
    from pending_dtensor.pending import Launch
    from pending_dtensor.torch_compat import work_registry_size

    aten = torch.ops.aten


# --- what is pending


def whole(dtype: torch.dtype | None = None) -> torch.Tensor:
    """The value that pending tensors here will have: (3, 5), so that gathering dim 1 is uneven."""
    return torch.arange(-4.0, 11.0).reshape(3, 5).to(dtype or torch.float32)


def gathering(ctx: RankContext, value: torch.Tensor) -> PendingLocal:
    """``value`` as an all_gather along its last dim that needs unpadding and re-concatenation."""
    dim = value.ndim - 1
    sizes = chunk_sizes(value.size(dim), ctx.world_size)
    part = value.split(sizes, dim)[ctx.rank]
    return all_gather(part, dim, mesh_axis(ctx.mesh(), 0), sizes)


def all_in_flight(tensors: list[PendingLocal]) -> None:
    assert [t.state for t in tensors] == [PendingState.IN_FLIGHT] * len(tensors)


def started(ctx: RankContext, count: int, value: torch.Tensor | None = None) -> list[PendingLocal]:
    """``count`` values in flight, on rank 0 certainly unfinished when this returns."""
    value = whole() if value is None else value
    return ahead(ctx, lambda: [gathering(ctx, value.clone()) for _ in range(count)], all_in_flight)


# --- reads


def reads() -> dict[str, Callable[[Any], Any]]:
    return {
        "add": lambda x: x + 1,
        "radd": lambda x: 1 + x,
        "mul self": lambda x: x * x,
        "matmul": lambda x: x @ x.t(),
        "linear": lambda x: F.linear(x, torch.ones(2, 5)),
        "compare": lambda x: x > 2,
        "sum": lambda x: x.sum(),
        "max with indices": lambda x: x.max(dim=1),
        "cat": lambda x: torch.cat([x, torch.zeros(1, 5), x]),
        "stack": lambda x: torch.stack([x, x], dim=1),
        "where": lambda x: torch.where(x > 0, x, -x),
        "equal": lambda x: torch.equal(x, whole()),
        "equal, as second": lambda x: torch.equal(whole(), x),
        "allclose": lambda x: torch.allclose(x, whole()),
        "contains": lambda x: 3.0 in x,
        "foreach": lambda x: torch._foreach_add([x, whole()], 1.0),
        "foreach, two lists": lambda x: torch._foreach_mul([whole()], [x]),
        "foreach norm": lambda x: torch._foreach_norm([x, x]),
        "vector norm": torch.linalg.vector_norm,
        "numpy": lambda x: x.numpy(),
        "numpy force": lambda x: x.numpy(force=True),
        "asarray": np.asarray,
        "array of another dtype": lambda x: np.asarray(x, dtype="int32"),
        "tolist": lambda x: x.tolist(),
        "item": lambda x: x[1, 2].item(),
        "int": lambda x: int(x[1, 2]),
        "float": lambda x: float(x[1, 2]),
        "complex": lambda x: complex(x[1, 2]),
        "bool": lambda x: bool(x[0, 4]),
        "index": lambda x: "abcdefgh"[x.long()[1, 2]],
        "if": lambda x: "yes" if x.sum() > 0 else "no",
        "len": len,
        "format": lambda x: f"{x[1, 2]:.2f} {x[1, 2]:5}",
        "getitem int": lambda x: x[-1],
        "getitem slice": lambda x: x[1:, ::2],
        "getitem ellipsis": lambda x: x[..., None, 1],
        "getitem mask": lambda x: x[x > 2],
        "getitem indices": lambda x: x[[2, 0], [1, 1]],
        "getitem tensor": lambda x: x[torch.tensor([2, 0])],
        "index with it": lambda x: torch.arange(20)[x[2].long()],
        "iterate": lambda x: [row.tolist() for row in x],
        "unpack": lambda x: [t.tolist() for t in (lambda a, b, c: (c, a))(*x)],
        "nonzero": lambda x: x.nonzero(),
        "unique": lambda x: x.long().abs().unique(),
        "sort": lambda x: x.sort(descending=True),
        "double": lambda x: x.double(),
        "bfloat16": lambda x: x.bfloat16(),
        "to int": lambda x: x.to(torch.int32),
        "to bool": lambda x: x.bool(),
        "type": lambda x: x.type(torch.float64),
        "type_as": lambda x: x.type_as(torch.zeros(1, dtype=torch.int64)),
        "cpu": lambda x: x.cpu(),
        "to cpu copy": lambda x: x.to("cpu", copy=True),
        "to meta": lambda x: x.to("meta"),
        "contiguous": lambda x: x.contiguous(),
        "contiguous of a view": lambda x: x.t().contiguous(),
        "reshape that copies": lambda x: x.t().reshape(-1),
        "clone": lambda x: x.clone(),
        "clone channels": lambda x: x.t().clone(memory_format=torch.contiguous_format),
        "wait": lambda x: x.wait() if isinstance(x, PendingLocal) else x,
        "data": lambda x: x.data + 1,
        "data_ptr": lambda x: list((ctypes.c_float * 15).from_address(x.data_ptr())),
        "data_ptr of a view": lambda x: list((ctypes.c_float * 5).from_address(x[1].data_ptr())),
        "untyped_storage": lambda x: bytes(x.untyped_storage())[: 15 * 4],
        "storage": lambda x: x.storage().tolist()[:15],
        "storage of a view": lambda x: x[1:].untyped_storage().nbytes() >= 15 * 4,
        "from_dlpack": torch.from_dlpack,
        "numpy from_dlpack": np.from_dlpack,
        "as_tensor": lambda x: torch.as_tensor(x) + 0,
        "asarray torch": lambda x: torch.asarray(x, dtype=torch.float64),
        "new_tensor of list": lambda x: x.new_tensor([1.0, 2.0]),
        "deepcopy": copy.deepcopy,
        "copy": copy.copy,
        "pickle": lambda x: pickle.loads(pickle.dumps(x)),
        "save": saved_and_loaded,
        "save a view": lambda x: saved_and_loaded(x[1:].t()),
        "as an argument of copy_": lambda x: torch.zeros(3, 5).copy_(x),
        "as an argument of setitem": lambda x: set_item(torch.zeros(4, 5), slice(1, 4), x),
        "as an index of setitem": lambda x: set_item(torch.zeros(20), x[2].long(), 1.0),
        "sparse": lambda x: x.relu().to_sparse().to_dense(),
        "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
        "gradient of": lambda x: torch.gradient(x, dim=1)[0],
        "detached share": lambda x: x.is_shared(),
        "no argument": lambda x: torch.special.expit(x * 0),
        "split that copies": lambda x: torch.split_copy(x, 2),
        "unsafe view": lambda x: aten._unsafe_view(x, [15]),
    }


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def set_item(target: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    target[index] = value
    return target


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@on_ranks(2)
def test_a_read_sees_the_finished_value(ctx: RankContext) -> None:
    cases = reads()
    pending = dict(zip(cases, started(ctx, len(cases)), strict=True))

    def check(name: str, read: Callable[[Any], Any]) -> None:
        value = read(pending[name])
        same(value, read(whole()))
        # Only views, and ops that give back what they were given, give a pending tensor.
        assert not isinstance(value, PendingLocal) or value.pending is pending[name].pending
        # Twice: the value is memoised.
        same(read(pending[name]), read(whole()))

    by_name(cases, check)


@on_ranks(2)
def test_numpy_of_a_tensor_in_a_graph_raises_as_in_torch(ctx: RankContext) -> None:
    leaf = torch.ones(3, requires_grad=True)
    (pending,) = ahead(ctx, lambda: [reduced(ctx, leaf)], all_in_flight)
    assert pending.requires_grad
    with pytest.raises(RuntimeError, match=r"Use tensor\.detach\(\)\.numpy\(\) instead"):
        pending.numpy()
    with pytest.raises(BufferError, match="require gradient"):
        torch.from_dlpack(pending)
    assert pending.numpy(force=True).tolist() == [2.0] * 3
    assert pending.detach().numpy().tolist() == [2.0] * 3
    assert pending.tolist() == [2.0] * 3


def reduced(ctx: RankContext, summand: torch.Tensor) -> torch.Tensor:
    """The sum of ``summand`` over ranks, in flight, with autograd."""
    summed = HyperDTensor.from_local(summand, ctx.mesh(), [Partial()])
    return summed.redistribute(placements=[Replicate()], async_op=True).to_local()


@on_ranks(2)
def test_c_code_that_takes_the_address_itself_is_refused(ctx: RankContext) -> None:
    (pending,) = started(ctx, 1)
    # It would read address 0. Nothing of ours is asked before these do it.
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(pending)
    with pytest.raises(RuntimeError, match="data is not allocated"):
        torch.tensor([pending[0, 0], pending[0, 1]])
    same(pending, whole())


@on_ranks(2)
def test_wait_is_the_identity_for_autograd(ctx: RankContext) -> None:
    leaf = torch.full((3,), ctx.rank + 1.0, requires_grad=True)
    one, view, written = ahead(
        ctx, lambda: [reduced(ctx, leaf), reduced(ctx, leaf)[1:], reduced(ctx, leaf)]
    )
    waited = one.wait()
    assert type(waited) is torch.Tensor
    assert waited.requires_grad
    waited.mul(torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [1.0, 2.0, 3.0]

    leaf.grad = None
    view.wait().sum().backward()
    assert leaf.grad.tolist() == [0.0, 1.0, 1.0]

    leaf.grad = None
    written.wait().mul_(2).sum().backward()
    assert leaf.grad.tolist() == [2.0, 2.0, 2.0]
    with torch.no_grad():
        assert not one.wait().requires_grad
    assert not started_here(ctx).wait().requires_grad


def started_here(ctx: RankContext) -> PendingLocal:
    return gathering(ctx, whole())


@on_ranks(2)
def test_what_wait_gives_is_not_the_memoised_value(ctx: RankContext) -> None:
    pending = started_here(ctx)
    pending.wait().t_()
    pending.wait().requires_grad_()
    same(pending + 0, whole())
    same(pending.wait(), whole())


@on_ranks(2)
def test_ops_that_hand_back_what_they_were_given(ctx: RankContext) -> None:
    """In inference mode they reach us whole, and would hand out the memoised value."""
    ops: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "type_as": lambda x: x.type_as(x),
        "to": lambda x: x.to(x.dtype),
        "contiguous": lambda x: x.contiguous(),
        "dropout": lambda x: F.dropout(x, training=False),
        "alpha_dropout": lambda x: F.alpha_dropout(x, training=False),
        "expand_as": lambda x: x.expand_as(x),
        "resolve_conj": lambda x: x.resolve_conj(),
        "positive": lambda x: +x,
        "sum_to_size": lambda x: x.sum_to_size(x.shape),
        "broadcast": lambda x: torch.broadcast_tensors(x, x)[0],
    }
    pending = dict(zip(ops, started(ctx, len(ops)), strict=True))

    def check(name: str, op: Callable[[torch.Tensor], torch.Tensor]) -> None:
        x, plain = pending[name], whole()
        for inference in False, True:
            with torch.inference_mode(inference), torch.no_grad():
                same = op(x)
                assert (same is x) == (op(plain) is plain)
                if same is not x:
                    same.unsqueeze_(0)
                assert (x + 0).shape == x.shape == plain.shape

    by_name(ops, check)


@on_ranks(2)
def test_gradients_flow_through_reads_of_a_pending_tensor(ctx: RankContext) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x.exp() * x[1:].sum() + x.view(-1).unsqueeze(0).narrow(1, 1, 2).sum()).sum()

    leaf = torch.arange(3.0).requires_grad_()
    (pending,) = ahead(ctx, lambda: [reduced(ctx, leaf)], all_in_flight)
    (grad,) = torch.autograd.grad(loss(pending), leaf)
    whole_leaf = (2 * torch.arange(3.0)).requires_grad_()
    (expected,) = torch.autograd.grad(loss(whole_leaf), whole_leaf)
    same(grad, expected)


# --- custom ops

if IN_RANK_PROCESS:
    _seen: list[type] = []

    @torch.library.custom_op("pending_local_tests::doubled", mutates_args=())
    def doubled(x: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
        _seen.extend([type(x), *map(type, others)])
        return torch.from_numpy(x.numpy() * 2 + sum(other.numpy() for other in others))

    @doubled.register_fake
    def _(x: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
        return torch.empty_like(x)

    doubled.register_autograd(
        lambda ctx, grad: (grad * 2, [grad] * ctx.others),
        setup_context=(lambda ctx, inputs, output: setattr(ctx, "others", len(inputs[1]))),
    )

    @torch.library.custom_op("pending_local_tests::negate_", mutates_args=("x",))
    def negate_(x: torch.Tensor) -> None:
        _seen.append(type(x))
        np.negative(x.numpy(), out=x.numpy())

    _library = torch.library.Library("pending_local_tests", "FRAGMENT")
    _library.define("address_of(Tensor x) -> int")

    @torch.library.impl(_library, "address_of", "CPU")
    def address_of(x: torch.Tensor) -> int:
        _seen.append(type(x))
        return x.data_ptr()


@on_ranks(2)
def test_a_custom_op_gets_a_finished_plain_tensor(ctx: RankContext) -> None:
    first, second, view, written, leaf_sum = ahead(
        ctx,
        lambda: [
            started_here(ctx),
            started_here(ctx),
            started_here(ctx)[1:].t(),
            started_here(ctx),
            reduced(ctx, torch.ones(2)),
        ],
        all_in_flight,
    )
    _seen.clear()
    same(doubled(first, [second, whole()]), whole() * 4)
    same(doubled(view.contiguous(), []), whole()[1:].t().contiguous() * 2)
    assert negate_(written) is None
    same(written, -whole())
    assert torch.ops.pending_local_tests.address_of(first) == first.wait().data_ptr() != 0
    assert _seen == [torch.Tensor] * len(_seen)
    assert len(_seen) == 6

    leaf = torch.ones(2, requires_grad=True)
    doubled(reduced(ctx, leaf), [leaf_sum]).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0, 2.0]


# --- writes


def writes_that_give_it_back() -> dict[str, Callable[[torch.Tensor], Any]]:
    return {
        "add_": lambda x: x.add_(1),
        "mul_": lambda x: x.mul_(x),
        "iadd": lambda x: operator.iadd(x, 2),
        "zero_": lambda x: x.zero_(),
        "fill_": lambda x: x.fill_(3),
        "copy_": lambda x: x.copy_(torch.ones(3, 5)),
        "neg_": lambda x: x.neg_(),
        "relu_": torch.relu_,
        "relu inplace": lambda x: F.relu(x, inplace=True),
        "clamp_": lambda x: x.clamp_(0, 3),
        "masked_fill_": lambda x: x.masked_fill_(x > 0, -1),
        "index_add_": lambda x: x.index_add_(0, torch.tensor([0, 2]), torch.ones(2, 5)),
        "scatter_": lambda x: x.scatter_(1, torch.zeros(3, 1, dtype=torch.long), 7.0),
        "index_put_": lambda x: x.index_put_((torch.tensor([0]), torch.tensor([1])), torch.ones(1)),
        "out": lambda x: torch.add(whole(), 5, out=x),
        "out, as input too": lambda x: torch.mul(x, x, out=x),
        "apply to itself": lambda x: x.addcmul_(x, x, value=2),
    }


def writes_that_give_something_else() -> dict[str, Callable[[torch.Tensor], Any]]:
    return {
        "setitem": lambda x: set_item(x, 0, 9.0),
        "setitem mask": lambda x: set_item(x, x > 2, 0.0),
        "setitem of itself": lambda x: set_item(x, 0, x[1]),
        "write to a row": lambda x: x[1].add_(1),
        "write to a view of a view": lambda x: x.t()[1:].view(4, 3).mul_(2),
        "write to an alias": lambda x: x.detach().mul_(2),
        "write to data": lambda x: x.data.mul_(2),
        "write to flat": lambda x: x.view(-1)[3:].zero_(),
        "write to split": lambda x: x.split(2, 1)[1].zero_(),
        "write to iterated": lambda x: [row.zero_() for row in x],
        "foreach_add_": lambda x: torch._foreach_add_([x], 1.0),
        "foreach_add_ lists": lambda x: torch._foreach_add_([x], [x]),
        "foreach_copy_": lambda x: torch._foreach_copy_([x], [torch.ones(3, 5)]),
        "out of two": lambda x: torch.sort(whole(), out=(x, torch.empty(3, 5, dtype=torch.long))),
        "out in a view": lambda x: torch.add(whole()[0], 5, out=x[1]),
        "numpy": lambda x: x.numpy().fill(4.0),
        "through wait": lambda x: (x.wait() if isinstance(x, PendingLocal) else x).fill_(4.0),
    }


@on_ranks(2)
def test_a_write_is_seen_by_the_pending_tensor_and_its_views(ctx: RankContext) -> None:
    give_it_back = writes_that_give_it_back()
    writes = {**give_it_back, **writes_that_give_something_else()}
    pending = dict(zip(writes, started(ctx, len(writes)), strict=True))

    def check(name: str, write: Callable[[torch.Tensor], Any]) -> None:
        x, plain = pending[name], whole()
        views = [
            (view(x), view(plain)) for view in (lambda t: t[1:], lambda t: t.t(), torch.detach)
        ]
        with torch.no_grad():
            result = write(x)
        write(plain)
        if name in give_it_back:
            assert result is x
        same(x, plain)
        for view, expected in views:
            same(view, expected)
        same(x[1:].t(), plain[1:].t())
        assert x.state is PendingState.READY

    by_name(writes, check)


@on_ranks(2)
def test_a_write_does_not_change_what_was_made_before_it(ctx: RankContext) -> None:
    """As on one device: what a later step makes of a value is made from the value as it was."""
    pending = started_here(ctx)
    as_double = pending.after(lambda value: value.double(), pending.shape, torch.float64)
    pending.add_(100)
    same(as_double, whole().double())
    same(pending, whole() + 100)


@on_ranks(2)
def test_writes_bump_the_version_that_autograd_checks(ctx: RankContext) -> None:
    weight = torch.ones(3, 5, requires_grad=True)
    pending = started_here(ctx)
    product = (weight * pending).sum()
    pending.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def metadata_writes() -> dict[str, Callable[[torch.Tensor], Any]]:
    return {
        "t_": lambda x: x.t_(),
        "transpose_": lambda x: x.transpose_(0, 1),
        "swapdims_": lambda x: x.swapdims_(0, 1),
        "unsqueeze_": lambda x: x.unsqueeze_(1),
        "squeeze_": lambda x: x.unsqueeze_(0).squeeze_(),
        "squeeze_ dim": lambda x: x.unsqueeze_(0).squeeze_(0),
        "as_strided_": lambda x: x.as_strided_((2, 3), (5, 1), 2),
        "resize_": lambda x: x.resize_(5, 3),
        "resize_ smaller": lambda x: x.resize_(2, 2),
        "set_": lambda x: x.set_(torch.arange(6.0).view(2, 3)),
        "set_ storage": lambda x: x.set_(torch.arange(6.0).untyped_storage(), 1, (2, 2), (2, 1)),
        "t_, then more": lambda x: x.t_().add_(1).unsqueeze_(0),
    }


@on_ranks(2)
def test_a_metadata_write_changes_this_tensor_only(ctx: RankContext) -> None:
    cases = metadata_writes()
    pending = dict(zip(cases, started(ctx, len(cases)), strict=True))

    def check(name: str, write: Callable[[torch.Tensor], Any]) -> None:
        x, plain = pending[name], whole()
        views = [
            (view(x), view(plain)) for view in (lambda t: t[1:], lambda t: t.t(), torch.detach)
        ]
        with torch.no_grad():
            result = write(x)
        write(plain)
        assert result is x
        assert (x.shape, x.stride(), x.storage_offset()) == (
            plain.shape,
            plain.stride(),
            plain.storage_offset(),
        )
        same(x, plain)
        for view, expected in views:
            same(view, expected)
        x.add_(1)
        plain.add_(1)
        same(x, plain)
        same(x[0], plain[0])

    by_name(cases, check)


def reshapes() -> dict[str, Callable[[torch.Tensor], Any]]:
    """The metadata writes that autograd takes on a tensor in a graph."""
    return {
        name: write
        for name, write in metadata_writes().items()
        if not name.startswith(("resize_", "set_"))
    }


@on_ranks(2)
def test_a_metadata_write_in_a_graph_has_its_gradient(ctx: RankContext) -> None:
    def check(name: str, write: Callable[[torch.Tensor], Any]) -> None:
        def written(x: torch.Tensor) -> torch.Tensor:
            write(x)
            row = x[0]
            x.mul_(x.detach() + 2)
            parts = [
                part * torch.arange(1.0, part.numel() + 1).view(part.shape) for part in (row, x)
            ]
            return torch.stack([part.sum() for part in parts]).sum()

        leaf = whole().requires_grad_()
        plain = (whole() * ctx.world_size).requires_grad_()
        (grad,) = torch.autograd.grad(written(owned_sum(ctx, leaf)), leaf)
        (expected,) = torch.autograd.grad(written(plain * 1), plain)
        same(grad, expected)

    by_name(reshapes(), check)


@on_ranks(2)
def test_a_metadata_write_that_autograd_would_get_wrong_is_refused(ctx: RankContext) -> None:
    """It makes views of a wrapper subclass again by replaying their ops on its present shape."""
    pending = {
        "in a graph": owned_sum(ctx, whole().requires_grad_()),
        "that may come into one": started_here(ctx),
    }
    views = {"a view": lambda x: x[:], "one of which views were taken": lambda x: (x.t(), x)[1]}

    def check(name: str, write: Callable[[torch.Tensor], Any]) -> None:
        for x in pending.values():
            for found, take in views.items():
                with pytest.raises(RuntimeError, match=rf"without views .* got {found} \("):
                    write(take(x))

    by_name(reshapes(), check)
    with torch.no_grad():
        same(pending["that may come into one"].t_(), whole().t())


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@on_ranks(2)
def test_an_out_argument_of_another_shape(ctx: RankContext) -> None:
    pending = started_here(ctx)
    plain = whole()
    for out in (pending, plain):
        torch.add(torch.ones(7), 1, out=out)
    assert pending.shape == plain.shape
    same(pending, plain)


@on_ranks(2)
def test_data_can_be_replaced(ctx: RankContext) -> None:
    pending, source = started(ctx, 2)
    view = pending[1:]
    pending.data = torch.arange(4.0)
    same(pending + 0, torch.arange(4.0))
    same(pending[1:], torch.arange(4.0)[1:])
    same(view, whole()[1:])
    pending.data = source
    same(pending + 0, whole())
    plain = torch.zeros(3, 5)
    plain.data = source.wait()
    same(plain, whole())


# --- views


def view_ops() -> dict[str, Callable[[torch.Tensor], Any]]:
    return {
        "view": lambda x: x.view(5, 3),
        "view with -1": lambda x: x.view(-1),
        "view dtype": lambda x: x.view(torch.int32),
        "view dtype smaller": lambda x: x.view(torch.uint8),
        "view_as": lambda x: x.view_as(torch.empty(15)),
        "reshape": lambda x: x.reshape(1, 15),
        "flatten": lambda x: x.flatten(),
        "unflatten": lambda x: x.view(-1).unflatten(0, (5, 3)),
        "transpose": lambda x: x.transpose(0, 1),
        "t": lambda x: x.t(),
        "mT": lambda x: x.mT,
        "permute": lambda x: x.view(1, 3, 5).permute(2, 0, 1),
        "movedim": lambda x: x.movedim(0, 1),
        "narrow": lambda x: x.narrow(1, 2, 2),
        "slice": lambda x: x[1:],
        "slice of slice": lambda x: x[1:][1:],
        "slice of slice of columns": lambda x: x[1:, 1:][:, 1:].t()[1:],
        "slice with step": lambda x: x[:, 1::2],
        "select": lambda x: x[1],
        "select of slice": lambda x: x[1:][1],
        "scalar": lambda x: x[2, 3],
        "split": lambda x: x.split(2, dim=1),
        "split sizes": lambda x: x.split([1, 0, 2]),
        "tensor_split": lambda x: x.tensor_split((1, 2), dim=1),
        "chunk": lambda x: x.chunk(2),
        "chunk of slice": lambda x: x[1:].chunk(2, dim=1),
        "unbind": lambda x: x.unbind(1),
        "unbind of slice": lambda x: x[:, 1:].unbind(1),
        "unsqueeze": lambda x: x.unsqueeze(-1),
        "squeeze": lambda x: x.view(3, 1, 5).squeeze(),
        "squeeze dim": lambda x: x.view(3, 1, 5).squeeze(1),
        "expand": lambda x: x.unsqueeze(0).expand(4, 3, 5),
        "expand_as": lambda x: x[0].expand_as(x),
        "broadcast_to": lambda x: x[:1].broadcast_to(3, 5),
        "alias": aten.alias,
        "detach": lambda x: x.detach(),
        "data": lambda x: x.data,
        "as_strided": lambda x: x.as_strided((2, 3), (5, 1), 1),
        "as_strided of slice": lambda x: x[1:].as_strided((2, 2), (5, 1)),
        "as_strided outside slice": lambda x: x[1:].as_strided((2, 2), (5, 1), 1),
        "diagonal": lambda x: x.diagonal(1),
        "unfold": lambda x: x.unfold(1, 3, 1),
        "view_as_complex": lambda x: torch.view_as_complex(x.view(-1)[:12].view(2, 3, 2)),
        "real": lambda x: x.real,
        "contiguous": lambda x: x.contiguous(),
        "to itself": lambda x: x.to(torch.float32),
        "cpu": lambda x: x.cpu(),
        "expand_dims": lambda x: x[None, ..., None],
        "hsplit": lambda x: x.hsplit((2,)),
        "requires_grad_": lambda x: x.detach().requires_grad_(),
        "split_with_sizes": lambda x: x.split_with_sizes([2, 3], 1),
    }


@on_ranks(2)
def test_a_view_stays_pending_and_shares_the_wait(ctx: RankContext) -> None:
    cases = view_ops()
    with record_overlap() as log:
        views: dict[str, tuple[PendingLocal, Any]] = {}

        def check(name: str, view: Callable[[torch.Tensor], Any]) -> None:
            x, got = views[name]
            for part, expected in zip(*map(as_list, (got, view(whole()))), strict=True):
                assert isinstance(part, PendingLocal)
                assert part.state is PendingState.IN_FLIGHT
                assert part.pending is x.pending
                assert (part.dtype, part.shape, part.stride(), part.storage_offset()) == (
                    expected.dtype,
                    expected.shape,
                    expected.stride(),
                    expected.storage_offset(),
                )
                assert part.requires_grad == expected.requires_grad

        def start() -> None:
            for name, view in cases.items():
                x = started_here(ctx)
                views[name] = x, view(x)

        ahead(ctx, start, lambda _: by_name(cases, check))

        def read(name: str, view: Callable[[torch.Tensor], Any]) -> None:
            x, got = views[name]
            for part, expected in zip(*map(as_list, (got, view(whole()))), strict=True):
                same(part.detach(), expected.detach())
                assert x.state is PendingState.READY
                assert part.wait().untyped_storage().data_ptr() == x.untyped_storage().data_ptr()

        by_name(cases, read)
    assert len(log.events) == len(cases)


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def complex_views() -> dict[str, Callable[[torch.Tensor], Any]]:
    return {
        "view_as_real": torch.view_as_real,
        "real": lambda x: x.real,
        "imag": lambda x: x.imag,
        "conj": lambda x: x.conj().resolve_conj(),
        "mH": lambda x: x.mH.resolve_conj(),
        "imag of conj": lambda x: x.conj().imag,
        "view_as_real of conj": lambda x: torch.view_as_real(x.conj().resolve_conj()),
        "is conj": lambda x: torch.tensor(x.conj().is_conj()),
        "is neg": lambda x: torch.tensor(x.conj().imag.is_neg()),
    }


@on_ranks(2)
def test_views_of_complex_values(ctx: RankContext) -> None:
    value = torch.complex(whole(), whole().flip(0))
    cases = complex_views()
    pending = dict(zip(cases, started(ctx, len(cases), value), strict=True))
    by_name(cases, lambda name, view: same(view(pending[name]), view(value)))


@on_ranks(2)
def test_a_write_to_a_pending_view_reaches_its_gradient(ctx: RankContext) -> None:
    """Autograd rebuilds the written view by shape, stride and offset, so these must be right."""

    def written(x: torch.Tensor) -> torch.Tensor:
        x[1:, 1:][1].mul_(3)
        x.t()[2:][:, 0].zero_()
        x.unbind(1)  # has no gradient of its own
        return (x * torch.arange(15.0).view(3, 5)).sum()

    leaf = whole().requires_grad_()
    pending = ahead(ctx, lambda: owned_sum(ctx, leaf), lambda sent: all_in_flight([sent]))
    (grad,) = torch.autograd.grad(written(pending), leaf)
    plain = whole().requires_grad_()
    (expected,) = torch.autograd.grad(written(plain * 1), plain)
    same(grad, expected)


def owned_sum(ctx: RankContext, summand: torch.Tensor) -> torch.Tensor:
    """As `reduced`, but with a result that may be written to, as a style's output may."""
    summed = HyperDTensor.from_local(summand, ctx.mesh(), [Partial()])
    return take_local(summed.redistribute(placements=[Replicate()], async_op=True))


# --- what neither waits nor launches


def metadata_only() -> dict[str, Callable[[torch.Tensor], Any]]:
    return {
        "repr": repr,
        "str": str,
        "format": "{}".format,
        "f-string": lambda x: f"{x} {x!r}",
        "repr in a DTensor": lambda x: repr(HyperDTensor.from_local(x, mesh_of(x), [Replicate()])),
        "shape": lambda x: x.shape,
        "size": lambda x: x.size(1),
        "stride": lambda x: x.stride(),
        "numel": lambda x: x.numel(),
        "dim": lambda x: x.dim(),
        "dtype": lambda x: x.dtype,
        "device": lambda x: x.device,
        "itemsize": lambda x: (x.itemsize, x.element_size(), x.nbytes),
        "is_contiguous": lambda x: x.is_contiguous(),
        "is_floating_point": lambda x: x.is_floating_point(),
        "layout": lambda x: x.layout,
        "len": len,
        "hash": lambda x: isinstance(hash(x), int),
        "is_same_size": lambda x: x.is_same_size(torch.empty(3, 5)),
        "requires_grad": lambda x: (x.requires_grad, x.is_leaf, x.grad_fn),
        "zeros_like": torch.zeros_like,
        "zeros_like dtype": lambda x: torch.zeros_like(x, dtype=torch.int64),
        "ones_like": torch.ones_like,
        "full_like": lambda x: torch.full_like(x, 3),
        "empty_like": lambda x: torch.empty_like(x).shape,
        "empty_like meta": lambda x: torch.empty_like(x, device="meta"),
        "empty_like of a view": lambda x: torch.empty_like(x.t()).stride(),
        "rand_like": lambda x: torch.rand_like(x).shape,
        "randint_like": lambda x: torch.randint_like(x, 3).shape,
        "new_zeros": lambda x: x.new_zeros(2, 2),
        "new_empty": lambda x: x.new_empty((2, 2)).shape,
        "new_full": lambda x: x.new_full((2,), 7),
        "new_ones": lambda x: x.new_ones(2, dtype=torch.int32),
        "new_empty_strided": lambda x: x.new_empty_strided((2, 2), (1, 2)).stride(),
        "new_tensor": lambda x: x.new_tensor([1.0]),
        "isinstance": lambda x: isinstance(x, torch.Tensor),
        "result_type": lambda x: torch.result_type(x, 1.0),
    }


def mesh_of(x: torch.Tensor) -> Any:
    from torch.distributed import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


@on_ranks(2)
def test_metadata_neither_waits_nor_launches(ctx: RankContext) -> None:
    mesh_of(whole())  # a first mesh may communicate

    def check(name: str, look: Callable[[torch.Tensor], Any]) -> None:
        for x in in_flight, in_flight[:, :], deferred, deferred[:, :]:
            state = x.state
            value = look(x)
            assert x.state is state
            if isinstance(value, str):
                assert "PendingLocal" in value
                assert state.value in value
                assert "all_gather" in value
                assert "shape=(3, 5)" in value
            else:
                same(value, look(whole()))
                assert not isinstance(value, PendingLocal)

    recipe = Gather(ctx)
    deferred = PendingLocal.deferred(recipe, (3, 5), torch.float32, torch.device("cpu"))
    in_flight = PendingLocal.ready(whole())

    def start() -> None:
        nonlocal in_flight
        in_flight = started_here(ctx)

    ahead(ctx, start, lambda _: by_name(metadata_only(), check))
    assert recipe.started == 0
    same(in_flight, whole())


@on_ranks(2)
def test_it_is_an_async_collective_tensor(ctx: RankContext) -> None:
    pending = started_here(ctx)
    assert isinstance(pending, AsyncCollectiveTensor)
    assert not pending.completed
    same(pending.trigger_wait(), whole())
    assert pending.completed
    assert pending.state is PendingState.READY
    same(pending.elem, whole())
    same(pending._get_acs_underlying_tensor(), whole())


# --- deferred


class Gather:
    """A deferred all_gather of `whole`."""

    kind = "all_gather"
    is_local = False

    def __init__(self, ctx: RankContext) -> None:
        self.ctx = ctx
        self.started = 0

    def compute(self) -> torch.Tensor:
        raise AssertionError("a collective recipe has no local computation")

    def start(self) -> PendingLocal:
        self.started += 1
        return gathering(self.ctx, whole())


class Compute:
    """A deferred local computation of `whole`."""

    kind = "matmul"
    is_local = True

    def __init__(self) -> None:
        self.computed = 0

    def compute(self) -> torch.Tensor:
        self.computed += 1
        return whole()

    def start(self) -> PendingLocal:
        raise AssertionError("a local recipe has no collective")


def deferred(recipe: Any) -> PendingLocal:
    return PendingLocal.deferred(
        recipe, (3, 5), torch.float32, torch.device("cpu"), group="the group"
    )


@on_ranks(2)
def test_reading_a_deferred_collective_is_refused(ctx: RankContext) -> None:
    """One rank that reads it would launch it alone and hang: nothing may be launched."""
    recipe = Gather(ctx)
    pending = deferred(recipe)
    view = pending.t()[1:]
    assert view.state is PendingState.DEFERRED
    reads: dict[str, Callable[[torch.Tensor], Any]] = {
        "aten.add": lambda x: x + 1,
        "aten.mm": lambda x: x @ x.t(),
        "aten.add_": lambda x: x.add_(1),
        "aten.copy_": lambda x: torch.zeros(3, 5).copy_(x),
        "a read": lambda x: x.tolist(),
        "a read ": lambda x: x.numpy(),
        "aten._local_scalar_dense": lambda x: x[0, 0].item(),
        "aten._local_scalar_dense.default": lambda x: bool(x[0, 0]),
        "aten._to_copy": lambda x: x.double(),
        "a read  ": lambda x: x.data_ptr(),
        "a read   ": copy.deepcopy,
        "a read    ": pickle.dumps,
        "wait": lambda x: x.wait(),
        "iteration": lambda x: [row.tolist() for row in x],
    }
    if ctx.rank == 0:  # alone, as a debugger would

        def check(name: str, read: Callable[[torch.Tensor], Any]) -> None:
            for tensor in pending, view:
                with pytest.raises(DeferredReadError) as raised:
                    read(tensor if tensor.shape == (3, 5) else tensor.t())
                message = str(raised.value)
                assert "deferred all_gather" in message  # the producer
                if name.startswith("aten"):
                    assert name in message  # the consumer
                assert "the group" in message
                assert ".start()" in message  # the way out
                assert isinstance(raised.value, RuntimeError)

        with record_overlap() as log:
            by_name(reads, check)
            with pytest.raises(DeferredReadError):
                repr(pending), f"{pending}", pending + 1
        assert log.events == []
        assert recipe.started == 0
    assert (pending.state, view.state) == (PendingState.DEFERRED, PendingState.DEFERRED)

    view.start()
    assert (pending.state, view.state) == (PendingState.IN_FLIGHT, PendingState.IN_FLIGHT)
    pending.start()  # a second time does nothing
    same(view, whole().t()[1:])
    same(pending, whole())
    pending.start()
    assert recipe.started == 1


@on_ranks(2)
def test_a_deferred_collective_dropped_unread_owes_nothing(ctx: RankContext) -> None:
    recipe = Gather(ctx)
    pending = deferred(recipe)
    view = pending[1:]
    del pending, view
    assert recipe.started == 0
    assert work_registry_size() == 0


@on_ranks(2)
def test_a_deferred_computation_may_be_read_by_one_rank(ctx: RankContext) -> None:
    recipe = Compute()
    pending = deferred(recipe)
    view = pending.t()
    assert "deferred" in repr(view)
    if ctx.rank == 0:
        same(view.contiguous(), whole().t().contiguous())
        same(pending + 0, whole())
        assert recipe.computed == 1
    else:
        assert recipe.computed == 0
    pending.start()
    assert pending.state is PendingState.READY
    assert recipe.computed == 1


@on_ranks(2)
def test_a_deferred_value_completed_from_outside(ctx: RankContext) -> None:
    recipe = Gather(ctx)
    pending = deferred(recipe)
    view = pending[1:]
    assert pending.recipe is recipe
    pending.complete(whole() * 2)
    same(view, whole()[1:] * 2)
    same(pending, whole() * 2)


@on_ranks(2)
def test_a_computation_that_fails_fails_at_each_read(ctx: RankContext) -> None:
    class Broken(Compute):
        def compute(self) -> torch.Tensor:
            raise ZeroDivisionError("broken recipe")

    pending = deferred(Broken())
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="broken recipe"):
            pending + 1


# --- copies


@on_ranks(2)
def test_a_copy_is_finished_and_independent(ctx: RankContext) -> None:
    one, other = started(ctx, 2)
    deep = copy.deepcopy(one)
    assert type(deep) is torch.Tensor
    deep.add_(1)
    same(one, whole())
    twice = copy.deepcopy([other, other, {"view": other[1:]}])
    assert twice[0] is twice[1]
    same(twice[2]["view"], whole()[1:])
    restored = pickle.loads(pickle.dumps(other))
    assert type(restored) is torch.Tensor
    restored.add_(1)
    same(other, whole())


@on_ranks(2)
def test_saved_inside_containers_and_dtensors(ctx: RankContext) -> None:
    """The row of the bug table: full((3,), r + 1) summed over ranks, saved while in flight."""

    def start() -> dict[str, Any]:
        def pending() -> torch.Tensor:
            return reduced(ctx, torch.full((3,), ctx.rank + 1.0))

        return {
            "local": pending(),
            "view": pending()[1:],
            "hyper": HyperDTensor.from_local(pending(), ctx.mesh(), [Replicate()]),
            "plain": DTensor.from_local(pending(), ctx.mesh(), [Replicate()], run_check=False),
            "nested": [(pending(),), {"deep": pending()}],
            "grad": reduced(ctx, torch.full((3,), ctx.rank + 1.0).requires_grad_()).detach(),
        }

    total = torch.full((3,), float(sum(range(1, ctx.world_size + 1))))
    for copied in (
        saved_and_loaded,
        lambda value: pickle.loads(pickle.dumps(value)),
        copy.deepcopy,
    ):
        loaded = copied(ahead(ctx, start))
        assert type(loaded["local"]) is torch.Tensor
        same(loaded["local"], total)
        same(loaded["view"], total[1:])
        same(loaded["nested"][0][0], total)
        same(loaded["nested"][1]["deep"], total)
        same(loaded["grad"], total)
        for name in "hyper", "plain":
            assert isinstance(loaded[name], DTensor)
            assert loaded[name].placements == (Replicate(),)
            same(loaded[name].to_local(), total)
        if copied is not copy.deepcopy:
            assert type(loaded["hyper"]) is DTensor
            assert type(loaded["hyper"]._local_tensor) is torch.Tensor


# --- grad modes


@on_ranks(2)
def test_inference_mode_and_no_grad(ctx: RankContext) -> None:
    for mode in torch.inference_mode, torch.no_grad:
        with mode():
            x, y = started(ctx, 2)
            same(y[1:].t(), whole()[1:].t())
            same(x + 1, whole() + 1)
            x.add_(1)
            same(x, whole() + 1)
            pending = reduced(ctx, torch.ones(2))
            assert pending.state is PendingState.IN_FLIGHT
            assert pending.tolist() == [2.0, 2.0]
        assert (x - 1).tolist() == whole().tolist()


@on_ranks(2)
def test_a_first_read_in_inference_mode_does_not_spoil_the_value(ctx: RankContext) -> None:
    leaf = torch.ones(3, 5, requires_grad=True)
    pending = started_here(ctx)
    view = pending[1:]
    with torch.inference_mode():
        assert pending.sum() == whole().sum()
        assert view.sum() == whole()[1:].sum()
    (leaf * pending).sum().backward()
    assert leaf.grad is not None
    same(leaf.grad, whole())
    pending.add_(1)
    view.wait().add_(1)
    same(pending[1:], whole()[1:] + 2)


@on_ranks(2)
def test_views_in_inference_mode_of_a_value_made_outside(ctx: RankContext) -> None:
    views = started_here(ctx), started_here(ctx), started_here(ctx)
    with torch.inference_mode():
        turned, parts, alias = views[0].t(), views[1].split(2), views[2].detach()
        assert isinstance(turned, PendingLocal)
        same(turned, whole().t())
        same(parts, whole().split(2))
        same(alias, whole())
        again = views[0].t()  # of a value that is there by now
        same(again, whole().t())
        again = parts[0].t()  # of a view that has been read
        same(again, whole().split(2)[0].t())
    assert not any(view.is_inference() for view in (turned, *parts, alias, again))


@on_ranks(2)
def test_a_copy_in_inference_mode_is_made_when_asked_for(ctx: RankContext) -> None:
    """There ops like ``to`` come whole, which say that they may give a view."""
    with torch.inference_mode():
        for copied in (
            lambda x: x.double(),
            lambda x: x.t().reshape(-1),
            lambda x: x.t().flatten(),
        ):
            pending = started_here(ctx)
            copy_ = copied(pending)
            pending.add_(1)
            same(copy_, copied(whole()))
        view = started_here(ctx).reshape(5, 3).flatten()
        assert isinstance(view, PendingLocal)
        assert view.state is PendingState.IN_FLIGHT
        same(view, whole().flatten())


@on_ranks(2)
def test_autograd_notices_a_foreach_write(ctx: RankContext) -> None:
    summand = HyperDTensor.from_local(torch.ones(3, requires_grad=True), ctx.mesh(), [Partial()])
    pending = take_local(summand.redistribute(placements=[Replicate()], async_op=True))
    squared = pending.square()
    with torch.no_grad():
        torch._foreach_mul_([pending], 3.0)
    same(pending.detach(), torch.full((3,), 3.0 * ctx.world_size))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()


# --- the end of a value


@on_ranks(2)
def test_dropped_unread_is_released_at_once(ctx: RankContext) -> None:
    """20 results of 8 MiB: torch keeps all of them, and their works, until the process ends."""
    elements = 2 * 2**20
    axis = mesh_axis(ctx.mesh(), 0)
    buffers = []
    before = resident_bytes()
    for _ in range(20):
        pending = all_reduce(torch.ones(elements), axis, "sum")
        view = pending.view(2, -1)
        buffers.append(weakref.ref(pending.pending._buffer))
        del pending
        assert buffers[-1]() is not None
        assert work_registry_size() == 1
        del view
        assert work_registry_size() == 0
        freed(buffers[-1])
    assert resident_bytes() - before < 10 * 4 * elements

    many = [all_reduce(torch.ones(elements), axis, "sum") for _ in range(20)]
    assert work_registry_size() == 20
    buffers = [weakref.ref(pending.pending._buffer) for pending in many]
    del many
    assert work_registry_size() == 0
    freed(*buffers)
    assert resident_bytes() - before < 10 * 4 * elements


def freed(*buffers: weakref.ref[torch.Tensor]) -> None:
    """Gloo's thread lets go of a buffer a moment after it says that the work is done."""
    deadline = time.monotonic() + 10
    while any(buffer() is not None for buffer in buffers):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def resident_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # the allocator keeps what was freed
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@on_ranks(2)
def test_the_buffer_is_freed_when_read(ctx: RankContext) -> None:
    pending = started_here(ctx)
    buffer = weakref.ref(pending.pending._buffer)
    assert pending.sum() == whole().sum()
    freed(buffer)


@on_ranks(2)
def test_a_kept_view_keeps_the_value(ctx: RankContext) -> None:
    (pending,) = started(ctx, 1)
    view = pending[1:].t()
    later = pending.after(lambda value: value * 2, pending.shape)[0]
    pending_life = weakref.ref(pending.pending)
    del pending
    same(view, whole()[1:].t())
    del view
    same(later, whole()[0] * 2)
    assert pending_life() is None
    assert later.state is PendingState.READY


@on_ranks(2)
def test_dropped_in_a_cycle(ctx: RankContext) -> None:
    cycle: dict[str, Any] = {"value": started_here(ctx)}
    cycle["itself"] = cycle
    del cycle
    gc.collect()
    assert work_registry_size() == 0


@on_ranks(2)
def test_a_training_step_with_an_unused_output_leaves_nothing(ctx: RankContext) -> None:
    leaf = torch.ones(4, requires_grad=True)
    used, unused = reduced(ctx, leaf), reduced(ctx, leaf)
    assert unused.state is PendingState.IN_FLIGHT
    used.sum().backward()
    del used, unused
    assert work_registry_size() == 0


@on_ranks(2)
def test_a_collective_that_fails_fails_at_each_read(ctx: RankContext) -> None:
    group = dist.new_group(timeout=timedelta(seconds=0.2))
    if ctx.rank == 0:  # the other never joins

        def launched() -> PendingLocal:
            buffer = torch.ops._c10d_functional.all_reduce(
                torch.ones(2, 3), "sum", group.group_name
            )
            return PendingLocal.in_flight(Launch("all_reduce", group.group_name, buffer), (2, 3))

        pending = launched()
        view = pending.t()
        later = pending.after(lambda value: value + 1, pending.shape)
        for read in (lambda: view + 1, pending.tolist, lambda: later + 1, pending.wait):
            for _ in range(2):
                with pytest.raises(RuntimeError, match=r"[Tt]imed out|timeout|Connection closed"):
                    read()
        assert "in flight" in repr(pending)
        assert work_registry_size() == 0
        unread = launched()  # nobody is told
        del unread
        assert work_registry_size() == 0
    dist.barrier()
    dist.destroy_process_group(group)


@on_ranks(2)
def test_the_input_must_stay_as_it_was_while_in_flight(ctx: RankContext) -> None:
    axis = mesh_axis(ctx.mesh(), 0)

    def launched(write: Callable[[torch.Tensor], Any]) -> PendingLocal:
        source = torch.ones(2, 3)
        pending = all_gather(source, 0, axis, [2] * ctx.world_size)
        write(source)
        return pending

    for write in (
        lambda source: source.add_(1),
        lambda source: source[0].zero_(),
        lambda source: source.view(-1).detach().mul_(2),
    ):
        pending = launched(write)
        for _ in range(2):
            with pytest.raises(InFlightInputModifiedError, match=r"input of all_gather.*in-place"):
                pending + 1
    same(launched(lambda source: source + 1), torch.ones(2 * ctx.world_size, 3))

    # What is copied before it is sent may be written to.
    source = torch.ones(2, 3)
    copied_t = all_gather(source.t(), 0, axis, [3] * ctx.world_size)
    summed = all_reduce(source, axis, "sum")
    source.zero_()
    same(copied_t, torch.ones(3 * ctx.world_size, 2))
    same(summed, torch.full((2, 3), float(ctx.world_size)))
    # After the read it may be written to as well.
    source = torch.ones(2, 3)
    gathered = all_gather(source, 0, axis, [2] * ctx.world_size)
    same(gathered, torch.ones(2 * ctx.world_size, 3))
    source.zero_()
    same(gathered, torch.ones(2 * ctx.world_size, 3))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@on_ranks(2)
def test_a_forked_child_cannot_wait(ctx: RankContext) -> None:
    pending, finished = started(ctx, 2)
    same(finished, whole())
    later = pending.after(lambda value: value * 2, pending.shape)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for read in (lambda: pending + 1, pending[1:].tolist, lambda: later + 1):
                with pytest.raises(ForkedPendingError, match="in a forked child"):
                    read()
            same(finished + 0, whole())
            assert "in flight" in repr(pending)
            del pending, later
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    same(pending, whole())
    same(later, whole() * 2)


@on_ranks(2)
def test_read_from_several_threads(ctx: RankContext) -> None:
    (pending,) = started(ctx, 1)
    views = [pending[i % 3] for i in range(6)]
    with ThreadPoolExecutor(6) as threads:
        rows = list(threads.map(lambda view: view.tolist(), views))
    assert rows == [whole()[i % 3].tolist() for i in range(6)]


# --- the end of the process


EXITS = """
    import os, sys
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.distributed import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate

    from pending_dtensor import HyperDTensor
    from pending_dtensor.torch_compat import work_registry_size

    def values(count):
        mesh = init_device_mesh("cpu", (2,))
        summed = HyperDTensor.from_local(torch.ones(1000), mesh, [Partial()])
        return [summed.redistribute(placements=[Replicate()], async_op=True) for _ in range(count)]

    def torch_does_it():
        global kept
        kept = torch.ops._c10d_functional.all_reduce(
            torch.ones(3), "sum", dist.group.WORLD.group_name
        )

    def normal_exit():
        global kept
        kept = values(3)

    def kept_in_a_cycle():
        here = values(3)
        here.append(here)
        sys.exit(3)

    def exception():
        global kept
        kept = values(3)
        raise ValueError("of the user")

    def destroyed_then_exit():
        global kept
        kept = values(3)
        dist.destroy_process_group()

    def destroyed_then_read():
        global kept
        kept = values(2)
        dist.destroy_process_group()
        dropped = kept.pop()
        del dropped
        print(work_registry_size(), kept[0].to_local().sum().item(), work_registry_size())

    def run(scenario):
        store = dist.FileStore(f"{os.environ['SCRIPT_STORE']}_{scenario.__name__}", 2)
        dist.init_process_group(
            "gloo", store=store, rank=int(os.environ["RANK"]), world_size=2,
            timeout=timedelta(seconds=30),
        )
        scenario()

    children = {}
    for scenario in (
        torch_does_it, normal_exit, kept_in_a_cycle, exception, destroyed_then_exit,
        destroyed_then_read,
    ):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            # Before any thread was started, and it ends as any process does: by the end of main.
            os.dup2(write_end, 1)
            os.dup2(write_end, 2)
            os.close(write_end)
            children = {}
            run(scenario)
            break
        os.close(write_end)
        children[child] = scenario.__name__, os.fdopen(read_end)
    for child, (name, output) in children.items():
        text = output.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(f"{name}: {code}: {text!r}")
"""


def test_the_end_of_a_process_that_read_nothing() -> None:
    ends = run_script_on_ranks(EXITS, 2)
    for end in ends:
        assert end.exit_code == 0, end.stderr
        assert end.stderr == ""
        lines = dict(line.split(": ", 1) for line in end.stdout.splitlines())
        assert len(lines) == 6
        torchs = lines.pop("torch_does_it")
        assert "unwaited collective calls" in torchs  # the control
        assert all("unwaited" not in line for line in lines.values())
        assert lines.pop("normal_exit") == "0: ''"
        assert lines.pop("kept_in_a_cycle") == "3: ''"
        exception = lines.pop("exception")
        assert exception.startswith("1: ")
        assert "ValueError: of the user" in exception
        assert exception.count("Traceback") == 1
        assert lines.pop("destroyed_then_exit") == "0: ''"
        assert lines.pop("destroyed_then_read") == "0: '1 2000.0 0\\n'"
