"""The server of the ranks imports torch while this process does, for the tests without ranks."""

from __future__ import annotations

from tests.common.distributed_launcher import fork_server

fork_server()
