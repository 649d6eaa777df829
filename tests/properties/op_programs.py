"""Random programs of tensor ops: what a step can be, and how a program of them is run.

A program works on a list of tensors. A step takes two of them and a number, and adds what it gives
to the list. Nothing here imports torch before a program is run: the parent draws, the ranks run.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hypothesis import strategies as st

from tests.common.distributed_launcher import IN_RANK_PROCESS

if IN_RANK_PROCESS or TYPE_CHECKING:
    import numpy as np
    import torch
    import torch.nn.functional as F

    from pending_dtensor import PendingLocal

MAX_VALUES = 12


class Step(NamedTuple):
    """``op`` of the values ``first`` and ``second``, counted modulo their number."""

    op: str
    first: int
    second: int
    number: int


Op = Callable[[Any, Any, int], Any]

# An op gives a tensor, some, something that is no tensor, or None if it only wrote to its first.
VIEWS: dict[str, Op] = {
    "transpose": lambda x, y, k: x.transpose(0, -1),
    "permute": lambda x, y, k: x.permute(*reversed(range(x.ndim))),
    "narrow": lambda x, y, k: x.narrow(dim(x, k), 0, x.size(dim(x, k)) // 2),
    "select": lambda x, y, k: x.select(dim(x, k), -1),
    "slice": lambda x, y, k: x[..., k % 2 :: 2],
    "unsqueeze": lambda x, y, k: x.unsqueeze(k % (x.ndim + 1)),
    "squeeze": lambda x, y, k: x.squeeze(),
    "flatten": lambda x, y, k: x.flatten(),
    "view": lambda x, y, k: x.view(-1),
    "view as bytes": lambda x, y, k: x.detach().view(torch.uint8),
    "expand": lambda x, y, k: x.expand(2, *x.shape),
    "diagonal": lambda x, y, k: x.diagonal(),
    "unfold": lambda x, y, k: x.unfold(dim(x, k), 1, 2),
    "as_strided": lambda x, y, k: x.as_strided((1, 1), (1, 1), x.storage_offset()),
    "chunk": lambda x, y, k: x.chunk(2, dim(x, k)),
    "split": lambda x, y, k: x.split([1, x.size(dim(x, k)) - 1], dim(x, k)),
    "unbind": lambda x, y, k: x.unbind(dim(x, k))[:2],
    "iterate": lambda x, y, k: list(x)[:2],
    "detach": lambda x, y, k: x.detach(),
    "data": lambda x, y, k: x.data,
    "alias": lambda x, y, k: torch.ops.aten.alias(x),
    "view_as": lambda x, y, k: x.view_as(x),
    "reshape": lambda x, y, k: x.reshape(-1, x.shape[0]),
    "wait": lambda x, y, k: waited(x.detach()),
}
WRITES: dict[str, Op] = {
    "add_": lambda x, y, k: nothing(x.add_(fitting(y, x))),
    "mul_": lambda x, y, k: nothing(x.mul_(k - 2)),
    "+=": lambda x, y, k: nothing(x.__iadd__(k)),
    "zero_": lambda x, y, k: nothing(x.zero_()),
    "copy_": lambda x, y, k: nothing(x.copy_(fitting(y, x))),
    "clamp_": lambda x, y, k: nothing(x.clamp_(-k, k)),
    "relu_": lambda x, y, k: nothing(x.relu_()),
    "set one": lambda x, y, k: x.__setitem__(0, k),
    "set a slice": lambda x, y, k: x.__setitem__((..., slice(None, None, 2)), k),
    "set a mask": lambda x, y, k: x.__setitem__(x > 0, k),
    "set from another": lambda x, y, k: x.__setitem__(slice(None), fitting(y, x)),
    "index_fill_": lambda x, y, k: nothing(x.index_fill_(0, torch.tensor([0]), k)),
    "index_add_": lambda x, y, k: nothing(x.index_add_(0, torch.tensor([0]), x[:1].clone())),
    "masked_fill_": lambda x, y, k: nothing(x.masked_fill_(fitting(y, x) > k, 1)),
    "transpose_": lambda x, y, k: nothing(may_be_reshaped(x).transpose_(0, -1)),
    "unsqueeze_": lambda x, y, k: nothing(may_be_reshaped(x).unsqueeze_(0)),
    "squeeze_": lambda x, y, k: nothing(may_be_reshaped(x).squeeze_()),
    "to a view": lambda x, y, k: nothing(x[..., :1].add_(k)),
    "to data": lambda x, y, k: nothing(x.data.add_(k)),
    "to detached": lambda x, y, k: nothing(x.detach().mul_(2)),
    "to numpy": lambda x, y, k: nothing(x.detach().numpy().__iadd__(1)),
    "out=": lambda x, y, k: nothing(torch.mul(fitting(y, x).detach(), k, out=x.detach())),
    "foreach": lambda x, y, k: nothing(torch._foreach_add_([x], k)),
}
READS: dict[str, Op] = {
    "add": lambda x, y, k: x + fitting(y, x),
    "mul": lambda x, y, k: x * y.sum(),
    "rsub": lambda x, y, k: k - x,
    "compare": lambda x, y, k: x > fitting(y, x),
    "where": lambda x, y, k: torch.where(x > k, x, fitting(y, x)),
    "relu": lambda x, y, k: F.relu(x),
    "double": lambda x, y, k: x.double(),
    "bfloat16": lambda x, y, k: x.bfloat16(),
    "to int": lambda x, y, k: x.to(torch.int32),
    "bool": lambda x, y, k: x.bool(),
    "type_as": lambda x, y, k: x.type_as(y),
    "float": lambda x, y, k: x.float(),
    "copy to": lambda x, y, k: x.to("cpu", copy=True),
    "clone": lambda x, y, k: x.clone(),
    "contiguous": lambda x, y, k: x.contiguous(),
    "copy.copy": lambda x, y, k: copy.copy(x.detach()),
    "deepcopy": lambda x, y, k: copy.deepcopy(x.detach()),
    "pickle": lambda x, y, k: pickle.loads(pickle.dumps(x.detach())),
    "save": lambda x, y, k: saved_and_loaded(x.detach()),
    "sum": lambda x, y, k: x.sum(),
    "sum of a dim": lambda x, y, k: x.sum(dim(x, k), keepdim=k > 2),
    "mean": lambda x, y, k: x.mean(),
    "amax": lambda x, y, k: x.amax(dim(x, k)),
    "min and where": lambda x, y, k: list(x.min(dim(x, k))),
    "argmax": lambda x, y, k: x.argmax(),
    "cumsum": lambda x, y, k: x.cumsum(dim(x, k)),
    "any": lambda x, y, k: x.any(),
    "sort": lambda x, y, k: x.flatten().sort()[0],
    "softmax": lambda x, y, k: x.softmax(-1),
    "matmul": lambda x, y, k: rows(x) @ rows(x).t(),
    "matmul of two": lambda x, y, k: rows(x) @ fitting(y, rows(x)).t(),
    "linear": lambda x, y, k: F.linear(x, rows(x)[:2], rows(x)[:2, 0]),
    "einsum": lambda x, y, k: torch.einsum("ij,ik->jk", rows(x), rows(x)),
    "layer_norm": lambda x, y, k: F.layer_norm(x, x.shape[-1:]),
    "index": lambda x, y, k: x[[0, -1]],
    "index with a tensor": lambda x, y, k: x[y.flatten()[:2].long() % max(len(x), 1)],
    "index with a mask": lambda x, y, k: x[x > 0],
    "gather": lambda x, y, k: x.gather(0, torch.zeros_like(x, dtype=torch.int64)),
    "take": lambda x, y, k: x.take(torch.tensor([-1, 0])),
    "masked_select": lambda x, y, k: x.masked_select(fitting(y, x) > 0),
    "nonzero": lambda x, y, k: x.nonzero(),
    "embedding": lambda x, y, k: F.embedding(torch.tensor([0, 1]), rows(x)),
    "cat": lambda x, y, k: torch.cat([x, fitting(y, x), x], dim(x, k)),
    "stack": lambda x, y, k: torch.stack([fitting(y, x), x], 1),
    "repeat": lambda x, y, k: x.repeat(2, *[1] * (x.ndim - 1)),
    "flip": lambda x, y, k: x.flip(0),
    "roll": lambda x, y, k: x.roll(k, 0),
    "pad": lambda x, y, k: F.pad(x, (1, k)),
    "foreach": lambda x, y, k: torch._foreach_mul([x, y], [2, k]),
    "zeros_like": lambda x, y, k: torch.zeros_like(x),
    "new_full": lambda x, y, k: x.new_full((2,), k),
    "numpy": lambda x, y, k: x.detach().numpy().copy(),
    "asarray": lambda x, y, k: np.asarray(x.detach()),
    "from_dlpack": lambda x, y, k: torch.from_dlpack(x.detach()),
    "tolist": lambda x, y, k: x.tolist(),
    "item": lambda x, y, k: x.sum().item(),
    "if": lambda x, y, k: bool(x.any()),
    "equal": lambda x, y, k: torch.equal(x, y),
    "in": lambda x, y, k: k in x,
    "address": lambda x, y, k: (x.data_ptr() - x.untyped_storage().data_ptr()) // x.itemsize,
    "metadata": lambda x, y, k: (x.shape, x.stride(), x.dtype, len(x)),
    "hook": lambda x, y, k: hooked(x),
}
OPS = VIEWS | WRITES | {f"read: {name}": op for name, op in READS.items()}
# Views and writes as often as reads: it is they that tie values together.
steps = st.builds(
    Step,
    st.sampled_from([*VIEWS, *WRITES, "drop"]) | st.sampled_from([f"read: {n}" for n in READS]),
    st.integers(0, MAX_VALUES - 1),
    st.integers(0, MAX_VALUES - 1),
    st.integers(0, 5),
)


# How the error begins by which a pending tensor with views refuses to be reshaped in place.
REFUSED = "Expected a tensor without views"


def run(values: list[torch.Tensor], program: Sequence[Step], refused: set[int]) -> list[Any]:
    """Runs ``program`` on ``values``, which grows by its results.

    Args:
        values: the tensors.
        program: the steps.
        refused: indices of steps not to run, since a pending tensor refused to be reshaped there;
            grows by those that do now.

    Returns:
        For each step what it gave that is no tensor, or the type of the error that it raised.
    """
    seen: list[Any] = []
    for index, step in enumerate(program):
        if index in refused:
            seen.append((step.op, RuntimeError))
            continue
        if step.op == "drop":
            if len(values) > 1:
                values.pop(step.first % len(values))
            continue
        one, other = (values[place % len(values)] for place in (step.first, step.second))
        try:
            result = OPS[step.op](one, other, step.number)
        except Exception as error:
            if str(error).startswith(REFUSED):
                refused.add(index)
            seen.append((step.op, type(error)))
            continue
        results = result if isinstance(result, (tuple, list)) else [result]
        tensors = [value for value in results if isinstance(value, torch.Tensor)]
        values += tensors[: MAX_VALUES - len(values)]
        seen.append((step.op, None if tensors else plain(result)))
    return seen


def plain(value: Any) -> Any:
    """``value`` so that two can be compared, also if it holds NaN."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.strides, value.tobytes()
    return repr(value)


