"""Totals, tables, traces and pictures of recordings whose times are given."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from pending_dtensor import NotFusedError, OverlapEvent, OverlapLog
from pending_dtensor.chrome_trace import read_trace
from pending_dtensor.events import ComputeSpan, Interval
from pending_dtensor.intervals import subtract, total, union
from pending_dtensor.report import main, write_report
from pending_dtensor.timeline import EXPOSED_COLOR, Bar, in_lanes, timelines

MS = 1e-3
MIB = 1 << 20


def collective(
    started_ms: float,
    read_ms: float | None = None,
    until_ms: float | None = None,
    *,
    kind: str = "all_gather",
    kernel: str = "unfused",
    mib: float = 1.0,
    launched_ms: float | None = None,
    device: str = "cpu",
    detail: str = "",
) -> OverlapEvent:
    """A collective that was read from ``read_ms`` and waited for until ``until_ms``."""
    event = OverlapEvent(
        kind, kernel, (2, 4), torch.float32, int(mib * MIB), "0", started_ms * MS, device=device
    )
    event.detail = detail
    event.launched = None if launched_ms is None else launched_ms * MS
    if read_ms is not None:
        wait = Interval(read_ms * MS, (until_ms or read_ms) * MS)
        event.wait_began, event.readable = wait
        event.waits.append(wait)
        event.exposed_s = wait.ended - wait.began
    return event


def log_of(*events: OverlapEvent, spans: tuple[ComputeSpan, ...] = (), rank: int = 0) -> OverlapLog:
    return OverlapLog(list(events), list(spans), rank=rank, opened=0.0, opened_unix_s=1000.0)


def a_step(rank: int = 0) -> OverlapLog:
    """One exposed half, one hidden, one fused in a kernel, one unread and one fallback."""
    fused = collective(30, 36, 37, kernel="pipelined", launched_ms=31, detail="chunks=4")
    fallback = OverlapEvent("fallback", "full_gather", (2, 4), None, 0, "", 42 * MS)
    fallback.detail = "aten.sort has no sharding rule"
    return log_of(
        collective(0, 5, 10),
        collective(12, 28, 28.01, kind="reduce_scatter"),
        fused,
        collective(38, kind="all_reduce"),
        fallback,
        spans=(
            ComputeSpan("linear", 0.0, 5 * MS),
            ComputeSpan("grad_weight", 12 * MS, 28 * MS),
            ComputeSpan("all_gather_matmul", 30 * MS, 40 * MS),
        ),
        rank=rank,
    )


# --- intervals


def test_union_and_difference() -> None:
    parts = [Interval(4, 6), Interval(0, 2), Interval(1, 3), Interval(6, 7)]
    assert union(parts) == [(0, 3), (4, 7)]
    assert total(union(parts)) == 6
    assert subtract(parts, [Interval(1, 2), Interval(2.5, 5), Interval(9, 10)]) == [
        (0, 1),
        (2, 2.5),
        (5, 7),
    ]
    assert subtract(parts, [Interval(-1, 8)]) == []


def test_bars_share_a_lane_where_they_do_not_overlap() -> None:
    a, b, c, d = Bar(0, 4, "a"), Bar(1, 2, "b"), Bar(2, 3, "c"), Bar(4, 5, "d")
    assert in_lanes([d, c, b, a]) == [[a, d], [b, c]]


# --- the hidden fraction


@pytest.mark.parametrize(
    ("events", "communication_ms", "hidden"),
    [
        # Read at once: nothing is hidden.
        ([collective(0, 0, 10)], 10, 0.0),
        # Read when the half of it was over.
        ([collective(0, 5, 10)], 10, 0.5),
        # Two at a time count once.
        ([collective(0, 9, 10), collective(5, 19, 20)], 20, 0.9),
        # Done before it was read: 2 MiB at the 10 ms for each MiB of the other, not 100 ms.
        ([collective(0, 0, 10), collective(100, 200, 200, mib=2)], 30, 2 / 3),
        # An all_reduce sends twice its size.
        ([collective(0, 0, 10), collective(100, 200, 200, kind="all_reduce")], 30, 2 / 3),
        # Its like took longer.
        (
            [
                collective(0, 0, 10),
                collective(10, 10, 40, kind="reduce_scatter"),
                collective(100, 200, 200, kind="reduce_scatter"),
            ],
            70,
            3 / 7,
        ),
        # But it was done when it was read.
        ([collective(0, 0, 10), collective(100, 110, 110, mib=9)], 20, 0.5),
        # Nothing to compare it with: until its read at most.
        ([collective(0, 10, 10)], 10, 1.0),
        # A kernel that multiplied first: in flight from its launch.
        ([collective(0, 8, 10, kernel="decomposed", launched_ms=8)], 2, 0.0),
        # Never read: not known.
        ([collective(0)], 0, None),
        # Streams wait, and the host does not see it.
        ([collective(0, 10, 10, device="cuda")], 10, None),
    ],
)
def test_hidden_fraction(
    events: list[OverlapEvent], communication_ms: float, hidden: float | None
) -> None:
    summary = log_of(*events).summary()
    assert summary["communication_s"] == pytest.approx(communication_ms * MS)
    assert summary["hidden_fraction"] == (None if hidden is None else pytest.approx(hidden))


def test_the_rate_is_that_of_most_bytes() -> None:
    slow_and_small = [collective(t, t, t + 9, mib=0.01) for t in (0, 10, 20)]
    unseen = collective(100, 200, 200)
    summary = log_of(*slow_and_small, collective(50, 50, 54, mib=4), unseen).summary()
    assert summary["communication_s"] == pytest.approx((3 * 9 + 4 + 1) * MS)


# --- tables


def test_table_of_kinds() -> None:
    assert a_step().table().splitlines() == [
        "collective      kernel     count   MiB  in flight ms  exposed ms  hidden",
        "all_gather      unfused        1  1.00         10.00        5.00     50%",
        "reduce_scatter  unfused        1  1.00          6.01        0.01     99%",
        "all_gather      pipelined      1  1.00          6.00        1.00     83%",
        "all_reduce      unfused        1  1.00          0.00        0.00       -",
        "total                          4  4.00         22.01        6.01     72%",
        "fallback: aten.sort has no sharding rule (2, 4)",
    ]


def test_table_of_events() -> None:
    lines = a_step().table(each=True).splitlines()
    assert lines[0].split()[:3] == ["event", "kernel", "dtype"]
    assert lines[3].split() == (
        ["all_gather", "pipelined", "float32", "2x4", "1.00", "30.00", "6.00", "1.00", "chunks=4"]
    )
    assert lines[4].split() == [
        "all_reduce",
        "unfused",
        "float32",
        "2x4",
        "1.00",
        "38.00",
        "-",
        "-",
    ]
    assert lines[5].startswith("fallback")
    assert len(lines) == 6


# --- requirements of tests


def test_require_passes() -> None:
    log_of(collective(0, 1, 2), collective(3, 4, 5, kernel="pipelined")).require(fused=1)


def test_require_says_what_ran_unfused_and_why() -> None:
    with pytest.raises(NotFusedError) as raised:
        a_step().require(fused=1)
    assert str(raised.value).splitlines() == [
        "Expected 1 collectives in fused kernels and no fallback, got 1 and 1 (rank 0).",
        "  - fallback of shape (2, 4): aten.sort has no sharding rule",
        "  - all_gather of shape (2, 4): launched on its own, not deferred to a fused kernel",
        "  - reduce_scatter of shape (2, 4): launched on its own, not deferred to a fused kernel",
        "  - all_reduce of shape (2, 4): launched on its own, not deferred to a fused kernel",
    ]
    assert isinstance(raised.value, AssertionError)
    with pytest.raises(NotFusedError, match=r"Expected 2 collectives .* got 1 and 0"):
        log_of(collective(0, 1, 2, kernel="pipelined")).require(fused=2)


# --- traces


def viewable(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, after a check that they are as the Trace Event Format wants them."""
    trace = json.loads(path.read_text(), parse_constant=pytest.fail)  # no NaN, no Infinity
    assert trace["displayTimeUnit"] == "ms"
    named = set()
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event.get("args", {}), dict)
        if event["ph"] == "M":
            named.add((event["name"], event["pid"], event.get("tid")))
            continue
        assert ("process_name", event["pid"], 0) in named
        assert ("thread_name", event["pid"], event["tid"]) in named
        assert event["ts"] >= 0
        assert event["dur"] >= 0 if event["ph"] == "X" else (event["ph"], event["s"]) == ("i", "t")
    return trace["traceEvents"]


