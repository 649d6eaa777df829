"""What nearly every test needs: imported once, by the server that rank processes are forked from.

Nothing here may start a thread or run torch. What cannot be imported is left to the ranks, which
can show why.
"""

from __future__ import annotations

import contextlib
import importlib

for name in ("tests.common.rank_process", "tests.common.mc2_models"):
    with contextlib.suppress(Exception):
        importlib.import_module(name)
