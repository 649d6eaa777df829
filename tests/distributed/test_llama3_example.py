"""The example's script, as a user starts it: its own ranks, and torchrun's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize("launch", LAUNCHES)
def test_trains_and_writes_what_it_saw(launch: str, tmp_path: Path) -> None:
    json_out, traces = tmp_path / "result.json", tmp_path / "traces"
    done = subprocess.run(
        [*LAUNCHES[launch], *SMALL, "--json-out", str(json_out), "--trace-out", str(traces)],
        cwd=Path(__file__).parents[2],
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert done.stdout.count("async: loss") == 1  # one rank reports
    assert "3/3" in done.stderr  # the progress bar
    result = json.loads(json_out.read_text())
    assert result["mode"] == "async"
    assert len(result["losses"]) == len(result["step_s"]) == 3
    assert [step["by_kind"] for step in result["overlap"]] == [
        {"all_gather": 7, "reduce_scatter": 6}
    ] * 3
    for rank in range(2):
        (log,) = json.loads((traces / f"async-rank{rank}.json").read_text())["pendingDtensor"]
        assert (log["name"], log["rank"], len(log["events"])) == ("async", rank, 13)
