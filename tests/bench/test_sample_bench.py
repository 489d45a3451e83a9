"""The bench of sampling runs, and its JSON has the fields that readers rely on."""

from __future__ import annotations

import json

import torch
from bench import sample


def test_the_quick_bench_measures_every_chain_and_number_of_rows(tmp_path):
    files = tmp_path / "bench.json", tmp_path / "bench.md"
    assert sample.main(["--quick", "--json", str(files[0]), "--markdown", str(files[1])]) == 0
    cases = json.loads(files[0].read_text())["cases"]
    assert [(case["rows"], case["chain"]) for case in cases] == [
        (rows, chain) for rows in (1, 2) for chain in sample.CHAINS
    ]
    for case in cases:
        assert case["ratio"]["reference"]["n"] == case["ratio"]["transformers"]["n"] == 2
        assert case["seconds"]["exkv"]["min"] > 0
    assert files[1].read_text().count(" fp32 ") == len(cases)


def test_all_ways_draw_from_the_same_tokens():
    logits = torch.tensor([[0.0, 5.0, 4.0, -1.0]]).expand(2000, -1)
    tokens = sample.warped(logits, (1.0, 2, 1.0, 0.0))()
    assert set(tokens.flatten().tolist()) == {1, 2}
