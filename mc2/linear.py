"""`MC2Linear`: an ``nn.Linear`` that runs in one kernel with its collective, or not at all."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from mc2.autocast import as_autocast, autocast_dtype
from mc2.autograd import RowLinear
from mc2.errors import MC2ConstraintError
from mc2.kernel_interface import CallFacts, Kernel, Operation, describe_reasons
from mc2.kernels import get_kernel, resolve_kernel
from mc2.options import ColumnBackward, FusionOptions
from mc2.row_layout import RowLayout
from mc2.rules import all_gather_linear
from mc2.shared_gather import a_row_runs, deferred_gather, shared_deferred_gather
from mc2.torch_compat import in_eager_mode
from pending_dtensor.collectives import DeferredAllGather, chunk_sizes
from pending_dtensor.hyper_dtensor import HyperDTensor, as_hyper, redistribute_deferred
from pending_dtensor.linear import plan_linear
from pending_dtensor.pending_local import PendingLocal

Mode = Literal["all_gather", "reduce_scatter"]

_call_in_eager_mode = in_eager_mode(nn.Linear.__call__)


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

    def __deepcopy__(self, memo: dict[int, Any]) -> _Configuration:
        return self  # a copied layer runs in the same process group, which cannot be copied


class MC2Linear(nn.Linear):
    """A Linear fused with the all-gather before it or the reduce-scatter after it.

    Mode ``all_gather`` (column): weight Shard(0), input sharded on the sequence, output Shard(-1).
    Mode ``reduce_scatter`` (row): weight Shard(1), input Shard(-1), output sharded on the sequence.

    It never runs unfused: unconfigured, or given what its kernel cannot do, it raises.
    """

    _mc2: _Configuration | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the layer and its hooks, outside of the graphs of ``torch.compile``."""
        # Dynamo cannot trace a value that is deferred.
        call = _call_in_eager_mode if torch.compiler.is_compiling() else nn.Linear.__call__
        return call(self, *args, **kwargs)

    @classmethod
    def from_linear(cls, linear: nn.Module) -> MC2Linear:
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
            TypeError: neither or both of ``device_mesh`` and ``group``, or something else than
                these, or than a whole number as ``sequence_dim``.
            ValueError: an unknown mode.
        """
        if (device_mesh is None) == (group is None):
            raise TypeError(
                "Expected either device_mesh or group, got both or neither (configure_mc2)."
            )
        where: Any = group if device_mesh is None else device_mesh
        kind = ProcessGroup if device_mesh is None else DeviceMesh
        for value, wanted in ((where, kind), (sequence_dim, int)):
            if not isinstance(value, wanted):
                raise TypeError(f"Expected {wanted.__name__}, got {value!r} (configure_mc2).")
        if device_mesh is not None:
            if device_mesh.ndim != 1:
                raise MC2ConstraintError(
                    f"Expected a 1-D mesh, got {device_mesh} (configure_mc2). Pass the TP axis of "
                    f'it, such as mesh["tp"].'
                )
            group = device_mesh.get_group()
        assert group is not None
        options = FusionOptions(kernel, chunks, regather, column_backward)
        options = checked_options(self, mode, self.weight.device.type, group, options)
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
        config = self._configuration()
        if not isinstance(input, DTensor):
            raise TypeError(
                f"Expected a DTensor, got {type(input).__name__} (MC2Linear in mode "
                f"{config.mode!r}). A plain tensor does not say how it is sharded; use the MC2 "
                f"styles, or HyperDTensor.from_local."
            )
        self._require_mesh(input, config)
        if config.mode == "all_gather":
            return self._column(input, config)
        return self._row(input, config)

    def _configuration(self) -> _Configuration:
        if self._mc2 is None:
            raise MC2ConstraintError(
                "Expected a configured MC2Linear, got one that does not know what to fuse with "
                "(MC2Linear.forward). Call configure_mc2, or use MC2ColwiseParallel or "
                "MC2RowwiseParallel."
            )
        return self._mc2

    def _require_mesh(self, input: DTensor, config: _Configuration) -> None:
        if input.device_mesh != self.weight.device_mesh:
            raise MC2ConstraintError(
                f"Expected an input on the mesh of the weight, {self.weight.device_mesh}, got "
                f"{input.device_mesh} (MC2Linear in mode {config.mode!r})."
            )

    def _column(self, input: DTensor, config: _Configuration) -> HyperDTensor:
        gathered = self._deferred_input(input, config)
        local = gathered._local_tensor
        layout = RowLayout.from_shape(
            local.shape, local.recipe.dim, local.recipe.sizes, config.group.rank()
        )
        operations: list[Operation] = ["all_gather_matmul"]
        if config.options.column_backward == "fused" and _will_differentiate(gathered):
            # Refused now rather than in backward, when half of the step is done.
            operations.append("matmul_reduce_scatter")
        self._require(config, operations, gathered.dtype, layout)
        self._join(gathered, config)
        bias = None if self.bias is None else as_autocast(self.bias)
        return all_gather_linear(gathered, as_autocast(self.weight), bias, config.options)

    def _row(self, input: DTensor, config: _Configuration) -> HyperDTensor:
        a_row_runs()
        hyper = as_autocast(as_hyper(input))
        weight = as_autocast(self.weight)
        bias = None if self.bias is None else as_autocast(self.bias)
        plan = plan_linear(hyper._spec, weight._spec, None if bias is None else bias._spec)
        if plan is None or not plan.out.placements[config.axis].is_partial():
            raise MC2ConstraintError(
                f"Expected an input that is Shard(-1) and fits the weight, got "
                f"{tuple(hyper.shape)} as {hyper.placements} for a weight {tuple(weight.shape)} as "
                f"{weight.placements} (MC2Linear in mode 'reduce_scatter')."
            )
        dim = self._require_row(hyper, hyper._local_tensor.shape[:-1], config)
        out = RowLinear.apply(hyper, weight, bias, plan, config.options, config.group.group_name)
        return redistribute_deferred(out, _with_axis(out.placements, config.axis, Shard(dim)))

    def require_row(self, input: DTensor) -> None:
        """Raises what `forward` of a row would, for an input that is not Shard(-1) yet.

        Asked before it is made so, because that communicates.

        Args:
            input: (*, K) in any placement on a 1-D mesh.

        Raises:
            MC2ConstraintError: the kernel cannot do it; nothing was communicated.
        """
        config = self._configuration()
        self._require_mesh(input, config)
        self._require_row(input, input.shape[:-1], config)

    def _require_row(self, input: DTensor, lead: Sequence[int], config: _Configuration) -> int:
        """Checks a row's output of ``(*lead, N)`` on this rank before it is reduced.

        Returns:
            The sequence dim.
        """
        dim = _sequence_dim(config, input)
        sizes = chunk_sizes(lead[dim], config.group.size())
        layout = RowLayout.from_shape((*lead, self.out_features), dim, sizes, config.group.rank())
        operations: list[Operation] = ["matmul_reduce_scatter"]
        if _will_differentiate(input):
            operations.append("all_gather_matmul")
        self._require(config, operations, autocast_dtype(input), layout)
        return dim

    def _require(
        self,
        config: _Configuration,
        operations: Sequence[Operation],
        dtype: torch.dtype,
        layout: RowLayout,
    ) -> None:
        facts = CallFacts(
            ranks=layout.ranks,
            dtypes=(dtype, *(autocast_dtype(p) for p in self.parameters(recurse=False))),
            layout=layout,
            group=config.group,
            chunks=config.options.chunks,
        )
        _require(get_kernel(config.options.kernel), dict.fromkeys(operations, facts))

    def shared_gather(
        self, source: torch.Tensor, boundary: Hashable, make: Callable[[], HyperDTensor]
    ) -> HyperDTensor:
        """`shared_deferred_gather` for this column, among columns that it can share one with."""
        config = self._configuration()

        def joins(gather: HyperDTensor) -> bool:
            return not self._reasons_not_to_join(gather, config)

        until_row = config.options.regather
        return shared_deferred_gather(source, self, boundary, make, joins, until_row=until_row)

    def _join(self, gathered: HyperDTensor, config: _Configuration) -> None:
        """Counts this column among the readers of a gather.

        Raises:
            MC2ConstraintError: the gather was handed to columns that cannot share it.
        """
        reasons = self._reasons_not_to_join(gathered, config)
        if reasons:
            raise MC2ConstraintError(
                f"Expected columns that can share the gather they were handed (MC2Linear in mode "
                f"'all_gather'), got: {' '.join(reasons)} Let each gather for itself: no "
                f"PrepareModuleInput(defer=True)."
            )
        readers = _readers.setdefault(gathered._local_tensor.recipe, _Readers(config.options, []))
        readers.out_features.append(self.out_features)

    def _reasons_not_to_join(self, gathered: HyperDTensor, config: _Configuration) -> list[str]:
        """Why the grad_inputs of this column and of a gather's readers cannot be reduced as one."""
        readers = _readers.get(gathered._local_tensor.recipe)
        if readers is None:
            return []
        options, first = config.options, readers.options
        if (options.kernel, options.column_backward) != (first.kernel, first.column_backward):
            return [
                f"Expected them to be fused alike, got kernel={options.kernel!r} with "
                f"column_backward={options.column_backward!r} besides {first.kernel!r} with "
                f"{first.column_backward!r}."
            ]
        if options.column_backward != "fused" or not _will_differentiate(gathered):
            return []
        ranks = config.group.size()
        features = [chunk_sizes(n, ranks) for n in (*readers.out_features, self.out_features)]
        contractions = tuple(sorted({sum(on_rank) for on_rank in zip(*features, strict=True)}))
        facts = CallFacts(ranks=ranks, contractions=contractions)
        return get_kernel(options.kernel).reasons_not_supported("matmul_reduce_scatter", facts)

    def _deferred_input(self, input: DTensor, config: _Configuration) -> HyperDTensor:
        """A column's input as the deferred gather of its sequence shard."""
        dim = _sequence_dim(config, input)
        axis, placements = config.axis, input.placements
        if placements[axis] == Shard(dim):
            if Shard(dim) in placements[axis + 1 :]:
                raise MC2ConstraintError(
                    f"Expected no mesh axis after {axis} that shards the sequence dim too, got "
                    f"{placements} (MC2Linear in mode 'all_gather'). Such an axis has to be "
                    f"gathered first: put the tensor parallel axis last in the mesh."
                )
            whole = _with_axis(placements, axis, Replicate())
            return self.shared_gather(input, whole, lambda: deferred_gather(as_hyper(input), whole))
        local = input._local_tensor
        recipe = local.recipe if isinstance(local, PendingLocal) else None
        if (
            not isinstance(input, HyperDTensor)
            or not isinstance(recipe, DeferredAllGather)
            or recipe.dim != dim
            or recipe.axis.group != config.group.group_name
        ):
            raise MC2ConstraintError(
                f"Expected the input sharded on sequence dim {dim}, or a deferred gather of that, "
                f"got {placements[axis]} with {type(local).__name__} (MC2Linear in mode "
                f"'all_gather'). Without sequence parallelism there is no gather to fuse: use "
                f"ColwiseParallel."
            )
        return input

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
    linear: nn.Linear,
    mode: Mode,
    device_type: str,
    group: ProcessGroup,
    options: FusionOptions,
) -> FusionOptions:
    """Resolves the kernel and checks all that is known before the first call.

    Decided from global facts, the same on every rank; nothing is communicated or changed.

    Args:
        linear: the layer, with its global sizes.
        mode: how it will be fused.
        device_type: where it will run.
        group: the ranks.
        options: what is asked for; kernel may be ``auto``.

    Raises:
        MC2ConstraintError: with every reason.
        ValueError: an unknown mode.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"Expected mode to be one of {get_args(Mode)}, got {mode!r}.")
    options = options.checked()
    kernel = resolve_kernel(options.kernel, device_type)
    contractions: dict[Operation, Sequence[int]] = {}
    if mode == "all_gather":
        contractions["all_gather_matmul"] = [linear.in_features]
        if options.column_backward == "fused":
            contractions["matmul_reduce_scatter"] = chunk_sizes(linear.out_features, group.size())
    else:
        contractions["matmul_reduce_scatter"] = chunk_sizes(linear.in_features, group.size())
        contractions["all_gather_matmul"] = [linear.out_features]
    facts = {
        op: CallFacts(
            ranks=group.size(),
            contractions=tuple(sorted(set(sizes))),
            dtypes=tuple(parameter.dtype for parameter in linear.parameters(recurse=False)),
            group=group,
            chunks=options.chunks,
        )
        for op, sizes in contractions.items()
    }
    _require(kernel, facts)
    sharded = linear.out_features if mode == "all_gather" else linear.in_features
    return options._replace(kernel=kernel.name, width=chunk_sizes(sharded, group.size())[0])


def _require(kernel: Kernel, facts: Mapping[Operation, CallFacts]) -> None:
    """Raises with every reason why the kernel cannot run one of these operations."""
    reasons = {op: kernel.reasons_not_supported(op, known) for op, known in facts.items()}
    messages = [describe_reasons(kernel.name, op, found) for op, found in reasons.items() if found]
    if messages:
        raise MC2ConstraintError("\n".join(messages))


class _Readers(NamedTuple):
    """The columns that have read a gather so far: options of the first, out features of each."""

    options: FusionOptions
    out_features: list[int]


_readers: weakref.WeakKeyDictionary[DeferredAllGather, _Readers] = weakref.WeakKeyDictionary()


def _will_differentiate(input: torch.Tensor) -> bool:
    return input.requires_grad and torch.is_grad_enabled()


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


def _with_axis(
    placements: tuple[Placement, ...], axis: int, placement: Placement
) -> tuple[Placement, ...]:
    return (*placements[:axis], placement, *placements[axis + 1 :])
