"""Every private torch name this package uses, in one file, as read in torch 2.13."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def in_eager_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, never traced by ``torch.compile``: it breaks the graph and runs as it is.

    Other than ``torch.compiler.disable`` it imports Dynamo, which takes seconds, at the first call.
    """
    return torch._compile._disable_dynamo(function)


def resolve_group(group_name: str) -> dist.ProcessGroup:
    """The process group registered under ``group_name``.

    Raises:
        RuntimeError: there is none, or no longer.
    """
    try:
        return torch._C._distributed_c10d._resolve_process_group(group_name)
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"Expected a process group to be alive, got {group_name!r}, which was destroyed or "
            f"never made (fused kernel). Make a new DeviceMesh after init_process_group and apply "
            f"the styles again."
        ) from error


def register_wait(tensor: torch.Tensor, wait: Callable[[], object]) -> None:
    """Makes ``_c10d_functional.wait_tensor(tensor)`` call ``wait``.

    Until then torch counts it among the unwaited collectives.
    """

    def callback(timeout: object) -> bool:
        wait()
        return True

    distributed = torch._C._distributed_c10d
    distributed._register_work(tensor, distributed.PythonCallbackWork(callback))


def gloo_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """How long ``group`` waits now, if its backend for ``device`` is gloo; else None."""
    backend = group_backend(group, device.type)
    return backend.options._timeout if isinstance(backend, dist.ProcessGroupGloo) else None


def is_profiled() -> bool:
    """Whether a profiler watches this thread."""
    return torch.autograd._profiler_enabled()


def group_backend(group: dist.ProcessGroup, device_type: str) -> Any:
    """What runs the collectives of ``group`` on tensors of ``device_type``, or None."""
    try:
        return group._get_backend(torch.device(device_type))
    except RuntimeError:
        return None
