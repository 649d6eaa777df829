"""The suite needs torch_npu: it is collected where that is, in the process of the outer test."""

from __future__ import annotations

import importlib.util

collect_ignore = [] if importlib.util.find_spec("torch_npu") else ["suite"]
