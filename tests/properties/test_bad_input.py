"""Public constructors and functions, given anything: they refuse in words, or what they made works.

An argument of the wrong type has to be refused. One of the right type may be refused as well, by an
error of the documented kinds that says what was expected and what it got, or else the result is put
to use, which may end in the same errors only. In rank processes, since a crash or a hang of one is
reported there.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import example, given
from hypothesis import strategies as st

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks
from tests.common.property_profiles import examples

if IN_RANK_PROCESS:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

    import parallel_styles
    from mc2 import MC2ConstraintError, MC2Linear, assert_fused, reasons_not_supported
    from mc2.row_layout import RowLayout
    from parallel_styles import ColwiseParallel, parallelize_module
    from pending_dtensor import HyperDTensor, distribute_tensor, record_overlap

FEATURES = 8


# --- what is handed in, by name: the parent draws names only


def itself() -> list[Any]:
    """A list that contains itself."""
    value: list[Any] = []
    value.append(value)
    return value


VALUES: dict[str, Callable[[RankContext], Any]] = {
    "None": lambda ctx: None,
    "True": lambda ctx: True,
    "0": lambda ctx: 0,
    "1": lambda ctx: 1,
    "-1": lambda ctx: -1,
    "-9": lambda ctx: -9,
    "2**70": lambda ctx: 2**70,
    "2.5": lambda ctx: 2.5,
    "nan": lambda ctx: float("nan"),
    "''": lambda ctx: "",
    "'x'": lambda ctx: "x",
    "'auto'": lambda ctx: "auto",
    "'pipelined'": lambda ctx: "pipelined",
    "'decomposed'": lambda ctx: "decomposed",
    "'ascend'": lambda ctx: "ascend",
    "'all_gather'": lambda ctx: "all_gather",
    "'reduce_scatter'": lambda ctx: "reduce_scatter",
    "'all_gather_matmul'": lambda ctx: "all_gather_matmul",
    "'fused'": lambda ctx: "fused",
    "'overlap'": lambda ctx: "overlap",
    "b'x'": lambda ctx: b"x",
    "()": lambda ctx: (),
    "(8, 8)": lambda ctx: (8, 8),
    "(8, -8)": lambda ctx: (8, -8),
    "['x']": lambda ctx: ["x"],
    "itself": lambda ctx: itself(),
    "{}": lambda ctx: {},
    "{1: 2}": lambda ctx: {1: 2},
    "object": lambda ctx: object(),
    "a class": lambda ctx: int,
    "a function": lambda ctx: itself,
    "Shard": lambda ctx: Shard,
    "Shard(0)": lambda ctx: Shard(0),
    "Shard(1)": lambda ctx: Shard(1),
    "Shard(-1)": lambda ctx: Shard(-1),
    "Shard(9)": lambda ctx: Shard(9),
    "Replicate()": lambda ctx: Replicate(),
    "Partial()": lambda ctx: Partial(),
    "Partial('max')": lambda ctx: Partial("max"),
    "(Shard(0),)": lambda ctx: (Shard(0),),
    "(Shard(1),)": lambda ctx: (Shard(1),),
    "[Replicate()]": lambda ctx: [Replicate()],
    "(Partial(),)": lambda ctx: (Partial(),),
    "(Shard(9),)": lambda ctx: (Shard(9),),
    "(Shard(0), None)": lambda ctx: (Shard(0), None),
    "(Shard(0), 'x')": lambda ctx: (Shard(0), "x"),
    "{'input': Shard(0)}": lambda ctx: {"input": Shard(0)},
    "{'other': Replicate()}": lambda ctx: {"other": Replicate()},
    "a tensor": lambda ctx: torch.ones(FEATURES, FEATURES),
    "a scalar": lambda ctx: torch.tensor(1.0),
    "whole numbers": lambda ctx: torch.ones(FEATURES, FEATURES, dtype=torch.int64),
    "a DTensor": lambda ctx: DTensor.from_local(torch.ones(4, 8), ctx.mesh(), [Shard(0)]),
    "a HyperDTensor": lambda ctx: hyper(ctx),  # noqa: PLW0108 - defined below
    "a pending tensor": lambda ctx: (
        hyper(ctx).redistribute(placements=[Replicate()], async_op=True)._local_tensor
    ),
    "a dtype": lambda ctx: torch.float32,
    "(a dtype,)": lambda ctx: (torch.float32,),
    "a mesh": lambda ctx: ctx.mesh(),
    "a mesh of two axes": lambda ctx: ctx.mesh(1, 2),
    "a group": lambda ctx: dist.group.WORLD,
    "a layout of rows": lambda ctx: RowLayout(1, (4, 4), 1, ctx.rank),
    "a Linear": lambda ctx: nn.Linear(FEATURES, FEATURES),
    "a model": lambda ctx: nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU()),
    "a style": lambda ctx: ColwiseParallel(),
    "{'0': a style}": lambda ctx: {"0": ColwiseParallel()},
    "{'nowhere': a style}": lambda ctx: {"nowhere": ColwiseParallel()},
    "{1: a style}": lambda ctx: {1: ColwiseParallel()},
    "{'0': 'x'}": lambda ctx: {"0": "x"},
}


def hyper(ctx: RankContext) -> HyperDTensor:
    return HyperDTensor.from_local(torch.ones(4, FEATURES), ctx.mesh(), [Shard(0)])


# The values that an argument of each kind has the right type for; any other must be refused.
PLACEMENT = {name for name in VALUES if re.fullmatch(r"(Shard|Replicate|Partial)\(.*\)", name)}
PLACEMENTS = {"()", "(Shard(0),)", "(Shard(1),)", "[Replicate()]", "(Partial(),)", "(Shard(9),)"}
NAMED = {"{}", "{'input': Shard(0)}", "{'other': Replicate()}"}
INT = {"True", "0", "1", "-1", "-9", "2**70"}
STR = {name for name in VALUES if name.startswith("'")}
KINDS: dict[str, set[str]] = {
    "anything": set(VALUES),
    "layout": PLACEMENT | {"None"},
    "layouts": PLACEMENT | PLACEMENTS | {"None", "(Shard(0), None)"},
    "output layouts": PLACEMENT | PLACEMENTS | {"(Shard(0), None)"},
    "named layouts": NAMED | {"None"},
    "placements": PLACEMENTS | {"None"},
    "int": INT,
    "int or None": INT | {"None"},
    "chunks": INT | {"'auto'"},
    "str": STR,
    "sizes": {"None", "()", "(8, 8)", "(8, -8)"},
    "sequence": {"()", "(8, 8)", "(8, -8)"},
    "dtypes": {"()", "(a dtype,)"},
    "dtype": {"None", "a dtype"},
    "mesh": {"None", "a mesh", "a mesh of two axes"},
    "group": {"None", "a group"},
    "row layout": {"None", "a layout of rows"},
    "local tensor": {"a tensor", "a scalar", "whole numbers", "a pending tensor"},
    "leaf": {"a tensor", "a scalar", "whole numbers", "a pending tensor"},
    "module": {"a Linear", "a model"},
    "plan": {"None", "{}", "a style", "{'0': a style}", "{'nowhere': a style}"},
    "names": {"()", "{}", "['x']"},
}


# --- what they are handed to


class Function(NamedTuple):
    """One public constructor or function.

    Attributes:
        call: calls it, and puts to use what it returns.
        arguments: the kind of each argument that is drawn.
        given: values of arguments that it needs, unless they are drawn.
    """

    call: Callable[..., Any]
    arguments: dict[str, str]
    given: dict[str, str]


def applied(ctx: RankContext, style: Any) -> None:
    """Uses a style on a Linear, forward and backward."""
    layer = nn.Linear(FEATURES, FEATURES)
    parallelize_module(layer, ctx.mesh(), style, src_data_rank=None)
    repr(style)
    whole = isinstance(style, parallel_styles.MC2RowwiseParallel)
    x = torch.ones(2, 4, FEATURES // 2 if whole else FEATURES, requires_grad=True)
    out = layer(x)
    if isinstance(out, DTensor):
        out = out.full_tensor()
    out.sum().backward()


def style(name: str, arguments: dict[str, str], given: dict[str, str] | None = None) -> Function:
    def call(ctx: RankContext, **arguments: Any) -> None:
        applied(ctx, getattr(parallel_styles, name)(**arguments))

    return Function(call, arguments, given or {})


def configure(ctx: RankContext, **arguments: Any) -> None:
    mode = arguments.pop("mode")
    layer = nn.Linear(FEATURES, FEATURES)
    placement = Shard(1) if mode == "reduce_scatter" else Shard(0)
    weight = torch_distribute_tensor(layer.weight.detach(), ctx.mesh(), [placement])
    layer.weight, layer.bias = nn.Parameter(weight), None
    configured = MC2Linear.from_linear(layer).configure_mc2(mode, **arguments)
    repr(configured)
    configured(hyper(ctx))


def redistribute(ctx: RankContext, **arguments: Any) -> None:
    hyper(ctx).redistribute(**arguments).full_tensor()


def record(ctx: RankContext, name: Any) -> None:
    with record_overlap(name) as log:
        hyper(ctx).full_tensor()
    log.table()
    log.summary()


def fused_check(ctx: RankContext, unfused: Any) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES))
    parallelize_module(model, ctx.mesh(), {"0": mc2_column()})
    with assert_fused(model, unfused=unfused):
        model(torch.ones(2, 4, FEATURES))


def mc2_column() -> Any:
    return parallel_styles.MC2ColwiseParallel(input_layouts=Shard(1), kernel="decomposed")


LAYER = {
    "input_layouts": "layout",
    "output_layouts": "layout",
    "use_local_output": "anything",
    "async_op": "anything",
}
INPUTS = {
    "input_layouts": "layouts",
    "desired_input_layouts": "layouts",
    "input_kwarg_layouts": "named layouts",
    "desired_input_kwarg_layouts": "named layouts",
}
OUTPUTS = {"output_layouts": "output layouts", "desired_output_layouts": "output layouts"}
MC2 = {
    "input_layouts": "layout",
    "output_layouts": "layout",
    "use_local_output": "anything",
    "kernel": "str",
    "chunks": "chunks",
}
COLUMN = {**MC2, "regather": "anything", "column_backward": "str"}
PIPELINED = {"kernel": "'pipelined'"}
SP_OUT = {"output_layouts": "Shard(0)", "desired_output_layouts": "Replicate()"}

FUNCTIONS: dict[str, Function] = {
    "ColwiseParallel": style("ColwiseParallel", LAYER),
    "RowwiseParallel": style("RowwiseParallel", LAYER, {"input_layouts": "Replicate()"}),
    "SequenceParallel": style(
        "SequenceParallel",
        {"sequence_dim": "int", "use_local_output": "anything", "async_op": "anything"},
    ),
    "PrepareModuleInput": style(
        "PrepareModuleInput", {**INPUTS, "use_local_output": "anything", "defer": "anything"}
    ),
    "PrepareModuleOutput": style(
        "PrepareModuleOutput", {**OUTPUTS, "use_local_output": "anything"}, SP_OUT
    ),
    "PrepareModuleInputOutput": style(
        "PrepareModuleInputOutput",
        {**INPUTS, **OUTPUTS, "use_local_input": "anything", "use_local_output": "anything"},
        SP_OUT,
    ),
    "MC2ColwiseParallel": style(
        "MC2ColwiseParallel", COLUMN, {"input_layouts": "Shard(1)", **PIPELINED}
    ),
    "MC2RowwiseParallel": style(
        "MC2RowwiseParallel", MC2, {"output_layouts": "Shard(1)", **PIPELINED}
    ),
    "configure_mc2": Function(
        configure,
        {
            "mode": "str",
            "device_mesh": "mesh",
            "group": "group",
            "sequence_dim": "int",
            **{name: COLUMN[name] for name in ("kernel", "chunks", "regather", "column_backward")},
        },
        {"mode": "'all_gather'", "device_mesh": "a mesh", "sequence_dim": "0", **PIPELINED},
    ),
    "from_linear": Function(
        lambda ctx, linear: MC2Linear.from_linear(linear), {"linear": "module"}, {}
    ),
    "from_local": Function(
        lambda ctx, **arguments: HyperDTensor.from_local(**arguments),
        {
            "local_tensor": "local tensor",
            "device_mesh": "mesh",
            "placements": "placements",
            "run_check": "anything",
            "shape": "sizes",
            "stride": "sizes",
            "grad_placements": "placements",
        },
        {"local_tensor": "a tensor", "device_mesh": "a mesh"},
    ),
    "redistribute": Function(
        redistribute,
        {
            "device_mesh": "mesh",
            "placements": "placements",
            "async_op": "anything",
            "forward_dtype": "dtype",
            "backward_dtype": "dtype",
        },
        {"placements": "[Replicate()]"},
    ),
    "to_local": Function(
        lambda ctx, grad_placements: hyper(ctx).to_local(grad_placements=grad_placements),
        {"grad_placements": "placements"},
        {},
    ),
    "full_tensor": Function(
        lambda ctx, grad_placements: hyper(ctx).full_tensor(grad_placements=grad_placements),
        {"grad_placements": "placements"},
        {},
    ),
    "distribute_tensor": Function(
        lambda ctx, **arguments: distribute_tensor(**arguments).full_tensor(),
        {
            "tensor": "leaf",
            "device_mesh": "mesh",
            "placements": "placements",
            "src_data_rank": "int or None",
        },
        {"tensor": "a tensor", "device_mesh": "a mesh"},
    ),
    "record_overlap": Function(record, {"name": "str"}, {}),
    "assert_fused": Function(fused_check, {"unfused": "names"}, {}),
    "reasons_not_supported": Function(
        lambda ctx, **arguments: [r.index("Expected") for r in reasons_not_supported(**arguments)],
        {
            "kernel": "anything",
            "op": "anything",
            "ranks": "int or None",
            "contractions": "sequence",
            "dtypes": "dtypes",
            "layout": "row layout",
            "group": "group",
            "chunks": "anything",
        },
        {"kernel": "'pipelined'", "op": "'all_gather_matmul'"},
    ),
    "parallelize_module": Function(
        lambda ctx, **arguments: parallelize_module(**arguments),
        {
            "module": "module",
            "device_mesh": "mesh",
            "parallelize_plan": "plan",
            "src_data_rank": "int or None",
        },
        {"module": "a model", "device_mesh": "a mesh", "parallelize_plan": "{'0': a style}"},
    ),
}

# What torch and Python say of arguments that are torch's, as in torch: layouts that do not go
# together, a global size that does not fit the layer, no current mesh, the truth of a flag, a dim
# that no Shard can hold.
TORCHS = re.compile(
    r"(?s)should have same length!|should not be None!|shapes cannot be multiplied|"
    r"same reduction dim|"
    r"No device mesh is currently active|Boolean value of Tensor with|Cannot distribute a DTensor|"
    r"incompatible constructor arguments.*\bShard\("
)


class Case(NamedTuple):
    """A function, and the names of the values that some of its arguments get."""

    function: str
    drawn: dict[str, str]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    name = draw(st.sampled_from(sorted(FUNCTIONS)))
    arguments = st.sampled_from(sorted(FUNCTIONS[name].arguments))
    values = st.sampled_from(sorted(VALUES))
    return Case(name, draw(st.dictionaries(arguments, values, min_size=1, max_size=2)))


@examples(300)
@given(case=cases())
@example(case=Case("from_local", {"device_mesh": "'x'"}))
@example(case=Case("MC2ColwiseParallel", {"kernel": "itself"}))
@example(case=Case("assert_fused", {"unfused": "{'0': 'x'}"}))
@on_ranks(2, keep_if_all_raise=True)
def test_anything_is_used_or_refused_in_words(ctx: RankContext, case: Case) -> None:
    function, drawn = FUNCTIONS[case.function], case.drawn
    names = {**function.given, **drawn}
    arguments = {name: VALUES[value](ctx) for name, value in names.items()}
    wrong = [name for name, value in drawn.items() if not right_type(function, name, value)]
    error: Exception | None = None
    try:
        function.call(ctx, **arguments)
    except Exception as raised:
        error = raised
    if error is None:
        assert not wrong, f"taken as they are: {wrong}"
    else:
        assert refused_in_words(error), "".join(traceback.format_exception(error))


def refused_in_words(error: Exception) -> bool:
    """Whether it says what was expected and what came, in a documented kind of error."""
    if TORCHS.search(str(error)):
        return isinstance(error, (AssertionError, RuntimeError, TypeError, ValueError))
    kinds = (TypeError, ValueError, NotImplementedError, MC2ConstraintError)
    said = re.match(
        r"(?s)(Module '.*': |Kernel '\w+' cannot run \w+:\s+- )*Expected .*[ ,]got[ :]", str(error)
    )
    return isinstance(error, kinds) and said is not None


def right_type(function: Function, name: str, value: str) -> bool:
    return value in KINDS[function.arguments[name]]
