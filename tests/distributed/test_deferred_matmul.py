"""Deferred matmuls: what leaves them deferred, and sums of them."""

from __future__ import annotations

from typing import Any

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks

if IN_RANK_PROCESS:
    import torch
    from torch.distributed.tensor.debug import CommDebugMode

    from mc2.deferred_matmul import DeferredMatmul, Term, defer_matmul
    from mc2.options import FusionOptions
    from pending_dtensor import PendingLocal, record_overlap
    from pending_dtensor.pending import PendingState
    from tests.common.mc2_models import QKVO, calls, fused, make
    from tests.common.sharded_models import part, whole_numbers


def deferred(bias: Any = None) -> Any:
    x, weight_t = whole_numbers(3, 2, seed=1), whole_numbers(2, 4, seed=2)
    return defer_matmul(DeferredMatmul([Term(x, weight_t)], (3,), FusionOptions("x"), bias))


@on_ranks(1)
def test_a_sum_has_every_bias(ctx: RankContext) -> None:
    """Also where both summands have the same one."""
    bias = whole_numbers(4, seed=3)
    product = deferred().materialize()
    biased, plain = deferred(bias), deferred()
    assert torch.equal(biased + biased, (product + bias) * 2)
    assert torch.equal(biased + plain, product * 2 + bias)
    both = deferred() + deferred()
    assert isinstance(both, PendingLocal)
    assert both.state is PendingState.DEFERRED
    assert torch.equal(both.wait(), product * 2)


@on_ranks(2)
def test_a_step_runs_fused_while_torch_counts_its_collectives(ctx: RankContext) -> None:
    """`CommDebugMode` takes apart, in every op, what can be taken apart."""
    model = fused(ctx, make(QKVO), 1, "decomposed")
    x = part(whole_numbers(3, 8, 8), 1).requires_grad_()
    with record_overlap() as log, CommDebugMode() as comm:
        model(x).sum().backward()
    assert calls(log) == [(kind, "decomposed") for kind in ("all_gather", "reduce_scatter") * 2]
    assert comm.get_total_counts() == 0
