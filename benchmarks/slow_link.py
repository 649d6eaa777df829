"""A network of a given rate between processes of one machine: for measuring overlap without a GPU.

    rank 0 [wire] -------- [wire] rank 1          two ranks: one veth pair
    rank 0 [wire] --- [port0] bridge [port1] ...  more: a switch, which is a namespace of its own

Each rank lives in a network namespace of its own, and ``tc tbf`` limits the rate on both ends of
each veth pair, so that a rank sends and receives at the given rate at once, as through a network
card. Traffic stays inside these namespaces; the machine's own interfaces are not touched.

Nothing needs to be cleaned up, also when this process is killed: the namespaces have no names. Each
is held open by a ``cat`` that reads from a pipe of this process and by the ranks inside it; when
they end, the kernel removes it with everything in it.

Run it to see whether a slow link can be had on this machine: ``python -m benchmarks.slow_link``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

TOOLS = ("unshare", "nsenter", "ip", "tc")
INTERFACE = "wire"
# Packets as large as TCP hands them to a network card, which cuts and joins them on its own. With
# small ones the ranks' processors would do that, and be interrupted 500 times for each 4 MiB.
MTU = 65000
# One connection at a time and no competitors: a window that only grows, and no start from zero
# after a pause, make the link's rate the only limit.
TCP_SETTINGS = {
    "net/ipv4/tcp_congestion_control": "reno",
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/tcp_no_metrics_save": "1",
}


class LinkUnavailableError(RuntimeError):
    """This machine cannot make a slow link; the message says why."""


class Link(Protocol):
    """How ranks are joined.

    Attributes:
        description: in words, for reports.
        is_slow: whether the rate is limited.
        interface: name of the network interface that ranks use.
    """

    description: str
    is_slow: bool
    interface: str

    def inside(self, rank: int) -> list[str]:
        """What to put before a command to run it where ``rank`` lives."""
        ...

    def set_rate(self, bytes_per_s: float) -> None:
        """Changes the rate, in each direction, of every rank."""
        ...


class Loopback:
    """All ranks in this process's network, over ``lo``: no limit to the rate."""

    is_slow = False
    interface = "lo"

    def __init__(self, reason: str) -> None:
        self.description = f"loopback, rate not limited ({reason})"

    def inside(self, rank: int) -> list[str]:
        """Nothing."""
        return []

    def set_rate(self, bytes_per_s: float) -> None:
        """Does nothing: loopback is as fast as it is."""


class SlowLink:
    """Ranks in namespaces of their own; see the module."""

    is_slow = True
    interface = INTERFACE

    def __init__(self, enter: Sequence[Sequence[str]], switch: Sequence[str] | None) -> None:
        """Joins namespaces that exist.

        Args:
            enter: for each rank, what to put before a command to run it in the rank's namespace.
            switch: the same for the namespace that joins more than two ranks.
        """
        self._enter = [list(prefix) for prefix in enter]
        self._switch = None if switch is None else list(switch)
        self.description = "not limited yet"

    def inside(self, rank: int) -> list[str]:
        """The command that enters the namespace of ``rank``."""
        return self._enter[rank]

    def set_rate(self, bytes_per_s: float) -> None:
        """Changes the rate on both ends of each pair."""
        for rank, prefix in enumerate(self._enter):
            run([*prefix, *rate_command(INTERFACE, bytes_per_s)])
            if self._switch is not None:
                run([*self._switch, *rate_command(f"port{rank}", bytes_per_s)])
        shape = "a veth pair" if self._switch is None else "veth pairs and a bridge"
        self.description = (
            f"{len(self._enter)} network namespaces, {shape}, tc tbf on both ends at "
            f"{bytes_per_s / 1e6:.4g} MB/s each way"
        )


