"""What a fused layer was asked to do, carried along with its deferred values."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from mc2.errors import MC2ConstraintError

ColumnBackward = Literal["fused", "overlap"]


class FusionOptions(NamedTuple):
    """How the fused rules shall run a layer.

    Attributes:
        kernel: name of the kernel, resolved: never ``auto``.
        chunks: pieces a rank's rows are cut into, or ``auto``; only the pipelined kernel cuts.
        regather: save a column's sharded input, not the gathered one; backward gathers again.
        column_backward: ``fused`` computes and reduces grad_input in one kernel; ``overlap``
            computes it, starts its reduce-scatter, and computes grad_weight meanwhile.
        width: features of the weight that are this rank's, of the rank that has most; for ``auto``.
        matmuls: of each row, while rows travel; for ``auto``.
    """

    kernel: str
    chunks: int | Literal["auto"] = "auto"
    regather: bool = False
    column_backward: ColumnBackward = "fused"
    width: int | None = None
    matmuls: int = 1

    def in_backward(self) -> FusionOptions:
        """The same for a call beside which each row is multiplied for grad_weight as well.

        Also where no grad_weight is wanted: all ranks have to cut alike.
        """
        return self._replace(matmuls=2)

    def checked(self) -> FusionOptions:
        """Itself.

        Raises:
            MC2ConstraintError: ``chunks`` below 1, or an unknown ``column_backward``.
        """
        reasons = []
        if self.chunks != "auto" and (not isinstance(self.chunks, int) or self.chunks < 1):
            reasons.append(f"Expected chunks to be 'auto' or at least 1, got {self.chunks!r}.")
        if self.column_backward not in get_args(ColumnBackward):
            reasons.append(
                f"Expected column_backward to be one of {get_args(ColumnBackward)}, got "
                f"{self.column_backward!r}."
            )
        if reasons:
            raise MC2ConstraintError(" ".join(reasons))
        return self
