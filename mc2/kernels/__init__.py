"""The kernels, and where they are registered. Behind one interface, they never import each other.

Equal on every kernel: ``out = AG(shard) @ weight_t`` and ``out = RS(sum of x @ weight_t)``, see
`mc2.kernel_interface.Kernel`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from mc2.errors import KernelConflictError, MC2ConstraintError
from mc2.kernel_interface import CallFacts, Chunks, Kernel, Operation
from mc2.kernels.ascend import AscendKernel
from mc2.kernels.decomposed import DecomposedKernel
from mc2.kernels.pipelined import PipelinedKernel
from mc2.row_layout import RowLayout

__all__ = [
    "available_kernels",
    "get_kernel",
    "reasons_not_supported",
    "register_kernel",
    "resolve_kernel",
]

_kernels: dict[str, Kernel] = {}


def register_kernel(kernel: Kernel) -> None:
    """Makes a kernel known by its name.

    Raises:
        KernelConflictError: another one has that name, or it is reserved.
    """
    known = _kernels.get(kernel.name)
    if known is not None:
        raise KernelConflictError(
            f"Expected a kernel name that is free, got {kernel.name!r} of {_class_name(kernel)}, "
            f"which {_class_name(known)} has. Give one of them another name."
        )
    if kernel.name == "auto":
        raise KernelConflictError(
            f'Expected a kernel name other than "auto", got it from {_class_name(kernel)}. It asks '
            f"for the kernel of the device."
        )
    _kernels[kernel.name] = kernel


def get_kernel(name: str) -> Kernel:
    """The kernel registered as ``name``.

    Raises:
        MC2ConstraintError: there is none.
    """
    kernel = _kernels.get(name) if isinstance(name, str) else None
    if kernel is None:
        raise MC2ConstraintError(
            f"Expected a kernel out of {_quoted(_kernels)}, got {name!r}. Pass one of these names, "
            f'or "auto" on npu.'
        )
    return kernel


def resolve_kernel(name: str, device_type: str) -> Kernel:
    """The kernel that ``kernel=name`` asks for on a device: "auto" means ascend on npu.

    Elsewhere "auto" is an error: who asks for a fused kernel must not get an unfused one unawares.

    Raises:
        MC2ConstraintError: ``name`` is unknown, or "auto" on another device.
    """
    if name != "auto":
        return get_kernel(name)
    if device_type == "npu":
        return get_kernel("ascend")
    raise MC2ConstraintError(
        f'Expected an npu for kernel="auto", which means "ascend", got device type '
        f"{device_type!r}. Ask by name for a kernel that could run here, out of "
        f'{_quoted(available_kernels())}, such as kernel="pipelined".'
    )


def available_kernels() -> list[str]:
    """Names of the kernels that this machine could run, given fitting sizes.

    `reasons_not_supported` says why another cannot.
    """
    return [name for name, kernel in _kernels.items() if not kernel.environment_reasons()]


def reasons_not_supported(
    kernel: str,
    op: Operation,
    *,
    ranks: int | None = None,
    contractions: Sequence[int] = (),
    dtypes: Sequence[torch.dtype] = (),
    layout: RowLayout | None = None,
    group: dist.ProcessGroup | None = None,
    chunks: Chunks = "auto",
) -> list[str]:
    """Why a kernel cannot run an operation: every reason at once, from what is known.

    Arguments that are left out are not checked. Nothing is communicated; with the same arguments
    every rank gets the same answer.

    Args:
        kernel: its name.
        op: ``all_gather_matmul`` or ``matmul_reduce_scatter``.
        ranks: ranks in the group.
        contractions: each contraction K that will occur.
        dtypes: dtypes of the operands.
        layout: rows of the activation.
        group: the process group.
        chunks: pieces for each rank's rows.

    Returns:
        Reasons, each a sentence or two; empty if the kernel can run it.

    Raises:
        TypeError: sizes, dtypes, a layout or a group that are something else.
    """
    _check_type("ranks", ranks, int)
    _check_type("layout", layout, RowLayout)
    _check_type("group", group, dist.ProcessGroup)
    _check_all("contractions", contractions, int)
    _check_all("dtypes", dtypes, torch.dtype)
    if not isinstance(kernel, str) or kernel not in _kernels:
        return [f"Expected a kernel out of {_quoted(_kernels)}, got {kernel!r}."]
    facts = CallFacts(
        ranks=ranks if layout is None else layout.ranks,
        contractions=tuple(contractions),
        dtypes=tuple(dtypes),
        layout=layout,
        group=group,
        chunks=chunks,
    )
    return _kernels[kernel].reasons_not_supported(op, facts)


def _check_type(name: str, value: object, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise TypeError(
            f"Expected {kind.__name__} or None as {name}, got {value!r} (reasons_not_supported). "
            f"Leave out what is not known."
        )


def _check_all(name: str, values: object, kind: type) -> None:
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, kind) for v in values):
        raise TypeError(
            f"Expected a sequence of {kind.__name__} as {name}, got {values!r} "
            f"(reasons_not_supported). Leave out what is not known."
        )


def _quoted(names: Sequence[str] | dict[str, Kernel]) -> str:
    return ", ".join(repr(name) for name in names)


def _class_name(kernel: Kernel) -> str:
    return f"{type(kernel).__module__}.{type(kernel).__qualname__}"


for _kernel in (AscendKernel(), PipelinedKernel(), DecomposedKernel()):
    register_kernel(_kernel)
