"""How long each collective was in flight, as far as the host can know.

[Note: finished unseen]
Nothing tells the host when a collective finishes, except a wait for it that ends, or a profiler.
Without one, what is done before it is read has finished at some time between its launch and its
read, and to count all of that as communication would make anything look hidden. So it is taken to
have run at the rate of its like, or else of all, that were waited for, and to have been done by its
read in any case. If nothing was waited for there is no rate; then hardly anything is exposed, and
the fraction is near 1 either way.
"""

from __future__ import annotations

from collections.abc import Sequence

from pending_dtensor.events import Interval, OverlapEvent

# A wait for what is done takes a moment too, and more on a busy machine. It counts as one that saw
# the collective finish if it was at least this part of the time since the launch.
_SEEN_FRACTION = 0.1


def in_flight(events: Sequence[OverlapEvent]) -> dict[OverlapEvent, Interval]:
    """When each event that was read was in flight (see the note on what finished unseen)."""
    at_most = {event: event.in_flight_at_most for event in events}
    known = {event: interval for event, interval in at_most.items() if interval is not None}
    seen = {event: known[event] for event in known if saw_the_end(event)}
    rates: dict[tuple[str, str], float | None] = {}

    def rate_of(event: OverlapEvent) -> float | None:
        """Of its like, or of all: a process group may send more for one kind than for another."""
        like = (event.kind, event.kernel)
        if like not in rates:
            alike = {e: times for e, times in seen.items() if (e.kind, e.kernel) == like}
            rates[like] = _seconds_per_byte(alike or seen)
        return rates[like]

    def ended(event: OverlapEvent, interval: Interval) -> float:
        if event.finished is not None:
            return event.finished
        rate = rate_of(event)
        if rate is None or event in seen:
            return interval.ended
        return min(interval.ended, interval.began + rate * _traffic_bytes(event))

    return {
        event: Interval(interval.began, ended(event, interval)) for event, interval in known.items()
    }


def saw_the_end(event: OverlapEvent) -> bool:
    """Whether a reader waited until the collective finished, so that it is known when it did."""
    interval = event.in_flight_at_most
    if interval is None or not event.waits:
        return False
    last = event.waits[-1]
    return last.ended - last.began >= _SEEN_FRACTION * (interval.ended - interval.began)


def _seconds_per_byte(seen: dict[OverlapEvent, Interval]) -> float | None:
    """The median over the bytes, the lower of two: neither latency nor one late rank decides."""
    rates = sorted(
        ((interval.ended - interval.began) / _traffic_bytes(event), _traffic_bytes(event))
        for event, interval in seen.items()
        if event.bytes
    )
    half = sum(size for _, size in rates) / 2
    for rate, size in rates:
        half -= size
        if half <= 0:
            return rate
    return None


def _traffic_bytes(event: OverlapEvent) -> int:
    """Bytes that travel, up to a factor that all kinds share."""
    return event.bytes * (2 if event.kind == "all_reduce" else 1)
