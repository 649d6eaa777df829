"""Files that are saved: they load with ``weights_only=True``, and name nothing of this library."""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from typing import Any

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks

if IN_RANK_PROCESS:
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from parallel_styles import ColwiseParallel, RowwiseParallel, parallelize_module
    from pending_dtensor import HyperDTensor, PendingState
    from tests.common.mc2_models import fused
    from tests.common.sharded_models import MLP, equal, full, part, whole_numbers

OURS = ("pending_dtensor", "mc2", "parallel_styles")


def words(pickled: bytes) -> set[str]:
    """Every string in a pickle: the names of all that unpickling could import are among them."""
    return {
        word
        for _, value, _ in pickletools.genops(pickled)
        if isinstance(value, str)
        for word in value.split()
    }


def ours(pickled: bytes) -> list[str]:
    """What a pickle names of this library."""
    return sorted(word for word in words(pickled) if word.partition(".")[0] in OURS)


def saved(value: Any) -> tuple[bytes, Any]:
    """The pickle inside what ``torch.save`` writes, and what ``weights_only=True`` reads of it."""
    file = io.BytesIO()
    torch.save(value, file)
    with zipfile.ZipFile(file) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        pickled = archive.read(name)
    file.seek(0)
    return pickled, torch.load(file, weights_only=True)


@on_ranks(2)
def test_pending_tensors_are_saved_as_torch_s(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    sharded = HyperDTensor.from_local(torch.full((2, 3), ctx.rank + 1.0), mesh, [Shard(0)])

    def in_flight() -> HyperDTensor:
        return sharded.redistribute(placements=[Replicate()], async_op=True)

    values = {
        "hyper": sharded,
        "hyper in flight": in_flight(),
        "in flight": in_flight().to_local(),
        "view": in_flight().to_local()[1:].t(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    pickled, loaded = saved(values)
    assert ours(pickled) == []
    assert {name: type(value) for name, value in loaded.items()} == {
        "hyper": DTensor,
        "hyper in flight": DTensor,
        "in flight": torch.Tensor,
        "view": torch.Tensor,
        "parameter": torch.nn.Parameter,
    }
    equal({n: full(v) for n, v in loaded.items()}, {n: full(v) for n, v in values.items()})
    assert ours(pickle.dumps([in_flight().to_local(), in_flight()])) == []


@pytest.mark.parametrize("styles", ["plain", "pipelined", "decomposed"])
@on_ranks(2)
def test_a_checkpoint_names_nothing_of_ours(ctx: RankContext, styles: str) -> None:
    """Of model and optimizer, after a step."""
    model: Any = MLP(8, 8)
    if styles == "plain":
        column, row = (
            ColwiseParallel(input_layouts=Shard(1)),
            RowwiseParallel(output_layouts=Shard(1)),
        )
        parallelize_module(model, ctx.mesh(), {"w1": column, "w2": row})
    else:
        model = fused(ctx, model, 1, styles)
    optimizer = torch.optim.AdamW(model.parameters())
    model(part(whole_numbers(1, 4, 8), 1)).sum().backward()
    optimizer.step()
    pickled, loaded = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert ours(pickled) == []
    equal(
        {name: full(value) for name, value in loaded["model"].items()},
        {name: full(value) for name, value in model.state_dict().items()},
    )
    optimizer.load_state_dict(loaded["optimizer"])


@on_ranks(1)
def test_a_name_of_ours_is_noticed(ctx: RankContext) -> None:
    assert ours(pickle.dumps(PendingState.READY)) == ["pending_dtensor.pending"]
    assert ours(pickle.dumps(PendingState.READY, protocol=0)) == ["pending_dtensor.pending"]
