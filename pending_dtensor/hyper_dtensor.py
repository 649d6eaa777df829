"""`HyperDTensor`: a DTensor whose redistribution can stay in flight, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed.tensor as torch_dtensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Partial, Placement

from pending_dtensor.collectives import mesh_axis
from pending_dtensor.consistency import check_consistent, checking
from pending_dtensor.dispatch import OpDispatcher
from pending_dtensor.metadata_check import check_local_metadata
from pending_dtensor.pending_local import PendingLocal, materialized
from pending_dtensor.redistribute import (
    as_tuple,
    cast_local,
    checked_dtype,
    checked_placements,
    fitting_placements,
    gradient_placements,
    redistribute_local,
    whole_placements,
    with_dtype,
    with_placements,
)
from pending_dtensor.reshape_in_place import refuse_if_autograd_knows_views
from pending_dtensor.torch_compat import (
    DTensorSpec,
    TensorMeta,
    compute_global_tensor_info,
    current_mesh,
    is_tracing,
    plain_dtensor,
    reserve_sequence_nr,
)

dispatcher = OpDispatcher()


class HyperDTensor(DTensor):
    """A `DTensor` whose local tensor may be a `PendingLocal`.

    Results of its ops are HyperDTensors again. Parameters and the gradients that reach leaves stay
    plain DTensors, so that optimizers, FSDP2 and checkpoints meet nothing new. It mixes with plain
    DTensors; pickled, it is a plain DTensor.

    Fields: ``_local_tensor`` and ``_spec``, as in torch.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: ``__new__`` has set everything, and torch's own costs 5 us to do as little."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatcher.call_function(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatcher.dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return (
            f"HyperDTensor(local_tensor={self._local_tensor!r}, device_mesh={self._spec.mesh}, "
            f"placements={self._spec.placements})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Saved as torch's own class, so that loading needs neither this package nor any trust in
        # it. Tensor.__reduce_ex__ looks at the class, so it is asked of a plain DTensor.
        local = materialized(self._local_tensor).detach()
        if local.storage_offset():
            local = local.clone()  # torch saves no DTensor whose local tensor has an offset
        plain = DTensor(local, self._spec, requires_grad=self.requires_grad)
        return plain.__reduce_ex__(protocol)

    def __coerce_same_metadata_as_tangent__(
        self, flatten_spec: Any, expected_type: type | None = None
    ) -> DTensor | None:
        """The gradient of a compiled graph's output as it was traced: torch's own class as well."""
        if expected_type not in (None, HyperDTensor, DTensor):
            return None
        traced_as_plain = expected_type is DTensor
        same = self.redistribute(placements=flatten_spec[0])
        if traced_as_plain:
            return plain_dtensor(materialized(same._local_tensor), same._spec)
        return same

    def data_ptr(self) -> int:
        """Zero: the data are the local tensor's. Torch's gives that tensor's offset."""
        return 0

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: torch.Size | Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> HyperDTensor:
        """As `DTensor.from_local`, giving a HyperDTensor.

        The gradient of ``local_tensor``: for Shard the shard of the gradient, for Replicate and
        Partial("sum") the whole gradient, for Partial("avg") the whole divided by the ranks (each
        rank's summand enters the mean with weight 1 / R). Torch leaves that division out.
        For Partial("max") and ("min") it is the whole gradient on every rank, as in torch.

        Args:
            local_tensor: this rank's part; its shape may differ between ranks only if ``shape`` and
                ``stride`` are given.
            device_mesh: the mesh; None for the current one.
            placements: one for each mesh axis; None for Replicate on all.
            run_check: compare shape, stride and dtype over the ranks (communicates), and broadcast
                Replicate data from the first rank of the axis.
            shape: global shape, needed for uneven shards; together with ``stride``.
            stride: global stride in elements.
            grad_placements: placements in which the gradient shall arrive.

        Raises:
            TypeError: ``local_tensor`` is not a plain tensor, or something else than a mesh,
                placements, or whole numbers in ``shape`` and ``stride``.
            PlacementError: placements that fit neither the mesh nor the tensor.
            ValueError: one of ``shape`` and ``stride`` without the other, or not of the tensor's
                dims, or ``run_check`` found ranks that disagree (raised on all of them).
        """
        return local_to_hyper(
            local_tensor,
            device_mesh,
            placements,
            run_check=run_check,
            shape=shape,
            stride=stride,
            grad_placements=grad_placements,
        )

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's local tensor, as it is: a `PendingLocal` stays pending.

        Args:
            grad_placements: placements of the gradient that will come back; None for this tensor's
                own, with Partial as Replicate.
        """
        if is_tracing():
            return super().to_local(grad_placements=grad_placements)
        return _to_local(self, grad_placements, owned=False)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> HyperDTensor:
        """Moves the tensor to other placements on its mesh; differentiable any number of times.

        Args:
            device_mesh: None, or the mesh the tensor is on.
            placements: the target, one for each mesh axis.
            async_op: return while the last collective is in flight; the first read waits. Backward
                does the same. False returns, forward and backward, nothing that is pending.
            forward_dtype: dtype to communicate in and to return; None for the tensor's.
            backward_dtype: dtype to communicate the gradient in, which is then cast back to the
                tensor's; None for the tensor's.

        Raises:
            PlacementError: placements that do not fit, or a change to Partial.
            TypeError: something else than placements, a mesh or dtypes.
            NotImplementedError: another mesh.
            ProcessGroupGoneError: the mesh's process group was destroyed.
        """
        if device_mesh is not None:
            checked_mesh(device_mesh, "redistribute")
        targets = checked_placements(as_tuple(placements), self._spec, device_mesh)
        checked_dtype(forward_dtype, "forward_dtype")
        checked_dtype(backward_dtype, "backward_dtype")
        if is_tracing():
            return super().redistribute(
                placements=targets,
                async_op=async_op,
                forward_dtype=forward_dtype,
                backward_dtype=backward_dtype,
            )
        dtype = forward_dtype or self.dtype
        return _redistribute(self, _Move(targets, async_op, dtype, dtype, backward_dtype))

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor on every rank, finished.

        Args:
            grad_placements: placements of the gradient that will come back; None for Replicate.
        """
        grads = _gradient_placements(grad_placements, self._spec)  # before any communication
        whole = self.redistribute(placements=[Replicate()] * self.device_mesh.ndim)
        return whole.to_local(grad_placements=grads)


