"""Into how many pieces ``chunks="auto"`` cuts each rank's rows: latency, rates of link and matmul.

    m    seconds to multiply the rows of one rank
    w    seconds for the rows of all other ranks to travel, one way

With C pieces from each of R - 1 peers, a gather ends with the product of the last piece to come,
and a reduction begins with that of the first to go; all else goes side by side. One collective
overlaps nothing, and costs no messages:

    T(C) = max(R m, w + m / C) + s_pipeline + C (R - 1) s_per_message
    T(0) = R m + collective_factor w

A link whose rate is not known has no w. Then pieces are cut so that T is never far from the least,
be w nothing or as much as all arithmetic, where cutting wins most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

ONE_COLLECTIVE = 0
MAX_CHUNKS = 8
# w over R m where the rate is not known. Beyond 1 the same seconds are won of more.
_UNKNOWN_TRAVEL = (0.0, 1.0)


@dataclass(frozen=True)
class CostModel:
    """What communication and arithmetic cost. It has to be the same on every rank.

    The defaults were fitted on two cores, one rank on each, over gloo, in float32, where gloo's
    thread takes the core from the rank that posts a receive for as long as a time slice.
    ``python -m benchmarks.scaling`` fits them to another machine.

    Attributes:
        flops_per_s: rate of a matmul on one rank [floating point operations / s].
        bytes_per_s: rate at which a rank sends, and receives [bytes / s]; None if not known.
        s_per_message: what one more piece from each peer costs: the message, smaller matmuls [s].
        s_pipeline: what the first piece costs more than one collective [s].
        collective_factor: time of the group's collective over that of as many bytes.
    """

    flops_per_s: float = 30e9
    bytes_per_s: float | None = None
    s_per_message: float = 1e-3
    s_pipeline: float = 2.5e-3
    collective_factor: float = 1.5

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"Expected {field.name} above 0, got {value!r} (CostModel).")

    def chunks(self, ranks: int, flops: float, message_bytes: float, most: int) -> int:
        """The number of pieces to cut each rank's rows into.

        Args:
            ranks: R.
            flops: floating point operations to multiply the rows of one rank.
            message_bytes: size of the rows of one rank.
            most: the largest number to consider, at least 1.

        Returns:
            1 to ``most``, or `ONE_COLLECTIVE` where the rate is known and overlap wins nothing.
        """
        multiply_s = flops / self.flops_per_s
        choices: Sequence[int] = range(1, most + 1)
        if self.bytes_per_s is None:
            travels = [part * ranks * multiply_s for part in _UNKNOWN_TRAVEL]
        else:
            travels = [(ranks - 1) * message_bytes / self.bytes_per_s]
            choices = [ONE_COLLECTIVE, *choices]
        costs = {
            chunks: [self._seconds(chunks, ranks, multiply_s, travel_s) for travel_s in travels]
            for chunks in choices
        }
        least = [min(at_travel) for at_travel in zip(*costs.values(), strict=True)]
        return min(
            choices,
            key=lambda chunks: max(
                c / max(b, 1e-30) for c, b in zip(costs[chunks], least, strict=True)
            ),
        )

    def _seconds(self, chunks: int, ranks: int, multiply_s: float, travel_s: float) -> float:
        """T of the formulas above."""
        if chunks == ONE_COLLECTIVE:
            return ranks * multiply_s + self.collective_factor * travel_s
        overlapped = max(ranks * multiply_s, travel_s + multiply_s / chunks)
        return overlapped + self.s_pipeline + chunks * (ranks - 1) * self.s_per_message


# Of devices that nothing has run on: orders of magnitude, from data sheets.
_ACCELERATOR = CostModel(
    flops_per_s=1e14, s_per_message=2e-5, s_pipeline=2e-5, collective_factor=1.0
)
_told: dict[str, CostModel] = {}


def use_cost_model(model: CostModel | None, device_type: str = "cpu") -> None:
    """Says what ``chunks="auto"`` goes by from now on. Call it on every rank alike.

    With a known rate, ``auto`` may also choose one collective: the log then says
    ``one collective``. Another number of pieces may give other last bits.

    Args:
        model: the costs; None for the defaults.
        device_type: of the tensors that it is for.

    Raises:
        TypeError: ``model`` is no `CostModel`.
    """
    if model is None:
        _told.pop(device_type, None)
    elif isinstance(model, CostModel):
        _told[device_type] = model
    else:
        raise TypeError(f"Expected a CostModel or None, got {model!r} (use_cost_model).")


def cost_model(device_type: str) -> CostModel:
    """What ``chunks="auto"`` goes by."""
    default = CostModel() if device_type == "cpu" else _ACCELERATOR
    return _told.get(device_type, default)
