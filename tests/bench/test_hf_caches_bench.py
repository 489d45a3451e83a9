"""The bench of caches under transformers runs, and what it says of memory holds anywhere."""

from __future__ import annotations

import json

from bench import hf_caches
from transformers import LlamaConfig


def test_the_bench_measures_every_cache_and_exkvs_take_less(tmp_path):
    file = tmp_path / "bench.json"
    small = {"contexts": 500, "tokens": 1, "rounds": 1, "layers": 2, "hidden": 128}
    options = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    assert hf_caches.main([*options, "--json", str(file)]) == 0
    cases = {case["cache"]: case for case in json.loads(file.read_text())["cases"]}
    names, reasons = hf_caches.served(LlamaConfig())
    assert list(cases) == names and len(names) + len(reasons) == len(hf_caches.CACHES)
    assert all("pip install" in reason for reason in reasons)
    assert cases["exkv 8bit"]["peak"] < cases["stock fp8"]["peak"]
    assert cases["exkv dynamic"]["peak"] < cases["stock dynamic"]["peak"]
