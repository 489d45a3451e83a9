"""The bench of proposals runs, sees that tokens are the same, and says how many were right."""

from __future__ import annotations

import json

from bench import speculation


def test_the_quick_bench_measures_both_ways(tmp_path):
    files = tmp_path / "bench.json", tmp_path / "bench.md"
    outputs = ["--json", str(files[0]), "--markdown", str(files[1])]
    assert speculation.main(["--quick", *outputs]) == 0
    values = json.loads(files[0].read_text())["values"]
    assert list(values) == list(speculation.WAYS)
    assert all(run["accepted"] <= run["proposed"] > 0 for run in values["n-grams"])
    assert all(run["proposed"] == 0 < run["speed"] for run in values["without"])
    assert "| n-grams" in files[1].read_text()
