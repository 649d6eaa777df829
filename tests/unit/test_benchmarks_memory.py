"""Adding up allocations."""

from __future__ import annotations

from benchmarks.memory import FORWARD_ENDED, Usage, gathered_bytes, regather_saves, usage_of


def test_peak_saved_and_left() -> None:
    changes = [100, 50, -50, 20, FORWARD_ENDED, 40, -100, -20, 30, -70]
    assert usage_of(changes, output_bytes=20) == Usage(100, 150, 160, 0)


def test_what_is_not_released_shows() -> None:
    assert usage_of([10, FORWARD_ENDED, 5], output_bytes=0).left == 15


def test_regather_saves_the_difference() -> None:
    usages = {"mc2 fused": Usage(100, 0, 0, 0), "mc2 regather": Usage(70, 0, 0, 0)}
    assert regather_saves(usages) == 30


def test_a_llama_block_gathers_twice() -> None:
    sizes = {"kind": "mlp", "batch": 2, "sequence": 8, "hidden": 16}
    assert gathered_bytes(sizes) == 4 * 2 * 8 * 16
    assert gathered_bytes({**sizes, "kind": "llama3"}) == 2 * 4 * 2 * 8 * 16
