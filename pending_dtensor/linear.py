"""``F.linear`` on HyperDTensors, on the local tensors, with its own order of backward.

[Note: the order of backward]
Torch's linear computes grad_input and grad_weight in one node, so the reduction of grad_input is
launched after both matmuls and hides behind neither. Here grad_weight is left as a deferred matmul
and run by a node of its own (`_FinishGradients`) on the edge to the weight. The engine runs the
ready node with the highest sequence number first. The redistribution that made the input reserved
the number below its own, and the weight's node takes it:

    linear: grad_input  >  redistribute: launch  >  grad_weight  >  whoever reads grad_input

Linears that share a gathered input (q, k, v) all run before the launch, since it needs the sum of
their grad_inputs, and all grad_weights after it. AccumulateGrad runs when its gradient is there, so
hooks on it fire as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from pending_dtensor.events import computing
from pending_dtensor.fused_rules import find_rule
from pending_dtensor.hyper_dtensor import (
    HyperDTensor,
    _Redistribute,
    _wrap,
    dispatcher,
)
from pending_dtensor.pending import PendingState, Readable
from pending_dtensor.pending_local import PendingLocal, materialized
from pending_dtensor.redistribute import redistribute_local, with_placements
from pending_dtensor.torch_compat import DTensorSpec, TensorMeta, is_tracing, plain_dtensor

_MAX_VIEWS_BEFORE_LINEAR = 4


class LinearPlan(NamedTuple):
    """How one linear runs on local tensors without communication.

    Attributes:
        out: spec of the output.
        grad_out: spec in which the output's gradient is needed.
        grad_input, grad_weight, grad_bias: specs of what backward makes.
        bias_share: ranks among whose partial outputs the bias is shared out (torch divides it).
    """

    out: DTensorSpec
    grad_out: DTensorSpec
    grad_input: DTensorSpec
    grad_weight: DTensorSpec
    grad_bias: DTensorSpec
    bias_share: int


def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """As `torch.nn.functional.linear`: out = input @ weight.T + bias.

    Shapes: input (*, K), weight (N, K), bias (N,), out (*, N). Along each mesh axis:

        input        weight      out          grad_input   grad_weight
        Replicate    Shard(0)    Shard(-1)    Partial      Shard(0)       column
        Shard(-1)    Shard(1)    Partial      Shard(-1)    Shard(1)       row
        Shard(d)     Replicate   Shard(d)     Shard(d)     Partial        batch or sequence
        Replicate    Replicate   Replicate    Replicate    Replicate

    No communication. An input whose gather was deferred goes to the fused rule
    (its kind, ``linear``). Anything else is left to torch's own sharding rules.

    Saves the input and the weight for backward.
    """
    if not isinstance(input, HyperDTensor) or not isinstance(weight, DTensor) or is_tracing():
        return NotImplemented
    if bias is not None and not isinstance(bias, DTensor):
        return NotImplemented
    device_type = input.device.type
    if torch.is_autocast_enabled(device_type):
        # Autocast casts below __torch_function__, so it would miss an op that is seen whole.
        dtype = torch.get_autocast_dtype(device_type)
        with torch.autocast(device_type, enabled=False):
            return F.linear(*(_autocast(t, dtype) for t in (input, weight, bias)))
    local = input._local_tensor
    if isinstance(local, PendingLocal) and local.state is PendingState.DEFERRED:
        rule = find_rule(local.kind, "linear")
        if rule is not None:
            return rule(input, weight, bias)
    plan = plan_linear(input._spec, weight._spec, None if bias is None else bias._spec)
    if plan is None:
        return NotImplemented
    weight_, bias_ = finished_late(input, weight, bias)
    return _Linear.apply(input, weight_, bias_, weight, plan)


def _autocast(tensor: Any, dtype: torch.dtype) -> Any:
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


@functools.lru_cache(maxsize=4096)
def plan_linear(
    input: DTensorSpec, weight: DTensorSpec, bias: DTensorSpec | None
) -> LinearPlan | None:
    """The plan for three specs, or None if local matmuls alone would not do."""
    features = len(input.shape) - 1
    if features < 1 or len(weight.shape) != 2 or input.mesh != weight.mesh:
        return None
    if input.shape[-1] != weight.shape[1] or (bias is not None and bias.mesh != weight.mesh):
        return None
    columns: list[tuple[Placement, ...]] = []
    share = 1
    for axis in range(input.mesh.ndim):
        x, w = input.placements[axis], weight.placements[axis]
        b = bias.placements[axis] if bias is not None else None
        row = _plan_for_axis(x, w, features)
        if row is None or (b is not None and b != row[-1]):
            return None
        if row[0] == Partial():
            share *= input.mesh.size(axis)
        columns.append(row)
    out, grad_out, grad_input, grad_weight, grad_bias, _ = zip(*columns, strict=True)
    shape = torch.Size((*input.shape[:-1], weight.shape[0]))
    stride = torch._prims_common.make_contiguous_strides_for(shape)
    assert input.tensor_meta is not None
    assert weight.tensor_meta is not None
    meta = TensorMeta(shape, tuple(stride), input.tensor_meta.dtype)
    bias_meta = TensorMeta(weight.shape[:1], (1,), weight.tensor_meta.dtype)
    return LinearPlan(
        with_placements(input, out, meta),
        with_placements(input, grad_out, meta),
        with_placements(input, grad_input),
        with_placements(weight, grad_weight),
        with_placements(weight, grad_bias, bias_meta),
        share,
    )


def _plan_for_axis(x: Placement, w: Placement, features: int) -> tuple[Placement, ...] | None:
    """(out, grad_out, grad_input, grad_weight, grad_bias, bias) along one mesh axis."""
    replicate, column = Replicate(), Shard(features)
    if x == replicate and w == Shard(0):
        return column, column, Partial(), Shard(0), Shard(0), Shard(0)
    if x == column and w == Shard(1):
        return Partial(), replicate, column, Shard(1), replicate, replicate
    if type(x) is Shard and x.dim < features and w == replicate:
        return x, x, x, Partial(), Partial(), replicate
    if x == replicate and w == replicate:
        return (replicate,) * 6
    return None


class _DeferredGradient:
    """Recipe of a weight or bias gradient: local, so any read may run it."""

    kind = "gradient"
    is_local = True

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        self._compute = compute

    def compute(self) -> torch.Tensor:
        return self._compute()

    def start(self) -> Readable:
        raise NotImplementedError("a gradient is computed, not launched")


class _FinishGradients(torch.autograd.Function):
    """Identity on parameters; backward runs their deferred gradients. Only its time matters."""

    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> tuple[DTensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(plain_dtensor(p._local_tensor, p._spec) for p in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: DTensor | None) -> tuple[Any, ...]:
        return tuple(_finished(grad) for grad in grads)


def _finished(grad: DTensor | None) -> DTensor | None:
    if grad is None or not isinstance(grad._local_tensor, PendingLocal):
        return grad
    return plain_dtensor(grad._local_tensor.materialize(), grad._spec)


def finished_late(
    input: HyperDTensor, weight: DTensor, bias: DTensor | None
) -> tuple[DTensor, DTensor | None]:
    """The parameters behind a node that runs after the launch of grad_input's reduction."""
    if not torch.is_grad_enabled() or not input.requires_grad:
        return weight, bias
    number = _number_after_launch(input.grad_fn)
    if number is None or not weight.requires_grad:
        return weight, bias
    bias_late = bias is not None and bias.requires_grad
    late = _FinishGradients.apply(weight, *((bias,) if bias_late else ()))
    late[0].grad_fn._set_sequence_nr(number)
    return late[0], late[-1] if bias_late else bias


