"""What `make demo` makes of its results: which it accepts, which it fails, and the table."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.torch.llama3 import demo


def result(mode: str, losses: list[float]) -> dict[str, Any]:
    step = {
        "exposed_s": 0.25,
        "by_kind": {"all_gather": 3},
        "by_kernel": {"unfused": 1, "pipelined": 2},
    }
    return {
        "mode": mode,
        "losses": losses,
        "step_s": [0.5] * len(losses),
        "overlap": [step] * len(losses),
    }


FALLING = [5.0, 4.0, 3.0, 3.0, 3.0]


def test_equal_falling_losses_are_accepted() -> None:
    assert demo.faults(demo.ASYNC, result("async", FALLING), result("sync", FALLING)) == []


@pytest.mark.parametrize("wrong", [3.0000000000000004, math.nan])
def test_one_different_loss_is_a_fault(wrong: float) -> None:
    losses = [*FALLING[:2], wrong, *FALLING[3:]]
    found = demo.faults(demo.ASYNC, result("async", losses), result("sync", FALLING))
    assert "Expected losses within 0 of the synchronous ones" in found[0]


def test_a_tolerance_allows_its_difference_only() -> None:
    mode = demo.Mode((), tolerance=0.5)
    reference = result("sync", FALLING)
    assert demo.faults(mode, result("other", [4.5, *FALLING[1:]]), reference) == []
    assert demo.faults(mode, result("other", [4.25, *FALLING[1:]]), reference) != []


def test_losses_that_do_not_fall_are_a_fault() -> None:
    flat = result("sync", [5.0, 4.9, 4.8, 4.8, 4.8])
    assert "Expected losses that fall by a tenth" in demo.faults(demo.REFERENCE, flat, flat)[0]


@pytest.mark.parametrize("wrong_mode", [None, demo.ASYNC, demo.MC2])
def test_exit_status_and_table(
    wrong_mode: demo.Mode | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fake_run(
        modes: Sequence[demo.Mode], *, ranks: int, steps: int, page: Path
    ) -> list[dict[str, Any]]:
        assert (ranks, steps, page.parts[-3:]) == (2, 5, ("build", "demo", "overlap.html"))
        wrong = [*FALLING[:-1], 2.9]
        return [result(m.flags[-1], wrong if m is wrong_mode else FALLING) for m in modes]

    monkeypatch.setattr(demo, "run", fake_run)
    monkeypatch.setattr("sys.argv", ["demo.py", "--steps", "5"])
    assert demo.main() == (0 if wrong_mode is None else 1)
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith(os.path.relpath(demo.PAGE))
    row = next(line.split() for line in printed.splitlines() if line.startswith("pipelined "))
    assert row[1] == "5.000000"
    assert row[4:] == ["0.500", "0.2500", "15", "0", "0", "0", "10"]
