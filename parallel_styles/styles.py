"""Torch's tensor parallel styles, with boundaries that redistribute asynchronously.

Names, arguments, defaults and semantics are torch's, and so are the parameters: plain DTensors.
Under ``torch.compile`` the boundaries are torch's own; the compiler schedules the collectives.
So they are while one process simulates many ranks (torch's ``LocalTensorMode``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.tensor.parallel as torch_parallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_map_only

from parallel_styles.boundaries import (
    Layouts,
    as_layout,
    attach_style,
    check_layout,
    first_input,
    prepare_layer_output,
)
from pending_dtensor.torch_compat import is_tracing


class ColwiseParallel(torch_parallel.ColwiseParallel):
    """Shards a Linear or Embedding by output features.

    Boundary      placements                          collective
    input         input_layouts -> Replicate          all_gather
    output        Shard(-1) -> output_layouts         all_to_all, or all_gather

    In backward the reduction of grad_input is in flight while grad_weight is computed.

    Args:
        input_layouts: placement of the input if it is a plain tensor; Replicate() by default.
        output_layouts: placement of the output; Shard(-1) by default.
        use_local_output: give a local tensor (pending until it is read), not a HyperDTensor. A
            layer that is handed one takes all ranks' to be of its size: uneven shards need False.
        async_op: False waits for each collective where it is launched, forward and backward.

    Raises:
        NotImplementedError: applied to a module that is no Linear or Embedding.
        RuntimeError: applied to a module that has a style already.
        TypeError: layouts that are no placements; at call, an input that is no tensor.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        async_op: bool = True,
    ) -> None:
        check_layout(self, "input_layouts", input_layouts)
        check_layout(self, "output_layouts", output_layouts)
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
        )
        self.async_op = async_op

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_applicable(self, module)
        partition = (
            self._partition_linear_fn
            if isinstance(module, nn.Linear)
            else self._partition_embedding_fn
        )
        return _parallelize_layer(self, module, device_mesh, partition, self.input_layouts)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, async_op={self.async_op})"