def test_trace_has_tracks_that_a_viewer_can_draw(tmp_path: Path) -> None:
    path = a_step(rank=3).to_chrome_trace(tmp_path / "trace.json")
    events = viewable(path)
    assert events[0]["args"]["name"] == "rank 3"
    assert {event["pid"] for event in events} == {0}
    tracks = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert list(tracks.values()) == ["communication", "exposed waits", "compute"]
    bars: dict[str, list[dict]] = {name: [] for name in tracks.values()}
    for event in events:
        if event["ph"] == "X":
            bars[tracks[event["tid"]]].append(event)
    named = {track: [bar["name"] for bar in found] for track, found in bars.items()}
    assert named["communication"] == ["all_gather", "reduce_scatter", "pipelined all_gather"]
    assert named["exposed waits"][0] == "waiting for all_gather"
    # The kernel's call is cut where it was blocked.
    assert named["compute"] == ["linear", "grad_weight", *["all_gather_matmul"] * 2]
    for track in bars.values():  # in order, and none over another
        for bar, following in pairwise(track):
            assert bar["ts"] + bar["dur"] <= following["ts"] + 1e-6
    first = bars["communication"][0]
    assert (first["ts"], first["dur"], first["args"]["bytes"]) == (0, pytest.approx(1e4), MIB)
    marks = [event["name"] for event in events if event["ph"] == "i"]
    assert marks == ["never read: all_reduce", "fallback: full_gather fallback"]


