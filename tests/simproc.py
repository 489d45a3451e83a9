"""Runs a piece of a test in a process of its own, since a process has one device list.

To import torch, exkv and the test file takes longer than most such pieces. So one process a test
file does that once and waits, and each piece runs in a fork of it.
"""

from __future__ import annotations

import atexit
import importlib.util
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

_BUILT = importlib.util.find_spec("exkv_ext._sim") is not None
_TESTS = Path(__file__).resolve().parent

# Reads jobs, a line of JSON each: environment, function or text to run, arguments, and the folder
# that takes the result and what is printed. Answers with the exit status, a line each.
_PROGRAM = """
import gc, importlib.util, json, os, sys, traceback
import torch
import exkv
from exkv import sim

names = {"torch": torch, "sim": sim}
if sys.argv[1]:
    spec = importlib.util.spec_from_file_location("run_sim_module", sys.argv[1])
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_sim_module"] = module
    spec.loader.exec_module(module)

def run(job):
    os.environ.update(job["env"])
    sim.enable_from_env()
    if sys.argv[1]:
        return getattr(module, job["code"])(*job["args"])
    exec(compile(job["code"], "<run_sim>", "exec"), names)
    return names.get("result")

def child(job):
    status = 1
    try:
        printed = os.open(job["folder"] + "/printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        result = run(job)
        with open(job["folder"] + "/result", "w") as file:
            json.dump(result, file)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

gc.collect()
gc.freeze()
answers = os.dup(1)
os.dup2(2, 1)  # what a test file prints is no answer
for line in sys.stdin:
    if (pid := os.fork()) == 0:
        child(json.loads(line))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(answers, f"{status}\\n".encode())
"""

#: For what a program of its own does on simulated devices; :func:`run_sim` sees to itself. Found,
#: not imported: importing it would take torch.accelerator away from a real GPU's tests.
needs_sim = pytest.mark.skipif(
    not _BUILT, reason="exkv_ext._sim isn't built (EXKV_BUILD=cpu builds it)"
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

    Without the compiled simulator (``EXKV_BUILD=none``) the test that asks for devices is skipped.

    Raises:
        RuntimeError: the process failed; the text ends with what it printed.
    """
    if devices and not _BUILT:
        pytest.skip("the simulated accelerator is compiled, and this build has no native modules")
    file = ""
    if not isinstance(code, str):
        file, code = inspect.getfile(code), code.__name__
    environment = {"EXKV_SIM_DEVICES": devices, **(env or {})}
    with tempfile.TemporaryDirectory() as folder:
        job = {"env": environment, "code": code, "args": list(args), "folder": folder}
        process = _start(file, environment) if fresh else _waiting(file)
        try:
            status = _answer(process, job, timeout)
        finally:
            if fresh:
                _end(process)
        if status != 0:
            printed = (Path(folder) / "printed").read_text()
            raise RuntimeError(f"the simulated process ended with {status}:\n{printed}")
        return json.loads((Path(folder) / "result").read_text())


_processes: dict[str, subprocess.Popen] = {}


def _waiting(file: str) -> subprocess.Popen:
    """The process that has imported ``file``; of other files' none is kept."""
    if file not in _processes:
        _end_all()
        _processes[file] = _start(file, {})
    return _processes[file]


def _start(file: str, further: Mapping[str, str]) -> subprocess.Popen:
    search = [str(_TESTS.parent), str(_TESTS), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, search)),
        **further,
        "OMP_NUM_THREADS": "1",  # a process with threads can't be forked
        "EXKV_SIM_DEVICES": "",  # a process has one device list: each fork its own
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", _PROGRAM, file]
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def _answer(process: subprocess.Popen, job: dict[str, Any], timeout: float) -> int:
    """The exit status of one job."""
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.flush()
    ready, _, _ = select.select([process.stdout], [], [], timeout)
    line = process.stdout.readline() if ready else ""
    if not line:
        _processes.clear()
        os.killpg(process.pid, signal.SIGKILL)
        raise RuntimeError(f"no answer within {timeout} s" if not ready else "it did not start")
    return int(line)


def _end(process: subprocess.Popen) -> None:
    process.stdin.close()
    process.wait()


@atexit.register
def _end_all() -> None:
    while _processes:
        _end(_processes.popitem()[1])
