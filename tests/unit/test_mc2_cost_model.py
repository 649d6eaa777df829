"""What ``chunks="auto"`` goes by."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mc2 import CostModel, use_cost_model
from mc2.cost_model import MAX_CHUNKS, ONE_COLLECTIVE, cost_model

MODEL = CostModel()
seconds = st.floats(1e-6, 1.0)
ranks = st.integers(2, 64)


def times(model: CostModel, chunks: int, ranks: int, multiply_s: float, travel_s: float) -> float:
    """The module's formulas, written once more."""
    if chunks == 0:
        return ranks * multiply_s + model.collective_factor * travel_s
    messages_s = model.s_pipeline + chunks * (ranks - 1) * model.s_per_message
    return max(ranks * multiply_s, travel_s + multiply_s / chunks) + messages_s


@given(ranks, seconds, seconds, st.integers(1, MAX_CHUNKS))
def test_with_a_known_rate_the_choice_costs_least(
    ranks: int, multiply_s: float, travel_s: float, most: int
) -> None:
    known = dataclasses.replace(MODEL, bytes_per_s=1e9)
    flops = multiply_s * MODEL.flops_per_s
    chosen = known.chunks(ranks, flops, 1e9 * travel_s / (ranks - 1), most)
    assert 0 <= chosen <= most
    costs = [times(MODEL, chunks, ranks, multiply_s, travel_s) for chunks in range(most + 1)]
    assert costs[chosen] == pytest.approx(min(costs))


@given(ranks, seconds, st.floats(0, 100), st.integers(1, MAX_CHUNKS))
def test_with_an_unknown_rate_no_link_makes_the_choice_bad(
    ranks: int, multiply_s: float, travel_over_arithmetic: float, most: int
) -> None:
    chosen = MODEL.chunks(ranks, multiply_s * MODEL.flops_per_s, 1.0, most)
    assert 1 <= chosen <= most  # never one collective, of which there is no telling

    def regret(chunks: int) -> float:
        """At the two rates that decide."""
        return max(
            times(MODEL, chunks, ranks, multiply_s, travel_s)
            / min(times(MODEL, c, ranks, multiply_s, travel_s) for c in range(1, most + 1))
            for travel_s in (0.0, ranks * multiply_s)
        )

    assert regret(chosen) == pytest.approx(min(regret(c) for c in range(1, most + 1)))
    # And at any other rate it is no worse than there.
    travel_s = travel_over_arithmetic * ranks * multiply_s
    best = min(times(MODEL, c, ranks, multiply_s, travel_s) for c in range(1, most + 1))
    there = times(MODEL, chosen, ranks, multiply_s, travel_s)
    assert there <= best * regret(chosen) * (1 + 1e-9)


def test_faster_links_and_slower_ones() -> None:
    def chosen(rate: float | None) -> int:
        model = dataclasses.replace(MODEL, bytes_per_s=rate)
        return model.chunks(2, 2 * 1024 * 256 * 512, 1024 * 256 * 4, MAX_CHUNKS)

    assert [chosen(rate) for rate in (1e12, 320e6, 80e6, 20e6)] == [ONE_COLLECTIVE, 1, 2, 3]
    assert chosen(None) == 2


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
