"""The registry of fused rules: which (producer, consumer) pairs one kernel can run together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pending_dtensor.errors import FusedRuleConflictError

FusedRule = Callable[..., Any]

_rules: dict[tuple[str, str], FusedRule] = {}


def register_fused_rule(producer: str, consumer: str, rule: FusedRule) -> None:
    """Registers what runs when ``consumer`` meets a value that ``producer`` deferred.

    Args:
        producer: kind of the deferred value's recipe, such as ``all_gather``.
        consumer: name of the consuming operation, such as ``linear`` or ``reduce_scatter``.
        rule: called with what the consumer was called with; must give the consumer's result.

    Raises:
        FusedRuleConflictError: the pair has a rule already.
    """
    known = _rules.get((producer, consumer))
    if known is not None:
        raise FusedRuleConflictError(
            f"Expected one rule for the pair ({producer}, {consumer}), got {_name(rule)} besides "
            f"{_name(known)} (register_fused_rule). Unregister the first, or use another pair."
        )
    _rules[producer, consumer] = rule


def unregister_fused_rule(producer: str, consumer: str) -> None:
    """Takes a rule out again.

    Raises:
        KeyError: the pair has no rule.
    """
    del _rules[producer, consumer]


def find_rule(producer: str, consumer: str) -> FusedRule | None:
    """The rule for a pair, or None."""
    return _rules.get((producer, consumer))


def fused_rules() -> dict[tuple[str, str], FusedRule]:
    """A copy of the registry."""
    return dict(_rules)


def _name(rule: FusedRule) -> str:
    return f"{getattr(rule, '__module__', '?')}.{getattr(rule, '__qualname__', repr(rule))}"
