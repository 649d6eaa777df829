"""The two fused rules, and the one place where they are registered.

    rule A  (all_gather, linear)      a deferred gather meets a matmul: all_gather_matmul
    rule B  (linear, reduce_scatter)  a deferred matmul meets its reduction: matmul_reduce_scatter

Forward and backward of a column and a row layer are these two in turn, so they give all four fused
kernels. A rule runs the kernel or raises; it never runs anything unfused.
"""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from mc2.autograd import ColumnLinear
from mc2.errors import MC2ConstraintError
from mc2.fused_calls import linear_reduce_scatter
from mc2.kernels import resolve_kernel
from mc2.options import FusionOptions
from pending_dtensor.fused_rules import register_fused_rule
from pending_dtensor.hyper_dtensor import HyperDTensor
from pending_dtensor.linear import finished_late, plan_linear


def all_gather_linear(
    input: HyperDTensor,
    weight: DTensor,
    bias: DTensor | None = None,
    options: FusionOptions | None = None,
) -> HyperDTensor:
    """Rule A: a linear reads a deferred gather.

    Args:
        input: (*, K), Replicate, its local tensor a deferred gather.
        weight: (N, K), Shard(0).
        bias: (N,), Shard(0), or None.
        options: the layer's; None, from a plain ``F.linear``, is kernel ``auto``.

    Returns:
        (*, N), Shard(-1).

    Raises:
        MC2ConstraintError: the kernel cannot do it, or the operands do not fit; nothing was sent.
    """
    if options is None:
        options = _options_of_a_plain_linear(input)
    plan = plan_linear(input._spec, weight._spec, None if bias is None else bias._spec)
    if plan is None:
        raise MC2ConstraintError(
            f"Expected an input that fits the weight, got {tuple(input.shape)} as "
            f"{input.placements} for a weight {tuple(weight.shape)} as {weight.placements} "
            f"(all_gather, linear). A column's weight is Shard(0), a row's Shard(1)."
        )
    weight_, bias_ = finished_late(input, weight, bias)
    return ColumnLinear.apply(input, weight_, bias_, weight, plan, options)


def _options_of_a_plain_linear(input: HyperDTensor) -> FusionOptions:
    try:
        return FusionOptions(resolve_kernel("auto", input.device.type).name)
    except MC2ConstraintError as error:
        raise MC2ConstraintError(
            f"{error} Here an nn.Linear that is no MC2Linear was handed a deferred gather: give it "
            f"MC2ColwiseParallel(kernel=...), or do not defer its input."
        ) from None


register_fused_rule("all_gather", "linear", all_gather_linear)
register_fused_rule("linear", "reduce_scatter", linear_reduce_scatter)
