"""Settings of every test run. Nothing here imports torch: only rank processes and unit tests do."""

from __future__ import annotations

import pytest

from tests.common import distributed_launcher

pytest_plugins = ["tests.common.property_profiles"]


def pytest_configure(config: pytest.Config) -> None:
    distributed_launcher.use_warning_filters(config.getini("filterwarnings"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts the server that ranks are forked from, which imports torch beside the first tests."""
    on_ranks = any("world_size" in getattr(item, "fixturenames", ()) for item in session.items)
    if on_ranks and not session.config.option.collectonly:
        distributed_launcher.fork_server()


def pytest_unconfigure(config: pytest.Config) -> None:
    distributed_launcher.shut_down_pools()
