"""What a fused kernel is: two operations on local tensors, and reasons why it cannot run.

[Note: no autograd in kernels]
The operations have no gradient formula. They are the *parts* of the formulas one layer up, where
forward and backward of a linear are each written as one of the two operations; a kernel that
differentiated itself would launch a collective of its own in backward. Calling one where autograd
would record it is an error.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist

from mc2.cost_model import ONE_COLLECTIVE
from mc2.errors import MC2ConstraintError
from mc2.kernel_ops import BlockedTime, blocked_time
from mc2.row_layout import RowLayout
from pending_dtensor.events import Interval

Operation = Literal["all_gather_matmul", "matmul_reduce_scatter"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)

Chunks = int | Literal["auto"]


@dataclass(frozen=True)
class KernelReport:
    """What one call of a kernel did, for the log.

    Attributes:
        kernel: its name.
        chunks: the most pieces that the rows of one rank were cut into; 1 means uncut, and 0 one
            collective: beside a gather this rank's rows are multiplied, beside a reduction nothing.
        steps: communication calls it made; 1 means a single collective.
        began: when it began, after all checks [s of ``time.perf_counter``].
        launched: when it sent the first message [s]; None if that is not known.
        waits: when the host was blocked on communication; none where streams wait instead.
    """

    kernel: str
    chunks: int
    steps: int
    began: float
    launched: float | None
    waits: tuple[Interval, ...]

    @property
    def blocked_s(self) -> float:
        """Seconds the host was blocked on communication."""
        return sum(wait.ended - wait.began for wait in self.waits)

    def __str__(self) -> str:
        if self.chunks == ONE_COLLECTIVE:
            return f"{self.kernel} one collective"
        return f"{self.kernel} chunks={self.chunks} steps={self.steps}"


class GatheredMatmul(NamedTuple):
    """Result of `Kernel.all_gather_matmul`."""

    outs: list[torch.Tensor]
    gathered: torch.Tensor | None
    report: KernelReport
    product: torch.Tensor | None = None


class ScatteredMatmul(NamedTuple):
    """Result of `Kernel.matmul_reduce_scatter`."""

    out: torch.Tensor
    report: KernelReport


class StartedScatter(NamedTuple):
    """Result of `Kernel.start_matmul_reduce_scatter`.

    Attributes:
        buffers: what the collectives are filling, to be waited for by ``wait_tensor``.
        finish: makes the result of the filled buffers, ``finish(*buffers)``.
        report: what the call did so far.
    """

    buffers: list[torch.Tensor]
    finish: Callable[..., torch.Tensor]
    report: KernelReport


class Schedule(NamedTuple):
    """How a kernel is going to run one call."""

    chunks: int
    steps: int
    extra_args: tuple[Any, ...] = ()  # what its op takes besides the common arguments


@dataclass(frozen=True, kw_only=True)
class CallFacts:
    """What is known of a call, or of all calls of a layer; None and () stand for "not known yet".

    Everything here must be the same on every rank, so that every rank finds the same reasons.

    Attributes:
        ranks: ranks in the group.
        contractions: the contraction K of each matmul (summed where terms are added up).
        dtypes: dtypes of all operands.
        layout: rows of the activation.
        group: the process group.
        chunks: what the caller asked for.
    """

    ranks: int | None = None
    contractions: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    layout: RowLayout | None = None
    group: dist.ProcessGroup | None = None
    chunks: Chunks = "auto"


class Kernel(ABC):
    """One way to run the two operations. Stateless but for what `prepare` keeps per group.

    A kernel defines its two ops with `mc2.kernel_ops`, and answers the questions below. Checking,
    calling and reporting are done here, alike for all.
    """

    name: str
    ops: Mapping[Operation, Any]  # the torch.ops.mc2 op of each operation

    def prepare(self, group: dist.ProcessGroup) -> None:  # noqa: B027 - most have nothing to do
        """Sets up what the kernel needs of ``group``. Collective: call it on every rank alike."""

    def environment_reasons(self) -> list[str]:
        """Why the kernel cannot run on this machine, whatever is asked of it."""
        return []

    @abstractmethod
    def constraint_reasons(self, op: Operation, facts: CallFacts) -> list[str]:
        """Why the kernel cannot run ``op``, as far as ``facts`` are known."""

    @abstractmethod
    def schedule(
        self,
        op: Operation,
        layout: RowLayout,
        message: torch.Tensor,
        chunks: Chunks,
        width: int | None = None,
        matmuls: int = 1,
    ) -> Schedule:
        """Decides how to run a call, from facts that are the same on every rank.

        Args:
            op: what is called.
            layout: rows of the activation.
            message: a tensor with the feature count and dtype of what is communicated.
            chunks: what the caller asked for.
            width: the features of an activation that are not communicated; None if not known.
            matmuls: of each row, while rows travel: see `all_gather_matmul` and
                `start_matmul_reduce_scatter`.
        """

    @abstractmethod
    def op_group(self, group: dist.ProcessGroup) -> str:
        """The string by which the kernel's ops know ``group``."""

    def reasons_not_supported(self, op: Operation, facts: CallFacts) -> list[str]:
        """Every reason why ``op`` cannot run; empty if it can, as far as ``facts`` are known."""
        reasons = self.environment_reasons()
        if op not in OPERATIONS:
            reasons.append(f"Expected an operation out of {', '.join(OPERATIONS)}, got {op!r}.")
        if len(set(facts.dtypes)) > 1:
            reasons.append(f"Expected operands of one dtype, got {_join(facts.dtypes)}.")
        if facts.chunks != "auto" and (type(facts.chunks) is not int or facts.chunks < 1):
            reasons.append(f'Expected chunks "auto" or an int >= 1, got {facts.chunks!r}.')
        if facts.layout is not None and facts.group is not None:
            expected, actual = (facts.layout.ranks, facts.layout.rank), _size_and_rank(facts.group)
            if expected != actual:
                reasons.append(
                    f"Expected a layout for the group, got (ranks, rank) {expected} for a group of "
                    f"{actual}. Lay the rows out over the mesh axis of this group."
                )
        return reasons + self.constraint_reasons(op, facts)

    def all_gather_matmul(
        self,
        shard: torch.Tensor,
        weights: Sequence[torch.Tensor],
        layout: RowLayout,
        group: dist.ProcessGroup,
        *,
        gather_output: bool = True,
        product_with: torch.Tensor | None = None,
        chunks: Chunks = "auto",
        width: int | None = None,
        matmuls: int = 1,
    ) -> GatheredMatmul:
        """Gathers rows and multiplies them by one or more weights (see the note on autograd).

        Equal to::

            gathered = all_gather(shard)  # in global row order
            outs = [gathered @ weight for weight in weights]
            product = gathered.T @ product_with

        Shapes:
            shard ``(m_r, K)``, weights ``(K, N_i)``, product_with ``(M, F)``; outs ``(M, N_i)``,
            gathered ``(M, K)``, product ``(K, F)``.

        Args:
            shard: this rank's rows, in local order (outer, sequence, inner).
            weights: the operands that share the one gather. N_i may differ between ranks.
            layout: the rows.
            group: the ranks, in the order of ``layout.sizes``.
            gather_output: whether the gathered tensor is wanted.
            product_with: local rows for one more product: in the backward of a row, where shard is
                that of grad_out, the input; the product is grad_weight. A kernel with a
                `product_op` makes it while rows arrive, any other after its op.
            chunks: pieces for each rank's rows, of kernels that cut.
            width: for "auto": the most features that a rank has of what is not communicated, N of a
                gather and K of a reduction. The same on every rank; None for as many as travel.
            matmuls: for "auto": of each row, for ``outs`` and ``product``; the same on every rank.

        Returns:
            outs and gathered in global row order, a report, and the product if asked for.
            ``gathered`` is None if it was not. It is ``shard`` itself on one rank.

        Raises:
            MC2ConstraintError: the kernel cannot run this; nothing was communicated.
            CollectiveFailedError: rows of another rank did not come.
        """
        facts = CallFacts(
            ranks=layout.ranks,
            contractions=tuple(weight.shape[0] for weight in weights[:1]),
            dtypes=(shard.dtype, *(weight.dtype for weight in weights)),
            layout=layout,
            group=group,
            chunks=chunks,
        )
        operands = [(shard, layout.local_rows, weight) for weight in weights]
        self._require("all_gather_matmul", facts, operands, product_with)
        product_op = self.product_op
        product_later = product_with is not None and product_op is None
        keep = (gather_output or product_later) and layout.ranks > 1
        schedule = self.schedule("all_gather_matmul", layout, shard, chunks, width, matmuls)
        args = (
            shard.contiguous(),
            list(weights),
            layout.outer,
            layout.sizes,
            layout.inner,
            layout.rank,
            keep,
            self.op_group(group),
            *schedule.extra_args,
        )
        sent = (layout.rows, shard.shape[1]), shard.dtype
        product = None
        with blocked_time(self.name, "all_gather_matmul", *sent, group) as blocked:
            if product_op is None or product_with is None:
                gathered, *outs = self.ops["all_gather_matmul"](*args)
            else:
                product, gathered, *outs = product_op(product_with.contiguous(), *args)
        if layout.ranks == 1:
            gathered = shard
        if product_later:
            product = gathered.t().mm(product_with)
        report = self._report(schedule, blocked)
        return GatheredMatmul(outs, gathered if gather_output else None, report, product)

    def matmul_reduce_scatter(
        self,
        terms: Sequence[tuple[torch.Tensor, torch.Tensor]],
        layout: RowLayout,
        group: dist.ProcessGroup,
        *,
        chunks: Chunks = "auto",
        width: int | None = None,
    ) -> ScatteredMatmul:
        """Sums matmuls over terms and ranks, each rank keeping its rows (see the note on autograd).

        Equal to::

            out = reduce_scatter(sum(x @ weight for x, weight in terms))

        Shapes:
            x ``(M, K_i)``, weight ``(K_i, N)``; out ``(m_r, N)``.

        Args:
            terms: pairs (x, weight), x in global row order. K_i may differ between ranks.
            layout: the rows.
            group: the ranks, in the order of ``layout.sizes``.
            chunks: pieces for each rank's rows, of kernels that cut.
            width: for "auto": the most features that a rank has of what is not communicated, N of a
                gather and K of a reduction. The same on every rank; None for as many as travel.

        Returns:
            This rank's rows of the sum, in local order, and a report.

        Raises:
            MC2ConstraintError: the kernel cannot run this; nothing was communicated.
            CollectiveFailedError: rows of another rank did not come.
        """
        schedule, args = self._prepare_scatter(terms, layout, group, chunks, width)
        sent = (layout.rows, terms[0][1].shape[1]), terms[0][1].dtype
        with blocked_time(self.name, "matmul_reduce_scatter", *sent, group) as blocked:
            out = self.ops["matmul_reduce_scatter"](*args)
        report = self._report(schedule, blocked)
        return ScatteredMatmul(out, report)

    def start_matmul_reduce_scatter(
        self,
        terms: Sequence[tuple[torch.Tensor, torch.Tensor]],
        layout: RowLayout,
        group: dist.ProcessGroup,
        *,
        chunks: Chunks = "auto",
        width: int | None = None,
        matmuls: int = 1,
    ) -> StartedScatter:
        """As `matmul_reduce_scatter`, but returns while the last rows are on their way.

        What is computed next, such as grad_weight, hides them: ``matmuls`` says to "auto" how often
        each row is multiplied, this matmul and those that come next; the same on every rank. A
        kernel without such an op returns its result finished.
        """
        if self.start_op is None:
            out, report = self.matmul_reduce_scatter(
                terms, layout, group, chunks=chunks, width=width
            )
            return StartedScatter([out], lambda out: out, report)
        schedule, args = self._prepare_scatter(terms, layout, group, chunks, width, matmuls)
        sent = (layout.rows, terms[0][1].shape[1]), terms[0][1].dtype
        with blocked_time(self.name, "matmul_reduce_scatter", *sent, group) as blocked:
            buffers = self.start_op(*args)
        report = self._report(schedule, blocked)
        finish = functools.partial(self.finish_scatter, layout, schedule)
        return StartedScatter(buffers, finish, report)

    def _report(self, schedule: Schedule, blocked: BlockedTime) -> KernelReport:
        return KernelReport(
            self.name,
            schedule.chunks,
            schedule.steps,
            blocked.began,
            blocked.launched,
            blocked.waits,
        )

    @property
    def product_op(self) -> Any | None:
        """The ``torch.ops.mc2`` op of ``product_with`` in `all_gather_matmul`, if it has one."""
        return None

    @property
    def start_op(self) -> Any | None:
        """The ``torch.ops.mc2`` op behind `start_matmul_reduce_scatter`, if the kernel has one."""
        return None

    def finish_scatter(
        self, layout: RowLayout, schedule: Schedule, *buffers: torch.Tensor
    ) -> torch.Tensor:
        """This rank's rows, made of what `start_op` returned and its collectives have filled."""
        raise NotImplementedError(f"kernel {self.name!r} starts nothing")

    def _prepare_scatter(
        self,
        terms: Sequence[tuple[torch.Tensor, torch.Tensor]],
        layout: RowLayout,
        group: dist.ProcessGroup,
        chunks: Chunks,
        width: int | None,
        matmuls: int = 1,
    ) -> tuple[Schedule, tuple[Any, ...]]:
        """Checks a matmul_reduce_scatter, and gives its schedule and the arguments of its ops."""
        facts = CallFacts(
            ranks=layout.ranks,
            contractions=(sum(weight.shape[0] for _, weight in terms),),
            dtypes=tuple(operand.dtype for term in terms for operand in term),
            layout=layout,
            group=group,
            chunks=chunks,
        )
        operands = [(x, layout.rows, weight) for x, weight in terms]
        self._require("matmul_reduce_scatter", facts, operands)
        message = terms[0][1]
        schedule = self.schedule("matmul_reduce_scatter", layout, message, chunks, width, matmuls)
        args = (
            [x.contiguous() for x, _ in terms],
            [weight for _, weight in terms],
            layout.outer,
            layout.sizes,
            layout.inner,
            layout.rank,
            self.op_group(group),
            *schedule.extra_args,
        )
        return schedule, args

    def operand_reasons(self, x: torch.Tensor, weight: torch.Tensor) -> list[str]:
        """Further reasons against a pair of operands that have fitting shapes."""
        return []

    def _require(
        self,
        op: Operation,
        facts: CallFacts,
        operands: Sequence[tuple[torch.Tensor, int, torch.Tensor]],
        product_with: torch.Tensor | None = None,
    ) -> None:
        """Raises with every reason against a call on ``operands``: x, rows it must have, weight."""
        reasons = self.reasons_not_supported(op, facts)
        if not operands:
            reasons.append("Expected at least one weight, got none.")
        for x, rows, weight in operands:
            reasons += _shape_reasons(x, rows, weight) or self.operand_reasons(x, weight)
        tensors = [tensor for x, _, weight in operands for tensor in (x, weight)]
        if product_with is not None:
            assert facts.layout is not None
            reasons += _product_reasons(product_with, facts.layout.rows, facts.dtypes[0])
            tensors.append(product_with)
        if reasons:
            raise MC2ConstraintError(describe_reasons(self.name, op, reasons))
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise RuntimeError(
                f"Expected no autograd around a kernel, got operands that require grad ({op} of "
                f"kernel {self.name!r}). Call it inside an autograd.Function or torch.no_grad()."
            )


