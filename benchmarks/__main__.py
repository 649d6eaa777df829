"""Runs every benchmark, one after the other, and repeats each one's last line: ``make bench``.

Takes about an hour on two cores. Nothing else should run meanwhile.
"""

from __future__ import annotations

import os
import subprocess
import sys

BENCHMARKS = ("host_overhead", "memory", "overlap", "timeline", "scaling")


def main() -> int:
    """Runs them; returns 1 if one could not be run."""
    conclusions = []
    failed = False
    for name in BENCHMARKS:
        module = f"benchmarks.{name}"
        print(f"$ python -m {module}", flush=True)
        done = subprocess.run(
            [sys.executable, "-m", module],
            check=False,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        print(done.stdout, flush=True)
        failed = failed or done.returncode != 0
        last = done.stdout.rstrip().rpartition("\n")[2] if done.returncode == 0 else "failed"
        conclusions.append(f"{name}: {last}")
    print("\n".join(conclusions))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
