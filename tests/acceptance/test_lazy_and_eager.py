"""The script of the lazy/eager trouble over one, two and three simulated devices: all rows pass."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
from simproc import run_sim
from tiny import llama, qwen3, reference, save, save_tokenizer

SCRIPT = Path(__file__).with_name("lazy_and_eager.py")
#: Layers of a hundred kilobytes, whose cache is from 64 KiB to 1 MiB.
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
}
#: A layer's weights and a call's workspace, and its cache for each token, in bytes.
LAYER, TOKEN = 1_300_000, 128
#: GB of a split by which each device but the last holds one layer.
SHARE = 0.0012
#: Devices and length, each number once. EXKV_ALL_ROWS=1 runs them with each other.
GRID = [(1, 1024), (2, 2048), (3, 8192)]
if os.environ.get("EXKV_ALL_ROWS"):
    GRID = [(count, length) for count in (1, 2, 3) for length in (1024, 2048, 4096, 8192)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, config in (("llama", llama(**SMALL)), ("qwen3", qwen3(**SMALL))):
        save(reference(config, torch.bfloat16), folder / name)
        save_tokenizer(folder / name)
    return folder


def rows(models: str, length: int, split: list[float]) -> list[str]:
    from exkv.compat.exllamav2 import serve

    serve()
    spec = importlib.util.spec_from_file_location("lazy_and_eager", SCRIPT)
    script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    folders = sorted(Path(models).iterdir())
    return list(script.complaints(folders, [length], [split, None]))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("count", "length"), GRID)
def test_lazy_and_eager_are_the_same_and_leave_nothing_behind(models, count, length):
    one = LAYER + length * TOKEN
    devices = ",".join([str(one)] * (count - 1) + ["64M"])
    split = [SHARE] * (count - 1) + [0.05]
    lines = run_sim(rows, devices, args=[str(models), length, split], timeout=900)
    assert [line for line in lines if not line.startswith("ok: ")] == []
    assert len(lines) == 2 * 2 * 2  # models, caches, by the split and by itself
    everywhere = str([f"sim:{index}" for index in range(count)])
    assert all(line.endswith(everywhere) for line in lines if "split [" in line)
    assert any(line.endswith(everywhere) for line in lines if "split None" in line)
