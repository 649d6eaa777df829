"""The overlap log without any collective: what opens, nests, counts and costs."""

from __future__ import annotations

import pytest
import torch

from pending_dtensor import OverlapEvent, OverlapLog, record_overlap
from pending_dtensor import events as events_module
from pending_dtensor.events import ComputeSpan, Interval, record_event


def record(kind: str = "all_gather", elements: int = 6, **options: object) -> OverlapEvent | None:
    arguments: dict = {
        "shape": (2, 3),
        "dtype": torch.bfloat16,
        "message_elements": elements,
        "group": "0",
        **options,
    }
    return record_event(kind, **arguments)


def test_nothing_is_recorded_while_no_log_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_clock() -> float:
        raise AssertionError("the clock was read")

    def no_event(*args: object, **kwargs: object) -> None:
        raise AssertionError("an event was made")

    monkeypatch.setattr(events_module.time, "perf_counter", no_clock)
    monkeypatch.setattr(events_module, "OverlapEvent", no_event)
    assert record() is None


def test_an_event_tells_what_was_launched() -> None:
    with record_overlap() as log:
        event = record(kernel="pipelined", detail="4 chunks")
    assert event is not None
    assert log.events == [event]
    assert (event.kind, event.kernel, event.shape, event.dtype, event.bytes) == (
        "all_gather",
        "pipelined",
        (2, 3),
        torch.bfloat16,
        12,
    )
    assert (event.group, event.detail) == ("0", "4 chunks")
    assert (event.wait_began, event.readable, event.exposed_s) == (None, None, 0.0)


def test_defaults() -> None:
    with record_overlap():
        event = record()
    assert event is not None
    assert (event.kernel, event.detail) == ("unfused", "")


def test_waits_are_marked_also_after_the_block() -> None:
    with record_overlap() as log:
        event = record()
    assert event is not None
    event.begin_wait()
    event.end_wait()
    (logged,) = log.events
    assert logged.wait_began is not None
    assert logged.readable is not None
    assert logged.started <= logged.wait_began <= logged.readable
    assert logged.exposed_s == logged.readable - logged.wait_began


def test_blocks_nest_and_each_gets_every_event() -> None:
    with record_overlap() as outer:
        record("all_gather")
        with record_overlap() as inner:
            record("all_reduce")
        record("all_to_all")
    record("reduce_scatter")
    assert [event.kind for event in outer.events] == ["all_gather", "all_reduce", "all_to_all"]
    assert [event.kind for event in inner.events] == ["all_reduce"]
    assert outer.events[1] is inner.events[0]


def test_blocks_that_end_in_another_order() -> None:
    first, second = record_overlap(), record_overlap()
    first_log, second_log = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    record()
    second.__exit__(None, None, None)
    record()
    assert (len(first_log.events), len(second_log.events)) == (0, 1)
    assert record() is None


def test_a_block_ends_with_an_exception() -> None:
    logs: list[OverlapLog] = []

    def failing_step() -> None:
        with record_overlap() as log:
            logs.append(log)
            record()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_step()
    assert len(logs[0].events) == 1
    assert record() is None


def test_summary() -> None:
    with record_overlap() as log:
        for kind, kernel, elements in [
            ("all_gather", "unfused", 6),
            ("all_gather", "pipelined", 4),
            ("reduce_scatter", "unfused", 10),
        ]:
            record(kind, elements, kernel=kernel)
        record("fallback", 0, dtype=None, kernel="full_gather")
    log.events[0].begin_wait()
    log.events[0].end_wait()
    log.events[0].exposed_s = 0.25
    log.events[0].started, log.events[0].waits = 1.0, [Interval(2.75, 3.0)]
    log.events[1].begin_wait()
    log.events[1].end_wait()
    log.events[1].exposed_s = 0.5
    log.events[1].launched, log.events[1].waits = 2.0, [Interval(2.5, 2.75), Interval(3.5, 3.75)]
    log.spans += [ComputeSpan("linear", 1.0, 2.75), ComputeSpan("linear", 2.0, 3.0)]
    assert log.summary() == {
        "collectives": 3,
        "by_kind": {"all_gather": 2, "reduce_scatter": 1},
        "by_kernel": {"unfused": 2, "pipelined": 1},
        "fused": 1,
        "bytes": 2 * (6 + 4 + 10),
        "exposed_s": 0.75,
        "communication_s": 2.75,  # from 1.0 to 3.75, of two that overlap
        "hidden_fraction": 1 - 0.75 / 2.75,
        "compute_s": 1.5,  # from 1.0 to 2.5, for from there to 3.0 somebody waited
        "unread": 1,
        "fallbacks": 1,
    }
    assert log.collectives == log.events[:3]
    assert log.fallbacks == log.events[3:]


def test_summary_of_nothing() -> None:
    assert OverlapLog().summary() == {
        "collectives": 0,
        "by_kind": {},
        "by_kernel": {},
        "fused": 0,
        "bytes": 0,
        "exposed_s": 0.0,
        "communication_s": 0.0,
        "hidden_fraction": None,
        "compute_s": 0.0,
        "unread": 0,
        "fallbacks": 0,
    }
