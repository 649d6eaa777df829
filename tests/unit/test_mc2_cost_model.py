"""What ``chunks="auto"`` goes by."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mc2 import CostModel, use_cost_model
from mc2.cost_model import MIN_PIECE_ROWS, ONE_COLLECTIVE, PIECES, cost_model

MODEL = CostModel()
sizes = st.tuples(st.integers(2, 64), st.integers(1, 1 << 14), st.integers(1, 4096))


def times(
    model: CostModel,
    chunks: int,
    ranks: int,
    rows: int,
    features: int,
    travel_s: float,
    *,
    gathers: bool,
    matmuls: int,
) -> float:
    """The module's formulas, written once more, for a square weight."""
    weight = features**2 * (matmuls if gathers else 1)
    multiply_s = 2 * rows * weight / model.flops_per_s
    next_s = 0.0 if gathers else (matmuls - 1) * ranks * multiply_s
    packing_s = model.s_per_weight_element * weight
    if chunks == 0 and gathers:
        own = max(multiply_s, travel_s * (model.collective_factor if ranks == 2 else 1.25))
        return own + (ranks - 1) * multiply_s + 2 * packing_s
    if chunks == 0:
        return ranks * multiply_s + max(next_s, model.collective_factor * travel_s)
    pieces_s = chunks * (ranks - 1) * (model.s_per_message + packing_s)
    busy = ranks * multiply_s + 0.75 * pieces_s + next_s
    overlapped = max(busy, travel_s + multiply_s / chunks)
    return overlapped + 0.25 * pieces_s + model.s_pipeline


def pieces_of(rows: int) -> list[int]:
    return [pieces for pieces in PIECES if pieces == 1 or rows // pieces >= MIN_PIECE_ROWS]


@given(sizes, st.floats(1e6, 1e11), st.booleans(), st.integers(1, 2))
def test_with_a_known_rate_the_choice_costs_least(
    size: tuple[int, int, int], rate: float, gathers: bool, matmuls: int
) -> None:
    ranks, rows, features = size
    known = dataclasses.replace(MODEL, bytes_per_s=rate)
    kind: dict[str, Any] = {"gathers": gathers, "matmuls": matmuls}
    chosen = known.chunks(ranks, rows, features, features, 4, **kind)
    travel_s = (ranks - 1) * rows * features * 4 / rate
    costs = {
        chunks: times(MODEL, chunks, *size, travel_s, **kind)
        for chunks in (ONE_COLLECTIVE, *pieces_of(rows))
    }
    assert costs[chosen] == pytest.approx(min(costs.values()))


@given(sizes, st.floats(0, 100), st.booleans(), st.integers(1, 2))
def test_with_an_unknown_rate_no_link_makes_the_choice_bad(
    size: tuple[int, int, int], travel_over_arithmetic: float, gathers: bool, matmuls: int
) -> None:
    ranks, rows, features = size
    cuts = pieces_of(rows)
    choices = [ONE_COLLECTIVE, *cuts] if gathers and ranks > 2 else cuts
    kind: dict[str, Any] = {"gathers": gathers, "matmuls": matmuls}
    chosen = MODEL.chunks(ranks, rows, features, features, 4, **kind)
    assert chosen in choices
    weight = features**2 * (matmuls if gathers else 1)
    multiply_s = 2 * rows * weight / MODEL.flops_per_s
    piece_s = MODEL.s_per_message + MODEL.s_per_weight_element * weight
    whole_s = (1 if gathers else matmuls) * ranks * multiply_s
    even = [
        whole_s - multiply_s / chunks + 0.75 * chunks * (ranks - 1) * piece_s for chunks in cuts
    ]

    def regret(chunks: int, travel_s: float) -> float:
        least = min(times(MODEL, other, *size, travel_s, **kind) for other in choices)
        return times(MODEL, chunks, *size, travel_s, **kind) / least

    def at_worst(chunks: int) -> float:
        return max(regret(chunks, travel_s) for travel_s in (0.0, *even, 1e3 * max(even)))

    assert at_worst(chosen) == pytest.approx(min(at_worst(chunks) for chunks in choices))
    # And at any other rate it is no worse than there.
    travel_s = travel_over_arithmetic * ranks * multiply_s
    assert regret(chosen, travel_s) <= at_worst(chosen) * (1 + 1e-9)


def test_faster_links_and_slower_ones() -> None:
    def chosen(rate: float | None, *, gathers: bool) -> int:
        model = dataclasses.replace(MODEL, bytes_per_s=rate)
        return model.chunks(2, rows=1024, features=256, width=512, item_bytes=4, gathers=gathers)

    rates = (1e12, 320e6, 60e6, 20e6)
    assert [chosen(rate, gathers=True) for rate in rates] == [ONE_COLLECTIVE, ONE_COLLECTIVE, 2, 4]
    assert [chosen(rate, gathers=False) for rate in rates] == [ONE_COLLECTIVE, 1, 2, 4]
    assert chosen(None, gathers=True) == chosen(None, gathers=False) == 2  # no collective of two


def test_a_reduction_that_grad_weight_hides_is_cut_less() -> None:
    def chosen(rate: float | None, matmuls: int) -> int:
        model = dataclasses.replace(MODEL, bytes_per_s=rate)
        return model.chunks(2, 1024, 256, 512, 4, gathers=False, matmuls=matmuls)

    assert [chosen(rate, 1) for rate in (320e6, 60e6, 20e6)] == [1, 2, 4]
    assert [chosen(rate, 2) for rate in (320e6, 60e6, 20e6)] == [ONE_COLLECTIVE, 1, 4]


def test_with_more_than_two_ranks_a_small_gather_is_one_collective_on_any_link() -> None:
    def chosen(ranks: int, rows: int) -> tuple[int, int]:
        sizes = {"rows": rows, "features": 256, "width": 512, "item_bytes": 4}
        return MODEL.chunks(ranks, **sizes, gathers=True), MODEL.chunks(
            ranks, **sizes, gathers=False
        )

    assert chosen(2, 256) == (1, 1)
    assert chosen(4, 128) == (ONE_COLLECTIVE, 1)
    assert chosen(4, 4096)[0] == 2


def test_a_large_weight_is_packed_less_often() -> None:
    def chosen(**costs: float) -> int:
        model = dataclasses.replace(MODEL, bytes_per_s=1.0, **costs)  # all time is travel
        return model.chunks(64, 1024, features=8192, width=8192, item_bytes=4, gathers=False)

    assert chosen() == 1
    assert chosen(s_per_weight_element=1e-15) == 8


def test_told_by_device_type() -> None:
    told = CostModel(bytes_per_s=1e9)
    use_cost_model(told, "meta")
    try:
        assert cost_model("meta") == told
        assert cost_model("cpu") == MODEL
    finally:
        use_cost_model(None, "meta")
    assert cost_model("meta") == cost_model("cuda") != MODEL


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(CostModel)])
@pytest.mark.parametrize("value", [0, -1.0, "fast", True, float("nan")])
def test_a_cost_that_is_none_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"Expected {name} above 0, got {value!r}"):
        CostModel(**{name: value})


def test_anything_else_than_a_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Expected a CostModel or None, got 20e6|20000000"):
        use_cost_model(20e6)  # type: ignore[arg-type]