def _wrap(local: torch.Tensor, spec: DTensorSpec) -> HyperDTensor:
    return HyperDTensor(local, spec, requires_grad=False)


dispatcher.set_wrapper(_wrap)


def _before_squeeze(tensor: HyperDTensor, *args: Any, **kwargs: Any) -> Any:
    """Of the ops that change a shape in place, torch has a sharding rule for ``squeeze_`` only."""
    # A view holds its base; so does a node that has saved it, and would find it written to.
    refuse_if_autograd_knows_views("squeeze_", tensor, tensor._use_count() > 1)
    return NotImplemented


dispatcher.register_function(torch.Tensor.squeeze_, _before_squeeze)


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> HyperDTensor:
    """As `torch.distributed.tensor.distribute_tensor`, giving a HyperDTensor leaf.

    Args:
        tensor: the global leaf tensor.
        device_mesh: the mesh; None for the current one.
        placements: one for each mesh axis; None for Replicate on all.
        src_data_rank: rank within each axis whose data is sent out; None to use each rank's own
            data without communication.

    Raises:
        PlacementError: placements that fit neither the mesh nor the tensor.
        TypeError: something else than a tensor, a mesh, placements or a rank.
        ValueError: a mesh axis does not have that rank; or, as in torch, a DTensor that would
            have to be moved.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"Expected a torch.Tensor, got {type(tensor).__name__} (distribute_tensor). Pass the "
            f"global tensor."
        )
    where = f"distribute_tensor of shape {tuple(tensor.shape)}"
    mesh = checked_mesh(device_mesh, where)
    if placements is not None:
        placements = fitting_placements(_some(placements), mesh, tensor.ndim, where)
    check_source_rank(src_data_rank, mesh, where)
    plain = torch_dtensor.distribute_tensor(tensor, mesh, placements, src_data_rank=src_data_rank)
    return HyperDTensor(plain._local_tensor, plain._spec, requires_grad=tensor.requires_grad)


def local_to_hyper(
    local: torch.Tensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    *,
    run_check: bool = False,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    grad_placements: Sequence[Placement] | None = None,
    async_backward: bool = False,
    where: str = "from_local",
) -> HyperDTensor:
    """`HyperDTensor.from_local`; ``async_backward`` leaves the gradient's reduction in flight.

    ``where`` is what `debug_consistency` calls the place if ranks disagree.
    """
    if not isinstance(local, torch.Tensor) or isinstance(local, DTensor):
        raise TypeError(
            f"Expected a local torch.Tensor, got {type(local).__name__} (from_local). "
            f"Use to_local() or full_tensor() to leave a DTensor first."
        )
    mesh = checked_mesh(mesh, "from_local")
    if placements is None:
        placements = [Replicate()] * mesh.ndim
    spec = _spec_of_local(
        tuple(local.shape),
        local.stride(),
        local.dtype,
        mesh,
        _some(placements),
        _checked_sizes(shape, "shape", local.ndim),
        _checked_sizes(stride, "stride", local.ndim),
    )
    if mesh.device_type != local.device.type and not local.is_meta:
        local = local.to(mesh.device_type)
    if checking():
        size = tuple(local.shape) if shape is None else tuple(shape)
        for axis in range(mesh.ndim):
            group = mesh_axis(mesh, axis).group
            check_consistent(where, group, shape=size, dtype=local.dtype, placements=placements)
    if run_check:
        local = check_local_metadata(local, spec, shape_given=shape is not None)
    grads = _gradient_placements(grad_placements, spec)
    tensor = _FromLocal.apply(local, spec, async_backward, grads)
    if async_backward and Replicate() in spec.placements:
        # A node of its own reduces the gradient: _FromLocal would wait in it if local is a leaf.
        same = _Move(spec.placements, True, local.dtype, local.dtype, None)
        tensor = _redistribute(tensor, same)
    return tensor


def as_hyper(tensor: DTensor) -> HyperDTensor:
    """The same DTensor as a HyperDTensor; its gradient goes back to it unchanged."""
    return tensor if isinstance(tensor, HyperDTensor) else _AsHyper.apply(tensor)


def redistribute_deferred(tensor: HyperDTensor, placements: Sequence[Placement]) -> HyperDTensor:
    """Redistributes for a fused rule: a gather at the end is deferred, forward and backward.

    A reduce-scatter of a deferred matmul runs by the rule (linear, reduce_scatter), if there is
    one. Any other collective is launched asynchronously.
    """
    targets = checked_placements(as_tuple(placements), tensor._spec, None)
    dtype = tensor.dtype
    return _redistribute(tensor, _Move(targets, True, dtype, dtype, None, defer=True))


def take_local(tensor: HyperDTensor) -> torch.Tensor:
    """`HyperDTensor.to_local` of a tensor that nobody else holds or has saved for backward.

    The result may be written to in place, which a view made inside an autograd function may not.
    """
    return _to_local(tensor, None, owned=True)


def _to_local(
    tensor: DTensor, grad_placements: Sequence[Placement] | None, *, owned: bool
) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return tensor._local_tensor
    grads = _gradient_placements(grad_placements, tensor._spec)
    return _ToLocal.apply(tensor, grads, owned)


def checked_mesh(mesh: Any, where: str) -> DeviceMesh:
    """The mesh, or the current one for None.

    Raises:
        TypeError: it is something else.
    """
    if mesh is None:
        return current_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"Expected a DeviceMesh or None, got {mesh!r} ({where}). Make one with "
            f"init_device_mesh."
        )
    return mesh


def check_source_rank(rank: Any, mesh: DeviceMesh, where: str) -> None:
    """Checks a ``src_data_rank``: a rank within every axis of the mesh, or None.

    Raises:
        TypeError: it is neither a whole number nor None.
        ValueError: an axis does not have it.
    """
    if rank is None:
        return
    if not isinstance(rank, int):
        raise TypeError(f"Expected an int or None as src_data_rank, got {rank!r} ({where}).")
    if not 0 <= rank < min(mesh.shape):
        raise ValueError(
            f"Expected a src_data_rank that each mesh axis has, got {rank} for {mesh} ({where}). "
            f"It is counted within an axis."
        )


def _checked_sizes(sizes: Any, name: str, ndim: int) -> tuple[int, ...] | None:
    if sizes is None:
        return None
    if not isinstance(sizes, (list, tuple)) or not all(
        isinstance(size, (int, torch.SymInt)) for size in sizes
    ):
        raise TypeError(
            f"Expected whole numbers as {name}, got {sizes!r} (from_local). Pass the global "
            f"tensor's {name}."
        )
    if len(sizes) != ndim or any(size < 0 for size in sizes):
        raise ValueError(
            f"Expected {name} of {ndim} dims, none of them negative, got {sizes} (from_local of a "
            f"tensor of {ndim} dims). Pass the global tensor's {name}."
        )
    return tuple(sizes)


def _some(placements: Any) -> tuple[Placement, ...]:
    found = as_tuple(placements)
    assert found is not None
    return found


def _gradient_placements(placements: Any, spec: DTensorSpec) -> tuple[Placement, ...] | None:
    if placements is None:
        return None
    where = f"grad_placements of a tensor of shape {tuple(spec.shape)}"
    return fitting_placements(_some(placements), spec.mesh, len(spec.shape), where)


@functools.lru_cache(maxsize=4096)
def _spec_of_local(
    local_shape: tuple[int, ...],
    local_stride: tuple[int, ...],
    dtype: torch.dtype,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...] | None,
    stride: tuple[int, ...] | None,
) -> DTensorSpec:
    where = f"from_local of a tensor of shape {local_shape}"
    if (shape is None) != (stride is None):
        raise ValueError(
            f"Expected shape and stride together, got shape={shape}, stride={stride} ({where}). "
            f"Pass both or neither."
        )
    normal = fitting_placements(placements, mesh, len(local_shape), where)
    if shape is None:
        like = torch.empty_strided(local_shape, local_stride, device="meta")
        shape, stride = compute_global_tensor_info(like, mesh, normal)
    assert stride is not None
    meta = TensorMeta(torch.Size(shape), tuple(stride), dtype)
    return DTensorSpec(mesh, normal, tensor_meta=meta)


# [Note: autograd functions]
# Each backward is written in terms of the functions themselves while a graph is being recorded
# (create_graph=True), which makes it differentiable any number of times, and on local tensors
# otherwise. Outputs are detached, not viewed: autograd forbids in-place writes to a view that a
# custom function made.


class _FromLocal(torch.autograd.Function):
    """(local, spec, async_backward, grad_placements) -> HyperDTensor."""

    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        spec: DTensorSpec,
        async_op: bool,
        grad_placements: tuple[Placement, ...] | None,
    ) -> HyperDTensor:
        ctx.set_materialize_grads(False)
        ctx.spec = spec
        ctx.async_op = async_op
        ctx.grad_placements = grad_placements
        if not spec.mesh._is_current_rank_part_of_mesh():
            local = local.new_empty(0)
        return _wrap(local.detach(), spec)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Any, ...]:
        if grad is None:
            return None, None, None, None
        target = ctx.grad_placements or whole_placements(ctx.spec.placements)
        weight = _mean_weight(ctx.spec)
        if torch.is_grad_enabled():
            moved = as_hyper(grad).redistribute(placements=target, async_op=ctx.async_op)
            local = moved.to_local()
        else:
            local = _moved_local(grad, target, ctx.async_op)
        # The autograd graph ends here if this tensor is a leaf, and leaves get finished gradients.
        if _feeds_leaf(ctx) and isinstance(local, PendingLocal):
            local = local.wait()
        return local if weight == 1 else local * weight, None, None, None


class _ToLocal(torch.autograd.Function):
    """(HyperDTensor, grad_placements, owned) -> local tensor."""

    @staticmethod
    def forward(
        ctx: Any, tensor: DTensor, grad_placements: tuple[Placement, ...] | None, owned: bool
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.spec = tensor._spec
        ctx.grad_placements = grad_placements
        local = tensor._local_tensor
        if owned:
            return local.alias() if isinstance(local, PendingLocal) else local.detach()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return None, None, None
        spec = ctx.spec
        placements = ctx.grad_placements or whole_placements(spec.placements)
        grad_spec = _spec_of_gradient(
            tuple(grad.shape), grad.stride(), grad.dtype, spec, tuple(placements)
        )
        if torch.is_grad_enabled():
            return _FromLocal.apply(grad, grad_spec, False, None), None, None
        return _wrap(grad, grad_spec), None, None


@functools.lru_cache(maxsize=4096)
def _spec_of_gradient(
    local_shape: tuple[int, ...],
    local_stride: tuple[int, ...],
    dtype: torch.dtype,
    spec: DTensorSpec,
    placements: tuple[Placement, ...],
) -> DTensorSpec:
    """Spec of the local gradient of a tensor with ``spec``, strided as the gradient is."""
    like = torch.empty_strided(local_shape, local_stride, device="meta")
    _, stride = compute_global_tensor_info(like, spec.mesh, placements)
    return with_placements(spec, placements, TensorMeta(spec.shape, tuple(stride), dtype))


class _AsHyper(torch.autograd.Function):
    """DTensor -> HyperDTensor of the same local tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> HyperDTensor:
        return _wrap(tensor._local_tensor, tensor._spec)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> DTensor:
        return grad


