"""The modules of a drawn case, and the styles that shard them."""

from __future__ import annotations

from typing import Any

from tests.common.distributed_launcher import IN_RANK_PROCESS
from tests.properties.layer_cases import Block, Case, Layer, Layout

if IN_RANK_PROCESS:
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from parallel_styles import (
        ColwiseParallel,
        MC2ColwiseParallel,
        MC2RowwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )
    from pending_dtensor import HyperDTensor

    class Scale(nn.Module):
        """Stands for a norm, and is exact."""

        def __init__(self, features: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(features))
            self.bias = nn.Parameter(torch.empty(features))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight + self.bias

    class Columns(nn.Module):
        """What reads one tensor: the columns, and now and then a plain op."""

        def __init__(self, block: Block, features: int) -> None:
            super().__init__()
            self.block = block
            self.linears = nn.ModuleList(
                nn.Linear(features, block.hidden_features, bias=column.bias)
                for column in block.columns
            )

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            also = x * 2 if self.block.reads_gather == "before" else None
            first, *others = [self.linears[number](x) for number in self.block.calls]
            for number, other in enumerate(others):
                if self.block.product and number == 0:
                    first = F.relu(first) * other
                else:
                    first = F.relu(first) - other
            return first, x * 2 if self.block.reads_gather == "after" else also

    class Chain(nn.Module):
        """The blocks of a case, sharded if there is a mesh."""

        def __init__(self, case: Case) -> None:
            super().__init__()
            self.case = case
            self.mesh: Any = None
            features = case.shape[-1]
            self.blocks = nn.ModuleList(
                nn.ModuleDict(
                    {
                        **({"norm": Scale(features)} if block.norm is not None else {}),
                        "columns": Columns(block, features),
                        "row": nn.Linear(block.hidden_features, features, bias=block.row.bias),
                    }
                )
                for block in case.blocks
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            layout = self.case.source
            for block, modules in zip(self.case.blocks, self.blocks, strict=True):
                h = modules["norm"](x) if block.norm is not None else x
                h, also = modules["columns"](h)
                out = modules["row"](consumed(h, block.between))
                if block.residual:
                    out += self.moved(x, layout, block)
                out = consumed(out, block.after)
                if also is not None:
                    out = out + self.moved(also, None, block)
                x, layout = out, block.out
            return x

        def moved(self, x: torch.Tensor, layout: Layout, block: Block) -> torch.Tensor:
            """``x`` in the layout that a block's output has."""
            if self.mesh is None:
                return x
            if not isinstance(x, DTensor):
                if block.out_local and layout == block.out:
                    return x
                x = HyperDTensor.from_local(x, self.mesh, [placement(layout)])
            x = x.redistribute(placements=[placement(block.out)])
            return x.to_local() if block.out_local else x


def consumed(x: torch.Tensor, ops: tuple[str, ...]) -> torch.Tensor:
    """What ``ops`` make of an activation."""
    for op in ops:
        if op == "relu_":
            x = F.relu_(x)
        elif op == "mul_":
            x *= 2
        elif op == "relu":
            x = F.relu(x)
        elif op == "double":
            x = x + x
        elif op == "clamp":
            x = x.clamp(-2, 2)
        elif op == "turn":
            x = x.transpose(0, 1).neg().transpose(0, 1)
        else:
            x.detach().sum()
    return x


def placement(layout: Layout) -> Any:
    return Replicate() if layout is None else Shard(layout)


def plan_of(case: Case) -> dict[str, Any]:
    """The styles of a case, by module name."""
    plan: dict[str, Any] = {}
    layout = case.source
    for number, block in enumerate(case.blocks):
        if block.norm is not None:
            layout, local, async_op = block.norm
            plan[f"blocks.{number}.norm"] = SequenceParallel(
                sequence_dim=layout, use_local_output=local, async_op=async_op
            )
        if block.told:
            plan[f"blocks.{number}.columns"] = PrepareModuleInput(
                input_layouts=placement(layout), desired_input_layouts=Replicate(), defer=True
            )
        for index, column in enumerate(block.columns):
            plan[f"blocks.{number}.columns.linears.{index}"] = column_style(column, layout, block)
        plan[f"blocks.{number}.row"] = row_style(block)
        layout = block.out
    return plan


def column_style(column: Layer, layout: Layout, block: Block) -> Any:
    boundaries = {
        "input_layouts": placement(layout),
        "output_layouts": placement(block.hidden),
        "use_local_output": block.hidden_local,
    }
    if not column.mc2:
        return ColwiseParallel(**boundaries, async_op=column.async_op)
    return MC2ColwiseParallel(
        **boundaries,
        kernel=column.kernel,
        chunks=column.chunks,
        regather=column.regather,
        column_backward=column.column_backward,
    )


def row_style(block: Block) -> Any:
    row = block.row
    boundaries = {
        "input_layouts": placement(block.hidden),
        "output_layouts": placement(block.out),
        "use_local_output": block.out_local,
    }
    if not row.mc2:
        return RowwiseParallel(**boundaries, async_op=row.async_op)
    return MC2RowwiseParallel(**boundaries, kernel=row.kernel, chunks=row.chunks)
