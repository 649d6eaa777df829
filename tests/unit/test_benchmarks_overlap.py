"""The overlap benchmark: what it makes of samples; that it runs, and catches wrong variants."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks import overlap
from benchmarks.interleaved import Sample
from benchmarks.overlap import Result, rate_for, report, slower_than_torch, verdicts
from benchmarks.rank_processes import Ranks, rank_processes
from benchmarks.slow_link import Loopback

LINK = Loopback("a test")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two ranks for all tests of this file."""
    with rank_processes(LINK, 2) as ranks:
        yield ranks


def result(kind: str = "mlp", **seconds: tuple[float, float]) -> Result:
    """A result from (forward, backward) seconds; names with ``_`` for a space."""
    phases = {
        "compute": (1.0, 2.0),
        "collectives": (0.6, 0.9),
        "point to point": (0.4, 0.6),
        "torch": (1.6, 2.9),
        "async": (1.6, 2.5),
        "mc2 fused": (1.05, 2.1),
        **{name.replace("_", " "): value for name, value in seconds.items()},
    }
    samples = {
        name: [Sample((forward,)), Sample((backward,)), Sample((forward + backward,))]
        for name, (forward, backward) in phases.items()
    }
    return Result("a workload", kind, "a link", samples)


def test_the_limit_is_the_larger_of_arithmetic_and_communication() -> None:
    assert [result().limit(phase) for phase in range(3)] == [1.0, 2.0, 3.0]
    slow_link = result(collectives=(3.0, 5.0), point_to_point=(1.5, 2.5))
    assert [slow_link.limit(phase) for phase in range(3)] == [1.5, 2.5, 4.0]


def test_ratios() -> None:
    assert result().comm_over_compute() == pytest.approx(0.5)
    assert result().over_limit("mc2 fused", 2) == pytest.approx(1.05)
    assert result().speedup("mc2 fused", 2) == pytest.approx(4.5 / 3.15)
    assert result().speedup("async", 1) == pytest.approx(2.9 / 2.5)


def test_a_rate_is_found_from_a_probe() -> None:
    assert rate_for(0.25, result(), 100e6) == pytest.approx(200e6)


def test_aims_that_are_reached() -> None:
    assert [reached for reached, _ in verdicts(result())] == [True, True, True]


@pytest.mark.parametrize(
    ("seconds", "missed"),
    [
        ({"mc2_fused": (1.2, 2.2)}, "mc2 fused 1.133 x limit"),
        ({"torch": (1.3, 2.7)}, "mc2 fused 1.270 x torch"),
        ({"async": (1.6, 2.7)}, "async backward 1.074 x torch"),
    ],
)
def test_aims_that_are_missed(seconds: dict[str, tuple[float, float]], missed: str) -> None:
    words = [words for reached, words in verdicts(result(**seconds)) if not reached]
    assert any(word.startswith(missed) for word in words)


def test_there_is_no_aim_where_little_is_sent_or_for_other_workloads() -> None:
    assert verdicts(result(collectives=(0.2, 0.3))) == []
    assert verdicts(result(kind="llama3")) == []


def test_the_better_column_backward_counts() -> None:
    both = result(mc2_fused=(1.5, 3.0), mc2_overlap=(1.0, 2.0))
    assert verdicts(both)[0][1].startswith("mc2 overlap 1.000 x limit")


def test_slower_than_torch_is_told() -> None:
    assert slower_than_torch(result()) == []
    (line, *rest) = slower_than_torch(result(mc2_fused=(2.0, 2.1)))
    assert line.startswith("mc2 fused forward: 0.800 x torch")
    assert not rest


def test_the_table_has_every_variant_and_the_limit() -> None:
    text = report(result())
    names = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    assert names[2:] == [
        "compute", "collectives", "point to point", "torch", "async", "mc2 fused", "limit"
    ]  # fmt: skip
    assert "comm / compute 0.50" in text


@pytest.mark.parametrize("kind", ["mlp", "llama3"])
@pytest.mark.parametrize("sequence_first", [True, False])
def test_every_variant_agrees_and_is_timed(ranks: Ranks, kind: str, sequence_first: bool) -> None:
    sizes = {
        "kind": kind,
        "sequence_first": sequence_first,
        "batch": 2,
        "sequence": 16,
        "hidden": 64,
        "intermediate": 32,
        "heads": 8,
        "kv_heads": 4,
    }
    timed = overlap.measured(ranks, LINK, sizes, rounds=2)
    assert set(timed.samples) == {
        overlap.COMPUTE, overlap.COLLECTIVES, overlap.WIRE, *overlap.VARIANTS
    }  # fmt: skip
    for samples in timed.samples.values():
        assert [len(sample.seconds) for sample in samples] == [2, 2, 2]
        assert all(second > 0 for sample in samples for second in sample.seconds)
    assert report(timed)


def compare_with_changed_weight(variant: str) -> str:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks import workloads

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    workload = workloads.Workload("mlp", False, 2, 8, 16, 32)
    steps = {name: workloads.parallel_step(workload, name, mesh) for name in ("torch", variant)}
    with torch.no_grad():
        steps[variant].module.w2.weight._local_tensor[0, 0] += 0.1
    try:
        workloads.check_equal(steps)
    except AssertionError as error:
        return str(error)
    return "equal"


@pytest.mark.parametrize("variant", ["async", "mc2 fused"])
def test_a_variant_that_computes_something_else_is_caught(ranks: Ranks, variant: str) -> None:
    for words in ranks.call(compare_with_changed_weight, variant=variant):
        assert words.startswith("Expected output of")
        assert repr(variant) in words


def flops_of_too_little() -> str:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks import workloads

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    workload = workloads.Workload("llama3", True, 1, 8, 64, 32, 8, 4)
    compute = workloads.compute_step(workload, mesh)
    workloads.check_same_arithmetic(workload, compute, mesh.size())
    try:
        workloads.check_same_arithmetic(workload, compute.forward, mesh.size())
    except AssertionError as error:
        return str(error)
    return "not noticed"


def test_a_compute_variant_that_skips_work_is_caught(ranks: Ranks) -> None:
    for words in ranks.call(flops_of_too_little):
        assert "FLOPs in variant 'compute'" in words
