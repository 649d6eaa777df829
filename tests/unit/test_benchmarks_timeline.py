"""What `benchmarks.timeline` makes of its measurements."""

from __future__ import annotations

import pytest

from benchmarks.timeline import TITLES, Seen, largest_distance, rows


def test_the_worst_variant_and_rank_counts_by_its_median() -> None:
    def seen(*logged: float | None) -> list[Seen]:
        return [Seen(1.0, value, 0.5, "") for value in logged]

    torch = {"torch": seen(None, None, None)}
    good = {**torch, "async": seen(0.5, 0.5, 0.9), "mc2 fused": seen(0.51, 0.5, 0.5)}
    bad = {**good, "mc2 fused": seen(0.3, 0.7, 0.5)}
    assert largest_distance([good, good]) == 0.0
    assert largest_distance([good, bad]) == pytest.approx(0.2)
    table = rows([good, bad])
    assert [row[:2] for row in table] == [[t, r] for t in TITLES.values() for r in ("0", "1")]
    assert table[0][2:] == ["1.000", "50.0%", "-"]
    assert table[2][2:] == ["1.000", "50.0%", "50.0%"]
