"""The example's script, as a user starts it: its own ranks, and torchrun's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.common.distributed_launcher import rank_environment

SCRIPT = "examples/torch/llama3/tensor_parallel_example.py"
SMALL = ["--dim", "32", "--n-layers", "1", "--ffn-dim", "64", "--seq-len", "16", "--steps", "3"]
LAUNCHES = {
    "alone": [sys.executable, SCRIPT, "--tp", "2"],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", "2", SCRIPT),
    ],
}


class Run(NamedTuple):
    """A process, and the folder for what it writes."""

    process: subprocess.Popen[str]
    folder: Path


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """All of them at once, as imports are most of what they do, and often in one process."""
    runs = {}
    try:
        for launch, command in LAUNCHES.items():
            folder = tmp_path_factory.mktemp(launch)
            out = ["--json-out", str(folder / "result.json"), "--trace-out", str(folder / "traces")]
            process = subprocess.Popen(
                [*command, *SMALL, *out],
                cwd=Path(__file__).parents[2],
                env=rank_environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            runs[launch] = Run(process, folder)
        yield runs
    finally:
        for run in runs.values():
            run.process.terminate()
            run.process.communicate()


@pytest.mark.parametrize("launch", LAUNCHES)
def test_trains_and_writes_what_it_saw(launch: str, running: dict[str, Run]) -> None:
    process, folder = running[launch]
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert "Warning" not in stderr
    assert stdout.count("async: loss") == 1  # one rank reports
    assert "3/3" in stderr  # the progress bar
    result = json.loads((folder / "result.json").read_text())
    assert result["mode"] == "async"
    assert len(result["losses"]) == len(result["step_s"]) == 3
    assert [step["by_kind"] for step in result["overlap"]] == [
        {"all_gather": 7, "reduce_scatter": 6}
    ] * 3
    for rank in range(2):
        trace = folder / "traces" / f"async-rank{rank}.json"
        (log,) = json.loads(trace.read_text())["pendingDtensor"]
        assert (log["name"], log["rank"], len(log["events"])) == ("async", rank, 13)
