"""Settings of every test run. Nothing here imports torch: only rank processes and unit tests do."""

from __future__ import annotations

import os

import hypothesis
import pytest

from tests.common import distributed_launcher

# Time limits are the launcher's: an example that restarts a pool is slow, and not wrong.
hypothesis.settings.register_profile("default", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config: pytest.Config) -> None:
    distributed_launcher.use_warning_filters(config.getini("filterwarnings"))


def pytest_unconfigure(config: pytest.Config) -> None:
    distributed_launcher.shut_down_pools()
