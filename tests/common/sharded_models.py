"""Small models to parallelize with our styles or torch's, and how to compare their results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tests.common.distributed_launcher import IN_RANK_PROCESS

if TYPE_CHECKING or IN_RANK_PROCESS:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    class MLP(nn.Module):
        """out = w2(relu(w1 x)): exact in float32 as long as everything is a small whole number."""

        def __init__(self, features: int = 8, hidden: int = 24, *, bias: bool = True) -> None:
            super().__init__()
            self.w1 = nn.Linear(features, hidden, bias=bias)
            self.w2 = nn.Linear(hidden, features, bias=bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w2(F.relu(self.w1(x)))


def whole_numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """-1, 0 and 1, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).float()


def with_whole_numbers(module: nn.Module) -> nn.Module:
    """``module`` with small whole numbers as parameters, so that every order of sums is exact."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(whole_numbers(*parameter.shape, seed=100 + number))
    return module


def full(tensor: Any) -> torch.Tensor:
    """The whole plain tensor, finished, without history."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    return tensor.detach()


def part(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    """This rank's even part along ``dim``; all of it if None."""
    if dim is None:
        return tensor.detach().clone()
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()].detach().clone()


def joined(local: torch.Tensor, dim: int | None) -> torch.Tensor:
    """The parts of all ranks along ``dim``; ``local`` itself if None."""
    if dim is None:
        return local
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local.contiguous())
    return torch.cat(parts, dim)


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The whole gradient of each parameter."""
    return {
        name: None if parameter.grad is None else full(parameter.grad)
        for name, parameter in module.named_parameters()
    }


def equal(got: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Asserts that named tensors are equal in every bit."""
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        if wanted is None:
            assert got[name] is None, f"{name}: got {got[name]}, expected None"
        else:
            assert got[name] is not None, f"{name}: got None"
            assert torch.equal(got[name], wanted), f"{name}: got {got[name]}, expected {wanted}"
