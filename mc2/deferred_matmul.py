"""The deferred matmul: a sum of x @ weight_t that waits to be fused with its reduce-scatter."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mc2.options import FusionOptions
from pending_dtensor.events import computing, record_event
from pending_dtensor.pending import Readable
from pending_dtensor.pending_local import PendingLocal, materialized, register_deferred_op


class Term(NamedTuple):
    """One summand: ``x (*, K) @ weight_t (K, N)``. ``x`` may be pending."""

    x: torch.Tensor
    weight_t: torch.Tensor

    def rows(self) -> torch.Tensor:
        """``x`` finished and flattened to (M, K)."""
        return materialized(self.x, "a deferred matmul").flatten(0, -2)


class DeferredMatmul:
    """Recipe of ``sum of terms (+ bias)``, of which every rank holds a summand.

    A sum of deferred matmuls is again one: autograd's ``add`` of the grad_inputs of siblings (wq,
    wk, wv) makes a list of terms, and one reduce-scatter serves them all.

    Fields: ``terms``; ``lead``, the output's dims before N; ``options``; ``bias`` (N,), to add once
    after the reduction, or None; ``ranks`` among whom an unreduced read shares the bias out.
    """

    kind = "linear"
    is_local = True

    def __init__(
        self,
        terms: list[Term],
        lead: tuple[int, ...],
        options: FusionOptions,
        bias: torch.Tensor | None = None,
        ranks: int = 1,
    ) -> None:
        self.terms = terms
        self.lead = lead
        self.ranks = ranks
        self.options = options
        self.bias = bias

    def compute(self) -> torch.Tensor:
        """This rank's summand, unfused: somebody read it who is no reduce-scatter."""
        with computing("matmul"):
            out = self.terms[0].rows() @ self.terms[0].weight_t
            for term in self.terms[1:]:
                out.addmm_(term.rows(), term.weight_t)
        if self.bias is not None:
            out += self.bias / self.ranks
        record_event(
            "fallback",
            kernel="unfused",
            shape=(*self.lead, out.shape[-1]),
            dtype=out.dtype,
            message_elements=0,
            group="",
            detail=f"a matmul deferred for kernel {self.options.kernel!r} was read unreduced",
        )
        return out.view(*self.lead, out.shape[-1])

    def start(self) -> Readable:
        """Never: it is local, so it is computed."""
        raise NotImplementedError("a deferred matmul is computed, not launched")


def defer_matmul(recipe: DeferredMatmul) -> PendingLocal:
    """The pending value of a recipe."""
    x, weight_t = recipe.terms[0]
    shape = (*recipe.lead, weight_t.shape[1])
    return PendingLocal.deferred(recipe, shape, x.dtype, x.device)


def _add(first: torch.Tensor, second: torch.Tensor, *, alpha: object = 1) -> object:
    """``first + second`` stays deferred if both are matmuls for one kernel, without bias."""
    if alpha != 1 or not isinstance(second, PendingLocal) or first.shape != second.shape:
        return NotImplemented
    a, b = first.recipe, second.recipe
    if not isinstance(a, DeferredMatmul) or not isinstance(b, DeferredMatmul):
        return NotImplemented
    whole = not first.is_view and not second.is_view
    biased = a.bias is not None or b.bias is not None
    if not whole or biased or a.options.kernel != b.options.kernel:
        return NotImplemented
    return defer_matmul(DeferredMatmul([*a.terms, *b.terms], a.lead, a.options))


register_deferred_op(DeferredMatmul.kind, torch.ops.aten.add.Tensor, _add)
