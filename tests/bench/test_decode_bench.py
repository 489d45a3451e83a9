"""The bench of decoding runs, and computes what it says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from bench import decode, llamacpp
from bench.common import SHAPES


def test_it_runs_and_writes_what_it_prints(tmp_path, capsys):
    files = tmp_path / "figures.json", tmp_path / "figures.md"
    assert decode.main(["--quick", "--json", str(files[0]), "--markdown", str(files[1])]) == 0
    assert files[1].read_text() in capsys.readouterr().out
    (model,) = json.loads(files[0].read_text())["models"]
    asked = decode.QUICK.rounds * len(decode.QUICK.contexts)
    counts = {name: 0 for name in ("exkv fp16", "exkv 4bit", decode.TRANSFORMERS)}
    for sample in model["samples"]:
        counts[sample["engine"]] = counts.get(sample["engine"], 0) + 1
    assert set(counts.values()) == {asked}


SAMPLE = decode.Sample(engine="exkv fp16", context=100, round=0, speed=10.0, before=4e9, after=4e9)


def test_a_share_is_of_the_memory_around_the_sample():
    shape = SHAPES["tiny"]
    size = decode.bytes_read(shape, "exkv fp16", 100)
    assert size == 2 * shape.read_parameters + 100 * 2 * 2 * 1 * 64 * 2  # layers, heads, D
    samples = [
        SAMPLE,
        replace(SAMPLE, speed=20.0, before=8e9, after=8e9),  # twice the speed on twice the memory
        replace(SAMPLE, speed=1.0, after=3e9),  # the machine was another one afterwards
        replace(SAMPLE, engine="other", speed=5.0),
    ]
    ours, other = decode.rows_of(shape, samples)
    assert ours["share"]["n"] == 2
    assert ours["share"]["min"] == ours["share"]["max"] == pytest.approx(10 * size / 4e9)
    assert ours["times"]["other"] == pytest.approx(2) and other["engine"] == "other"
    half = decode.bytes_read(shape, "exkv 8bit", 100) - 2 * shape.read_parameters
    assert half / (size - 2 * shape.read_parameters) == pytest.approx(8.5 / 16)


def test_heads_are_turned_into_pairs_that_are_neighbours():
    """Row j and row j + D/2 of a head's matrix become rows 2j and 2j + 1; all others stay."""
    shape = SHAPES["tiny"]
    rows = torch.arange(2.0 * shape.head_dim).view(-1, 1).expand(-1, 3)
    found = llamacpp._turned("model.layers.0.self_attn.q_proj.weight", rows, shape)[:, 0]
    half = shape.head_dim // 2
    for head in range(2):
        mine = found[head * shape.head_dim :][: shape.head_dim] - head * shape.head_dim
        assert mine[0::2].tolist() == list(range(half))
        assert mine[1::2].tolist() == list(range(half, 2 * half))
    assert llamacpp._turned("model.layers.0.self_attn.v_proj.weight", rows, shape) is rows
