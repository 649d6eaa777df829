"""Random chains of styled layers against the same modules on one device."""

from __future__ import annotations

from hypothesis import example, given

from tests.common.distributed_launcher import RankContext, on_ranks
from tests.common.property_profiles import examples
from tests.properties.layer_cases import Block, Case, Layer, cases
from tests.properties.layer_checks import check_case

COLUMN = Layer(mc2=True, kernel="decomposed")
# Rarely drawn: siblings that are handed the leaf itself, which is filled again for the next step.
REFILLED = Case(
    shape=(2, 12, 3),
    source=1,
    kind="local",
    leaf=True,
    input_grad=True,
    blocks=(
        Block(
            norm=None,
            columns=(COLUMN, COLUMN),
            calls=(0, 1),
            told=False,
            reads_gather="",
            product=False,
            hidden_features=12,
            hidden=-1,
            hidden_local=True,
            between=(),
            row=Layer(mc2=True),
            out=1,
            out_local=True,
            after=(),
            residual=False,
        ),
    ),
    frozen=(),
    evaluated=True,
    refilled=True,
    checked=False,
)


@examples(30)
@given(case=cases())
@example(case=REFILLED)
@on_ranks(2, 3, 4, keep_if_all_raise=True)
def test_layers_equal_those_of_one_device(ctx: RankContext, case: Case) -> None:
    check_case(ctx, case)
