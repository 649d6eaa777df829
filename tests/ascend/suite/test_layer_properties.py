"""Random chains of layers of the ``ascend`` kernel, through the real operators over gloo."""

from __future__ import annotations

from collections import Counter
from unittest import mock

from hypothesis import example, given

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks
from tests.common.property_profiles import examples
from tests.properties.layer_cases import ASCEND, Block, Case, Layer, cases
from tests.properties.layer_checks import check_case

if IN_RANK_PROCESS:
    from mc2.kernels import ascend
    from pending_dtensor import OverlapLog
    from tests.ascend.operators_on_cpu import OperatorCall, hccl_over_gloo
    from tests.common.mc2_models import calls

OPERATORS = {
    "all_gather": "npu_all_gather_base_mm",
    "reduce_scatter": "npu_mm_reduce_scatter_base",
}


def least_calls(case: Case) -> Counter[str]:
    """How often each operator has to run at least: siblings may share, or gather for themselves."""
    forwards, backwards = 2 + case.evaluated, 2 * case.input_grad
    least: Counter[str] = Counter()
    for block in case.blocks:
        if block.row.is_ascend:
            least.update(reduce_scatter=forwards, all_gather=backwards)
        if any(block.columns[number].is_ascend for number in block.calls):
            least.update(all_gather=forwards)
        if reduces_fused(block):
            least.update(reduce_scatter=backwards)
    return least


def reduces_fused(block: Block) -> bool:
    """Whether all that reads its input is, in backward."""
    return not block.reads_gather and all(
        block.columns[number].is_ascend and block.columns[number].column_backward == "fused"
        for number in block.calls
    )


def check_ran_fused(case: Case, log: OverlapLog, operators: list[OperatorCall]) -> None:
    """The log tells of the operators that ran, and all ran that have to."""
    logged = [kind for kind, kernel in calls(log) if kernel == "ascend"]
    assert [call.name for call in operators] == [OPERATORS[kind] for kind in logged]
    assert Counter(logged) >= least_calls(case)


COLUMN = Layer(mc2=True, kernel="ascend")
# Rarely drawn: three siblings whose grad_inputs are too much for one reduction. Handed one gather
# they are refused, else they gather for themselves.
TOLD = Case(
    shape=(2, 4, 256),
    source=1,
    kind="hyper",
    leaf=True,
    input_grad=True,
    blocks=(
        Block(
            norm=None,
            columns=(COLUMN, COLUMN, COLUMN),
            calls=(0, 1, 2),
            told=True,
            reads_gather="",
            product=False,
            hidden_features=1024,
            hidden=-1,
            hidden_local=True,
            between=(),
            row=COLUMN,
            out=1,
            out_local=False,
            after=(),
            residual=False,
        ),
    ),
    frozen=(),
    evaluated=False,
    refilled=False,
    checked=False,
    dtype="bfloat16",
    contraction_limit=700,
)
UNTOLD = TOLD._replace(blocks=(TOLD.blocks[0]._replace(told=False),))
UNEVEN = UNTOLD._replace(shape=(2, 5, 256))
EMPTY = UNTOLD._replace(shape=(0, 4, 256))


@examples(12)
@given(case=cases(ASCEND).filter(lambda case: any(layer.is_ascend for layer in case.layers)))
@example(case=TOLD)
@example(case=UNTOLD)
@example(case=UNEVEN)
@example(case=EMPTY)
@on_ranks(2, 4, keep_if_all_raise=True)
def test_layers_equal_those_of_one_device(ctx: RankContext, case: Case) -> None:
    limit = mock.patch.object(ascend, "_CONTRACTION_LIMIT", case.contraction_limit)
    with hccl_over_gloo() as operators, limit:
        log = check_case(ctx, case)
        if log is not None:
            check_ran_fused(case, log, operators)
