"""The suite of tests that call the real torch_npu, run in an environment of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from tests.ascend import environment
from tests.ascend.environment import (
    ROOT,
    EnvironmentBuildError,
    build_environment,
    missing_tools,
)
from tests.common.property_profiles import FUZZ_FACTOR, PROFILE
from tests.common.script_on_ranks import run_script_on_ranks

SUITE_TIMEOUT_S = 500.0 * (FUZZ_FACTOR if PROFILE == "fuzz" else 1)

needs_compiler = pytest.mark.skipif(
    bool(missing_tools()),
    reason=f"the stand-ins for CANN are compiled here, and {missing_tools()} not found",
)


@pytest.mark.hypothesis  # it has a property: `make fuzz` shall reach that
@needs_compiler
def test_the_suite_passes_with_the_real_torch_npu(
    record_property: Callable[[str, object], None],
) -> None:
    variables = build_environment().variables()
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/ascend/suite", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=SUITE_TIMEOUT_S,
    )
    report = run.stdout + run.stderr
    assert run.returncode == 0, f"the suite failed in the environment of torch_npu:\n{report}"
    # Not a run that had nothing to run.
    passed = re.search(r"(\d+) passed", report)
    assert passed is not None, report
    assert int(passed[1]) >= 50, report
    assert "skipped" not in report, report
    record_property("examples", sum(map(int, re.findall(r"property examples: \S+ (\d+)", report))))


@needs_compiler
def test_a_second_build_runs_nothing() -> None:
    first = build_environment()
    with mock.patch.object(environment, "_run", side_effect=AssertionError):
        assert build_environment() == first


@needs_compiler
def test_a_failed_build_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        mock.patch.object(environment, "TORCH_NPU_VERSION", "0.0.0.nonsense"),
        pytest.raises(EnvironmentBuildError, match=r"torch-npu==0\.0\.0\.nonsense"),
    ):
        build_environment(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_torch_npu_is_not_in_the_environment_of_the_other_tests() -> None:
    script = "import torch, sys; sys.exit('torch_npu' in sys.modules)"
    (end,) = run_script_on_ranks(script, world_size=1)
    assert (end.exit_code, end.stderr) == (0, "")
