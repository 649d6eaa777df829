"""`parallelize_module`: torch's, and what it gets wrong: ties of parameters, src_data_rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import NamedTuple

import torch.distributed.tensor.parallel as torch_parallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from mc2.errors import MC2ConstraintError
from parallel_styles.mc2_styles import MC2ColwiseParallel, MC2RowwiseParallel
from parallel_styles.styles import check_applicable, distributes_parameters
from pending_dtensor.hyper_dtensor import check_source_rank, checked_mesh

_PREPARE_STYLES = (
    torch_parallel.PrepareModuleInput,
    torch_parallel.PrepareModuleOutput,
    torch_parallel.PrepareModuleInputOutput,
)
_NOT_PLANNED = "not in the plan"


class _Planned(NamedTuple):
    path: str
    module: nn.Module
    style: ParallelStyle


class _Use(NamedTuple):
    """One place where a parameter is registered."""

    path: str
    module: nn.Module
    name: str

    @property
    def parameter(self) -> nn.Parameter | None:
        return self.module._parameters[self.name]

    def __str__(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | dict[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Applies a plan of parallel styles to a module, as torch's `parallelize_module` does.

    Besides, a parameter that several modules share is one parameter afterwards, or the plan is
    refused; ``src_data_rank`` holds for every module of the plan; and what cannot be done is
    refused before anything is changed, naming the module.

    A warning is given if only some of the modules that share a parameter are in the plan: the
    others hold the DTensor too then, and need a style before they can run.

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
        MC2ConstraintError: layers of the plan cannot be fused.
        NotImplementedError: a style does not fit its module.
        RuntimeError: a module has a style already, or is given two.
        TypeError: a plan that is neither a style nor a dict of styles by path, or something else
            than a module, a mesh or a rank.
        ValueError: a plan that would break a tie between parameters, a mesh of several axes, or a
            rank that the mesh does not have.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"Expected an nn.Module, got {module!r} (parallelize_module).")
    if device_mesh is not None:  # the current mesh is looked up later; torch checks then
        checked_mesh(device_mesh, "parallelize_module")
        check_source_rank(src_data_rank, device_mesh, "parallelize_module")
    if parallelize_plan is None:
        return torch_parallel.parallelize_module(module, device_mesh, src_data_rank=src_data_rank)
    if not isinstance(parallelize_plan, (ParallelStyle, dict)):
        raise TypeError(
            f"Expected a ParallelStyle or a dict of them by path, got a "
            f"{type(parallelize_plan).__name__}, {parallelize_plan!r} (parallelize_module)."
        )
    plan = (
        {"": parallelize_plan} if isinstance(parallelize_plan, ParallelStyle) else parallelize_plan
    )
    planned: list[_Planned] = []
    for pattern, style in plan.items():
        if not isinstance(pattern, str):
            raise TypeError(
                f"Expected the path of a submodule, or a pattern, as a str, got {pattern!r} "
                f"(parallelize_module)."
            )
        if not isinstance(style, ParallelStyle):
            raise TypeError(
                f"Expected a ParallelStyle for {pattern!r}, got {style!r} (parallelize_module)."
            )
        # By id, so that a module found by two paths is parallelized once.
        matched = {
            id(found): _Planned(path, found, style) for path, found in _matching(module, pattern)
        }
        if not matched:  # torch warns that the pattern leads nowhere
            torch_parallel.parallelize_module(
                module, device_mesh, {pattern: style}, src_data_rank=src_data_rank
            )
        planned.extend(matched.values())
    _check_fusable(device_mesh, planned)
    for path, found, style in planned:
        check_applicable(style, found, path)
    _check_one_style_each(planned)
    _check_mesh(device_mesh, planned)
    ties = _ties(module)
    _check_ties(ties, planned)
    for path, found, style in planned:
        found._parallelized_as = path
        torch_parallel.parallelize_module(found, device_mesh, style, src_data_rank=src_data_rank)
    for uses in ties:
        _tie_again(uses, planned)
    return module


def _matching(module: nn.Module, pattern: str, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Submodules whose path matches ``pattern``, part by part."""
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


