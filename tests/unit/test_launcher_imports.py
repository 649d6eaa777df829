"""The parent of a distributed test imports no torch: asserted in a fresh interpreter each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCH_FREE = ["tests/conftest.py", "tests/common/*.py"]
RUN_ON_RANKS = [f"tests/{suite}/test_*.py" for suite in ("distributed", "properties", "faults")]


def _modules() -> list[str]:
    paths = {path for pattern in TORCH_FREE + RUN_ON_RANKS for path in ROOT.glob(pattern)}
    names = (path.relative_to(ROOT).with_suffix("").parts for path in sorted(paths))
    return [".".join(parts) for parts in names]


def _imports_torch(module: str) -> bool:
    script = f"import sys, {module}; sys.exit('torch' in sys.modules and 3)"
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode in (0, 3), run.stderr
    return run.returncode == 3


@pytest.mark.parametrize("module", _modules())
def test_parent_imports_no_torch(module: str) -> None:
    assert not _imports_torch(module)


def test_the_check_can_fail() -> None:
    assert _imports_torch("torch")
