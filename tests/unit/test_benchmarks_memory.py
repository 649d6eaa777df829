"""Adding up allocations."""

from __future__ import annotations

from benchmarks.memory import (
    FORWARD_ENDED,
    MIB,
    Usage,
    gathered_bytes,
    more_than_allowed,
    most_at_once,
    regather_saves,
    usage_of,
)


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


def test_most_bytes_at_once() -> None:
    one_after_the_other = [(0.0, 1.0, 5), (1.0, 2.0, 7)]
    assert most_at_once(one_after_the_other) == 7
    assert most_at_once([*one_after_the_other, (0.5, None, 1)]) == 8
    assert most_at_once([(0.0, 3.0, 5), (1.0, 2.0, 7), (4.0, 5.0, 9)]) == 12
    assert most_at_once([]) == 0


def test_a_peak_may_be_that_of_sync_and_what_is_in_flight() -> None:
    usages = {
        "sync": Usage(0, 0, 10 * MIB, 0),
        "async": Usage(0, 0, 13 * MIB, 0, in_flight=3 * MIB),
        "mc2 fused": Usage(0, 0, 13 * MIB, 0, in_flight=2 * MIB),
    }
    assert more_than_allowed(usages) == ["mc2 fused"]
