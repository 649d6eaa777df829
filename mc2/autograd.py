"""The autograd functions of the two fused layers.

Each rank holds: column, weight W (N / R, K) and bias (N / R,); row, weight W (N, K / R) and the
whole bias (N,). X is the input, Y the output, d the gradient; seq(.) a sequence shard; rows M.

    column   Y = gather(seq(X)) @ W.T + b                          all_gather_matmul
             d seq(X) = scatter(sum over ranks of dY @ W)          matmul_reduce_scatter
             dW = dY.T @ X,  db = sum of dY over the rows          local, X as gathered in forward
    row      seq(Y) = scatter(sum over ranks of X @ W.T) + b       matmul_reduce_scatter
             dX = gather(seq(dY)) @ W,  dW = dY.T @ X              all_gather_matmul
             db = sum of dY over the rows                          local, dY as gathered for dX

The gathers and reductions are not made here: they come and go as deferred values, and the
redistributions before a column and after a row carry them, forward and backward.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mc2.deferred_matmul import DeferredMatmul, Term, defer_matmul
from mc2.fused_calls import gather_matmul
from mc2.options import FusionOptions
from mc2.shared_gather import forget_shared_gather
from pending_dtensor.collectives import DeferredAllGather, all_reduce
from pending_dtensor.events import computing
from pending_dtensor.hyper_dtensor import HyperDTensor
from pending_dtensor.linear import LinearPlan, late_gradient, local_gradient
from pending_dtensor.pending import PendingState
from pending_dtensor.pending_local import PendingLocal, materialized


class ColumnLinear(torch.autograd.Function):
    """(deferred gather of the input, weight, bias, weight to save, plan, options) -> output.

    Per rank and call it communicates (R - 1) / R of X forward and of dX backward. Saves the
    gathered input (with ``regather``, its shard) if the weight needs a gradient, and the weight if
    the input does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: HyperDTensor,
        weight: DTensor,
        bias: DTensor | None,
        saved_weight: DTensor,
        plan: LinearPlan,
        options: FusionOptions,
    ) -> HyperDTensor:
        """See the class."""
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.options = plan, options
        ctx.late = weight is not saved_weight
        gathered = input._local_tensor
        out, _ = gather_matmul(gathered, materialized(weight._local_tensor).t(), options)
        if bias is not None:
            out += materialized(bias._local_tensor)
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        ctx.regather = None
        # Local tensors are saved, not what wraps them: autograd then sees in-place writes to them,
        # and hooks on saved tensors get what takes the memory.
        saved_input = None
        if needs_weight:
            if options.regather:
                ctx.regather = _Regather.of(gathered)
                saved_input = gathered.recipe.source("a linear that regathers")
            else:
                saved_input = gathered.materialize()
        ctx.save_for_backward(saved_weight if needs_input else None, saved_input)
        return HyperDTensor(out, plan.out, requires_grad=False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Any, ...]:
        """See the class."""
        if grad is None:
            return (None,) * 6
        _refuse_double_backward()
        forget_shared_gather()
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        weight, saved_input = ctx.saved_tensors
        plan: LinearPlan = ctx.plan
        options: FusionOptions = ctx.options
        grad_out = local_gradient(grad, plan)
        regathered = None
        if ctx.regather is not None and needs_weight:
            regathered = ctx.regather.start(saved_input)  # in flight while grad_input is made
        grad_input = None
        if needs_input:
            term = Term(grad_out, materialized(weight._local_tensor))
            recipe = DeferredMatmul([term], tuple(grad_out.shape[:-1]), options.in_backward())
            local = defer_matmul(recipe)
            if options.column_backward == "overlap":
                with computing("grad_input"):
                    local = term.x.matmul(term.weight_t)
            grad_input = HyperDTensor(local, plan.grad_input, requires_grad=False)
        rows = grad_out.flatten(0, -2)
        grad_weight = grad_bias = None
        if needs_weight:

            def weight_gradient() -> torch.Tensor:
                with computing("grad_weight"):
                    x = saved_input if regathered is None else regathered.materialize()
                    return rows.t().mm(x.flatten(0, -2))

            shape = (grad_out.shape[-1], plan.grad_input.shape[-1])
            grad_weight = late_gradient(weight_gradient, plan.grad_weight, shape, ctx.late)
        if needs_bias:
            features = rows.shape[1:]
            grad_bias = late_gradient(lambda: rows.sum(0), plan.grad_bias, features, ctx.late)
        return grad_input, grad_weight, grad_bias, None, None, None


