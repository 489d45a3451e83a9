"""The bench of the engine runs, and its JSON has the fields that readers rely on."""

from __future__ import annotations

import json

from bench import engine, step


def test_the_quick_bench_measures_both_ways(tmp_path):
    files = tmp_path / "bench.json", tmp_path / "bench.md"
    assert engine.main(["--quick", "--json", str(files[0]), "--markdown", str(files[1])]) == 0
    values = json.loads(files[0].read_text())["values"]
    assert list(values) == list(engine.WAYS)
    for runs in values.values():
        assert len(runs) == 2
        assert all(0 < run["first"] < run["clock"] for run in runs)
    assert "| together" in files[1].read_text()


def test_prompts_have_in_common_what_is_said():
    settings = engine.Settings(shape="tiny", prompt=40, shared=30)
    first, second, *_ = engine.prompts(settings, 1)
    assert len(first) == len(second) == 40 and first[:30] == second[:30] and first != second


def test_a_step_is_the_native_run_the_call_and_what_is_around_it(tmp_path):
    files = tmp_path / "step.json", tmp_path / "step.md"
    assert step.main(["--quick", "--json", str(files[0]), "--markdown", str(files[1])]) == 0
    values = json.loads(files[0].read_text())["values"]
    assert list(values) == ["1", "3"]
    for steps in values.values():
        assert all(0 < each["native"] < each["call"] < each["whole"] for each in steps)
    assert "| 3" in files[1].read_text()
