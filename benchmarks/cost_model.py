"""What a column-row MLP costs, forward and backward: latency + bytes / rate + FLOPs / matmul rate.

Unsharded sizes: M rows, H hidden, I intermediate; R ranks, C pieces a rank's rows are cut into.

    matmul      M H I / R multiply-adds: 6 of them, 2 forward and 4 backward
    message     M H / R elements to each of R - 1 ranks: 4 times, a gather and a reduction each way

    torch       6 matmuls + 4 collectives, one after the other
    mc2         a gather ends with the product of the last piece, a reduction begins with that of
                the first; the rest goes side by side, and the last reduction beside 2 matmuls:

                max(matmul, comm + piece) forward, gather
              + max(matmul, piece + comm) forward, reduction
              + max(2 matmul, comm + 2 piece)               backward of the row
              + max(2 matmul, piece + comm)                 backward of the column

Sending and receiving also takes processor time, which is part of ``matmul`` where they overlap.
Used by `benchmarks.scaling`, and tested without ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from mc2.cost_model import ONE_COLLECTIVE, CostModel

CHUNKS = (1, 2, 4, 8, 16)
MATMULS = 6
COLLECTIVES = 4
ITEM_BYTES = 4


@dataclass(frozen=True)
class Shape:
    """One case.

    Attributes:
        ranks: R.
        rows, hidden, intermediate: unsharded sizes M, H, I.
        bytes_per_s: rate of the link, each way.
    """

    ranks: int
    rows: int
    hidden: int
    intermediate: int
    bytes_per_s: float

    @property
    def matmul_flops(self) -> float:
        """Of one of the `MATMULS`, on one rank."""
        return 2 * self.rows * self.hidden * self.intermediate / self.ranks

    @property
    def message_bytes(self) -> float:
        """What one rank sends, and receives, for one gather or one reduction."""
        return ITEM_BYTES * self.rows * self.hidden * (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class Measured:
    """Seconds of forward + backward of one case.

    Attributes:
        shape: the case.
        compute_s: arithmetic alone.
        collectives_s: the collectives of torch's styles alone.
        messages_s: as much from rank to rank, alone.
        torch_s: torch's styles.
        async_s: ours, asynchronous.
        mc2_s: the MC2 styles, by chunk count.
    """

    shape: Shape
    compute_s: float
    collectives_s: float
    messages_s: float
    torch_s: float
    async_s: float
    mc2_s: dict[int, float]


@dataclass(frozen=True)
class Machine:
    """The constants.

    Attributes:
        cores: of the machine; infinite where each rank has its own.
        s_per_flop: of a matmul on one core.
        s_per_matmul: fixed cost of one, with its part of everything that is not a matmul.
        s_per_message: fixed cost of a message to one rank.
        collective_factor: time of the process group's collectives over bytes / rate.
        message_factor: the same for messages from rank to rank.
        busy_s_per_byte: processor time that communication takes away from arithmetic.
        torch_host_s, mc2_host_s: what else a forward + backward takes.
    """

    cores: float
    s_per_flop: float
    s_per_matmul: float
    s_per_message: float
    collective_factor: float
    message_factor: float
    busy_s_per_byte: float = 0.0
    torch_host_s: float = 0.0
    mc2_host_s: float = 0.0

    def share(self, shape: Shape) -> float:
        """Ranks for each core, at least 1: how much longer arithmetic takes."""
        return max(1.0, shape.ranks / self.cores)

    def matmul_s(self, shape: Shape, pieces: int = 1) -> float:
        """One matmul, cut in pieces."""
        return self.share(shape) * (
            shape.matmul_flops * self.s_per_flop + pieces * self.s_per_matmul
        )

    def message_s(self, shape: Shape, chunks: int = 1) -> float:
        """All messages of one gather or reduction."""
        count = (shape.ranks - 1) * chunks
        wire = shape.message_bytes / shape.bytes_per_s
        return count * self.s_per_message + self.message_factor * wire

    def torch_s(self, shape: Shape) -> float:
        """Torch's styles."""
        wire = shape.message_bytes / shape.bytes_per_s
        fixed = (shape.ranks - 1) * self.s_per_message
        comm = fixed + self.collective_factor * wire
        host = self.share(shape) * self.torch_host_s
        return MATMULS * self.matmul_s(shape) + 4 * comm + host

    def mc2_s(self, shape: Shape, chunks: int) -> float:
        """The MC2 styles, pipelined kernel, column_backward="fused"."""
        pieces = shape.ranks * chunks
        plain = self.matmul_s(shape)
        busy = self.share(shape) * self.busy_s_per_byte * shape.message_bytes
        matmul = self.matmul_s(shape, pieces) + busy
        piece = matmul / pieces
        comm = self.message_s(shape, chunks)
        one = max(matmul, comm + piece)
        host = self.share(shape) * self.mc2_host_s
        row = max(matmul + plain, comm + 2 * piece)
        column = max(matmul + plain, piece + comm)
        return 2 * one + row + column + host

    def best_chunks(self, shape: Shape, choices: Sequence[int] = CHUNKS) -> int:
        """The number of pieces that costs least; the smaller of two that cost the same."""
        return min(choices, key=lambda chunks: (self.mc2_s(shape, chunks), chunks))


