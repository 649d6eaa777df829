"""Exact comparison, and many cases in one test without losing which of them failed."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import pytest


def same(got: Any, expected: Any) -> None:
    """Asserts equality: of tensors in every bit, and in dtype, shape, stride and requires_grad.

    A pending tensor is waited for. NaN equals nothing.
    """
    import numpy as np
    import torch

    from pending_dtensor import PendingLocal

    if isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor)
        if isinstance(got, PendingLocal):
            got = got.wait()
        described, wanted = (
            (t.dtype, tuple(t.shape), t.stride(), t.requires_grad) for t in (got, expected)
        )
        assert described == wanted, f"got {described}, expected {wanted}"
        if not expected.is_meta:
            assert torch.equal(got, expected), f"got {got}, expected {expected}"
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            same(one, other)
    elif isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype
        assert np.array_equal(got, expected)
    else:
        assert type(got) is type(expected)
        assert got == expected, f"got {got}, expected {expected}"


def same_bits(got: Any, expected: Any, name: str = "") -> None:
    """Asserts that two finished tensors agree in dtype, shape and every bit: NaN equals itself."""
    import torch

    described, wanted = ((t.dtype, tuple(t.shape)) for t in (got, expected))
    assert described == wanted, f"{name}: got {described}, expected {wanted}"
    one, other = (
        t.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        for t in (got, expected)
    )
    assert torch.equal(one, other), f"{name}: got {got}, expected {expected}"


def by_name(cases: Mapping[str, Any], check: Callable[[str, Any], None]) -> None:
    """Runs ``check`` for each case; the error names every case that failed."""
    failures = []
    for name, case in cases.items():
        try:
            check(name, case)
        except (Exception, pytest.fail.Exception):
            failures.append(f"case {name!r}: {traceback.format_exc(limit=-3)}")
    assert not failures, "\n".join(failures)
