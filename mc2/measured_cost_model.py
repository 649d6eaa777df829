"""What a link and a matmul are worth here, measured, for ``chunks="auto"`` to go by."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mc2.cost_model import CostModel, cost_model
from mc2.row_exchange import RowExchange
from mc2.row_layout import RowLayout

# Enough for what a message costs to be little beside its bytes, and a row not to be a cache line.
_MESSAGE_BYTES = 2**22
_MATMUL_SIZE = 1024
_ROUNDS = 7


def measure_cost_model(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> CostModel:
    """Times messages between the ranks, and a matmul while all multiply; the rest is the default.

    Nobody else should use the link and the cores meanwhile. It takes as long as 8 x (R - 1)
    messages of 4 MiB. All ranks get the same model, with the rates of the slowest. Two
    measurements differ a little, and near a border ``auto`` may then choose another number of
    pieces, which gives other last bits: for the same bits in every run, measure once, and tell the
    printed `CostModel` from then on.

        use_cost_model(measure_cost_model(mesh), mesh.device_type)

    Args:
        mesh: 1-D, of the ranks that MC2 layers are sharded over; every rank has to call.
        dtype: what is multiplied.

    Raises:
        TypeError: ``mesh`` is no `DeviceMesh`.
        ValueError: it has several dims, or one rank.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"Expected a DeviceMesh, got {mesh!r} (measure_cost_model).")
    if mesh.ndim != 1 or mesh.size() < 2:
        raise ValueError(
            f"Expected one mesh dim of at least 2 ranks, got shape {tuple(mesh.shape)} "
            "(measure_cost_model). Take the dim of the tensor parallel ranks: mesh['tp']."
        )
    device = torch.device(mesh.device_type)
    group = mesh.get_group()
    ranks = mesh.size()
    layout = RowLayout(outer=1, sizes=(1,) * ranks, inner=1, rank=mesh.get_local_rank())
    sent = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device=device)
    received = [torch.empty_like(sent) for _ in range(ranks - 1)]
    rows = torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, dtype=dtype, device=device)

    def exchange() -> None:
        steps = [
            RowExchange(into, sent, distance, layout, group)
            for distance, into in enumerate(received, 1)
        ]
        for step in steps:
            step.wait()

    exchange_s = _median_s(exchange, group, device)
    multiply_s = _median_s(lambda: torch.nn.functional.linear(rows, rows), group, device)
    slowest = torch.tensor([exchange_s, multiply_s], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    exchange_s, multiply_s = slowest.tolist()
    return dataclasses.replace(
        cost_model(mesh.device_type),
        flops_per_s=2 * _MATMUL_SIZE**3 / multiply_s,
        bytes_per_s=(ranks - 1) * _MESSAGE_BYTES / exchange_s,
    )


def _median_s(run: Callable[[], object], group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds that ``run`` takes on this rank when all begin together, after one run to warm up."""
    taken = []
    for _ in range(1 + _ROUNDS):
        dist.barrier(group)
        begin = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])