class _Move(NamedTuple):
    """One redistribution: where to, and in which dtypes.

    Attributes:
        placements: the target.
        async_op: whether the last hop may stay in flight.
        op_dtype: dtype to communicate in.
        out_dtype: dtype to return.
        backward_dtype: dtype to communicate the gradient in; None for the input's.
        defer: whether an all-gather at the end, forward or backward, is left to a fused rule.
    """

    placements: tuple[Placement, ...]
    async_op: bool
    op_dtype: torch.dtype
    out_dtype: torch.dtype
    backward_dtype: torch.dtype | None
    defer: bool = False


class _Redistribute(torch.autograd.Function):
    """(DTensor, move) -> HyperDTensor; backward is the way back."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, move: _Move) -> HyperDTensor:
        ctx.set_materialize_grads(False)
        ctx.source = tensor._spec
        ctx.async_op = move.async_op
        ctx.backward_dtype = move.backward_dtype
        ctx.defer = move.defer
        local = cast_local(tensor._local_tensor, move.op_dtype)
        source = with_dtype(tensor._spec, move.op_dtype)
        target = with_placements(source, move.placements)
        local = redistribute_local(local, source, target, async_op=move.async_op, defer=move.defer)
        return _wrap(cast_local(local, move.out_dtype), with_dtype(target, move.out_dtype))

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Any, ...]:
        if grad is None:
            return None, None
        source = ctx.source
        dtype = source.tensor_meta.dtype
        move = _Move(
            gradient_placements(grad.placements, source.placements),
            ctx.async_op,
            ctx.backward_dtype or dtype,
            dtype,
            ctx.backward_dtype,
            ctx.defer,
        )
        return _redistribute(grad, move), None


def _redistribute(tensor: DTensor, move: _Move) -> HyperDTensor:
    if move.async_op:
        _reserve_place_after_launch(tensor)
    return _Redistribute.apply(tensor, move)


def _reserve_place_after_launch(tensor: torch.Tensor) -> None:
    """Keeps a place free in the order of backward, just after the node that is made next.

    Weight gradients take it: after that node has launched, before whoever reads what it launched.
    See [Note: the order of backward] in linear.py.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        reserve_sequence_nr()


def _moved_local(grad: DTensor, placements: tuple[Placement, ...], async_op: bool) -> torch.Tensor:
    source = grad._spec
    target = with_placements(source, placements)
    return redistribute_local(grad._local_tensor, source, target, async_op=async_op)


def _mean_weight(spec: DTensorSpec) -> float:
    """d(global) / d(local) of a tensor of local parts: 1 / R for each axis of Partial("avg")."""
    weight = 1.0
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Partial) and placement.reduce_op == "avg":
            weight /= spec.mesh.size(axis)
    return weight


def _feeds_leaf(node: Any) -> bool:
    following = node.next_functions[0][0]
    return following is not None and following.name() == "torch::autograd::AccumulateGrad"
