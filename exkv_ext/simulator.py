"""Builds and loads ``exkv_ext._sim``, the simulated accelerator, where it is first used.

It is compiled against ATen's own headers, which differ between releases of torch, so no wheel can
hold it for all of them. The result is kept in the user's cache folder, in a file named after
everything that it was made of. The sources are in ``sim/``: start at ``fallback.cpp``.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import IO

import torch
from rich.console import Console
from rich.progress import Progress

__all__ = ["build", "lacking", "load"]

_FOLDER = Path(__file__).resolve().parent / "sim"
_PARAMS = _FOLDER.with_name("params")
CXX_FLAGS = ["-O2", "-g0"]
#: As setup.py's: a compiler may link libstdc++ statically, and its copy must not mix with torch's.
LINK_FLAGS = ["-Wl,--exclude-libs,ALL"] if sys.platform.startswith("linux") else []
#: In a process of its own: loading registers the backend, and whoever builds may not want that.
_PROGRAM = """
import json, sys
from torch.utils.cpp_extension import load
load("_sim", **json.loads(sys.argv[1]))
"""


@cache
def load() -> ModuleType:
    """Import ``exkv_ext._sim``, which registers the backend; builds it first where it is missing.

    Raises:
        RuntimeError: it can't be built, or doesn't load; the message says why.
    """
    file = build()
    spec = importlib.util.spec_from_file_location("exkv_ext._sim", file)
    assert spec is not None and spec.loader is not None  # its suffix is an extension module's
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise RuntimeError(
            f"the simulated accelerator, {file}, does not load: {error}. "
            "Remove the file, and it is built again"
        ) from error
    sys.modules[spec.name] = module
    return module


def build() -> Path:
    """Compile the simulator unless that was done before; returns its file, and loads nothing.

    Processes that need it at the same time wait for the first of them.

    Raises:
        RuntimeError: something that it takes is missing, or the build failed.
    """
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exkv"
    key = _digest(_made_of())
    if missing := lacking():
        if built := sorted(kept.glob(f"sim-{key}-*.so")):  # while there was a compiler
            return built[0]
        raise RuntimeError(f"the simulated accelerator is compiled at its first use, {missing}")
    file = kept / f"sim-{key}-{_digest([_compiler_version()])}.so"
    try:
        if not file.exists():
            with _locked(file.with_suffix(".lock")) as lock:
                if not file.exists():
                    _compile(file, lock)
    except OSError as error:
        raise RuntimeError(
            "the simulated accelerator is compiled at its first use, and can't be kept: "
            f"{error}. XDG_CACHE_HOME may name another folder"
        ) from error
    return file


def lacking() -> str | None:
    """What this machine lacks to compile the simulator, as half a sentence; None if nothing."""
    if shutil.which(_compiler()[0]) is None:
        return (
            f"and there is no C++ compiler here ({_compiler()[0]}): install g++, or name one in CXX"
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return f"and Python's headers are not in {headers}: install python3-dev (python3-devel)"
    return None


def _compiler() -> list[str]:
    """The C++ compiler that torch.utils.cpp_extension takes, with what $CXX gives it."""
    return shlex.split(os.environ.get("CXX") or "c++")


def _compiler_version() -> str:
    command = [*_compiler(), "--version"]
    return subprocess.run(command, capture_output=True, text=True).stdout


def _made_of() -> Iterator[str | bytes]:
    """Everything but the compiler that the result depends on."""
    yield from (torch.__version__, str(torch.version.git_version))
    # How torch was built: a release has several builds. The last line is this processor's.
    yield re.sub("CPU capability usage.*", "", torch.__config__.show())
    yield from EXTENSION_SUFFIXES  # Python's version and the platform
    yield from (*CXX_FLAGS, *LINK_FLAGS)
    for file in _files():
        yield file.name
        yield file.read_bytes()


def _files() -> list[Path]:
    """The sources, and everything that they include."""
    files = [file for folder in (_FOLDER, _PARAMS) for file in sorted(folder.iterdir())]
    return [file for file in files if file.suffix in (".cpp", ".h")]


def _digest(parts: Iterator[str | bytes] | list[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[IO[str]]:
    """Hold a lock that ends with the processes that hold it, however they end."""
    import fcntl  # not on every platform that can plan

    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def _compile(file: Path, lock: IO[str]) -> None:
    """Build in a folder beside the file, and show on stderr how far that is."""
    draft = file.with_suffix(".draft")
    shutil.rmtree(draft, ignore_errors=True)  # of a build that was killed
    draft.mkdir()
    sources = sorted(map(str, _FOLDER.glob("*.cpp")))
    arguments = {
        "sources": sources,
        "build_directory": str(draft),
        "extra_cflags": CXX_FLAGS,
        "extra_ldflags": LINK_FLAGS,
    }
    command = [sys.executable, "-c", _PROGRAM, json.dumps(arguments)]
    # Ninja came with exkv, beside this Python, whose folder need not be on PATH.
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    with (draft / "log").open("w+") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": path, "CXX": shlex.join(_compiler())},
            pass_fds=[lock.fileno()],  # it goes on where this process is killed
        )
        _show(process, draft, len(sources))
        log.seek(0)
        if process.returncode != 0:
            raise RuntimeError(
                f"building the simulated accelerator failed: {_reason(log.read())}. "
                f"All of it: {log.name}"
            )
    (draft / "_sim.so").replace(file)
    shutil.rmtree(draft)


def _reason(log: str) -> str:
    """The first error of a compiler, else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["no reason given"]
    return next((line for line in lines if "error: " in line), lines[-1])


def _show(process: subprocess.Popen[bytes], draft: Path, total: int) -> None:
    """Wait for a build, with a bar of the objects that are made, or a line where none can move."""
    console = Console(stderr=True)
    title = f"Building the simulated accelerator for torch {torch.__version__} (once)"
    if not console.is_terminal:
        console.print(title, highlight=False, soft_wrap=True)
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(title, total=total + 1)  # and linking
        while process.poll() is None:
            bar.update(task, completed=len(list(draft.glob("*.o"))))
            time.sleep(0.1)
