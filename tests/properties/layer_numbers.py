"""The numbers of a drawn case, of which no order of summation rounds any.

All are whole. In float64 anything small will do; a dtype of few bits gets numbers of which so few
are not 0 that it holds every result on one device with a bit to spare.
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

from tests.common.distributed_launcher import IN_RANK_PROCESS
from tests.properties.layer_cases import Case

if IN_RANK_PROCESS:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from tests.common.sharded_models import whole_numbers
    from tests.properties.layer_models import Chain

    class RoundedError(Exception):
        """A dtype is too narrow."""

    class Exact(TorchDispatchMode):
        """Raises RoundedError where a dtype does not hold a result with a bit to spare."""

        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            info = torch.finfo(dtype)
            # Of the 52 bits of a float64 mantissa, those that have to be 0.
            self.beyond = (1 << (53 - round(-math.log2(info.eps)))) - 1
            self.limit = info.max / 2

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            results = func(*args, **(kwargs or {}))
            # Not what fresh memory holds, nor the sum of a whole tensor, which nobody uses.
            if not func.is_view and "empty" not in func.__name__:
                for result in tree_leaves(results):
                    if isinstance(result, torch.Tensor) and result.dim() > 0:
                        self._check(result.double())
            return results

        def _check(self, result: torch.Tensor) -> None:
            if result.numel() == 0:
                return
            least, most = result.aminmax()
            if max(-least, most) > self.limit or (result.view(torch.int64) & self.beyond).any():
                raise RoundedError


MOST_HALVINGS = 20


class Numbers(NamedTuple):
    """What a case computes with, and what comes out.

    Attributes:
        model: on one device, before the first step.
        inputs: of each step.
        grad: what comes back in each step.
        expected: output and gradients of each step, by name.
    """

    model: Any
    inputs: list[torch.Tensor]
    grad: torch.Tensor
    expected: list[dict[str, torch.Tensor | None]]


def numbers_of(case: Case) -> Numbers:
    """The same on every rank: the most that the dtype holds."""
    dtype = getattr(torch, case.dtype)
    for halvings in range(MOST_HALVINGS):
        model, inputs, grad = given_to(case, halvings)
        reference = copy.deepcopy(model)
        try:
            with Exact(dtype):
                expected = [
                    step(reference, x.requires_grad_(case.input_grad), grad) for x in inputs
                ]
        except RoundedError:
            continue
        return Numbers(
            model.to(dtype),
            [x.detach().to(dtype) for x in inputs],
            grad.to(dtype),
            [{n: None if t is None else t.to(dtype) for n, t in e.items()} for e in expected],
        )
    raise AssertionError(f"found no numbers whose results {dtype} holds")


def given_to(case: Case, halvings: int = 0) -> tuple[Any, list[torch.Tensor], torch.Tensor]:
    """Model, inputs and what comes back, in float64.

    Where gradients that are Partial and Replicate meet, DTensor adds a share of the Replicate one
    on each rank: once a block.
    """
    few = 1.0 if case.dtype == "float64" else 0.5**halvings
    model = Chain(case).double()
    parameters = list(model.parameters())
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            share = few
            if case.dtype != "float64" and parameter.dim() == 2:
                share = max(4 * few, 1) / parameter.shape[1]  # so that a row has one, if not four
            parameter.copy_(numbers(*parameter.shape, share=share, seed=100 + number))
            parameter *= unit_of(case, name)
    for number in case.frozen:
        parameters[number % len(parameters)].requires_grad_(False)
    inputs = [numbers(*case.shape, share=few, seed=seed) for seed in (0, 1)]
    grad = numbers(*case.shape, share=few, seed=7) * shared_by(case) ** len(case.blocks)
    return model, inputs, grad


def numbers(*shape: int, share: float, seed: int) -> torch.Tensor:
    """-1, 0 and 1, all but a share of them 0."""
    if share == 1:
        return whole_numbers(*shape, seed=seed).double()
    found = torch.zeros(math.prod(shape), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    count = min(round(share * found.numel()), found.numel())
    places = torch.randint(0, max(found.numel(), 1), (count,), generator=generator)
    found[places] = torch.randint(0, 2, (count,), generator=generator).double() * 2 - 1
    return found.view(shape)


def shared_by(case: Case) -> int:
    """What numbers are multiples of that 2, 3 or 4 ranks share out; not 3 where bits are few."""
    return 12 if case.dtype == "float64" else 4


def unit_of(case: Case, name: str) -> int:
    """What a parameter is a multiple of: ranks share the bias of a row out."""
    return shared_by(case) if name.endswith("row.bias") else 1


def step(model: Any, leaf: Any, grad: Any) -> dict[str, Any]:
    """One step of training; output and gradients by name, copied before anything changes them."""
    leaf.grad = None
    out = model(leaf if model.case.leaf else leaf * 1)
    if out.requires_grad:
        out.backward(grad)
    found = {"out": out, "x": leaf.grad, **{n: p.grad for n, p in model.named_parameters()}}
    found = {name: None if t is None else t.detach().clone() for name, t in found.items()}
    trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
    if trained:
        groups = [
            {"params": [p], "lr": float(unit_of(model.case, name))} for name, p in trained.items()
        ]
        # As on any CPU: torch_npu would ask a device before it decides.
        optimizer = torch.optim.SGD(groups, foreach=False)
        for parameter in trained.values():
            # Keeps the numbers small, and as few.
            parameter.grad = parameter.grad.sign() * parameter.detach().sign().abs()
        optimizer.step()
        optimizer.zero_grad()
    return found
