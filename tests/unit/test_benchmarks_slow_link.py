"""The slow link: its commands, what it does where it cannot be had, its rate, and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import slow_link
from benchmarks.slow_link import (
    MTU,
    LinkUnavailableError,
    join_commands,
    rate_command,
    slow_link_or_loopback,
)

RATE = 4e6
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def needs_link() -> None:
    """Skips where no link can be made, and says why."""
    try:
        with slow_link.slow_link(2, RATE):
            pass
    except LinkUnavailableError as error:
        pytest.skip(f"no slow link on this machine: {error}")


def test_two_ranks_are_joined_by_one_pair() -> None:
    commands = [
        (namespace, " ".join(command)) for namespace, command in join_commands([11, 12], [])
    ]
    pairs = [entry for entry in commands if "type veth" in entry[1]]
    assert pairs == [
        (0, f"ip link add wire mtu {MTU} type veth peer name wire mtu {MTU} netns 12"),
    ]
    assert (0, "ip addr add 10.0.0.1/24 dev wire") in commands
    assert (1, "ip addr add 10.0.0.2/24 dev wire") in commands
    assert commands.index(pairs[0]) < commands.index((1, "ip link set wire up"))


def test_more_ranks_are_joined_by_a_bridge_of_its_own_namespace() -> None:
    commands = [
        (namespace, " ".join(command))
        for namespace, command in join_commands([11, 12, 13, 14], [15])
    ]
    assert commands[0] == (4, "ip link add bridge type bridge")
    for rank in range(4):
        pair = f"ip link add wire mtu {MTU} type veth peer name port{rank} mtu {MTU} netns 15"
        assert (rank, pair) in commands
        assert (4, f"ip link set port{rank} master bridge up") in commands
        assert (rank, f"ip addr add 10.0.0.{rank + 1}/24 dev wire") in commands


def test_a_rate_is_set_in_bits_with_a_burst_of_a_millisecond() -> None:
    command = " ".join(rate_command("wire", 100e6))
    assert command.startswith("tc qdisc replace dev wire root tbf rate 800000000bit burst 100000 ")


def test_a_slow_rate_still_lets_packets_through() -> None:
    words = rate_command("wire", 1e5)
    assert int(words[words.index("burst") + 1]) > MTU


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_a_rate_has_to_be_positive(rate: float) -> None:
    with pytest.raises(ValueError, match="above 0 bytes/s"):
        rate_command("wire", rate)


def test_without_tools_loopback_is_used_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_link.shutil, "which", lambda tool: None if tool == "tc" else tool)
    with slow_link_or_loopback(2, RATE) as link:
        assert not link.is_slow
        assert link.interface == "lo"
        assert link.inside(1) == []
        assert link.description.startswith("loopback, rate not limited (tc not found")


def test_without_rights_loopback_is_used_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_link.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(slow_link.os, "geteuid", lambda: 0)
    real = subprocess.Popen

    def refused(command: list[str], **kwargs: object) -> subprocess.Popen[str]:
        return real(["sh", "-c", "echo Operation not permitted >&2; exit 1"], **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(slow_link.subprocess, "Popen", refused)
    with slow_link_or_loopback(2, RATE) as link:
        assert "Operation not permitted" in link.description


def test_a_failed_command_is_told_in_its_words() -> None:
    with pytest.raises(LinkUnavailableError, match=r"^sh -c .*: no such thing$"):
        slow_link.run(["sh", "-c", "echo no such thing >&2; exit 3"])


SEND = """
import socket, sys, time
with socket.create_connection(("10.0.0.1", 5000)) as connection:
    connection.sendall(bytes({size}))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
"""
RECEIVE = """
import socket, time
with socket.create_server(("10.0.0.1", 5000)) as server:
    print("listening", flush=True)
    connection = server.accept()[0]
    connection.recv(1)
    began = time.perf_counter()
    received = 1
    while data := connection.recv(1 << 20):
        received += len(data)
    print(received / (time.perf_counter() - began), flush=True)
    connection.sendall(b".")
"""


@pytest.mark.usefixtures("needs_link")
@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_arrive_at_the_rate_that_was_set(ranks: int) -> None:
    with slow_link.slow_link(ranks, RATE) as link:
        for rate in (RATE, 2 * RATE):
            link.set_rate(rate)
            receiver = subprocess.Popen(
                [*link.inside(0), sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE, text=True
            )
            with receiver:
                assert receiver.stdout
                assert receiver.stdout.readline() == "listening\n"
                send = SEND.format(size=round(rate / 4))
                subprocess.run([*link.inside(1), sys.executable, "-c", send], check=True)
                measured = float(receiver.stdout.readline())
            # Never faster, but for the first burst; slower only where the machine is busy.
            assert 0.5 * rate < measured < 1.2 * rate


@pytest.mark.usefixtures("needs_link")
def test_nothing_of_it_is_left() -> None:
    with slow_link.slow_link(3, RATE) as link:
        own = {namespace_of(link.inside(rank)) for rank in range(3)}
        assert len(own) == 3
        assert own <= namespaces()
    assert not own & namespaces()


KILLED = """
import time
from benchmarks.rank_processes import rank_processes
from benchmarks.slow_link import slow_link
from tests.unit.test_benchmarks_slow_link import namespace_of
with slow_link(2, 4e6) as link, rank_processes(link, 2) as ranks:
    print(namespace_of(link.inside(0)), namespace_of(link.inside(1)), flush=True)
    time.sleep(600)
"""


@pytest.mark.usefixtures("needs_link")
def test_nothing_of_it_is_left_when_it_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    with process:
        assert process.stdout
        own = set(process.stdout.readline().split())
        assert len(own) == 2
        assert own <= namespaces()
        assert list(tmp_path.iterdir())
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while (own & namespaces() or list(tmp_path.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not own & namespaces()
    assert not list(tmp_path.iterdir())


def namespace_of(enter: list[str]) -> str:
    """Identity of the network namespace that a prefix enters."""
    (target,) = (word for word in enter if word.startswith("--target="))
    return os.readlink(f"/proc/{target.removeprefix('--target=')}/ns/net")


def namespaces() -> set[str]:
    """The network namespaces that a process lives in."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                found.add(os.readlink(entry / "ns" / "net"))
    return found
