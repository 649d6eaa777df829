"""`MC2Linear`: an ``nn.Linear`` that runs in one kernel with its collective, or not at all."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from mc2.autograd import RowLinear
from mc2.errors import MC2ConstraintError
from mc2.kernel_interface import CallFacts, Kernel, Operation, describe_reasons
from mc2.kernels import get_kernel, resolve_kernel
from mc2.options import ColumnBackward, FusionOptions
from mc2.row_layout import RowLayout
from mc2.rules import all_gather_linear
from mc2.shared_gather import shared_deferred_gather
from pending_dtensor.collectives import DeferredAllGather, chunk_sizes
from pending_dtensor.hyper_dtensor import HyperDTensor, as_hyper, redistribute_deferred
from pending_dtensor.linear import plan_linear
from pending_dtensor.pending_local import PendingLocal

Mode = Literal["all_gather", "reduce_scatter"]


class _Configuration(NamedTuple):
    """What `MC2Linear.configure_mc2` decided.

    Attributes:
        mode: ``all_gather`` for a column, ``reduce_scatter`` for a row.
        axis: mesh axis of the weight that the layer is sharded over.
        group: its process group.
        sequence_dim: the tensor dim that is sharded before a column or after a row.
        options: kernel and the like.
    """

    mode: Mode
    axis: int
    group: ProcessGroup
    sequence_dim: int
    options: FusionOptions


class MC2Linear(nn.Linear):
    """A Linear fused with the all-gather before it or the reduce-scatter after it.

    Mode ``all_gather`` (column): weight Shard(0), input sharded on the sequence, output Shard(-1).
    Mode ``reduce_scatter`` (row): weight Shard(1), input Shard(-1), output sharded on the sequence.

    It never runs unfused: unconfigured, or given what its kernel cannot do, it raises.
    """

    _mc2: _Configuration | None = None

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> MC2Linear:
        """Turns a Linear into an MC2Linear: the same object, with its parameters, hooks and names.

        Args:
            linear: exactly an ``nn.Linear``; it becomes the MC2Linear.

        Returns:
            ``linear``.

        Raises:
            TypeError: it is something else; a subclass may compute something else, too.
        """
        if isinstance(linear, cls):
            return linear
        if type(linear) is not nn.Linear:
            raise TypeError(
                f"Expected an nn.Linear, got {type(linear).__name__} (MC2Linear.from_linear). A "
                f"fused kernel computes input @ weight.T + bias and nothing else."
            )
        linear.__class__ = cls
        return linear

    def configure_mc2(
        self,
        mode: Mode,
        device_mesh: DeviceMesh | None = None,
        *,
        group: ProcessGroup | None = None,
        sequence_dim: int = 1,
        kernel: str = "auto",
        chunks: int | Literal["auto"] = "auto",
        regather: bool = False,
        column_backward: ColumnBackward = "fused",
    ) -> MC2Linear:
        """Says how to fuse. Collective: call it on every rank of the group alike.

        Args:
            mode: ``all_gather`` or ``reduce_scatter``.
            device_mesh: 1-D mesh that the weight is sharded over; or
            group: that mesh axis's process group.
            sequence_dim: tensor dim that is sharded on the sequence side; may be negative.
            kernel: ``ascend``, ``pipelined``, ``decomposed``, or ``auto``: ascend on npu, an error
                elsewhere.
            chunks: pieces each rank's rows are cut into by the pipelined kernel.
            regather: save the sharded input of a column, and gather it again in backward.
            column_backward: ``fused`` or ``overlap``; see `FusionOptions`.

        Returns:
            The module.

        Raises:
            MC2ConstraintError: with every reason why this cannot be fused.
            TypeError: neither or both of ``device_mesh`` and ``group``.
        """
        if (device_mesh is None) == (group is None):
            raise TypeError(
                "Expected either device_mesh or group, got both or neither (configure_mc2)."
            )
        if device_mesh is not None:
            if device_mesh.ndim != 1:
                raise MC2ConstraintError(
                    f"Expected a 1-D mesh, got {device_mesh} (configure_mc2). Pass the TP axis of "
                    f'it, such as mesh["tp"].'
                )
            group = device_mesh.get_group()
        assert group is not None
        options = checked_options(
            mode,
            self.in_features,
            self.out_features,
            self.weight.dtype,
            self.weight.device.type,
            group,
            FusionOptions(kernel, chunks, regather, column_backward),
        )
        axis = _sharded_axis(self.weight, mode, group)
        get_kernel(options.kernel).prepare(group)
        self._mc2 = _Configuration(mode, axis, group, sequence_dim, options)
        return self

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Runs the layer in its fused kernel.

        Args:
            input: DTensor (*, K), sharded on the sequence or a deferred gather of that (column), or
                Shard(-1) (row).

        Returns:
            HyperDTensor (*, N).

        Raises:
            MC2ConstraintError: unconfigured, or the kernel cannot do it; nothing was communicated.
            TypeError: the input is no DTensor.
        """
        config = self._mc2
        if config is None:
            raise MC2ConstraintError(
                "Expected a configured MC2Linear, got one that does not know what to fuse with "
                "(MC2Linear.forward). Call configure_mc2, or use MC2ColwiseParallel or "
                "MC2RowwiseParallel."
            )
        if not isinstance(input, DTensor):
            raise TypeError(
                f"Expected a DTensor, got {type(input).__name__} (MC2Linear in mode "
                f"{config.mode!r}). A plain tensor does not say how it is sharded; use the MC2 "
                f"styles, or HyperDTensor.from_local."
            )
        if config.mode == "all_gather":
            return self._column(input, config)
        return self._row(input, config)

    def _column(self, input: DTensor, config: _Configuration) -> HyperDTensor:
        gathered = _deferred_input(input, config)
        weight, bias = _autocast(self.weight, self.bias)
        recipe = gathered._local_tensor.recipe
        layout = RowLayout.from_shape(gathered.shape, recipe.dim, recipe.sizes, config.group.rank())
        if gathered.requires_grad and torch.is_grad_enabled():
            # Refused now rather than in backward, when half of the step is done.
            _require(config, "matmul_reduce_scatter", gathered.dtype, layout)
        return all_gather_linear(gathered, weight, bias, config.options)

    def _row(self, input: DTensor, config: _Configuration) -> HyperDTensor:
        hyper = as_hyper(input)
        weight, bias = _autocast(self.weight, self.bias)
        if hyper.dtype != weight.dtype and weight is not self.weight:
            hyper = hyper.to(weight.dtype)
        plan = plan_linear(hyper._spec, weight._spec, None if bias is None else bias._spec)
        if plan is None or not plan.out.placements[config.axis].is_partial():
            raise MC2ConstraintError(
                f"Expected an input that is Shard(-1) and fits the weight, got "
                f"{tuple(hyper.shape)} as {hyper.placements} for a weight {tuple(weight.shape)} as "
                f"{weight.placements} (MC2Linear in mode 'reduce_scatter')."
            )
        dim = _sequence_dim(config, input)
        sizes = chunk_sizes(plan.out.shape[dim], config.group.size())
        layout = RowLayout.from_shape(plan.out.shape, dim, sizes, config.group.rank())
        _require(config, "matmul_reduce_scatter", hyper.dtype, layout)
        if hyper.requires_grad and torch.is_grad_enabled():
            _require(config, "all_gather_matmul", hyper.dtype, layout)
        out = RowLinear.apply(hyper, weight, bias, plan, config.options)
        return redistribute_deferred(out, _with_axis(out.placements, config.axis, Shard(dim)))

    def extra_repr(self) -> str:
        """The Linear's, with mode, kernel and ranks."""
        config = self._mc2
        if config is None:
            return f"{super().extra_repr()}, mode=None"
        options = config.options
        extra = f", mode={config.mode}, kernel={options.kernel}, ranks={config.group.size()}"
        if options.chunks != "auto":
            extra += f", chunks={options.chunks}"
        if config.mode == "all_gather":
            extra += f", regather={options.regather}, column_backward={options.column_backward}"
        return super().extra_repr() + extra


