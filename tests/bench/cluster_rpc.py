"""llama.cpp's RPC, for ``cluster.py``: endpoints on loopback with a core each.

Two programs of llama.cpp's (https://github.com/ggml-org/llama.cpp) do the work, which are built so,
in its sources:

    cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_RPC=ON -DLLAMA_CURL=OFF
    cmake --build build -j --target ggml-rpc-server llama-batched-bench

``--llama-cpp build/bin`` says where they are; older versions call the first ``rpc-server``. The
weights are written for them as GGUF, for which there must be the package ``gguf``.
``llama-batched-bench`` shares the first endpoint's core, as the driver of a cluster is its first
stage.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The first of its names that is there.
SERVERS, CLIENT = ("ggml-rpc-server", "rpc-server"), "llama-batched-bench"
#: What is measured, as ``cluster.py`` calls it: a long prompt, jobs with their prompts, jobs while
#: all of them decode, and a decode step of one sequence.
ROWS = ("prompt, tokens/s", "jobs, tokens/s", "jobs that all decode, tokens/s", "decode step, ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes in tokens. ``short`` is the context of a decode step."""

    prefill: int
    chunk: int
    jobs: int
    prompt: int
    new: int
    short: int


def program(folder: Path, *names: str) -> str:
    """The first of these programs that exists.

    Raises:
        FileNotFoundError: none is.
    """
    for name in names:
        if (folder / name).is_file():
            return str(folder / name)
    raise FileNotFoundError(f"{folder} has no {names[0]}: how to build it is in cluster_rpc.py")


def _endpoint(server: str, core: int, stack: ExitStack) -> str:
    """Start an endpoint with one core and one thread -> its address; it ends with the stack."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [server, "-H", "127.0.0.1", "-p", str(port), "-t", "1", "-d", "CPU"]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen(["taskset", "-c", str(core), *words], **silent)
    stack.callback(child.wait)
    stack.callback(child.terminate)
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return f"127.0.0.1:{port}"
        except OSError:
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{server} does not listen at port {port}") from None
        time.sleep(0.05)


def measure(
    folder: Path, file: Path, cores: Sequence[int], sizes: Sizes, *, long: bool
) -> dict[str, float]:
    """One round over as many endpoints as cores: ``ROWS``, the first of them where ``long`` says
    so."""
    prompt, jobs, decoding, step = ROWS
    lengths = (sizes.short, sizes.prefill) if long else (sizes.short,)
    with ExitStack() as stack:
        server, client = program(folder, *SERVERS), program(folder, CLIENT)
        addresses = ",".join(_endpoint(server, core, stack) for core in cores)
        words = ["taskset", "-c", str(cores[0]), client, "-m", str(file), "--rpc", addresses]
        alone = _run(words, sizes, lengths, 1)
        (batch,) = _run(words, sizes, (sizes.prompt,), sizes.jobs)
    found = {jobs: batch["speed"], decoding: batch["speed_tg"]}
    found[step] = 1000 * alone[0]["t_tg"] / alone[0]["tg"]
    return {prompt: alone[1]["speed_pp"], **found} if long else found


def _run(
    words: Sequence[str], sizes: Sizes, prompts: Sequence[int], rows: int
) -> list[dict[str, Any]]:
    """The program's figures for each prompt length, with ``rows`` sequences."""
    room = rows * (max(prompts) + sizes.new)
    options = [
        *("-ngl", "99", "-t", "1", "-fa", "on", "--output-format", "jsonl"),
        *("-c", str(room), "-b", str(sizes.prefill), "-ub", str(sizes.chunk)),
        *("-npp", ",".join(map(str, prompts)), "-ntg", str(sizes.new), "-npl", str(rows)),
    ]
    done = subprocess.run([*words, *options], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != len(prompts):
        raise RuntimeError(f"{CLIENT} failed with {done.returncode}: {done.stderr[-500:]}")
    return [json.loads(line) for line in lines]
