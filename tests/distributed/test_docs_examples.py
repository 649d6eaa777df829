"""The code of the documentation runs as it stands, and prints what the pages say it prints."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks

if IN_RANK_PROCESS:
    from mc2 import kernels
    from pending_dtensor.fused_rules import fused_rules, unregister_fused_rule

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "docs/mc2.md",
    "docs/seeing_overlap.md",
    "docs/styles.md",
    "docs/writing_a_fused_rule.md",
]

# A block of code, and the block of text that says what it prints, if one follows it.
_EXAMPLE = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n^```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
# What differs from run to run.
_TIME = re.compile(r"\b\d+\.\d+ ms")
_GROUP = re.compile(r"(?<=group )'\w+'|(?<=group=)'\w+'")


def comparable(output: str) -> str:
    """What a block printed, without the times and the name of the process group."""
    return _GROUP.sub("NAME", _TIME.sub("TIME", output)).strip()


@pytest.mark.parametrize("page", PAGES)
@on_ranks(2)
def test_code_of_a_page(ctx: RankContext, page: str) -> None:
    text = (ROOT / page).read_text()
    namespace: dict[str, Any] = {"mesh": ctx.mesh()}
    outputs = []  # compared at the end, for ranks that stop in the middle leave the others alone
    with what_pages_register_removed(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no DTensor sharding rule")
        for example in _EXAMPLE.finditer(text):
            line = text.count("\n", 0, example.start("code"))
            code = "\n" * line + example["code"]  # so that a traceback shows the page's lines
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(code, str(ROOT / page), "exec"), namespace)
            outputs.append((printed.getvalue(), example["output"]))
    assert outputs, "a page without code is not to be listed"
    if ctx.rank == 0:
        for printed_output, said in outputs:
            assert said is None or comparable(printed_output) == comparable(said)


@contextlib.contextmanager
def what_pages_register_removed() -> Any:
    """Takes out the rules and kernels that the block added to the registries."""
    rules, names = set(fused_rules()), set(kernels._kernels)
    try:
        yield
    finally:
        for pair in set(fused_rules()) - rules:
            unregister_fused_rule(*pair)
        for name in set(kernels._kernels) - names:
            del kernels._kernels[name]


def test_every_python_block_is_on_a_page_that_is_run() -> None:
    with_code = {
        str(path.relative_to(ROOT))
        for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
        if "```python" in path.read_text()
    }
    assert with_code == {*PAGES, "CONTRIBUTING.md"}  # its block is a test, like those here


def test_output_is_compared_without_what_differs_between_runs() -> None:
    said = "all_gather 0.61 ms, group='0', of group 'x': 3"
    other = "all_gather 17.00 ms, group='12', of group 'y': 3"
    assert comparable(said) == comparable(other)
    assert comparable(said) != comparable(said.replace(": 3", ": 4"))
