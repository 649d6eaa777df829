"""The files that benchmarks write."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.results_file import hardware_slug, table, write_results


def test_a_table_is_markdown_with_even_columns() -> None:
    lines = table(["name", "s"], [["a", "1.25"], ["longer", "2"]]).splitlines()
    assert lines == [
        "| name   | s    |",
        "|--------|------|",
        "| a      | 1.25 |",
        "| longer | 2    |",
    ]


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("AMD EPYC", "amd-epyc-2cores"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "intel-xeon-2cores"),
        ("AMD EPYC 7B13 64-Core Processor", "amd-epyc-7b13-2cores"),
        ("aarch64", "aarch64-2cores"),
    ],
)
def test_hardware_has_a_short_name(name: str, slug: str) -> None:
    assert hardware_slug(name, 2) == slug


def test_a_file_says_what_ran_on_what_and_where_we_lose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_results(
        "theme", "A title", [("Case", "a table")], ["slow at 3"], "ratio 1.5", tmp_path / "results"
    )
    assert re.fullmatch(r"theme_[a-z0-9-]+_\d{6}\.md", path.name)
    text = path.read_text()
    for wanted in (
        "# A title",
        "`python ",
        "versions: torch ",
        "## Case\n\na table",
        "- slow at 3",
    ):
        assert wanted in text
    assert text.splitlines()[-1] == "ratio 1.5"
    assert capsys.readouterr().out.splitlines()[-1] == "ratio 1.5"


def test_a_file_that_loses_nowhere_says_so(tmp_path: Path) -> None:
    path = write_results("theme", "A title", [], [], "ratio 1.5", tmp_path)
    assert "## Where we lose\n\nNowhere in what was measured." in path.read_text()