def _number_after_launch(node: Any) -> int | None:
    """The reserved place after the async redistribution that made a linear's input, if one did."""
    for _ in range(_MAX_VIEWS_BEFORE_LINEAR):
        if node is None:
            return None
        if isinstance(node, _Redistribute._backward_cls):
            return node._sequence_nr() - 1 if node.async_op else None
        if len(node.next_functions) != 1:
            return None
        node = node.next_functions[0][0]
    return None


class _Linear(torch.autograd.Function):
    """(input, weight, bias, weight to save, plan) -> out.

    out         = input @ weight.T + bias
    grad_input  = grad_out @ weight                   at once
    grad_weight = grad_out.T @ input                  deferred if its node runs later, else at once
    grad_bias   = sum of grad_out over the rows       likewise
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: HyperDTensor,
        weight: DTensor,
        bias: DTensor | None,
        saved_weight: DTensor,
        plan: LinearPlan,
    ) -> HyperDTensor:
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        ctx.late = weight is not saved_weight
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        # The parameter itself is saved, so that a change to it before backward is noticed.
        ctx.save_for_backward(
            input if needs_weight else None, saved_weight if needs_input else None
        )
        bias_local = None
        if bias is not None:
            bias_local = materialized(bias._local_tensor)
            if plan.bias_share > 1:
                bias_local = bias_local / plan.bias_share
        with computing("linear"):
            out = F.linear(
                materialized(input._local_tensor, "linear"),
                materialized(weight._local_tensor),
                bias_local,
            )
        return _wrap(out, plan.out)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 5
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return _differentiable_gradients(grad, input, weight, ctx.needs_input_grad)
        plan: LinearPlan = ctx.plan
        grad_local = local_gradient(grad, plan)
        grad_input = grad_weight = grad_bias = None
        if needs_input:
            with computing("grad_input"):
                local = grad_local.matmul(materialized(weight._local_tensor))
            grad_input = _wrap(local, plan.grad_input)

        rows = functools.partial(grad_local.flatten, 0, -2)  # -1 would be ambiguous for no features
        if needs_weight:

            def weight_gradient() -> torch.Tensor:
                with computing("grad_weight"):
                    x = materialized(input._local_tensor)
                    return rows().t().mm(x.flatten(0, -2))

            shape = (grad_local.shape[-1], input._local_tensor.shape[-1])
            grad_weight = late_gradient(weight_gradient, plan.grad_weight, shape, ctx.late)
        if needs_bias:
            features = (grad_local.shape[-1],)
            grad_bias = late_gradient(lambda: rows().sum(0), plan.grad_bias, features, ctx.late)
        return grad_input, grad_weight, grad_bias, None, None


def local_gradient(grad: DTensor, plan: LinearPlan) -> torch.Tensor:
    """The local tensor of an output's gradient, finished, in the placements the plan needs."""
    return redistribute_local(grad._local_tensor, grad._spec, plan.grad_out, async_op=False)


def late_gradient(
    compute: Callable[[], torch.Tensor], spec: DTensorSpec, shape: tuple[int, ...], late: bool
) -> DTensor:
    """A parameter's gradient, computed now, or ``late`` by its `_FinishGradients` node."""
    if not late:
        return plain_dtensor(compute(), spec)
    device = torch.device(spec.mesh.device_type)
    assert spec.tensor_meta is not None
    pending = PendingLocal.deferred(
        _DeferredGradient(compute), shape, spec.tensor_meta.dtype, device
    )
    return plain_dtensor(pending, spec)


def _differentiable_gradients(
    grad: DTensor, input: HyperDTensor, weight: DTensor, needed: tuple[bool, ...]
) -> tuple[Any, ...]:
    """The same gradients in differentiable ops, for create_graph=True."""
    rows = grad.reshape(-1, grad.shape[-1])
    grad_input = grad.matmul(weight) if needed[0] else None
    grad_weight = rows.t().mm(input.reshape(-1, input.shape[-1])) if needed[1] else None
    grad_bias = rows.sum(0) if needed[2] else None
    return grad_input, grad_weight, grad_bias, None, None


dispatcher.register_function(F.linear, linear)
