"""Into how many pieces ``chunks="auto"`` cuts each rank's rows: latency, rates of link and matmul.

    m    seconds to multiply the rows of one rank by a weight of E elements
    w    seconds for the rows of all other ranks to travel, one way

With C pieces from each of R - 1 peers, a gather ends with the product of the last piece to come,
and a reduction begins with that of the first to go; all else goes side by side. Each piece costs p,
for a message and for a matmul call, which packs the weight; most of it, h, goes unseen where the
link is busy longer than the core:

    p    e + s_per_message                    e    E s_per_weight_element
    P    C (R - 1) p
    T(C) = max(R m + h P + n, w + m / C) + (1 - h) P + s_pipeline

In backward each row is multiplied for grad_weight as well. Of gathered rows that is done piece by
piece: m and e are those of both matmuls. Beside a reduction it is what comes next, when all pieces
are made: n = R m; in forward n = 0.

One collective costs no messages. Beside a gather a rank multiplies its own rows, and then those of
the ranks below and above; beside a reduction only what comes next is computed:

    T(0) = max(m, g w) + (R - 1) m + 2 e     gather
    T(0) = R m + max(n, f w)                 reduction

    f    collective_factor
    g    f where R = 2. In a ring of more, ranks receive from one neighbour and send to the other,
         and gloo's two directions cannot keep each other waiting (see `row_exchange`)

A link whose rate is not known has no w. Then T is to be never far from the least, whatever w is: a
collective that takes f times as long is none of the choices. The worst ratio of two T that are left
is where w is nothing or all, or where the link is busy as long as the core in one of them.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

ONE_COLLECTIVE = 0
# Matmuls of a power of two of rows are the fastest, so such a number is cut into others.
PIECES = (1, 2, 4, 8)
# Below, a matmul of so few rows is slow by itself.
MIN_PIECE_ROWS = 64
_ALL = 1e3  # so many times what else there is
_RING = 1.25  # g: measured 0.8 at 20 MB/s to 1.4 at 320 MB/s, on 4 ranks
_UNSEEN = 0.75  # h: measured where the link is slow, and pieces cost little


@dataclass(frozen=True)
class CostModel:
    """What communication and arithmetic cost. It has to be the same on every rank.

    The defaults were fitted to 2 and 4 ranks on two cores, over gloo, in float32.
    ``python -m benchmarks.scaling`` fits them to another machine.

    Attributes:
        flops_per_s: rate of a matmul on one rank [floating point operations / s].
        bytes_per_s: rate at which a rank sends, and receives [bytes / s]; None if not known.
        s_per_message: what one more piece from each peer costs, whatever the weight [s].
        s_per_weight_element: what one more matmul call costs for each element of the weight [s].
        s_pipeline: what the first piece costs more than one collective [s].
        collective_factor: time of the group's collective over that of as many bytes.
    """

    flops_per_s: float = 24e9  # one core makes 30e9, but ranks may share theirs
    bytes_per_s: float | None = None
    s_per_message: float = 1.5e-3
    s_per_weight_element: float = 4e-9
    s_pipeline: float = 2e-4
    collective_factor: float = 1.5

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"Expected {field.name} above 0, got {value!r} (CostModel).")

    def chunks(
        self,
        ranks: int,
        rows: int,
        features: int,
        width: int,
        item_bytes: int,
        *,
        gathers: bool,
        matmuls: int = 1,
    ) -> int:
        """The number of pieces to cut each rank's rows into.

        Args:
            ranks: R.
            rows: of one rank.
            features: that travel with each row.
            width: the weight's other dim, so that E = features x width.
            item_bytes: size of an element.
            gathers: or else it reduces.
            matmuls: of each row: 2 in backward.

        Returns:
            One of `PIECES`, or `ONE_COLLECTIVE` where pieces win nothing.
        """
        return _pieces(self, ranks, rows, features, width, item_bytes, gathers, matmuls)

    def seconds(
        self,
        chunks: int,
        ranks: int,
        multiply_s: float,
        travel_s: float,
        weight: int,
        *,
        gathers: bool,
        next_s: float = 0.0,
    ) -> float:
        """What one fused call takes, with what is computed next: T(chunks) [s].

        Args:
            chunks: pieces of each rank's rows, or `ONE_COLLECTIVE`.
            ranks: R.
            multiply_s: m [s].
            travel_s: w [s].
            weight: elements of it, E.
            gathers: or else it reduces.
            next_s: n [s].
        """
        if chunks == ONE_COLLECTIVE and gathers:
            arriving_s = travel_s * (self.collective_factor if ranks == 2 else _RING)
            packing_s = weight * self.s_per_weight_element
            return max(multiply_s, arriving_s) + (ranks - 1) * multiply_s + 2 * packing_s
        if chunks == ONE_COLLECTIVE:
            return ranks * multiply_s + max(next_s, self.collective_factor * travel_s)
        pieces_s = chunks * self._piece_s(ranks, weight)
        busy_s = ranks * multiply_s + _UNSEEN * pieces_s + next_s
        overlapped_s = max(busy_s, travel_s + multiply_s / chunks)
        return overlapped_s + (1 - _UNSEEN) * pieces_s + self.s_pipeline

    def even_travel_s(
        self, chunks: int, ranks: int, multiply_s: float, weight: int, next_s: float = 0.0
    ) -> float:
        """The w at which the link is as long busy as the core in T(chunks), chunks > 0 [s].

        Arguments as of `seconds`.
        """
        pieces_s = chunks * self._piece_s(ranks, weight)
        return ranks * multiply_s + _UNSEEN * pieces_s + next_s - multiply_s / chunks

    def _piece_s(self, ranks: int, weight: int) -> float:
        return (ranks - 1) * (self.s_per_message + weight * self.s_per_weight_element)


@functools.lru_cache(maxsize=1024)  # a layer asks in every call
def _pieces(
    model: CostModel,
    ranks: int,
    rows: int,
    features: int,
    width: int,
    item_bytes: int,
    gathers: bool,
    matmuls: int,
) -> int:
    weight = features * width
    if gathers:
        weight *= matmuls
    multiply_s = 2 * rows * weight / model.flops_per_s
    next_s = 0.0 if gathers else (matmuls - 1) * ranks * multiply_s
    cuts = [pieces for pieces in PIECES if pieces == 1 or rows // pieces >= MIN_PIECE_ROWS]
    if model.bytes_per_s is None:
        even = [model.even_travel_s(chunks, ranks, multiply_s, weight, next_s) for chunks in cuts]
        travels = [0.0, *even, _ALL * max(even)]
        choices = [ONE_COLLECTIVE, *cuts] if gathers and ranks > 2 else cuts
    else:
        travels = [(ranks - 1) * rows * features * item_bytes / model.bytes_per_s]
        choices = [ONE_COLLECTIVE, *cuts]
    # One row for each travel, of which each choice may be so many times the least.
    costs = [
        {
            chunks: model.seconds(
                chunks, ranks, multiply_s, travel_s, weight, gathers=gathers, next_s=next_s
            )
            for chunks in choices
        }
        for travel_s in travels
    ]
    return min(
        choices,
        key=lambda chunks: max(cost[chunks] / max(min(cost.values()), 1e-30) for cost in costs),
    )


# Of devices that nothing has run on: orders of magnitude, from data sheets.
_ACCELERATOR = CostModel(
    flops_per_s=1e14,
    s_per_message=2e-5,
    s_per_weight_element=1e-14,
    s_pipeline=2e-5,
    collective_factor=1.0,
)
_told: dict[str, CostModel] = {}


def use_cost_model(model: CostModel | None, device_type: str = "cpu") -> None:
    """Says what ``chunks="auto"`` goes by from now on. Call it on every rank alike.

    Where ``auto`` chooses one collective, the log says ``one collective``. Another number of pieces
    may give other last bits.

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
