"""Settings of every test run. Nothing here imports torch: only rank processes and unit tests do."""

from __future__ import annotations

import pytest

from tests.common import distributed_launcher

pytest_plugins = ["tests.common.property_profiles"]


def pytest_configure(config: pytest.Config) -> None:
    distributed_launcher.use_warning_filters(config.getini("filterwarnings"))


def pytest_unconfigure(config: pytest.Config) -> None:
    distributed_launcher.shut_down_pools()