class RowwiseParallel(torch_parallel.RowwiseParallel):
    """Shards a Linear by input features, or an Embedding by rows.

    Boundary      placements                          collective
    input         input_layouts -> Shard(-1)          local slice, or all_to_all
    output        Partial -> output_layouts           all_reduce, or reduce_scatter

    An Embedding's input goes to Replicate instead. In backward the communication of grad_input is
    in flight while grad_weight is computed.

    Args:
        input_layouts: placement of the input if it is a plain tensor; by default Shard(-1) for a
            Linear and Replicate() for an Embedding, whose indices no rank has only a part of.
        output_layouts: placement of the output; Replicate() by default.
        use_local_output: give a local tensor (pending until it is read), not a HyperDTensor. A
            layer that is handed one takes all ranks' to be of its size: uneven shards need False.
        async_op: False waits for each collective where it is launched, forward and backward.

    Raises:
        NotImplementedError: applied to a module that is no Linear or Embedding.
        RuntimeError: applied to a module that has a style already.
        TypeError: layouts that are no placements; at call, an input that is no tensor.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        async_op: bool = True,
    ) -> None:
        check_layout(self, "input_layouts", input_layouts)
        check_layout(self, "output_layouts", output_layouts)
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
        )
        self.async_op = async_op
        self._input_layouts_given = input_layouts is not None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_applicable(self, module)
        partition: Callable[..., None]
        input_layouts: Layouts = self.input_layouts
        if isinstance(module, nn.Linear):
            partition = self._partition_linear_fn
            self.desired_input_layouts = (Shard(-1),)
        else:
            partition = self._partition_embedding_fn
            self.desired_input_layouts = (Replicate(),)
            if not self._input_layouts_given:
                input_layouts = (Replicate(),)
        return _parallelize_layer(self, module, device_mesh, partition, input_layouts)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, async_op={self.async_op})"


class SequenceParallel(torch_parallel.SequenceParallel):
    """Replicates a module's parameters and runs it on its part of the sequence.

    Boundary      placements                          collective
    input         -> Shard(sequence_dim)              local slice, or all_to_all

    Every tensor argument of the first tensor's shape (a residual, say) is taken to be sharded like
    it; other arguments are passed on as they are. All DTensors in the output are converted, in
    whatever structure the module returns. Frozen parameters stay frozen.

    Args:
        sequence_dim: the tensor dim that is sharded.
        use_local_output: give local tensors, not HyperDTensors. A layer that is handed one takes
            all ranks' to be of its size: uneven shards need False.
        async_op: False waits for each collective where it is launched, forward and backward.

    Raises:
        RuntimeError: applied to a module that has a style already.
        TypeError: a ``sequence_dim`` that is no int; at call, a first input that is no tensor.
    """

    def __init__(
        self, *, sequence_dim: int = 1, use_local_output: bool = False, async_op: bool = True
    ) -> None:
        if not isinstance(sequence_dim, int):
            raise TypeError(
                f"Expected an int as sequence_dim, got {sequence_dim!r} (SequenceParallel)."
            )
        super().__init__(sequence_dim=sequence_dim, use_local_output=use_local_output)
        self.async_op = async_op

    def _replicate_module_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for parameter_name, parameter in list(module.named_parameters(recurse=False)):
            # As torch, takes each rank's own data, whatever src_data_rank: norms start as ones.
            replicated = distribute_tensor(
                parameter.detach(), device_mesh, [Replicate()], src_data_rank=None
            )
            module.register_parameter(
                parameter_name, nn.Parameter(replicated, requires_grad=parameter.requires_grad)
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_applicable(self, module)

        def prepare_input(
            mod: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[Any, Any]:
            def shard(tensor: torch.Tensor) -> DTensor:
                if is_tracing():
                    return self._prepare_input_fn(
                        self.sequence_sharding, mod, (tensor,), device_mesh
                    )
                return as_layout(
                    tensor, device_mesh, self.sequence_sharding, async_op=self.async_op, module=mod
                )

            first = first_input(self, mod, args, kwargs)
            first_sharded = shard(first)
            shape, local_shape = first_sharded.shape, first_sharded._local_tensor.shape

            def convert(tensor: torch.Tensor) -> torch.Tensor:
                if tensor is first:
                    return first_sharded
                alike = shape if isinstance(tensor, DTensor) else local_shape
                return shard(tensor) if tensor.shape == alike else tensor

            return tree_map_only(torch.Tensor, convert, (args, kwargs))

        def prepare_output(mod: nn.Module, args: Any, output: Any) -> Any:
            if not self.use_local_output:
                return output
            return tree_map_only(DTensor, lambda out: out.to_local(), output)

        return attach_style(
            self, module, device_mesh, self._replicate_module_fn, prepare_input, prepare_output
        )

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, async_op={self.async_op})"


_LAYER_STYLES = (torch_parallel.ColwiseParallel, torch_parallel.RowwiseParallel)


def distributes_parameters(style: ParallelStyle) -> bool:
    """Whether it is a style that a module can have one of: it turns parameters into DTensors."""
    return isinstance(style, (*_LAYER_STYLES, torch_parallel.SequenceParallel))


def check_applicable(style: ParallelStyle, module: nn.Module, path: str = "") -> None:
    """Says whether a style fits a module, before anything is changed.

    Args:
        style: one of ours, or another, which is not looked into.
        module: what it shall be applied to.
        path: the module's name in the model, for the message.

    Raises:
        NotImplementedError: Colwise or Rowwise on something that is no Linear or Embedding.
        RuntimeError: the module has a style already.
    """
    name = type(style).__name__
    at = f"module {path!r}" if path else "the module"
    layer_style = isinstance(style, _LAYER_STYLES)
    if layer_style and not isinstance(module, (nn.Linear, nn.Embedding)):
        raise NotImplementedError(
            f"Expected an nn.Linear or nn.Embedding, got {type(module).__name__} ({name} on {at}). "
            f"Name the Linear or Embedding inside it, or write a ParallelStyle for it."
        )
    if distributes_parameters(style) and getattr(module, "_distribute_module_applied", False):
        raise RuntimeError(
            f"Expected a module without a parallel style, got a {type(module).__name__} that has "
            f"one already ({name} on {at}). Give each module one style, once."
        )


def _parallelize_layer(
    style: Any,
    module: nn.Module,
    mesh: DeviceMesh,
    partition: Callable[..., None],
    input_layouts: Layouts,
) -> nn.Module:
    """Colwise or Rowwise on a Linear or Embedding, whose forward takes one tensor, ``input``."""
    desired = style.desired_input_layouts

    def prepare_input(
        mod: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        tensor = first_input(style, mod, args, kwargs)
        if is_tracing():
            moved = style._prepare_input_fn(input_layouts, desired, mod, (tensor,), mesh)
        else:
            moved = as_layout(
                tensor, mesh, input_layouts, desired, async_op=style.async_op, module=mod
            )
        if args:
            return (moved, *args[1:]), kwargs
        return args, {**kwargs, next(iter(kwargs)): moved}

    prepare_output = prepare_layer_output(style, mesh)
    return attach_style(style, module, mesh, partition, prepare_input, prepare_output)
