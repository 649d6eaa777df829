"""The parent of a distributed test imports no torch: each module is imported in its own fork."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCH_FREE = ["tests/conftest.py", "tests/common/*.py"]
RUN_ON_RANKS = [f"tests/{suite}/test_*.py" for suite in ("distributed", "properties", "faults")]

# What nearly all of them import is imported once; if that were torch, every module would show it.
IMPORT_EACH = """
import importlib, os, sys
import hypothesis, multiprocessing.connection, multiprocessing.forkserver, pytest
for module in sys.argv[1:]:
    if os.fork() == 0:
        importlib.import_module(module)
        print(module, "torch" in sys.modules, flush=True)
        os._exit(0)
    os.wait()
"""


def _modules() -> list[str]:
    paths = {path for pattern in TORCH_FREE + RUN_ON_RANKS for path in ROOT.glob(pattern)}
    names = (path.relative_to(ROOT).with_suffix("").parts for path in sorted(paths))
    return [".".join(parts) for parts in names]


@pytest.fixture(scope="module")
def torch_is_there() -> dict[str, bool]:
    """Whether it is once a module is imported, for each."""
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH, *_modules(), "torch"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr == ""
    return {module: there == "True" for module, there in map(str.split, run.stdout.splitlines())}


@pytest.mark.parametrize("module", _modules())
def test_parent_imports_no_torch(module: str, torch_is_there: dict[str, bool]) -> None:
    assert not torch_is_there[module]


def test_the_check_can_fail(torch_is_there: dict[str, bool]) -> None:
    assert torch_is_there["torch"]
