"""An environment in which the real torch_npu can be imported without CANN and without an NPU.

It has the wheel in a folder of its own, as its entry point would break ``import torch`` in the
environment that runs everything else, and stand-ins for the libraries of CANN: every function that
the wheel misses, returning 0. Built once, then kept in ``build/ascend``.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH_NPU_VERSION = "2.13.0"
# The stand-in that defines the functions; the others only need it.
MAIN_LIBRARY = "libascendcl.so"
# What is linked against, besides torch, the wheel itself and what it names.
SYSTEM_LIBRARIES = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1")


class EnvironmentBuildError(Exception):
    """A command that builds the environment failed; the message has its output."""


@dataclass(frozen=True)
class AscendEnvironment:
    """Where the parts are."""

    wheel: Path
    stand_ins: Path

    def variables(self) -> dict[str, str]:
        """Environment variables of a process that imports torch_npu."""
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.stand_ins),
            "PYTHONPATH": os.pathsep.join([str(self.wheel), str(ROOT)]),
            # torch_npu shall be imported by mc2, when it needs it, and by nobody before.
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "OMP_NUM_THREADS": "1",
            "PENDING_DTENSOR_PYTEST": "tests.ascend",
        }


def missing_tools() -> list[str]:
    """Programs that the build needs and this machine lacks."""
    return [tool for tool in ("gcc", "readelf", "nm") if shutil.which(tool) is None]


def build_environment(parent: Path = ROOT / "build" / "ascend") -> AscendEnvironment:
    """The environment, built if it is not there for this interpreter, torch and torch_npu.

    Raises:
        EnvironmentBuildError: with the output of the command that failed.
    """
    torch_folder = _torch_folder()
    sources = [Path(__file__), torch_folder / "version.py"]
    identity = [TORCH_NPU_VERSION, sys.version, *(path.read_text() for path in sources)]
    folder = parent / hashlib.sha256("".join(identity).encode()).hexdigest()[:16]
    parent.mkdir(parents=True, exist_ok=True)
    with open(parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            for outdated in set(parent.iterdir()) - {Path(lock.name)}:
                shutil.rmtree(outdated)
            # Renamed when it is complete, so that an interrupted build starts over.
            unfinished = Path(tempfile.mkdtemp(dir=parent, prefix="unfinished-"))
            try:
                _install_wheel(unfinished / "wheel")
                _build_stand_ins(unfinished / "wheel", torch_folder, unfinished / "stand_ins")
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return AscendEnvironment(folder / "wheel", folder / "stand_ins")


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")  # finds it without importing it
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _install_wheel(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--no-deps", "--target", str(folder), f"torch-npu=={TORCH_NPU_VERSION}"])


def _build_stand_ins(wheel: Path, torch_folder: Path, folder: Path) -> None:
    package = wheel / "torch_npu"
    users = [
        path
        for pattern in ("lib/*.so", "_C*.so", "dynamo/torchair/core/*.so")
        for path in sorted(package.glob(pattern))
    ]
    libraries, functions = _missing(users, torch_folder)
    folder.mkdir()
    source = folder / "stand_ins.c"
    source.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in functions))
    # Some names are built-in functions of the compiler, declared otherwise.
    options = ["-shared", "-fPIC", "-fno-builtin", "-w", "-Wl,-rpath,$ORIGIN"]
    _run(["gcc", *options, f"-Wl,-soname,{MAIN_LIBRARY}", str(source), "-o", MAIN_LIBRARY], folder)
    source.write_text("")
    for name in libraries - {MAIN_LIBRARY}:
        link = ["-Wl,--no-as-needed", "-L.", f"-l:{MAIN_LIBRARY}"]
        _run(["gcc", *options, f"-Wl,-soname,{name}", str(source), "-o", name, *link], folder)


def _missing(users: Iterable[Path], torch_folder: Path) -> tuple[set[str], list[str]]:
    """Libraries and functions that ``users`` need and nobody here has."""
    users = list(users)
    providers = [*users, *(torch_folder / "lib").glob("*.so*")]
    names = {path.name for path in providers}
    missing = set()
    for name in sorted({name for path in users for name in _needed(path)} - names):
        found = _system_library(name)
        if found is None:
            missing.add(name)
        else:
            providers.append(found)
    providers += [path for name in SYSTEM_LIBRARIES if (path := _system_library(name)) is not None]
    defined = {symbol for path in providers for symbol in _symbols(path, "--defined-only")}
    undefined = {symbol for path in users for symbol in _symbols(path, "--undefined-only")}
    python = ("Py", "_Py")  # the interpreter's own, wherever it keeps them
    return missing, sorted(s for s in undefined - defined if not s.startswith(python))


def _needed(library: Path) -> list[str]:
    lines = _run(["readelf", "-d", str(library)]).splitlines()
    return [line.split("[")[1].rstrip("]") for line in lines if "(NEEDED)" in line]


def _symbols(library: Path, which: str) -> list[str]:
    """Names without versions; weak undefined ones are left out, as they may stay so."""
    symbols = [line.split() for line in _run(["nm", "-D", which, str(library)]).splitlines()]
    return [name.split("@")[0] for *_, kind, name in symbols if kind not in ("w", "v")]


def _system_library(name: str) -> Path | None:
    path = Path(_run(["gcc", f"-print-file-name={name}"]).strip())
    if path.is_absolute():
        return path
    inside_python = Path(sysconfig.get_config_var("LIBDIR") or "") / name
    return inside_python if inside_python.exists() else None


def _run(command: Sequence[str], folder: Path | None = None) -> str:
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise EnvironmentBuildError(
            f"{' '.join(command)} ended with {run.returncode}:\n{run.stdout}{run.stderr}"
        )
    return run.stdout