def describe_reasons(kernel: str, op: str, reasons: Sequence[str]) -> str:
    """One message for all reasons why a kernel cannot run."""
    lines = "\n".join(f"  - {reason}" for reason in dict.fromkeys(reasons))
    return f"Kernel {kernel!r} cannot run {op}:\n{lines}"


def _shape_reasons(x: torch.Tensor, rows: int, weight: torch.Tensor) -> list[str]:
    if x.dim() != 2 or weight.dim() != 2:
        shapes = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        return [f"Expected 2-D by 2-D operands, got shapes {shapes}. Flatten the rows first."]
    reasons = []
    if x.shape[0] != rows:
        reasons.append(f"Expected {rows} rows by the layout, got {x.shape[0]}.")
    if x.shape[1] != weight.shape[0]:
        reasons.append(f"Expected equal contractions, got {x.shape[1]} and {weight.shape[0]}.")
    return reasons


def _product_reasons(x: torch.Tensor, rows: int, dtype: torch.dtype) -> list[str]:
    if x.dim() == 2 and x.shape[0] == rows and x.dtype == dtype:
        return []
    return [f"Expected ({rows}, F) of {dtype} as product_with, got {tuple(x.shape)} of {x.dtype}."]


def _size_and_rank(group: dist.ProcessGroup) -> tuple[int, int]:
    return group.size(), group.rank()


def _join(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in dict.fromkeys(values))
