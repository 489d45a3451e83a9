"""Loading, measured in a process of its own for each try: start-up, load, first token, memory.

``python -m tests.bench.load exkv FOLDER cpu`` is one try and prints one line of JSON; ``compare``
runs the competitors in turn. The files are in the page cache, so that no disk is measured.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

ENGINES = ("exkv", "transformers")
ROOT = Path(__file__).resolve().parents[2]
MODULE = "tests.bench.load"
#: Figures of one try, in seconds and bytes.
FIGURES = (
    "import_seconds",
    "load_seconds",
    "load_processor_seconds",
    "first_forward_seconds",
    "peak_rss",
    "private",
    "device_peak",
)


def compare(folder: Path, device: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Engine -> figure -> its values, a round each; see :func:`one_try`."""
    values = {engine: {name: [] for name in FIGURES} for engine in ENGINES}
    for round_index in range(rounds):
        order = ENGINES if round_index % 2 == 0 else ENGINES[::-1]
        for engine in order:
            command = [sys.executable, "-m", MODULE, engine, str(folder), device]
            run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if run.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{run.stderr}")
            for name, value in json.loads(run.stdout.splitlines()[-1]).items():
                values[engine][name].append(value)
    return values


def one_try(engine: str, folder: str, device: str) -> dict[str, float]:
    """Load and run one token.

    Returns:
        ``import_seconds`` until the engine is imported, ``load_seconds`` until it says that it
        has loaded, of which the processor worked ``load_processor_seconds`` in all threads,
        ``first_forward_seconds`` until the first logits are there; ``peak_rss``, the
        bytes that the process grew by at its highest (pages of the mapped file included), and
        ``private``, the bytes of it that are no file's and so can't be dropped, at the end;
        ``device_peak``, the most that was allocated on the accelerator.
    """
    started = time.perf_counter()
    load = {"exkv": _exkv, "transformers": _transformers}[engine]()
    imported = time.perf_counter()
    before, private_before = _peak_rss(), _private_bytes()
    spent = time.process_time()
    forward = load(folder, device)
    loaded, spent = time.perf_counter(), time.process_time() - spent
    forward()
    done = time.perf_counter()
    return {
        "import_seconds": imported - started,
        "load_seconds": loaded - imported,
        "load_processor_seconds": spent,
        "first_forward_seconds": done - loaded,
        "peak_rss": _peak_rss() - before,
        "private": _private_bytes() - private_before,
        "device_peak": _device_peak(device),
    }


def _exkv():
    import torch

    from exkv import Cache, Model

    def load(folder: str, device: str):
        model = Model(folder)
        cache = Cache(model, max_seq_len=64)
        model.load_autosplit(cache, devices=[device])
        return lambda: model.forward(torch.tensor([[1]]), cache).argmax(-1).tolist()

    return load


def _transformers():
    import torch
    from transformers import LlamaForCausalLM

    def load(folder: str, device: str):
        # With accelerate it loads straight to the device, without it by way of the host.
        straight = device != "cpu" and importlib.util.find_spec("accelerate") is not None
        options = {"device_map": device} if straight else {}
        model = LlamaForCausalLM.from_pretrained(folder, dtype="auto", **options).to(device)
        ids = torch.tensor([[1]], device=device)
        return torch.no_grad()(lambda: model(ids, use_cache=True).logits.argmax(-1).tolist())

    return load


def _peak_rss() -> int:
    # Not getrusage's ru_maxrss: that starts at what the parent had when it forked.
    return _status("VmHWM")


def _device_peak(device: str) -> int:
    import torch

    return 0 if device == "cpu" else torch.accelerator.max_memory_allocated(device)


def _private_bytes() -> int:
    return _status("RssAnon")


def _status(field: str) -> int:
    """Bytes, from what Linux tells of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field} line: this needs Linux")


if __name__ == "__main__":
    print(json.dumps(one_try(*sys.argv[1:4])))
