"""Recordings made of profiler traces whose times are given."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pending_dtensor import OverlapLog
from pending_dtensor.report import write_report

BASE_S = 1_700_000_000


def span(name: str, began_ms: float, ended_ms: float, category: str = "cpu_op") -> dict[str, Any]:
    times = {"ts": began_ms * 1e3, "dur": (ended_ms - began_ms) * 1e3}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, **times}


def work(kind: str, began_ms: float, ended_ms: float) -> dict[str, Any]:
    return span(f"gloo:{kind}", began_ms, ended_ms, "user_annotation")


def wait(kind: str, began_ms: float, ended_ms: float) -> list[dict[str, Any]]:
    """Ours, around torch's."""
    return [
        span(f"pending_dtensor::wait {kind}", began_ms, ended_ms, "user_annotation"),
        span("_c10d_functional::wait_tensor", began_ms, ended_ms),
    ]


def written(folder: Path, *events: dict[str, Any], rank: int = 0) -> Path:
    path = folder / f"{rank}.pt.trace.json"
    trace = {
        "schemaVersion": 1,
        "baseTimeNanoseconds": BASE_S * 10**9,
        "distributedInfo": {"rank": rank},
        "traceEvents": [{"ph": "M", "name": "process_name", "pid": 1}, *events],
    }
    path.write_text(json.dumps(trace))
    return path


def test_a_collective_is_over_when_the_process_group_says_so(tmp_path: Path) -> None:
    log = OverlapLog.from_trace(
        written(
            tmp_path,
            span("c10d::_allgather_base_", 10, 11),
            work("all_gather", 12, 20),  # begun when a thread was free: launched at 10
            *wait("all_gather", 15, 20),
            span("aten::addmm_", 20, 40),
            span("c10d::allreduce_", 40, 41),
            work("all_reduce", 41, 50),  # over long before it is read
            span("aten::addmm", 41, 100),
            *wait("all_reduce", 100, 101),
        )
    )
    gather, reduce = log.events
    assert (gather.kind, gather.started, gather.finished) == ("all_gather", 0.010, 0.020)
    assert (reduce.kind, reduce.started, reduce.finished) == ("all_reduce", 0.040, 0.050)
    assert [(wait.began, wait.ended) for wait in reduce.waits] == [(0.100, 0.101)]
    summary = log.summary()
    assert summary["communication_s"] == pytest.approx(0.010 + 0.010 + 0.001)
    assert summary["exposed_s"] == pytest.approx(0.005 + 0.001)
    assert summary["hidden_fraction"] == pytest.approx(1 - 6 / 21)
    assert summary["compute_s"] == pytest.approx(0.020 + 0.059)
    assert (summary["unread"], summary["by_kernel"]) == (0, {"unfused": 2})
    assert log.opened_unix_s == pytest.approx(BASE_S + 0.010)


def test_kernels_of_ours_are_recognized_by_what_they_launch(tmp_path: Path) -> None:
    log = OverlapLog.from_trace(
        written(
            tmp_path,
            span("mc2::pipelined_all_gather_matmul_product", 0, 50),
            span("c10d::alltoall_base_", 1, 2),
            work("all_to_all", 3, 30),
            span("aten::mm", 3, 25),
            span("pending_dtensor::wait piece", 25, 30, "user_annotation"),
            span("mc2::decomposed_matmul_scatter_start", 60, 70),
            span("c10d::_reduce_scatter_base_", 69, 70),
            work("all_reduce", 75, 90),  # begun when the kernel had returned already
            *wait("reduce_scatter", 80, 90),
            span("c10d::alltoall_base_", 100, 101),
            work("all_to_all", 101, 102),
        )
    )
    assert [(event.kind, event.kernel) for event in log.events] == [
        ("all_gather", "pipelined"),
        ("reduce_scatter", "decomposed"),
        ("all_to_all", "unfused"),
    ]
    assert log.summary()["hidden_fraction"] == pytest.approx(1 - 15 / (29 + 21 + 2))
    log.require(fused=2)


def test_matmuls_of_a_dtensor_count_once_and_without_waits(tmp_path: Path) -> None:
    """Torch's styles wait inside the matmul of the DTensor."""
    log = OverlapLog.from_trace(
        written(
            tmp_path,
            span("c10d::_allgather_base_", 0, 1),
            work("all_gather", 0, 10),
            span("aten::mm", 2, 30),
            span("_c10d_functional::wait_tensor", 3, 10),
            span("aten::mm", 10, 30),
            span("aten::mm", 30, 40),
        )
    )
    assert [(round(s.began * 1e3), round(s.ended * 1e3)) for s in log.spans] == [(10, 30), (30, 40)]
    assert log.summary()["hidden_fraction"] == pytest.approx(0.3)


def test_on_a_gpu_what_no_other_kernel_runs_beside_is_exposed(tmp_path: Path) -> None:
    log = OverlapLog.from_trace(
        written(
            tmp_path,
            span("aten::mm", 0, 1),
            span("c10d::allreduce_", 1, 2),
            span(
                "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0, 10, "kernel"
            ),
            span("sm90_xmma_gemm_f32f32", 4, 8, "kernel"),
            span("ncclKernel_ReduceScatter_RING_LL_Sum_float(ncclWork)", 20, 30, "kernel"),
            span("sm90_xmma_gemm_f32f32", 15, 40, "kernel"),
        )
    )
    assert [(event.kind, event.device) for event in log.events] == [
        ("all_gather", "cuda"),
        ("reduce_scatter", "cuda"),
    ]
    assert [event.exposed_s for event in log.events] == pytest.approx([0.006, 0.0])
    assert log.summary()["hidden_fraction"] == pytest.approx(0.7)


def test_two_exposed_kernels_at_once_count_once(tmp_path: Path) -> None:
    log = OverlapLog.from_trace(
        written(
            tmp_path,
            span("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 0, 10, "kernel"),
            span("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclWork)", 5, 20, "kernel"),
            span("sm90_xmma_gemm_f32f32", 15, 20, "kernel"),
        )
    )
    assert [(event.kind, event.exposed_s) for event in log.events] == [
        ("send_recv", pytest.approx(0.010)),
        ("all_reduce", pytest.approx(0.005)),
    ]
    assert log.summary()["hidden_fraction"] == pytest.approx(0.25)


def test_report_joins_profiles_zipped_or_not(tmp_path: Path) -> None:
    events = [work("all_reduce", 0, 10), *wait("all_reduce", 4, 10), span("aten::mm", 0, 4)]
    plain, other = written(tmp_path, *events), written(tmp_path, *events, rank=1)
    zipped = tmp_path / "1.json.gz"
    zipped.write_bytes(gzip.compress(other.read_bytes()))
    joined = tmp_path / "joined.json"
    text = write_report([plain, zipped], html=tmp_path / "page.html", trace=joined)
    for rank in (0, 1):
        assert f"rank {rank}: 40% hidden, 10.0 ms in flight, 6.0 ms exposed, 10.0 ms in all" in text
    sizes_are_not_known = ["all_reduce", "unfused", "1", "-", "10.00", "6.00", "40%"]
    assert [line.split() for line in text.splitlines()].count(sizes_are_not_known) == 2
    with pytest.raises(ValueError, match="Expected a trace of one rank, got 2"):
        OverlapLog.from_trace(joined)
