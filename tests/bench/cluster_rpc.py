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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
    """What is run; in tokens. ``short`` is what a decode step comes behind."""

    prefill: int
    chunk: int
    jobs: int
    prompt: int
    new: int
    short: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Where they are."""

    server: Path
    client: Path

    @classmethod
    def of(cls, folder: Path) -> Programs:
        """Those of a folder.

        Raises:
            FileNotFoundError: it lacks one.
        """
        found = []
        for names in (SERVERS, (CLIENT,)):
            there = [folder / name for name in names if (folder / name).is_file()]
            if not there:
                raise FileNotFoundError(
                    f"{folder} has no {names[0]}: how to build it is in cluster_rpc.py"
                )
            found.append(there[0])
        return cls(server=found[0], client=found[1])


@contextmanager
def endpoints(programs: Programs, cores: Sequence[int]) -> Iterator[list[str]]:
    """Addresses of as many endpoints, each with one core and one thread; they end behind this."""
    with ExitStack() as stack:
        yield [_endpoint(programs, core, stack) for core in cores]


def _endpoint(programs: Programs, core: int, stack: ExitStack) -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [str(programs.server), "-H", "127.0.0.1", "-p", str(port), "-t", "1", "-d", "CPU"]
    child = subprocess.Popen(
        ["taskset", "-c", str(core), *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    stack.callback(child.wait)
    stack.callback(child.terminate)
    _wait_for(child, port)
    return f"127.0.0.1:{port}"


def _wait_for(child: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{SERVERS[0]} does not listen at port {port}") from None
        time.sleep(0.05)


def measure(
    programs: Programs, file: Path, cores: Sequence[int], sizes: Sizes, *, long: bool
) -> dict[str, float]:
    """One round over as many endpoints as cores: ``ROWS``, the first of them where ``long`` says
    so."""
    prompt, jobs, decoding, step = ROWS
    lengths = (sizes.short, sizes.prefill) if long else (sizes.short,)
    with endpoints(programs, cores) as addresses:
        alone = _run(programs, file, cores[0], addresses, sizes, lengths, 1)
        (batch,) = _run(programs, file, cores[0], addresses, sizes, (sizes.prompt,), sizes.jobs)
    found = {jobs: batch["speed"], decoding: batch["speed_tg"]}
    found[step] = 1000 * alone[0]["t_tg"] / alone[0]["tg"]
    return {prompt: alone[1]["speed_pp"], **found} if long else found


def _run(
    programs: Programs,
    file: Path,
    core: int,
    addresses: Sequence[str],
    sizes: Sizes,
    prompts: Sequence[int],
    rows: int,
) -> list[dict[str, Any]]:
    """What the program says of each of these lengths of prompts, with so many sequences."""
    room = rows * (max(prompts) + sizes.new)
    words = [
        *("taskset", "-c", str(core), str(programs.client), "-m", str(file)),
        *("--rpc", ",".join(addresses), "-ngl", "99", "-t", "1", "-fa", "on"),
        *("-c", str(room), "-b", str(sizes.prefill), "-ub", str(sizes.chunk)),
        *("-npp", ",".join(map(str, prompts)), "-ntg", str(sizes.new), "-npl", str(rows)),
        *("--output-format", "jsonl"),
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != len(prompts):
        raise RuntimeError(f"{CLIENT} failed with {done.returncode}: {done.stderr[-500:]}")
    return [json.loads(line) for line in lines]
