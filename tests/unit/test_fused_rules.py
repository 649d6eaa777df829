"""The registry of fused rules: one rule for a pair, and an error that names both of two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pending_dtensor import register_fused_rule
from pending_dtensor.errors import FusedRuleConflictError
from pending_dtensor.fused_rules import find_rule, fused_rules, unregister_fused_rule

PAIR = ("test_producer", "test_consumer")


def first_rule() -> str:
    return "first"


def second_rule() -> str:
    return "second"


@pytest.fixture
def registered() -> Iterator[None]:
    before = fused_rules()
    register_fused_rule(*PAIR, first_rule)
    yield
    unregister_fused_rule(*PAIR)
    assert fused_rules() == before


@pytest.mark.usefixtures("registered")
def test_a_rule_is_found_by_its_pair() -> None:
    assert find_rule(*PAIR) is first_rule
    assert find_rule(*reversed(PAIR)) is None
    assert find_rule(PAIR[0], "other") is None
    assert fused_rules()[PAIR] is first_rule


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("rule", [first_rule, second_rule, lambda: None])
def test_a_second_rule_for_a_pair_is_refused(rule: object) -> None:
    with pytest.raises(FusedRuleConflictError) as raised:
        register_fused_rule(*PAIR, rule)  # type: ignore[arg-type]
    message = str(raised.value)
    assert isinstance(raised.value, ValueError)
    for named in (*PAIR, f"{__name__}.first_rule", f"{__name__}.{rule.__qualname__}"):  # type: ignore[attr-defined]
        assert named in message
    assert find_rule(*PAIR) is first_rule


@pytest.mark.usefixtures("registered")
def test_the_copy_is_a_copy() -> None:
    fused_rules().clear()
    assert find_rule(*PAIR) is first_rule


def test_a_rule_without_a_name_is_named_by_its_repr() -> None:
    class Rule:
        def __repr__(self) -> str:
            return "<a rule object>"

        def __call__(self) -> None:
            return None

    register_fused_rule(*PAIR, Rule())
    try:
        with pytest.raises(FusedRuleConflictError, match="<a rule object>"):
            register_fused_rule(*PAIR, Rule())
    finally:
        unregister_fused_rule(*PAIR)


def test_unregistering_what_is_not_there() -> None:
    with pytest.raises(KeyError):
        unregister_fused_rule(*PAIR)
