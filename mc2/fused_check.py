"""`assert_fused`: for users' own tests that a model runs in fused kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from mc2.linear import MC2Linear
from pending_dtensor.errors import NotFusedError
from pending_dtensor.overlap_log import OverlapLog, record_overlap


@contextmanager
def assert_fused(model: nn.Module, *, unfused: Collection[str] = ()) -> Iterator[OverlapLog]:
    """Checks that what runs inside the block runs fused, as ``model`` promises.

    Put a step, forward and backward, inside. An `MC2Linear` never runs unfused by itself, so what
    is left to find are Linears that no MC2 style was applied to, layers that did not run, deferred
    matmuls that were read unreduced, and gathers of a fallback. Collectives around the layers (an
    embedding's, a loss's) may run on their own. Nothing is communicated for the check.

    Args:
        model: the parallelized model.
        unfused: names of sharded Linears that are meant to run unfused, such as ``output``.

    Yields:
        OverlapLog: of the block; ``log.require(fused=N)`` also checks the count.

    Raises:
        NotFusedError: with each thing that ran unfused, or did not run, and why.
        TypeError: ``unfused`` is no collection of names.
        ValueError: ``unfused`` names a module that ``model`` does not have.
    """
    if (
        isinstance(unfused, (str, Mapping))
        or not isinstance(unfused, Collection)
        or not all(isinstance(name, str) for name in unfused)
    ):
        raise TypeError(
            f"Expected a collection of names of modules as unfused, got {unfused!r} "
            f"(assert_fused). Pass a tuple, also for one."
        )
    modules = dict(model.named_modules())
    unknown = sorted(set(unfused) - set(modules))
    if unknown:
        raise ValueError(
            f"Expected names of modules of the model, got {unknown} (assert_fused). They are those "
            f"of model.named_modules()."
        )
    fused = {name: module for name, module in modules.items() if isinstance(module, MC2Linear)}
    calls: Counter[str] = Counter()
    with ExitStack() as hooks:
        for name, module in fused.items():
            hook = module.register_forward_hook(lambda *_, name=name: calls.update([name]))
            hooks.callback(hook.remove)
        with record_overlap() as log:
            yield log
    found = [
        f"{name}: {type(module).__name__} with weight {module.weight.placements}, to which no MC2 "
        f"style was applied"
        for name, module in modules.items()
        if name not in fused and name not in unfused and _is_sharded_linear(module)
    ]
    found += [f"{name}: MC2Linear that was not called" for name in fused if not calls[name]]
    found += [f"{event.detail} (shape {event.shape})" for event in log.fallbacks]
    if not fused:
        found.append("the model has no MC2Linear: apply MC2ColwiseParallel and MC2RowwiseParallel")
    elif calls and not log.summary()["fused"]:
        found.append("no fused kernel was called, though MC2 layers were: their output was unread")
    if found:
        lines = "\n".join(f"  - {line}" for line in found)
        raise NotFusedError(
            f"Expected {type(model).__name__} to run in fused kernels, got (rank {log.rank}):\n"
            f"{lines}"
        )


def _is_sharded_linear(module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear) or not isinstance(module.weight, DTensor):
        return False
    return any(placement != Replicate() for placement in module.weight.placements)
