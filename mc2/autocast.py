"""What autocast makes of a linear's operands. It casts below the layers here, so they ask."""

from __future__ import annotations

from typing import TypeVar

import torch

T = TypeVar("T", bound=torch.Tensor)


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which ``F.linear`` would compute with ``tensor`` here; its own outside."""
    device_type = tensor.device.type
    exempt = tensor.dtype == torch.float64 or not tensor.is_floating_point()
    if exempt or not torch.is_autocast_enabled(device_type):
        return tensor.dtype
    return torch.get_autocast_dtype(device_type)


def as_autocast(tensor: T) -> T:
    """``tensor`` in the dtype in which ``F.linear`` would compute with it here."""
    dtype = autocast_dtype(tensor)
    return tensor if dtype == tensor.dtype else tensor.to(dtype)
