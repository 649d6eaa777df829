"""Runs pytest where the real torch_npu is: ``python -m tests.ascend tests/ascend/suite``."""

from __future__ import annotations

import os
import sys

from tests.ascend.environment import build_environment

command = [sys.executable, "-m", "pytest", *sys.argv[1:]]
os.execve(sys.executable, command, build_environment().variables())