def fit(measured: Sequence[Measured], cores: float) -> Machine:
    """The constants that fit best, relative errors counting alike.

    Raises:
        ValueError: fewer than two cases.
    """
    if len(measured) < 2:
        raise ValueError(f"Expected at least two measured cases, got {len(measured)} (fit).")
    machine = Machine(cores, 0.0, 0.0, 0.0, 0.0, 0.0)
    shares = [MATMULS * machine.share(case.shape) for case in measured]
    s_per_flop, s_per_matmul = least_squares(
        [
            (share * case.shape.matmul_flops, share)
            for share, case in zip(shares, measured, strict=True)
        ],
        [case.compute_s for case in measured],
    )
    wires = [4 * case.shape.message_bytes / case.shape.bytes_per_s for case in measured]
    fixed = [4 * (case.shape.ranks - 1) for case in measured]
    message_factor, s_per_message = least_squares(
        list(zip(wires, fixed, strict=True)), [case.messages_s for case in measured]
    )
    collective_factor, _ = least_squares(
        list(zip(wires, fixed, strict=True)), [case.collectives_s for case in measured]
    )
    machine = replace(
        machine,
        s_per_flop=s_per_flop,
        s_per_matmul=s_per_matmul,
        s_per_message=s_per_message,
        collective_factor=collective_factor,
        message_factor=message_factor,
    )

    hosts = [0.0, *_geometric(1e-5, 1e-1, 60)]
    machine = _best(
        [replace(machine, torch_host_s=host) for host in hosts],
        lambda candidate: [(candidate.torch_s(case.shape), case.torch_s) for case in measured],
    )
    return _best(
        [
            replace(machine, mc2_host_s=host, busy_s_per_byte=busy)
            for host in hosts
            for busy in [0.0, *_geometric(1e-11, 1e-7, 60)]
        ],
        lambda candidate: [
            (candidate.mc2_s(case.shape, chunks), seconds)
            for case in measured
            for chunks, seconds in case.mc2_s.items()
        ],
    )


def kernel_costs(machine: Machine, measured: Sequence[Measured]) -> CostModel:
    """What ``chunks="auto"`` goes by, on this machine: medians over the cases.

    A message costs what makes cut calls take as much longer than uncut ones as they did; the first
    piece, what is left of MC2's uncut time over that of plain collectives. Packing is the default.

    Args:
        machine: fitted to the same cases.
        measured: with an uncut case among ``mc2_s``.
    """
    plain = CostModel(
        flops_per_s=1 / machine.s_per_flop, collective_factor=max(machine.collective_factor, 0.01)
    )

    def seconds(model: CostModel, case: Measured, chunks: int) -> float:
        shape = case.shape
        multiply_s = machine.share(shape) * shape.matmul_flops * machine.s_per_flop / shape.ranks
        weight = shape.hidden * shape.intermediate // shape.ranks
        travel_s = shape.message_bytes / shape.bytes_per_s
        return model.seconds(chunks, shape.ranks, multiply_s, travel_s, weight, gathers=False)

    def s_per_message(case: Measured, chunks: int) -> float:
        """By bisection: the more a message costs, the longer the cut call takes."""
        longer_s = (case.mc2_s[chunks] - case.mc2_s[1]) / COLLECTIVES
        low, high = 1e-6, 1.0
        for _ in range(50):
            middle = math.sqrt(low * high)
            model = replace(plain, s_per_message=middle)
            if seconds(model, case, chunks) - seconds(model, case, 1) < longer_s:
                low = middle
            else:
                high = middle
        return low

    message_s = median([s_per_message(case, n) for case in measured for n in case.mc2_s if n > 1])
    fitted = replace(plain, s_per_message=message_s)
    first = [
        (case.mc2_s[1] - case.async_s) / COLLECTIVES
        + seconds(fitted, case, ONE_COLLECTIVE)
        - (seconds(fitted, case, 1) - fitted.s_pipeline)
        for case in measured
    ]
    return replace(fitted, s_pipeline=max(median(first), 1e-6))


def _best(
    candidates: Sequence[Machine], pairs: Callable[[Machine], list[tuple[float, float]]]
) -> Machine:
    """The machine whose predictions are closest: pairs of predicted and measured seconds."""

    def error(candidate: Machine) -> float:
        logs = [math.log(predicted / actual) for predicted, actual in pairs(candidate)]
        return math.fsum(value * value for value in logs)

    return min(candidates, key=error)


def least_squares(
    rows: Sequence[tuple[float, float]], targets: Sequence[float]
) -> tuple[float, float]:
    """(a, b), neither negative, for which a x + b y comes closest to the targets, relatively."""
    scaled = [(x / t, y / t) for (x, y), t in zip(rows, targets, strict=True)]
    xx = math.fsum(x * x for x, _ in scaled)
    xy = math.fsum(x * y for x, y in scaled)
    yy = math.fsum(y * y for _, y in scaled)
    x1 = math.fsum(x for x, _ in scaled)
    y1 = math.fsum(y for _, y in scaled)
    determinant = xx * yy - xy * xy
    only_x, only_y = (x1 / xx, 0.0), (0.0, y1 / yy)
    if determinant <= 1e-12 * xx * yy:
        return only_x
    a, b = (x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant
    if b < 0:
        return only_x
    return (a, b) if a >= 0 else only_y


def errors(machine: Machine, measured: Sequence[Measured]) -> list[float]:
    """Relative errors of every predicted time of torch and mc2, largest last."""
    found = []
    for case in measured:
        pairs = [(machine.torch_s(case.shape), case.torch_s)]
        pairs += [(machine.mc2_s(case.shape, c), seconds) for c, seconds in case.mc2_s.items()]
        found += [abs(predicted / actual - 1) for predicted, actual in pairs]
    return sorted(found)


def _geometric(first: float, last: float, count: int) -> list[float]:
    step = (last / first) ** (1 / (count - 1))
    return [first * step**i for i in range(count)]