@contextmanager
def slow_link(ranks: int, bytes_per_s: float) -> Iterator[SlowLink]:
    """Joins ``ranks`` new namespaces by links of a rate.

    Raises:
        LinkUnavailableError: the machine, or what this user may do on it, does not allow it.
    """
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise LinkUnavailableError(f"{', '.join(missing)} not found: install util-linux, iproute2")
    with ExitStack() as held:
        # The first namespace also makes the user namespace that gives a non-root user its rights.
        flags = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        pids = [held.enter_context(_namespace(["unshare", *flags, "--net"]))]
        join = ["--user", "--preserve-credentials"] if flags else []
        count = ranks if ranks <= 2 else ranks + 1
        for _ in range(count - 1):
            via_first = ["nsenter", f"--target={pids[0]}", *join, "unshare", "--net"]
            pids.append(held.enter_context(_namespace(via_first)))
        enter = [["nsenter", f"--target={pid}", *join, "--net"] for pid in pids]
        for prefix in enter:
            for setting, value in TCP_SETTINGS.items():
                run([*prefix, "sh", "-c", f"echo {value} > /proc/sys/{setting}"])
        for namespace, command in join_commands(pids[:ranks], pids[ranks:]):
            run([*enter[namespace], *command])
        link = SlowLink(enter[:ranks], enter[ranks] if count > ranks else None)
        link.set_rate(bytes_per_s)
        yield link


@contextmanager
def slow_link_or_loopback(ranks: int, bytes_per_s: float) -> Iterator[Link]:
    """`slow_link`, or where there is none `Loopback`, which says why."""
    with ExitStack() as held:
        link: Link
        try:
            link = held.enter_context(slow_link(ranks, bytes_per_s))
        except LinkUnavailableError as error:
            link = Loopback(str(error))
        yield link


def join_commands(pids: Sequence[int], switch: Sequence[int]) -> list[tuple[int, list[str]]]:
    """The commands that join namespaces, each with the index of the namespace to run it in.

    Args:
        pids: a process in the namespace of each rank.
        switch: none for two ranks; for more, one process in the namespace of the bridge.
    """
    commands: list[tuple[int, list[str]]] = []

    def add(namespace: int, command: str) -> None:
        commands.append((namespace, command.split()))

    pair = f"ip link add {INTERFACE} mtu {MTU} type veth peer name"
    if not switch:
        if len(pids) == 2:
            add(0, f"{pair} {INTERFACE} mtu {MTU} netns {pids[1]}")
    else:
        bridge = len(pids)
        add(bridge, "ip link add bridge type bridge")
        add(bridge, f"ip link set bridge mtu {MTU} up")
        for rank in range(len(pids)):
            add(rank, f"{pair} port{rank} mtu {MTU} netns {switch[0]}")
            add(bridge, f"ip link set port{rank} master bridge up")
    for rank in range(len(pids)):
        add(rank, "ip link set lo up")
        if len(pids) > 1:
            add(rank, f"ip addr add 10.0.0.{rank + 1}/24 dev {INTERFACE}")
            add(rank, f"ip link set {INTERFACE} up")
    return commands


def rate_command(interface: str, bytes_per_s: float) -> list[str]:
    """The command that limits what leaves an interface.

    The burst is what a timer tick of 1 ms lets through, and at least a packet with its
    headers; the queue is longer than TCP's largest window, so that nothing is ever dropped.
    """
    if bytes_per_s <= 0:
        raise ValueError(f"Expected a rate above 0 bytes/s, got {bytes_per_s} (slow link).")
    burst = max(MTU + 1000, round(bytes_per_s / 1000))
    return (
        f"tc qdisc replace dev {interface} root tbf rate {round(8 * bytes_per_s)}bit "
        f"burst {burst} limit {64 * 2**20}"
    ).split()


def run(command: Sequence[str]) -> None:
    """Runs a command.

    Raises:
        LinkUnavailableError: it failed; the message has its words.
    """
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise LinkUnavailableError(f"{' '.join(command)}: {said}")


@contextmanager
def _namespace(unshare: Sequence[str]) -> Iterator[int]:
    """A network namespace, held by a process that ends with this one; yields its process id."""
    holder = subprocess.Popen(
        [*unshare, "sh", "-c", "echo there; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process to act on
    )
    assert holder.stdin
    assert holder.stdout
    assert holder.stderr
    try:
        if holder.stdout.readline() != "there\n":
            said = holder.stderr.read().strip()
            raise LinkUnavailableError(f"{' '.join(unshare)}: {said or 'no namespace'}")
        yield holder.pid
    finally:
        holder.stdin.close()
        holder.wait()
        holder.stdout.close()
        holder.stderr.close()


def main() -> int:
    """Makes a link and says what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", type=float, default=20.0, help="MB/s (default 20)")
    args = parser.parse_args()
    with slow_link_or_loopback(args.ranks, args.rate * 1e6) as link:
        print(link.description)
        return 0 if link.is_slow else 1


if __name__ == "__main__":
    sys.exit(main())
