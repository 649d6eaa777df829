"""`parallelize_module`: torch's, and what it gets wrong: ties of parameters, src_data_rank."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from typing import NamedTuple

import torch.distributed.tensor.parallel as torch_parallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from parallel_styles.styles import check_applicable


class _Planned(NamedTuple):
    path: str
    module: nn.Module
    style: ParallelStyle


class _Use(NamedTuple):
    """One place where a parameter is registered."""

    path: str
    module: nn.Module
    name: str


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | dict[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Applies a plan of parallel styles to a module, as torch's `parallelize_module` does.

    Besides, a parameter that several modules share is one parameter afterwards, or the plan is
    refused; ``src_data_rank`` holds for every module of the plan; and a module that a style does
    not fit is named before anything is changed.

    Args:
        module: the module to parallelize, changed in place.
        device_mesh: 1-D mesh, or the TP axis of a larger one; None for the current mesh.
        parallelize_plan: a style for ``module`` itself, or styles by submodule path, whose parts
            may be ``fnmatch`` patterns; ``""`` is the module itself.
        src_data_rank: rank within the mesh whose parameters are sent out; None to use each rank's
            own without communication.

    Returns:
        The module.

    Raises:
        NotImplementedError: a style does not fit its module.
        RuntimeError: a module has a style already.
        TypeError: a plan that is neither a style nor a dict of styles.
        ValueError: a plan that would break a tie between parameters.
    """
    if parallelize_plan is None or not isinstance(parallelize_plan, (ParallelStyle, dict)):
        return torch_parallel.parallelize_module(
            module, device_mesh, parallelize_plan, src_data_rank=src_data_rank
        )
    plan = (
        {"": parallelize_plan} if isinstance(parallelize_plan, ParallelStyle) else parallelize_plan
    )
    planned: list[_Planned] = []
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise TypeError(
                f"Expected a ParallelStyle for {pattern!r}, got {type(style).__name__} "
                f"(parallelize_module)."
            )
        matched = [_Planned(path, found, style) for path, found in _matching(module, pattern)]
        if not matched:  # torch warns that the pattern leads nowhere
            torch_parallel.parallelize_module(
                module, device_mesh, {pattern: style}, src_data_rank=src_data_rank
            )
        planned.extend(matched)
    for path, found, style in planned:
        check_applicable(style, found, path)
    ties = _ties(module)
    _check_ties(ties, planned)
    for _, found, style in planned:
        torch_parallel.parallelize_module(found, device_mesh, style, src_data_rank=src_data_rank)
    for uses in ties:
        _tie_again(uses)
    return module


def _matching(module: nn.Module, pattern: str, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Submodules whose path matches ``pattern``, part by part, each module once."""
    if pattern == "":
        yield path, module
        return
    part, _, rest = pattern.partition(".")
    for name, child in module.named_children():
        if fnmatch(name, part):
            yield from _matching(child, rest, f"{path}.{name}" if path else name)


def _ties(module: nn.Module) -> list[list[_Use]]:
    """The parameters that are registered in more than one place."""
    uses: dict[int, list[_Use]] = {}
    for path, submodule in module.named_modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                uses.setdefault(id(parameter), []).append(_Use(path, submodule, name))
    return [places for places in uses.values() if len(places) > 1]


def _check_ties(ties: list[list[_Use]], planned: list[_Planned]) -> None:
    """Refuses a plan under which a shared parameter could not stay one parameter."""
    for uses in ties:
        outcomes = [_outcome(use, planned) for use in uses]
        if all(outcome == outcomes[0] for outcome in outcomes):
            continue
        listing = ", ".join(
            f"{'.'.join(filter(None, (use.path, use.name)))}: {outcome}"
            for use, outcome in zip(uses, outcomes, strict=True)
        )
        raise ValueError(
            f"Expected tied parameters to be sharded alike, got {listing} (parallelize_module). "
            f"Give all modules that share the parameter styles that shard the same dim (Rowwise "
            f"for an Embedding with Colwise for the output Linear), or untie them first."
        )


def _outcome(use: _Use, planned: list[_Planned]) -> Placement | str:
    """What the plan makes of a parameter at one of its places."""
    for path, target, style in planned:
        inside = path == use.path or path == "" or use.path.startswith(path + ".")
        if not inside:
            continue
        if isinstance(style, torch_parallel.SequenceParallel):
            return Replicate()
        if target is not use.module:
            continue
        embedding = isinstance(target, nn.Embedding)
        if isinstance(style, torch_parallel.ColwiseParallel):
            return Shard(1) if embedding else Shard(0)
        if isinstance(style, torch_parallel.RowwiseParallel):
            if use.name == "bias":
                return Replicate()
            return Shard(0) if embedding else Shard(1)
    return "not in the plan"


def _tie_again(uses: list[_Use]) -> None:
    first, *others = uses
    parameter = first.module._parameters[first.name]
    for use in others:
        other = use.module._parameters[use.name]
        if isinstance(parameter, DTensor) and isinstance(other, DTensor):
            use.module.register_parameter(use.name, parameter)
