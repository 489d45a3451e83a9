"""One try of ``load.py``, a process of its own: ``python -m tests.bench.opening exkv FOLDER cpu``
loads a model, runs one token, and prints a line of JSON. It imports nothing before it is timed."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path


def one_try(engine: str, folder: str, device: str) -> dict[str, float]:
    """Open a model, and once more.

    Returns:
        ``import`` seconds until the engine is imported, ``load`` until it says that it has loaded,
        of which the processor worked ``load_processor`` in all threads, ``first`` until the first
        logits are there, and ``second`` for both when it is opened again. ``peak``, the bytes that
        the process grew by at its highest (pages of the mapped file included), and ``private``, the
        bytes of it at the end that are no file's and so can't be dropped; ``device_peak``, the most
        that was allocated on the accelerator.
    """
    started = time.perf_counter()
    load = {"exkv": _exkv, "transformers": _transformers}[engine]()
    imported = time.perf_counter()
    before, private, spent = _status("VmHWM"), _status("RssAnon"), time.process_time()
    forward = load(folder, device)
    loaded, spent = time.perf_counter(), time.process_time() - spent
    forward()
    figures = {
        "import": imported - started,
        "load": loaded - imported,
        "load_processor": spent,
        "first": time.perf_counter() - loaded,
        # Not getrusage's ru_maxrss: that starts at what the parent had when it forked.
        "peak": _status("VmHWM") - before,
        "private": _status("RssAnon") - private,
        "device_peak": _device_peak(device),
    }
    del forward
    started = time.perf_counter()
    load(folder, device)()
    return figures | {"second": time.perf_counter() - started}


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


def _device_peak(device: str) -> int:
    import torch

    return 0 if device == "cpu" else torch.accelerator.max_memory_allocated(device)


def _status(field: str) -> int:
    """This process's bytes, from /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    print(json.dumps(one_try(*sys.argv[1:4])))
