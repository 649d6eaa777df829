"""Deferred values in any order of steps: gather, linear, reduce, add, read, drop, backward.

The machine writes a program and foretells what each step launches, raises and leaves deferred. At
the end the ranks replay it, step by step beside one device: see `fused_programs.Replay` for what
they check. Then the parent compares what the ranks have launched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.common.distributed_launcher import Task, pool
from tests.common.property_profiles import examples
from tests.properties.fused_programs import PARAMETERS, Options, Setup, Step, replay

AG, RS = "all_gather", "reduce_scatter"
FALLBACK = ("fallback", "unfused")

setups = st.builds(
    Setup,
    ranks=st.sampled_from([2, 3, 4]),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 3)),
    hidden=st.integers(1, 4),
    sequence_dim=st.sampled_from([0, 1]),
    input_grads=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    frozen=st.lists(st.sampled_from(PARAMETERS), max_size=3, unique=True).map(tuple),
)
options = st.builds(
    lambda kernel, *others: Options(*kernel, *others),
    st.sampled_from([("pipelined", 1), ("pipelined", 2), ("decomposed", 1)]),
    st.booleans(),
    st.sampled_from(["fused", "overlap"]),
)
# Chooses among the values that fit: 0 is the latest.
picks = st.integers(0, 99)


@dataclass
class Value:
    """What the machine knows of a value.

    Attributes:
        kind: ``shard`` of the sequence, ``gather`` of one, ``hidden`` after a column, ``partial``
            after a row, ``whole`` on every rank, ``slice`` of the features.
        state: ``deferred``, ``fused`` (a gather that a kernel made), ``started``, or ``ready``.
        kernel: that a deferred matmul waits for.
        bias: whether a bias is to be added to it.
        used: whether a ``partial`` has gone into an op. Its gradient may be a deferred gather,
            which autograd can add to another of its kind only.
        gathers: whether that was by ops whose gradients all are deferred gathers.
        plain: whether an op has made it that can do nothing with such a gradient.
    """

    kind: str
    state: str = "ready"
    kernel: str = ""
    bias: bool = False
    used: bool = False
    gathers: bool = False
    plain: bool = False

    @property
    def is_deferred(self) -> bool:
        return self.state == "deferred"

    @property
    def is_readable(self) -> bool:
        """Whether a plain op may read it."""
        return self.kind != "gather" or not self.is_deferred


def is_partial(value: Value) -> bool:
    """Whether it is a partial that may go into an op."""
    return value.kind == "partial" and not value.used


def is_deferred_gather(value: Value) -> bool:
    """Whether it is a gather that nobody has made."""
    return value.kind == "gather" and value.is_deferred


class FusedRuleMachine(RuleBasedStateMachine):
    """Writes one program."""

    def __init__(self) -> None:
        super().__init__()
        self.setup: Setup | None = None
        self.values = {0: Value("shard"), 1: Value("shard"), 2: Value("hidden")}
        self.made = self.leaves = len(self.values)
        self.program: list[Step] = []

    @initialize(setup=setups)
    def set_up(self, setup: Setup) -> None:
        """Sizes, and what is trained."""
        self.setup = setup

    def numbers(self, fits: Callable[[Value], bool]) -> list[int]:
        """The values that fit, the latest first."""
        return [number for number, value in reversed(self.values.items()) if fits(value)]

    def pick(self, pick: int, fits: Callable[[Value], bool]) -> int:
        """One of them."""
        numbers = self.numbers(fits)
        return numbers[pick % len(numbers)]

    def read(self, *numbers: int) -> list[tuple[str, str]]:
        """Notes that plain ops read these; gives the events of matmuls that were deferred."""
        events = []
        for number in numbers:
            if self.values[number].is_deferred:
                self.values[number].state = "ready"
                events.append(FALLBACK)
        return events

    def note(
        self,
        op: str,
        *values: int,
        args: tuple[Any, ...] = (),
        makes: Value | None = None,
        raises: str = "",
        events: list[tuple[str, str]] | None = None,
    ) -> None:
        """Adds a step to the program, after what it does to its values has been noted."""
        out = -1
        if makes is not None:
            out, self.made = self.made, self.made + 1
            self.values[out] = makes
        deferred = frozenset(self.numbers(lambda value: value.is_deferred))
        self.program.append(Step(op, values, out, args, raises, events, deferred))

    @precondition(lambda self: len(self.numbers(lambda v: v.kind == "gather")) < 3)
    @rule(pick=picks)
    def gather(self, pick: int) -> None:
        """Defers a gather."""
        number = self.pick(pick, lambda value: value.kind == "shard")
        self.note("gather", number, makes=Value("gather", "deferred"), events=[])

    @rule(pick=picks, which=st.integers(0, 1), bias=st.booleans(), options=options)
    def column(self, pick: int, which: int, bias: bool, options: Options) -> None:
        """Rule A, or a sibling's matmul with what is gathered."""
        if not self.numbers(lambda value: value.kind == "gather"):
            self.gather(pick)
        number = self.pick(pick, lambda value: value.kind == "gather")
        gather = self.values[number]
        args = (which, bias, options, False)
        if gather.state == "started":
            self.note("column", number, args=args, raises="MC2ConstraintError", events=[])
            return
        events = [(AG, options.kernel)] if gather.is_deferred else []
        gather.state = "fused"
        self.note("column", number, args=args, makes=Value("hidden"), events=events)

    @rule(pick=picks, which=st.integers(0, 1), bias=st.booleans(), options=options)
    def row(self, pick: int, which: int, bias: bool, options: Options) -> None:
        """Defers a matmul."""
        number = self.pick(pick, lambda value: value.kind == "hidden")
        made = Value("partial", "deferred", options.kernel, bias)
        self.note("row", number, args=(which, bias, options), makes=made, events=[])

    @rule(pick=picks, how=st.sampled_from(["defer", "async", "sync"]))
    def scatter(self, pick: int, how: str) -> None:
        """Rule B; unfused if the matmul was read before."""
        assert self.setup is not None
        defer = how == "defer"

        def fits(value: Value) -> bool:
            return (is_partial(value) and not (value.plain and defer)) or (value.gathers and defer)

        if not self.numbers(fits):
            self.row(pick, 0, False, Options())
        number = self.pick(pick, fits)
        partial = self.values[number]
        partial.used, partial.gathers = True, defer
        args = (self.setup.sequence_dim, how)
        events = [(RS, partial.kernel if partial.is_deferred else "unfused")]
        self.note("reduce", number, args=args, makes=Value("shard"), events=events)

    @precondition(lambda self: self.numbers(is_partial))
    @rule(pick=picks, how=st.sampled_from(["defer", "async", "sync"]), features=st.booleans())
    def reduce_otherwise(self, pick: int, how: str, features: bool) -> None:
        """To the whole, or to features, which no kernel does."""
        number = self.pick(pick, is_partial)
        args = (2 if features else None, how)
        deferred = self.values[number].is_deferred
        self.values[number].used = not (features and deferred)
        if not features:
            events = [*self.read(number), ("all_reduce", "unfused")]
            self.note("reduce", number, args=args, makes=Value("whole"), events=events)
        elif deferred:
            self.note("reduce", number, args=args, raises="MC2ConstraintError", events=[])
        else:
            made = Value("slice")
            self.note("reduce", number, args=args, makes=made, events=[(RS, "unfused")])

    @rule(first=picks, second=picks)
    def add_partials(self, first: int, second: int) -> None:
        """Stays deferred for one kernel and without bias."""
        while len(self.numbers(is_partial)) < 2:
            self.row(second, 1, False, Options())
        numbers = [self.pick(first, is_partial)]
        numbers += [self.pick(second, lambda v: is_partial(v) and v is not self.values[numbers[0]])]
        a, b = (self.values[number] for number in numbers)
        a.used = b.used = True
        if a.is_deferred and b.is_deferred and a.kernel == b.kernel and not (a.bias or b.bias):
            made = Value("partial", "deferred", a.kernel)
            self.note("add", *numbers, makes=made, events=[])
            return
        events = self.read(*numbers)
        made = Value("partial", plain=a.plain or b.plain)
        self.note("add", *numbers, makes=made, events=events)

    @rule(
        first=picks,
        second=picks,
        kinds=st.sampled_from([("shard",), ("hidden",), ("whole", "gather")]),
    )
    def add_others(self, first: int, second: int, kinds: tuple[str, ...]) -> None:
        """Reads what was gathered or reduced."""

        def fits(value: Value) -> bool:
            return value.kind in kinds and value.is_readable

        if self.numbers(fits):
            numbers = [self.pick(n, fits) for n in (first, second)]
            self.note("add", *numbers, makes=Value(kinds[0]), events=[])

    @rule(pick=picks, op=st.sampled_from(["read", "twice", "relu", "drop"]))
    def use(self, pick: int, op: str) -> None:
        """A plain op, or none any more."""
        if op == "drop":
            made = [number for number in self.numbers(lambda _: True) if number >= self.leaves]
            if made:
                number = made[pick % len(made)]
                del self.values[number]
                self.note("drop", number, events=[])
            return
        number = self.pick(pick, lambda value: value.is_readable and not value.used)
        kind = self.values[number].kind
        if op == "relu" and kind == "partial":
            op = "twice"  # a relu would have to reduce it
        self.values[number].used = op == "twice" and kind == "partial"
        events = self.read(number)
        makes = None
        if op != "read":
            makes = Value("whole" if kind == "gather" else kind, plain=kind == "partial")
        self.note(op, number, makes=makes, events=events)

    @precondition(lambda self: self.numbers(is_deferred_gather))
    @rule(pick=picks, how=st.integers(0, 11), options=options)
    def misuse(self, pick: int, how: int, options: Options) -> None:
        """What a deferred gather is not for."""
        number = self.pick(pick, is_deferred_gather)
        if how == 11:
            self.values[number].state = "started"
            self.note("start", number, events=[(AG, "unfused")])
        elif how == 10:
            args = (0, False, options, True)
            self.note("column", number, args=args, raises="MC2ConstraintError", events=[])
        else:
            self.note("misread", number, args=(how,), raises="DeferredReadError", events=[])

    @precondition(lambda self: len(self.values) > self.leaves)
    @rule(pick=picks, seed=st.integers(0, 9))
    def backward(self, pick: int, seed: int) -> None:
        """From one value, of a graph that is kept."""
        numbers = [number for number in reversed(self.values) if number >= self.leaves]
        self.note("backward", numbers[pick % len(numbers)], args=(seed,))

    def teardown(self) -> None:
        """The ranks replay the program."""
        if self.setup is None or not self.program:
            return
        arguments = (self.setup, self.program)
        task = Task(replay.__module__, replay.__qualname__, arguments, {}, keep_if_all_raise=True)
        launched = pool(self.setup.ranks).run_task(task)
        assert launched == [launched[0]] * self.setup.ranks


FusedRuleMachine.TestCase.settings = settings(examples(50), stateful_step_count=30)
TestFusedRules = FusedRuleMachine.TestCase
