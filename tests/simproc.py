"""Runs a piece of a test in a process of its own, since a process has one device list."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

_BUILT = importlib.util.find_spec("exkv_ext._sim") is not None
_TESTS = Path(__file__).resolve().parent
_MARK = "exkv-result:"
_PROGRAM = """
import importlib.util, json, sys
job = json.loads(sys.stdin.read())
import torch
from exkv import sim
sim.enable_from_env()
if job["file"] is None:
    names = {"torch": torch, "sim": sim}
    exec(compile(job["code"], "<run_sim>", "exec"), names)
    result = names.get("result")
else:
    spec = importlib.util.spec_from_file_location("run_sim_module", job["file"])
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_sim_module"] = module
    spec.loader.exec_module(module)
    result = getattr(module, job["code"])(*job["args"])
print(job["mark"] + json.dumps(result))
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
) -> Any:
    """Run ``code`` in a fresh process with simulated devices and hand back its result.

    Args:
        code: a function at the top of a test file, called there with ``args`` (what JSON can
            carry), its return value is the result; or source text, in which ``torch`` and
            ``exkv.sim`` as ``sim`` are at hand, and ``result`` is the result.
        devices: capacities as EXKV_SIM_DEVICES spells them; "" for none.
        env: further environment variables.
        timeout: seconds until the process counts as hung.

    Without the compiled simulator (``EXKV_BUILD=none``) the test that asks for devices is skipped.

    Raises:
        RuntimeError: the process failed; the text ends with its stderr.
    """
    if devices and not _BUILT:
        pytest.skip("the simulated accelerator is compiled, and this build has no native modules")
    file = None
    if not isinstance(code, str):
        file, code = inspect.getfile(code), code.__name__
    job = json.dumps({"file": file, "code": code, "args": list(args), "mark": _MARK})
    search = [str(_TESTS.parent), str(_TESTS), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, search)),
        "OMP_NUM_THREADS": "1",
        "EXKV_SIM_DEVICES": devices,
        **(env or {}),
    }
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=job,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the simulated process ended with {done.returncode}:\n{done.stderr}")
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith(_MARK))
    return json.loads(line[len(_MARK) :])