def _check_fusable(mesh: DeviceMesh | None, planned: list[_Planned]) -> None:
    """Refuses a plan with layers that cannot be fused, with every reason of each."""
    if mesh is None:
        return  # the current mesh is looked up later; each style checks then
    messages = []
    for path, module, style in planned:
        if isinstance(style, (MC2ColwiseParallel, MC2RowwiseParallel)):
            try:
                style.check(module, mesh)
            except MC2ConstraintError as error:
                messages.append(f"Module {path!r}: {error}" if path else str(error))
    if messages:
        raise MC2ConstraintError("\n".join(messages))


def _check_one_style_each(planned: list[_Planned]) -> None:
    """Refuses a plan that gives a module two styles, of which the second would fail."""
    first: dict[int, _Planned] = {}
    for entry in planned:
        if not distributes_parameters(entry.style):
            continue
        other = first.setdefault(id(entry.module), entry)
        if other is not entry:
            raise RuntimeError(
                f"Expected one parallel style for module {entry.path!r}, got "
                f"{type(other.style).__name__} and {type(entry.style).__name__} "
                f"(parallelize_module). Narrow a pattern of the plan, or leave one entry out."
            )


def _check_mesh(mesh: DeviceMesh | None, planned: list[_Planned]) -> None:
    needs_one_axis = [
        entry
        for entry in planned
        if distributes_parameters(entry.style) or isinstance(entry.style, _PREPARE_STYLES)
    ]
    if mesh is not None and mesh.ndim != 1 and needs_one_axis:
        path, _, style = needs_one_axis[0]
        raise ValueError(
            f"Expected a 1-D mesh, got {mesh} ({type(style).__name__} on module {path!r}). "
            f"Pass its tensor parallel axis, as in mesh['tp']."
        )


def _check_ties(ties: list[list[_Use]], planned: list[_Planned]) -> None:
    """Refuses a plan under which a shared parameter could not stay one parameter."""
    for uses in ties:
        outcomes = [_outcome(use, planned) for use in uses]
        known = [outcome for outcome in outcomes if isinstance(outcome, Placement)]
        listing = ", ".join(f"{use}: {out}" for use, out in zip(uses, outcomes, strict=True))
        if any(outcome != known[0] for outcome in known):
            raise ValueError(
                f"Expected tied parameters to be sharded alike, got {listing} "
                f"(parallelize_module). Give all modules that share the parameter styles that "
                f"shard the same dim (Rowwise for an Embedding with Colwise for the output "
                f"Linear), or untie them first."
            )
        if known and _NOT_PLANNED in outcomes:
            warnings.warn(
                f"Expected a style for all modules that share a parameter, got {listing} "
                f"(parallelize_module). They share the DTensor from now on: give the others a "
                f"style that shards the same dim before they run, or untie them first.",
                stacklevel=3,
            )


def _outcome(use: _Use, planned: list[_Planned]) -> Placement | str:
    """What the plan makes of a parameter at one of its places, as far as can be told."""
    for path, target, style in planned:
        inside = path in ("", use.path) or use.path.startswith(path + ".")
        if not inside or isinstance(style, _PREPARE_STYLES):
            continue
        if isinstance(style, torch_parallel.SequenceParallel):
            return Replicate()
        embedding = isinstance(target, nn.Embedding)
        if isinstance(style, torch_parallel.ColwiseParallel):
            return Shard(1) if embedding else Shard(0)
        if isinstance(style, torch_parallel.RowwiseParallel):
            if use.name == "bias":
                return Replicate()
            return Shard(0) if embedding else Shard(1)
        return f"up to {type(style).__name__}"
    return _NOT_PLANNED


def _tie_again(uses: list[_Use], planned: list[_Planned]) -> None:
    """Registers what a shared parameter has become wherever it was registered."""
    made = next((use.parameter for use in uses if isinstance(use.parameter, DTensor)), None)
    if made is None:
        return
    for use in uses:
        if isinstance(use.parameter, DTensor):
            same = use.parameter.placements == made.placements
        else:
            same = _outcome(use, planned) == _NOT_PLANNED
        if same:
            use.module.register_parameter(use.name, made)
