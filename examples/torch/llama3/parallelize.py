"""The tensor-parallel plan of the Llama-3 model: which style each module gets.

With sequence parallelism (the default) the residual stream is sharded on the sequence dim, and each
half of a block is gather -> column-parallel -> row-parallel -> reduce-scatter:

    module               style             input -> output of the module
    tok_embeddings       Rowwise           Replicate -> Shard(1)
    attention_norm       Sequence          Shard(1)  -> Shard(1)
    attention            SharedInput       Shard(1)  -> Replicate, once for wq, wk, wv
      wq, wk, wv         Colwise           Replicate -> Shard(-1), whole heads
      wo                 Rowwise           Shard(-1) -> Shard(1)
    ffn_norm             Sequence          Shard(1)  -> Shard(1)
    feed_forward         SharedInput       Shard(1)  -> Replicate, once for w1, w3
      w1, w3             Colwise           Replicate -> Shard(-1)
      w2                 Rowwise           Shard(-1) -> Shard(1)
    norm                 Sequence          Shard(1)  -> Shard(1)
    output               Colwise           Shard(1)  -> Replicate, or Shard(-1) for loss parallel

With MC2 the collectives of attention and feed-forward run inside the matmul kernels: MC2Colwise and
MC2Rowwise take the place of Colwise and Rowwise, and PrepareModuleInput(defer=True) that of
SharedInput. The embedding and the head stay as they are: an embedding has no matmul to fuse, and
the head's output leaves through a gather of its own.

Without sequence parallelism the residual stream is replicated: every Shard(1) above reads
Replicate, the norms run unsharded, and each half of a block ends in an all-reduce.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from examples.torch.llama3.model import ModelArgs, Transformer
from parallel_styles import (
    ColwiseParallel,
    MC2ColwiseParallel,
    MC2RowwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from pending_dtensor import HyperDTensor


class SharedInput(ParallelStyle):
    """Makes a module's first argument replicated, once for all column-parallel layers inside.

    `PrepareModuleInput` would do the same, but synchronously in both directions. Giving each column
    its own `input_layouts=Shard(1)` would be asynchronous, but gather the same tensor three times.
    Here one gather is started in forward, and in backward one reduce of the summed gradients of all
    the columns is in flight while their weight gradients are computed: which is where the
    asynchronous styles gain, for in forward the next op reads the gathered tensor at once.

    Args:
        input_layouts: placement of the argument where it arrives as a plain tensor.
        async_op: start the redistribution without waiting for it.
    """

    def __init__(self, *, input_layouts: Placement, async_op: bool) -> None:
        super().__init__()
        self.input_layouts = (input_layouts,)
        self.async_op = async_op

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicate_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x, *rest = args
            if not isinstance(x, DTensor):
                x = HyperDTensor.from_local(x, device_mesh, self.input_layouts, run_check=False)
            return (x.redistribute(placements=(Replicate(),), async_op=self.async_op), *rest)

        module.register_forward_pre_hook(replicate_input)
        return module


def parallelize_llama3(
    model: Transformer,
    tp_mesh: DeviceMesh,
    *,
    enable_sequence_parallel: bool = True,
    enable_loss_parallel: bool = False,
    enable_mc2: bool = False,
    async_redistribute: bool = True,
    mc2_kernel: str = "auto",
) -> Transformer:
    """Shards the model over a tensor-parallel mesh, in place.

    Args:
        model: the unsharded model, with the same weights on every rank.
        tp_mesh: 1-D mesh of the ranks that share the model.
        enable_sequence_parallel: shard the residual stream and the norms on the sequence dim. The
            sequence length must then be a multiple of the number of ranks.
        enable_loss_parallel: leave the logits a DTensor sharded on the vocabulary, for a loss
            inside `torch.distributed.tensor.parallel.loss_parallel()`.
        enable_mc2: fuse each collective of attention and feed-forward with its matmul. Needs
            sequence parallelism.
        async_redistribute: let the collectives that are not fused run while other work goes on. The
            results are the same bit by bit.
        mc2_kernel: the kernel that runs the fused pairs; `"auto"` is the device's own.

    Returns:
        The same model.

    Raises:
        ValueError: the model's sizes do not divide by the number of ranks, the mesh is not 1-D, or
            MC2 is asked for without sequence parallelism.
        MC2ConstraintError: MC2 is asked for and the kernel cannot run here.
    """
    _check_divisible(model.args, tp_mesh)
    if enable_mc2 and not enable_sequence_parallel:
        raise ValueError(
            "Expected enable_sequence_parallel=True with enable_mc2=True, got False "
            "(parallelize_llama3). MC2 fuses the gather and scatter of the sequence dim: "
            "enable sequence parallelism or disable MC2."
        )
    residual = Shard(1) if enable_sequence_parallel else Replicate()
    if enable_mc2:
        block_plan = _mc2_block_plan(mc2_kernel)
    else:
        block_plan = _block_plan(residual, async_op=async_redistribute)
    plan = {
        "tok_embeddings": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=residual, async_op=async_redistribute
        ),
        **{f"layers.*.{path}": style for path, style in block_plan.items()},
        "output": ColwiseParallel(
            input_layouts=residual,
            output_layouts=Shard(-1) if enable_loss_parallel else Replicate(),
            use_local_output=not enable_loss_parallel,
            async_op=async_redistribute,
        ),
    }
    if enable_sequence_parallel:
        plan["layers.*.*_norm"] = plan["norm"] = SequenceParallel(async_op=async_redistribute)
    parallelize_module(model, tp_mesh, plan)
    return model


def _block_plan(residual: Placement, *, async_op: bool) -> dict[str, ParallelStyle]:
    """Styles of attention and feed-forward inside one block, unfused."""
    shared_input = SharedInput(input_layouts=residual, async_op=async_op)
    column = ColwiseParallel(async_op=async_op)
    row = RowwiseParallel(output_layouts=residual, async_op=async_op)
    return {
        "attention": shared_input,
        "attention.w[qkv]": column,
        "attention.wo": row,
        "feed_forward": shared_input,
        "feed_forward.w[13]": column,
        "feed_forward.w2": row,
    }


def _mc2_block_plan(kernel: str) -> dict[str, ParallelStyle]:
    """Styles of attention and feed-forward inside one block, fused; needs sequence parallelism.

    The parent defers its gather, and the first column to read it fuses with it; its siblings take
    what that kernel gathered.
    """
    column = MC2ColwiseParallel(input_layouts=Shard(1), kernel=kernel)
    row = MC2RowwiseParallel(output_layouts=Shard(1), kernel=kernel)
    return {
        "attention": PrepareModuleInput(  # its second argument, the rotary table, stays as it is
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None), defer=True
        ),
        "attention.w[qkv]": column,
        "attention.wo": row,
        "feed_forward": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), defer=True
        ),
        "feed_forward.w[13]": column,
        "feed_forward.w2": row,
    }


def _check_divisible(args: ModelArgs, tp_mesh: DeviceMesh) -> None:
    """Refuses sizes that would leave ranks with uneven shards of heads or hidden channels.

    The local tensors between the column and row layers are plain tensors, and whole heads at that:
    uneven ones could not be told from even ones.
    """
    if tp_mesh.ndim != 1:
        raise ValueError(
            f"Expected a 1-D tp_mesh, got {tp_mesh.ndim} axes (parallelize_llama3). "
            "Slice the tensor-parallel axis out of the mesh, as in mesh['tp']."
        )
    ranks = tp_mesh.size()
    uneven = [
        f"{name}={size}"
        for name in ("n_heads", "n_kv_heads", "ffn_dim", "vocab_size")
        if (size := getattr(args, name)) % ranks
    ]
    if uneven:
        raise ValueError(
            f"Expected sizes that divide by {ranks} tensor-parallel ranks, got {', '.join(uneven)} "
            "(parallelize_llama3). Change the model's sizes or the number of ranks."
        )
