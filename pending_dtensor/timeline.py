"""What the pictures and traces show of each rank: lanes of bars, on one clock for all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pending_dtensor.events import ComputeSpan, Interval, OverlapEvent, Recording
from pending_dtensor.in_flight import in_flight
from pending_dtensor.intervals import subtract, union
from pending_dtensor.overlap_summary import percent, summarize

# Told apart also by people who cannot tell red from green, and in grey.
COMMUNICATION_COLOR = "#5b9bd5"
UNSEEN_COLOR = "#dbe8f5"
EXPOSED_COLOR = "#d1330a"
COMPUTE_COLOR = "#bdbdbd"


class Bar(NamedTuple):
    """A stretch of a lane, in seconds since the first rank's block of that name began."""

    began: float
    ended: float
    name: str
    detail: str = ""
    event: OverlapEvent | None = None

    def name_within(self, letters: float) -> str:
        """The name, or what is left of it where there is room for so many letters."""
        names = (self.name, self.name.rpartition(" ")[2], "")
        return next(name for name in names if len(name) < letters or not name)


@dataclass(frozen=True)
class RankTimeline:
    """One rank's lanes.

    Attributes:
        title: name of the recording, and the rank.
        communication: lanes of collectives in flight; as many as were in flight at once.
        until_read: the same, each until somebody had read it.
        unseen: from the end of `communication` until then, those that nobody saw finish.
        waits: where a reader was blocked.
        compute: matmuls and fused kernels, cut where they were blocked.
        unread: collectives that nobody read: it is not known how long they took.
        fallbacks: where something fell back.
        summary: totals, see `OverlapLog.summary`.
    """

    title: str
    communication: list[list[Bar]]
    until_read: list[list[Bar]]
    unseen: list[Bar]
    waits: list[Bar]
    compute: list[Bar]
    unread: list[Bar]
    fallbacks: list[Bar]
    summary: dict[str, Any]

    def in_communication_lanes(self, bars: Sequence[Bar]) -> Iterator[tuple[int, Bar]]:
        """Bars of `waits` or `unseen`, each with the lane of its collective."""
        lane_of = {bar.event: lane for lane, bars in enumerate(self.communication) for bar in bars}
        return ((lane_of[bar.event], bar) for bar in bars)

    @property
    def ended(self) -> float:
        """When the last bar ended [s]."""
        lanes = [*self.communication, self.waits, self.compute, self.unread, self.fallbacks]
        return max((bar.ended for lane in lanes for bar in lane), default=0.0)

    def totals(self) -> list[str]:
        """The totals beside a picture, most wanted first."""
        numbers = self.summary
        hidden = numbers["hidden_fraction"]
        lines = [
            "hidden not known: streams wait, not the host"
            if hidden is None and numbers["communication_s"]
            else f"{percent(hidden)} hidden",
            f"{numbers['communication_s'] * 1e3:.1f} ms in flight",
            f"{numbers['exposed_s'] * 1e3:.1f} ms exposed",
            f"{self.ended * 1e3:.1f} ms in all",
            f"{numbers['collectives']} collectives, {numbers['fused']} fused",
        ]
        if numbers["bytes"]:
            lines.append(f"{numbers['bytes'] / 2**20:.1f} MiB")
        lines += [f"{numbers[what]} {what}" for what in ("unread", "fallbacks") if numbers[what]]
        return lines


def timelines(recordings: Sequence[Recording]) -> list[RankTimeline]:
    """The lanes of each rank, in order; those of one name are aligned by the ranks' clocks.

    Ranks of one machine share a clock; those of several are aligned as well as their clocks are.
    """
    first: dict[str, float] = {}
    for recording in recordings:
        opened = recording.opened_unix_s
        first[recording.name] = min(first.get(recording.name, opened), opened)
    return [
        _timeline(recording, recording.opened_unix_s - first[recording.name])
        for recording in in_order(recordings)
    ]


def in_order(recordings: Sequence[Recording]) -> list[Recording]:
    """Recordings of one name together, the names as they come, their ranks by number."""
    names = list(dict.fromkeys(recording.name for recording in recordings))
    return sorted(recordings, key=lambda recording: (names.index(recording.name), recording.rank))


def _timeline(recording: Recording, shift: float) -> RankTimeline:
    shift -= recording.opened

    def bar(interval: Interval | ComputeSpan, name: str, event: OverlapEvent | None = None) -> Bar:
        detail = "" if event is None else _describe(event)
        return Bar(interval.began + shift, interval.ended + shift, name, detail, event)

    def moment(event: OverlapEvent) -> Bar:
        return bar(Interval(event.started, event.started), label(event), event)

    flights = in_flight(recording.collectives)
    until_read = {event: event.in_flight_at_most or flight for event, flight in flights.items()}
    lanes = in_lanes([bar(times, label(event), event) for event, times in until_read.items()])
    in_flight_bars = {event: bar(flight, label(event), event) for event, flight in flights.items()}
    waits = union(wait for event in flights for wait in event.waits)
    return RankTimeline(
        recording.title,
        [[in_flight_bars[bar.event] for bar in lane if bar.event] for lane in lanes],
        lanes,
        [
            bar(Interval(flight.ended, until_read[event].ended), "finished unseen", event)
            for event, flight in flights.items()
            if flight.ended < until_read[event].ended
        ],
        [
            bar(wait, f"waiting for {label(event)}", event)
            for event in flights
            for wait in event.waits
        ],
        [
            bar(part, span.name)
            for span in sorted(recording.spans, key=lambda span: (span.began, -span.ended))
            for part in subtract([span], waits)
        ],
        [moment(event) for event in recording.collectives if event not in flights],
        [moment(event) for event in recording.fallbacks],
        summarize(recording),
    )


def in_lanes(bars: Sequence[Bar]) -> list[list[Bar]]:
    """Bars in as few lanes as have room for them without overlap, the earliest in the first."""
    lanes: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: bar.began):
        for lane in lanes:
            if lane[-1].ended <= bar.began:
                lane.append(bar)
                break
        else:
            lanes.append([bar])
    return lanes


def label(event: OverlapEvent) -> str:
    """Its kind, and the kernel if it was fused."""
    return event.kind if event.kernel == "unfused" else f"{event.kernel} {event.kind}"


def _describe(event: OverlapEvent) -> str:
    facts = [
        "x".join(map(str, event.shape)),
        str(event.dtype or "").removeprefix("torch."),
        f"{event.bytes / 2**20:.2f} MiB",
        f"{event.exposed_s * 1e3:.2f} ms exposed",
        event.detail,
    ]
    return ", ".join(fact for fact in facts if fact)
