"""A property that fails prints one command, which tries that example again and no other."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROPERTIES = """
from hypothesis import given
from hypothesis import strategies as st
from tests.common.property_profiles import examples

numbers = st.integers(0, 10_000)

@examples(30)
@given(number=numbers)
def test_holds(number):
    pass

@examples(300)
@given(number=numbers)
def test_fails(number):
    with open("tried", "a") as file:
        print(number, file=file)
    assert number < 1234
"""


def run(command: list[str], folder: Path) -> str:
    """What a command prints that ends with the exit code of a failed test."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HYPOTHESIS_PROFILE": "default"}
    ended = subprocess.run(
        command, check=False, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    return ended.stdout


def test_the_printed_command_replays_the_smallest_example(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.common.property_profiles"]\n')
    (tmp_path / "test_numbers.py").write_text(PROPERTIES)
    tried = tmp_path / "tried"

    printed = run([sys.executable, "-m", "pytest", "test_numbers.py"], tmp_path)
    assert "property examples: test_numbers.py::test_holds 30\n" in printed
    (command,) = re.findall(r"Try this example again: (.*)", printed)
    assert len(set(tried.read_text().split())) > 1
    tried.unlink()

    run(shlex.split(command), tmp_path)
    assert set(tried.read_text().split()) == {"1234"}
