"""Runs programs in processes of their own: for what a process does once (native modules are loaded
with one instruction set), and for what may end it.

To import torch and transformers takes longer than most of these programs. So one process does that
and waits, and each program runs in a fork of it, which imports exkv with environment variables of
its own. What torch reads when it is imported, it has read by then.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_SEARCHED = [str(ROOT / place) for place in ("tests/ops", "tests/models", "tests", ".")]

# Reads jobs, a line of JSON each: the environment, the program's text, and the folder for what it
# prints. Answers with the exit status, a line each.
_WAITING = """
import gc, json, os, sys, traceback
import chance, numpy, pytest, torch
import transformers.models.llama.modeling_llama

def status_of(program):
    try:
        exec(compile(program, "<apart>", "exec"), sys.modules["__main__"].__dict__)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

def child(job):
    status = 1
    try:
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            file = os.open(f"{job['folder']}/{name}", os.O_RDWR | os.O_CREAT)
            os.dup2(file, number)
        sys.stdin = open(0, closefd=False)  # the other had the jobs
        os.environ.clear()
        os.environ.update(job["env"])
        if "OMP_NUM_THREADS" in job["env"]:  # was read when torch was imported
            torch.set_num_threads(int(job["env"]["OMP_NUM_THREADS"]))
        status = status_of(job["program"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

gc.collect()
gc.freeze()
answers = os.dup(1)
for line in sys.stdin:
    if (pid := os.fork()) == 0:
        child(json.loads(line))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(answers, f"{status}\\n".encode())
"""


def run_script(
    *command: str | Path, typed: str = "", timeout: float = 300, **env: str
) -> subprocess.CompletedProcess[str]:
    """What ``python *command`` does in the repository's folder, if it is asked for a file and its
    arguments, or for ``-m``, a module and its arguments; what it reads from its input is
    ``typed``. A program on which signals or a terminal work needs a process of its own."""
    words = [str(word) for word in command]
    return run_apart(f"{_SCRIPT}run({words!r})", typed=typed, timeout=timeout, **env)


_SCRIPT = f"""
def run(words):
    import os, runpy, sys
    os.chdir({str(ROOT)!r})
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.abspath(words[0])))
    start = runpy.run_module if is_module else runpy.run_path
    start(sys.argv[0], run_name="__main__", **({{"alter_sys": True}} if is_module else {{}}))
"""


def run_apart(
    program: str, *, typed: str = "", timeout: float = 300, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run Python text, which finds exkv and the tests' modules, with these environment variables
    beside this process's own, and ``typed`` as its input.

    Raises:
        subprocess.TimeoutExpired: it took longer than so many seconds.
    """
    waiting = _waiting()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "stdin").write_text(typed)
        job = {"env": {**os.environ, **env}, "program": program, "folder": folder}
        waiting.stdin.write(json.dumps(job) + "\n")
        waiting.stdin.flush()
        if not select.select([waiting.stdout], [], [], timeout)[0]:
            os.killpg(waiting.pid, signal.SIGKILL)
            _waiting.cache_clear()
            raise subprocess.TimeoutExpired(program, timeout)
        status = int(waiting.stdout.readline())
        printed = ((Path(folder) / name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(program, status, *printed)


@cache
def _waiting() -> subprocess.Popen[str]:
    """The process that has imported torch."""
    search = [*_SEARCHED, os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-c", _WAITING],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(process.stdin.close)
    return process
