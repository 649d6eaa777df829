"""The check behind ``from_local(run_check=True)``: do the ranks of a mesh hold parts that fit?"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

from pending_dtensor.torch_compat import DTensorSpec


def check_local_metadata(
    local: torch.Tensor, spec: DTensorSpec, *, shape_given: bool
) -> torch.Tensor:
    """Compares shape, stride and dtype over the ranks of the mesh; broadcasts Replicate data.

    Args:
        local: this rank's part.
        spec: the spec it was given.
        shape_given: whether the caller gave the global shape; then shapes may differ over ranks.

    Returns:
        The part, with the first rank's data along each Replicate axis.

    Raises:
        ValueError: ranks disagree; raised on every rank of the mesh, before data is sent.
    """
    mine = (tuple(local.shape), tuple(local.stride()), str(local.dtype))
    compared = mine[2:] if shape_given else mine
    found: list[Any] = [(dist.get_rank(), compared)]
    for axis in range(spec.mesh.ndim):
        group = spec.mesh.get_group(axis)
        parts: list[Any] = [None] * spec.mesh.size(axis)
        dist.all_gather_object(parts, found, group=group)
        found = [entry for part in parts for entry in part]
    if any(other != compared for _, other in found):
        listing = ", ".join(f"rank {rank}: {other}" for rank, other in sorted(found))
        raise ValueError(
            f"Expected the same shape, stride and dtype on every rank, got {listing} "
            f"(from_local with run_check=True, placements {spec.placements}). For uneven shards "
            f"pass the global shape and stride."
        )
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Replicate):
            local = local.contiguous()
            dist.broadcast(local, group=spec.mesh.get_group(axis), group_src=0)
    return local