def dim(x: torch.Tensor, number: int) -> int:
    return number % x.ndim


def rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` in two dims and floating point, as a matrix product wants it."""
    x = x if x.is_floating_point() else x.float()
    return x.reshape(-1, x.shape[-1])


def fitting(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``y``, or if its shape or dtype is not that of ``x``, its sum in them."""
    return y if (y.shape, y.dtype) == (x.shape, x.dtype) else y.sum().to(x.dtype).expand(x.shape)


def nothing(_: object) -> None:
    """For an op that only writes."""


def may_be_reshaped(x: torch.Tensor) -> torch.Tensor:
    """``x``, if it is no plain view of a pending tensor: such a view cannot refuse."""
    if x._is_view() and isinstance(x._base, PendingLocal) and not isinstance(x, PendingLocal):
        raise RuntimeError(REFUSED)
    return x


def hooked(x: torch.Tensor) -> None:
    """Registers a hook; in inference mode torch lets some views have one, for no gradient."""
    if not torch.is_inference_mode_enabled():
        x.register_hook(doubled)


def doubled(grad: torch.Tensor | None) -> torch.Tensor | None:
    """As a hook: torch asks also for parts of a split that get no gradient."""
    return None if grad is None else grad * 2


def waited(x: torch.Tensor) -> torch.Tensor:
    return x.wait() if isinstance(x, PendingLocal) else x


def saved_and_loaded(value: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
