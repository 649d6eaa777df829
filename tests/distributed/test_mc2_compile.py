"""torch.compile of models with MC2 layers: the layers stay out of the graph, and stay fused."""

from __future__ import annotations

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks

if IN_RANK_PROCESS:
    import torch
    from torch import nn

    from tests.common.mc2_models import QKVO, fused, make, run
    from tests.common.sharded_models import equal, whole_numbers

    class Residual(nn.Module):
        """Arithmetic of its own around layers that share their input, for Dynamo to compile."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 2 * self.inner(x * 3)


@pytest.mark.parametrize("defer", [False, True], ids=["untold", "deferred by the parent"])
@pytest.mark.parametrize("kernel", ["decomposed", "pipelined"])
@on_ranks(2)
@pytest.mark.filterwarnings("default")  # compiling warns of much that is not ours
def test_a_compiled_model_computes_and_launches_the_same(
    ctx: RankContext, kernel: str, defer: bool
) -> None:
    torch._dynamo.reset()
    x = whole_numbers(3, 8, 8)
    model = Residual(fused(ctx, make(QKVO), 1, kernel, defer=defer))
    expected = run(ctx, model, x, 1)
    assert expected.calls == [("all_gather", kernel), ("reduce_scatter", kernel)] * 2
    model.zero_grad()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = run(ctx, model, x, 1, forward=torch.compile(model, backend=backend))
    equal(compiled.values, expected.values)
    assert compiled.calls == expected.calls
    assert graphs, "nothing was compiled"
