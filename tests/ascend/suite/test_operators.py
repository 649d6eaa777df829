"""What the real operators declare, take and refuse: the facts the ``ascend`` kernel rests on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401 - defines the operators
from torch._subclasses.fake_tensor import FakeTensorMode

GATHER = torch.ops.npu.npu_all_gather_base_mm
SCATTER = torch.ops.npu.npu_mm_reduce_scatter_base
OPERATORS = pytest.mark.parametrize("operator", [GATHER, SCATTER])


def test_schema_of_the_gather() -> None:
    assert str(GATHER.default._schema) == (
        "npu::npu_all_gather_base_mm(Tensor input, Tensor x2, str hcom, int world_size, *, "
        "Tensor? bias=None, Tensor? x1_scale=None, Tensor? x2_scale=None, int gather_index=0, "
        "bool gather_output=True, int comm_turn=0, ScalarType? output_dtype=None, "
        "str? comm_mode=None) -> (Tensor, Tensor)"
    )


def test_schema_of_the_scatter() -> None:
    assert str(SCATTER.default._schema) == (
        "npu::npu_mm_reduce_scatter_base(Tensor input, Tensor x2, str hcom, int world_size, *, "
        'str reduce_op="sum", Tensor? bias=None, Tensor? x1_scale=None, Tensor? x2_scale=None, '
        "int comm_turn=0, ScalarType? output_dtype=None, str? comm_mode=None) -> Tensor"
    )


@OPERATORS
@pytest.mark.parametrize("name", ["self", "x1"])
def test_the_first_operand_has_another_name_than_documents_say(operator: Any, name: str) -> None:
    x, x2 = torch.ones(4, 256), torch.ones(256, 3)
    with pytest.raises(RuntimeError, match="missing value for argument 'input'"):
        operator(**{name: x}, x2=x2, hcom="name", world_size=2)


@OPERATORS
def test_what_follows_the_world_size_is_keyword_only(operator: Any) -> None:
    with pytest.raises(RuntimeError, match="takes 4 positional"):
        operator(torch.ones(4, 256), torch.ones(256, 3), "name", 2, None)


@OPERATORS
def test_an_unknown_keyword(operator: Any) -> None:
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'transpose_x2'"):
        operator(torch.ones(4, 256), torch.ones(256, 3), "name", 2, transpose_x2=True)


@OPERATORS
def test_no_cpu_implementation_of_its_own(operator: Any) -> None:
    with pytest.raises(NotImplementedError, match="'CPU' backend"):
        operator(torch.ones(4, 256), torch.ones(256, 3), "name", 2)


def test_shapes() -> None:
    with FakeTensorMode():
        x, x2 = torch.empty(4, 256).half(), torch.empty(256, 3).half()
        out, gathered = GATHER(x, x2, "name", 2)
        assert (out.shape, gathered.shape) == ((8, 3), (8, 256))
        out, gathered = GATHER(x, x2, "name", 2, gather_output=False)
        assert (out.shape, gathered.shape) == ((8, 3), (0,))
        assert SCATTER(x, x2, "name", 2).shape == (2, 3)


def test_the_operators_check_nothing_before_the_device() -> None:
    """Wrong contraction, ranks, rows, dtype: why `reasons_not_supported` has to."""
    with FakeTensorMode():
        assert GATHER(torch.empty(4, 7), torch.empty(6, 3), "name", 3)[0].shape == (12, 3)
        assert SCATTER(torch.empty(5, 6), torch.empty(6, 3), "name", 2).shape == (2, 3)
        SCATTER(torch.empty(4, 6), torch.empty(6, 3), "name", 2, reduce_op="avg")