def checked_options(
    mode: Mode,
    in_features: int,
    out_features: int,
    dtype: torch.dtype,
    device_type: str,
    group: ProcessGroup,
    options: FusionOptions,
) -> FusionOptions:
    """Resolves the kernel and checks all that is known before the first call.

    Decided from global facts, the same on every rank; nothing is communicated.

    Raises:
        MC2ConstraintError: with every reason.
        ValueError: an unknown mode.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"Expected mode to be one of {get_args(Mode)}, got {mode!r}.")
    options = options.checked()._replace(kernel=resolve_kernel(options.kernel, device_type).name)
    kernel = get_kernel(options.kernel)
    ranks = group.size()
    contractions: dict[Operation, list[int]]
    if mode == "all_gather":
        contractions = {
            "all_gather_matmul": [in_features],
            "matmul_reduce_scatter": chunk_sizes(out_features, ranks),
        }
    else:
        contractions = {
            "matmul_reduce_scatter": chunk_sizes(in_features, ranks),
            "all_gather_matmul": [out_features],
        }
    messages = []
    for op, sizes in contractions.items():
        facts = CallFacts(
            ranks=ranks,
            contractions=tuple(sorted(set(sizes))),
            dtypes=(dtype,),
            group=group,
            chunks=options.chunks,
        )
        reasons = kernel.reasons_not_supported(op, facts)
        if reasons:
            messages.append(describe_reasons(kernel.name, op, reasons))
    if messages:
        raise MC2ConstraintError("\n".join(messages))
    return options


def _require(config: _Configuration, op: Operation, dtype: torch.dtype, layout: RowLayout) -> None:
    kernel: Kernel = get_kernel(config.options.kernel)
    facts = CallFacts(ranks=layout.ranks, dtypes=(dtype,), layout=layout, group=config.group)
    reasons = kernel.reasons_not_supported(op, facts)
    if reasons:
        raise MC2ConstraintError(describe_reasons(kernel.name, op, reasons))


def _sharded_axis(weight: Any, mode: Mode, group: ProcessGroup) -> int:
    """The mesh axis over ``group`` that a weight is sharded over as ``mode`` needs it."""
    wanted = Shard(0) if mode == "all_gather" else Shard(1)
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        for axis, placement in enumerate(weight.placements):
            if placement == wanted and mesh.get_group(axis).group_name == group.group_name:
                return axis
    found = weight.placements if isinstance(weight, DTensor) else "a plain tensor"
    raise MC2ConstraintError(
        f"Expected a DTensor weight that is {wanted} over the group {group.group_name!r} for mode "
        f"{mode!r}, got {found} (configure_mc2). Distribute the weight first, or use the MC2 "
        f"styles, which do."
    )


def _sequence_dim(config: _Configuration, input: DTensor) -> int:
    dim = config.sequence_dim
    if not -input.ndim <= dim < input.ndim or dim % input.ndim == input.ndim - 1:
        raise MC2ConstraintError(
            f"Expected a sequence dim before the last of {input.ndim} dims, got {dim} (MC2Linear "
            f"in mode {config.mode!r}, input of shape {tuple(input.shape)})."
        )
    return dim % input.ndim


def _deferred_input(input: DTensor, config: _Configuration) -> HyperDTensor:
    """A column's input as the deferred gather of its sequence shard."""
    dim = _sequence_dim(config, input)
    placement = input.placements[config.axis]
    if placement == Shard(dim):
        whole = _with_axis(input.placements, config.axis, Replicate())
        return shared_deferred_gather(input, whole, lambda: as_hyper(input))
    local = input._local_tensor
    recipe = local.recipe if isinstance(local, PendingLocal) else None
    if (
        not isinstance(input, HyperDTensor)
        or not isinstance(recipe, DeferredAllGather)
        or recipe.dim != dim
        or recipe.axis.group != config.group.group_name
    ):
        raise MC2ConstraintError(
            f"Expected the input sharded on sequence dim {dim}, or a deferred gather of that, got "
            f"{placement} with {type(local).__name__} (MC2Linear in mode 'all_gather'). Without "
            f"sequence parallelism there is no gather to fuse: use ColwiseParallel."
        )
    return input


def _autocast(weight: DTensor, bias: DTensor | None) -> tuple[DTensor, DTensor | None]:
    device_type = weight.device.type
    if not torch.is_autocast_enabled(device_type) or weight.dtype == torch.float64:
        return weight, bias
    dtype = torch.get_autocast_dtype(device_type)
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def _with_axis(
    placements: tuple[Placement, ...], axis: int, placement: Placement
) -> tuple[Placement, ...]:
    return (*placements[:axis], placement, *placements[axis + 1 :])
