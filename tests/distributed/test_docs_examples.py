"""The code blocks of the documentation that claim to run, run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks

if IN_RANK_PROCESS:
    from mc2 import kernels
    from pending_dtensor.fused_rules import unregister_fused_rule

ROOT = Path(__file__).parents[2]


def code_block(path: str, label: str) -> str:
    """The one block in a page that is fenced as ``python <label>``."""
    page = (ROOT / path).read_text()
    (block,) = re.findall(rf"^```python {label}\n(.*?)^```$", page, flags=re.M | re.S)
    return block


def run_block(ctx: RankContext, path: str, label: str) -> None:
    exec(compile(code_block(path, label), path, "exec"), {"mesh": ctx.mesh()})


@on_ranks(2)
def test_a_rule(ctx: RankContext) -> None:
    try:
        run_block(ctx, "docs/writing_a_fused_rule.md", "rule")
    finally:
        unregister_fused_rule("scale", "linear")


@on_ranks(2)
def test_a_kernel(ctx: RankContext) -> None:
    try:
        run_block(ctx, "docs/writing_a_fused_rule.md", "kernel")
    finally:
        kernels._kernels.pop("counting")


@on_ranks(2)
def test_readme_usage(ctx: RankContext) -> None:
    run_block(ctx, "README.md", "usage")