def test_trace_is_read_back_as_it_was(tmp_path: Path) -> None:
    log = a_step(rank=1)
    (read,) = read_trace(log.to_chrome_trace(tmp_path / "trace.json"))
    assert [vars(event) for event in read.events] == [vars(event) for event in log.events]
    assert (read.spans, read.rank, read.opened_unix_s) == (log.spans, 1, 1000.0)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"traceEvents": []}'])
def test_another_file_is_refused(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text(text)
    assert main([str(other)]) == 1
    assert "Expected a trace with 'pendingDtensor' in it" in capsys.readouterr().err


def test_ranks_are_aligned_by_their_clocks() -> None:
    early, late = a_step(rank=1), a_step(rank=0)
    late.opened_unix_s += 0.5
    lanes = timelines([early, late])
    assert [timeline.title for timeline in lanes] == ["rank 0", "rank 1"]
    assert [timeline.communication[0][0].began for timeline in lanes] == [0.5, 0.0]


# --- pictures


def test_page_shows_each_rank_and_loads_nothing(tmp_path: Path) -> None:
    traces = [a_step(rank).to_chrome_trace(tmp_path / f"{rank}.json") for rank in (0, 1)]
    write_report(traces, html=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "http" not in page
    assert "<script" not in page
    pictures = [ET.fromstring("<svg" + part.split("</svg>")[0] + "</svg>") for part in _svgs(page)]
    assert len(pictures) == 2
    for picture in pictures:
        bars: dict[str, list[float]] = {}
        for rect in picture.iter("rect"):
            bars.setdefault(rect.attrib["class"], []).append(float(rect.attrib["y"]))
        assert [len(bars[kind]) for kind in ("communication", "unseen")] == [3, 1]
        assert max(bars["communication"]) < min(bars["compute"])
        # Each wait over what was waited for, and over what could have been computed.
        assert sorted(bars["exposed"]) == sorted(
            [*bars["communication"], *[bars["compute"][0]] * 3]
        )
        texts = [text.text for text in picture.iter("text")]
        assert {"72% hidden", "6.0 ms exposed", "1 unread", "1 fallbacks"} <= set(texts)
        assert {"0 ms", "5 ms", "40 ms"} <= set(texts)
    assert page.count("aten.sort has no sharding rule") >= 2


def _svgs(page: str) -> list[str]:
    return page.split("<svg")[1:]


def _red_fraction(path: Path) -> float:
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    pixels = torch.from_numpy(imread(path).copy())[..., :3]
    return (
        (pixels - torch.tensor(to_rgb(EXPOSED_COLOR))).abs().amax(-1).lt(0.02).float().mean().item()
    )


def test_image_marks_what_was_exposed(tmp_path: Path) -> None:
    hidden = log_of(collective(0, 100, 100)).to_png(tmp_path / "hidden.png")
    half = log_of(collective(0, 50, 100)).to_png(tmp_path / "half.png")
    exposed = log_of(collective(0, 0, 100)).to_png(tmp_path / "exposed.png")
    assert hidden.read_bytes().startswith(b"\x89PNG")
    key_alone, in_half, in_all = map(_red_fraction, (hidden, half, exposed))
    assert in_all > in_half > 10 * key_alone
    assert in_all == pytest.approx(2 * in_half, rel=0.1)


def test_a_bar_is_named_by_what_it_has_room_for() -> None:
    bar = Bar(0, 1, "pipelined all_gather")
    assert [bar.name_within(letters) for letters in (21, 20, 11, 10, 0)] == [
        "pipelined all_gather",
        "all_gather",
        "all_gather",
        "",
        "",
    ]


def test_nothing_can_be_drawn_too(tmp_path: Path) -> None:
    assert log_of().to_png(tmp_path / "empty.png").exists()
    assert "- hidden" in log_of().to_html(tmp_path / "empty.html").read_text()
    assert "total" in log_of().table()
    assert log_of().table(each=True)


def test_without_matplotlib_an_image_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match=r"pip install 'pending-dtensor\[report\]'"):
        a_step().to_png(tmp_path / "picture.png")
    a_step().to_html(tmp_path / "page.html")


# --- the command


def test_command_joins_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = [str(a_step(rank).to_chrome_trace(tmp_path / f"{rank}.json")) for rank in (1, 0)]
    page, image, joined = (str(tmp_path / name) for name in ("p.html", "p.png", "joined.json"))
    assert main([*traces, "--html", page, "--png", image, "--trace", joined]) == 0
    printed = capsys.readouterr().out
    assert printed.index("rank 0: 72% hidden") < printed.index("rank 1: 72% hidden")
    assert printed.rstrip().endswith(f"wrote {page}, {image}, {joined}")
    assert [recording.rank for recording in read_trace(joined)] == [0, 1]
    assert Path(page).exists()
    assert Path(image).exists()


def test_a_rank_that_comes_twice_is_refused(tmp_path: Path) -> None:
    trace = a_step().to_chrome_trace(tmp_path / "0.json")
    with pytest.raises(ValueError, match=r"different ranks, got \['rank 0', 'rank 0'\]"):
        write_report([trace, trace])


def test_runs_are_told_apart_by_name(tmp_path: Path) -> None:
    traces = []
    for run, name in enumerate(("sync", "async")):
        for rank in (1, 0):
            log = a_step(rank)
            log.name = name
            log.opened_unix_s += 60 * run  # each run begins at 0
            traces.append(log.to_chrome_trace(tmp_path / f"{name}-{rank}.json"))
    joined = tmp_path / "joined.json"
    text = write_report(traces, html=tmp_path / "p.html", png=tmp_path / "p.png", trace=joined)
    titles = [f"{name}, rank {rank}" for name in ("sync", "async") for rank in (0, 1)]
    assert [line.split(":")[0] for line in text.splitlines() if "hidden," in line] == titles
    assert [recording.title for recording in read_trace(joined)] == titles
    assert [timeline.title for timeline in timelines(read_trace(joined))] == titles
    assert {timeline.communication[0][0].began for timeline in timelines(read_trace(joined))} == {0}
    events = viewable(joined)
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(named.values()) == titles
    page = (tmp_path / "p.html").read_text()
    assert [page.count(f">{title}<") for title in titles] == [2, 2, 2, 2]
