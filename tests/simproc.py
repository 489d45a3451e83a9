"""Runs a piece of a test in a process of its own, since a process has one device list.

To import torch, exkv and transformers takes longer than most such pieces. So one process does that
and waits; a fork of it imports the test file and waits, too; each piece runs in a fork of that.
"""

from __future__ import annotations

import atexit
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from exkv_ext import simulator

_LACKING = simulator.lacking()
_TESTS = Path(__file__).resolve().parent

# Reads lines of JSON. The path of a test file: a fork imports it and reads on, up to null. A job,
# which is environment, function or text to run, arguments, and the folder that takes the result and
# what is printed: a fork runs it, and its exit status is the answer, a line.
_PROGRAM = """
import gc, importlib.util, json, os, sys, traceback
import torch
import exkv
from exkv import sim
if sys.argv[1:]:
    import hypothesis, pytest, tiny

names = {"torch": torch, "sim": sim}

def module_of(file):
    spec = importlib.util.spec_from_file_location("run_sim_module", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_sim_module"] = module
    spec.loader.exec_module(module)
    return module

def run(module, job):
    os.environ.update(job["env"])
    sim.enable_from_env()
    if module is not None:
        return getattr(module, job["code"])(*job["args"])
    exec(compile(job["code"], "<run_sim>", "exec"), names)
    return names.get("result")

def child(module, job):
    printed = os.open(job["folder"] + "/printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    result = run(module, job)
    with open(job["folder"] + "/result", "w") as file:
        json.dump(result, file)

def forked(function, *args):
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        function(*args)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

def serve(file):
    module = module_of(file) if file else None
    gc.collect()
    gc.freeze()
    for line in lines:
        job = json.loads(line)
        if job is None:
            return
        if isinstance(job, dict):
            os.write(answers, f"{forked(child, module, job)}\\n".encode())
        elif forked(serve, job) != 0:
            sys.exit(1)

lines = open(0, "rb", buffering=0)  # a fork reads on where this process stopped
answers = os.dup(1)
os.dup2(2, 1)  # what a test file prints is no answer
serve("")
"""

if _LACKING is None:
    # Now, outside of every test's time. It isn't loaded: that would take torch.accelerator away
    # from a real GPU's tests.
    simulator.build()

#: For what a program of its own does on simulated devices; :func:`run_sim` sees to itself.
needs_sim = pytest.mark.skipif(
    _LACKING is not None, reason=f"the simulated accelerator is compiled, {_LACKING}"
)


def run_sim(
    code: str | Callable[..., Any],
    devices: str = "64M,48M",
    *,
    args: Sequence[Any] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
    fresh: bool = False,
) -> Any:
    """Run ``code`` in a process of its own with simulated devices and hand back its result.

    Args:
        code: a function at the top of a test file, called there with ``args`` (what JSON can
            carry), its return value is the result; or source text, in which ``torch`` and
            ``exkv.sim`` as ``sim`` are at hand, and ``result`` is the result.
        devices: capacities as EXKV_SIM_DEVICES spells them; "" for none.
        env: further environment variables; those that exkv reads while it is imported need
            ``fresh``.
        timeout: seconds until the process counts as hung.
        fresh: in a process that ran nothing before: for what measures its memory.

    Without a compiler for the simulator the test that asks for devices is skipped.

    Raises:
        RuntimeError: the process failed; the text ends with what it printed.
    """
    if devices and _LACKING:
        pytest.skip(f"the simulated accelerator is compiled, {_LACKING}")
    file = ""
    if not isinstance(code, str):
        file, code = inspect.getfile(code), code.__name__
    environment = {"EXKV_SIM_DEVICES": devices, **(env or {})}
    with tempfile.TemporaryDirectory() as folder:
        job = {"env": environment, "code": code, "args": list(args), "folder": folder}
        if fresh:
            with _Process(environment) as process:
                status = process.answer(file, job, timeout)
        else:
            status = _waiting().answer(file, job, timeout)
        if status != 0:
            printed = (Path(folder) / "printed").read_text()
            raise RuntimeError(f"the simulated process ended with {status}:\n{printed}")
        return json.loads((Path(folder) / "result").read_text())


class _Process:
    """A process that runs jobs in forks of its own.

    Args:
        environment: variables that exkv reads while it is imported.
        imports: "tiny" for what most test files import, too.
    """

    def __init__(self, environment: Mapping[str, str], *imports: str) -> None:
        search = [str(_TESTS.parent), str(_TESTS), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, search)),
            **environment,
            "OMP_NUM_THREADS": "1",  # a process with threads can't be forked
            "EXKV_SIM_DEVICES": "",  # a process has one device list: each fork its own
        }
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", _PROGRAM, *imports]
        self._process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        self._file = ""  # that is imported

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.stdin.close()
        self._process.wait()

    def answer(self, file: str, job: dict[str, Any], timeout: float) -> int:
        """The exit status of a job with the test file imported ("" for none)."""
        if file != self._file and self._file:
            self._tell(None)
        if file != self._file and file:
            self._tell(file)
        self._file = file
        self._tell(job)
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            _waiting.cache_clear()
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            raise RuntimeError(f"no answer within {timeout} s" if not ready else "it did not start")
        return int(line)

    def _tell(self, what: str | dict[str, Any] | None) -> None:
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()


@cache
def _waiting() -> _Process:
    """The process that has imported what most test files import."""
    process = _Process({}, "tiny")
    atexit.register(process.__exit__)
    return process
