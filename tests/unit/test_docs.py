"""The documentation points at what exists: links, headings, files and tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
# A test file, and the tests that are named after it.
_TESTS = re.compile(
    r"`((?:tests/)?(?:unit|distributed|ascend|faults|properties)/[\w/]+\.py)`"
    r"((?:[:,]\s+`test_\w+`)*)"
)


def prose(page: Path) -> str:
    return _CODE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(prose(page)))
    return {heading.replace(" ", "-") for heading in words}


def missing_links(page: Path, text: str) -> list[str]:
    missing = []
    for link in _LINK.findall(text):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    return missing


def missing_tests(text: str) -> list[str]:
    missing = []
    for path, named in _TESTS.findall(text):
        file = ROOT / "tests" / path.removeprefix("tests/")
        source = file.read_text() if file.exists() else ""
        missing += [path] if not source else []
        missing += [name for name in re.findall(r"test_\w+", named) if f"def {name}(" not in source]
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert missing_links(page, prose(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_tests_exist(page: Path) -> None:
    assert missing_tests(prose(page)) == []


def test_a_wrong_pointer_is_noticed() -> None:
    page = ROOT / "README.md"
    text = "[a](docs/mc2.md#what-never-ran) [b](docs/nothing.md) [c](docs/mc2.md#no-such-heading)"
    assert missing_links(page, text) == ["docs/nothing.md", "docs/mc2.md#no-such-heading"]
    here = (
        "`unit/test_docs.py`: `test_links_lead_somewhere`, `test_nobody_wrote`; `unit/test_no.py`"
    )
    assert missing_tests(here) == ["test_nobody_wrote", "unit/test_no.py"]


def test_every_promise_names_its_tests() -> None:
    rows = re.findall(
        r"^\| (?!promise|---)(.*) \| (.*) \|$", prose(ROOT / "docs/guarantees.md"), re.M
    )
    assert len(rows) > 30
    assert [promise for promise, tests in rows if not _TESTS.search(tests)] == []