class RowLinear(torch.autograd.Function):
    """(input, weight, bias, plan, options, group) -> deferred output, Partial until it is reduced.

    Per rank and call it communicates (R - 1) / R of Y forward and of dY backward. Saves the input
    if the weight needs a gradient, and the weight if the input does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: HyperDTensor,
        weight: DTensor,
        bias: DTensor | None,
        plan: LinearPlan,
        options: FusionOptions,
        group: str,
    ) -> HyperDTensor:
        """See the class; ``group`` is the name of the process group that reduces the output."""
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.options, ctx.group = plan, options, group
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        x = materialized(input._local_tensor, "linear")
        ctx.save_for_backward(weight if needs_input else None, x if needs_weight else None)
        recipe = DeferredMatmul(
            [Term(x, materialized(weight._local_tensor).t())],
            tuple(x.shape[:-1]),
            options,
            None if bias is None else materialized(bias._local_tensor),
            plan.bias_share,
        )
        return HyperDTensor(defer_matmul(recipe), plan.out, requires_grad=False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Any, ...]:
        """See the class."""
        if grad is None:
            return (None,) * 6
        _refuse_double_backward()
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        weight, x = ctx.saved_tensors
        plan: LinearPlan = ctx.plan
        grad_out = _grad_out(grad, plan, ctx.group)
        is_gather = isinstance(grad_out, PendingLocal)
        grad_input = grad_weight = grad_bias = None
        product = None
        if needs_input:
            weight_ = materialized(weight._local_tensor)
            if is_gather:
                local, product = gather_matmul(grad_out, weight_, ctx.options.in_backward(), x)
            else:
                with computing("grad_input"):
                    local = grad_out.matmul(weight_)
            grad_input = HyperDTensor(local, plan.grad_input, requires_grad=False)
        elif needs_weight and is_gather:
            grad_out.start()  # there is no matmul to fuse the gather with
        if needs_weight:
            if product is None:
                with computing("grad_weight"):
                    rows = materialized(grad_out).flatten(0, -2)
                    product = rows.t().mm(x.flatten(0, -2))
            grad_weight = DTensor(product, plan.grad_weight, requires_grad=False)
        if needs_bias:
            grad_bias = DTensor(_sum_of_rows(grad_out), plan.grad_bias, requires_grad=False)
        return grad_input, grad_weight, grad_bias, None, None, None


class _Regather:
    """The second gather of a column's input, one for all siblings that saved the same shard."""

    def __init__(self, recipe: DeferredAllGather) -> None:
        self._recipe = recipe
        self._uses = 0
        self._gathered: PendingLocal | None = None

    @classmethod
    def of(cls, gathered: PendingLocal) -> _Regather:
        """The one that belongs to a gather."""
        recipe = gathered.recipe
        assert isinstance(recipe, DeferredAllGather)
        shared = _regathers.get(recipe)
        if shared is None:
            again = DeferredAllGather(recipe.part, recipe.dim, recipe.axis, recipe.sizes)
            shared = _regathers[recipe] = cls(again)
        shared._uses += 1
        return shared

    def start(self, part: torch.Tensor) -> PendingLocal:
        """Starts the gather at its first use; the last use lets go of it.

        Args:
            part: this rank's shard, as autograd saved it.
        """
        if self._gathered is None:
            self._recipe.part = part
            self._gathered = self._recipe.start()
        gathered = self._gathered
        self._uses -= 1
        if self._uses == 0:
            self._gathered = None
        return gathered


_regathers: weakref.WeakKeyDictionary[DeferredAllGather, _Regather] = weakref.WeakKeyDictionary()


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "Expected create_graph=False, got True (backward of an MC2 layer). A fused kernel has "
            "no second derivative; use ColwiseParallel and RowwiseParallel instead."
        )


def _grad_out(grad: DTensor, plan: LinearPlan, group: str) -> Any:
    """A row's output gradient, all rows of it: a deferred gather over ``group``, or finished."""
    local = grad._local_tensor
    if isinstance(local, PendingLocal) and local.state is PendingState.DEFERRED:
        recipe = local.recipe
        if isinstance(recipe, DeferredAllGather) and recipe.axis.group == group:
            return local
        local.start()  # over another mesh axis
    return local_gradient(grad, plan)


def _sum_of_rows(grad_out: torch.Tensor) -> torch.Tensor:
    """Sum over the rows; of a gather that nobody needed, R numbers a feature are sent for it."""
    if isinstance(grad_out, PendingLocal) and grad_out.state is PendingState.DEFERRED:
        recipe = grad_out.recipe
        assert isinstance(recipe, DeferredAllGather)
        part = recipe.source("grad_bias").flatten(0, -2).sum(0)
        return all_reduce(part, recipe.axis, "sum").materialize()
    return materialized(grad_out).flatten(0, -2).sum(0)
