"""Property tests: how many examples are tried, how many were, and one command to try one again.

A pytest plugin that `tests/conftest.py` names. ``HYPOTHESIS_PROFILE`` chooses a profile: the
default tries the same examples in each run, ``fuzz`` (``make fuzz``) many more, and new ones each
time. A property asks for the default's number, and runs on ranks that survive a failing example, so
that it can be made smaller quickly:

    @examples(100)
    @given(sizes=st.lists(st.integers(0, 9)))
    @on_ranks(2, 4, keep_if_all_raise=True)
    def test_sizes(ctx: RankContext, sizes: list[int]) -> None: ...
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections import Counter

import hypothesis
import pytest
from hypothesis import Phase

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
FUZZ_FACTOR = 20
# The module that runs pytest; another where tests need an environment of their own.
PYTEST = os.environ.get("PENDING_DTENSOR_PYTEST", "pytest")

# Time limits are the launcher's: an example that restarts a pool is slow, and not wrong. Failing
# examples are kept by nobody: they are printed, with the command that tries them again.
_common = hypothesis.settings(
    max_examples=25,
    deadline=None,
    database=None,
    print_blob=True,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
hypothesis.settings.register_profile("default", _common, derandomize=True)
hypothesis.settings.register_profile("fuzz", _common, max_examples=25 * FUZZ_FACTOR)
hypothesis.settings.load_profile(PROFILE)


def examples(count: int) -> hypothesis.settings:
    """Tries ``count`` examples, under fuzz `FUZZ_FACTOR` times as many.

    Decorates a test above ``@given``; a state machine has it as ``TestCase.settings``.
    """
    return hypothesis.settings(max_examples=count * (FUZZ_FACTOR if PROFILE == "fuzz" else 1))


# --- one command to try an example again

_BLOB = re.compile(r"@reproduce_failure\('([\w.]+)', b'([^']+)'\)")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--replay``."""
    parser.addoption(
        "--replay",
        metavar="VERSION:BLOB",
        help="try one example of a property test again; a failure prints the whole command",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Reduces the selected property to the example of ``--replay``."""
    if config.option.replay is None:
        return
    version, _, blob = config.option.replay.partition(":")
    if len(items) != 1 or not isinstance(items[0], pytest.Function):
        raise pytest.UsageError(
            f"Expected one test to replay an example of, got {len(items)}. Name it in full, as in "
            f"the command that the failure printed."
        )
    test = items[0].obj
    machine = getattr(test, "_hypothesis_state_machine_class", None)
    hypothesis.reproduce_failure(version, blob.encode())(machine or test)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints a command for each example that failed, and how many each property tried."""
    tried: Counter[str] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            if report.when == "call" and (found := _BLOB.search(report.longreprtext)):
                again = f"--replay={found[1]}:{found[2]}"
                command = shlex.join([sys.executable, "-m", PYTEST, report.nodeid, again])
                terminalreporter.write_line(f"Try this example again: {command}")
            for name, count in report.user_properties:
                if name == "examples":
                    tried[report.nodeid.partition("[")[0]] += count
    for nodeid, count in tried.items():
        terminalreporter.write_line(f"property examples: {nodeid} {count}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> object:
    """Notes how many examples a property tried."""
    if call.when == "call" and (statistics := getattr(item, "hypothesis_statistics", None)):
        passed = sum(map(int, re.findall(r"(\d+) passing", statistics)))
        item.user_properties.append(("examples", passed))
    return (yield)
