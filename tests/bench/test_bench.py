"""The bench runs, and its JSON has the fields that readers and scripts rely on. No speed is
asserted: that is for people to read, beside the machine's description."""

from __future__ import annotations

import importlib
import json
import sys

import pytest
from bench import attention, llama
from bench.common import Spread, disturbed, markdown, rotated
from bench.load import FIGURES

SPREAD = {"median", "min", "max", "n"}


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The quick bench's exit status, JSON and tables."""
    folder = tmp_path_factory.mktemp("bench")
    files = folder / "bench.json", folder / "bench.md"
    status = llama.main(["--quick", "--json", str(files[0]), "--markdown", str(files[1])])
    return status, json.loads(files[0].read_text()), files[1].read_text()


def test_fp32_tokens_are_the_peers_and_the_bench_says_so(quick):
    status, result, _ = quick
    assert status == 0
    rows = result["models"][0]["generate"]
    plain = [row for row in rows if row["engine"] in ("exkv Cache", "transformers")]
    assert len(plain) == 2 * len(result["settings"]["contexts"])
    assert all(row["same_tokens"] == row["tokens"] for row in plain)


def test_the_json_has_its_promised_fields(quick):
    _, result, _ = quick
    assert {"date", "cpu", "cores", "torch", "transformers"} <= result["machine"].keys()
    (model,) = result["models"]
    assert {row["engine"] for row in model["generate"]} == {
        "exkv Cache",
        "exkv Cache8bit",
        "transformers",
    }
    for row in model["generate"]:
        for figure in ("decode", "prefill"):
            assert row[f"{figure}_ratio"].keys() == SPREAD
            assert row[f"{figure}_tokens_per_second"]["min"] > 0
    for row in model["load"]:
        assert all(row[figure].keys() == SPREAD for figure in ("time_ratio", *FIGURES))
        assert row["load_seconds"]["min"] > 0
    assert len(model["probes_gb_per_second"]) == result["settings"]["rounds"]


def test_the_tables_name_every_competitor_and_the_machine(quick):
    _, result, text = quick
    assert text.startswith(result["machine"]["cpu"])
    for name in ("exkv Cache", "exkv Cache8bit", "transformers"):
        assert text.count(f" {name} |") >= len(result["settings"]["contexts"])


def test_tokens_that_differ_in_fp32_are_an_error_and_those_of_a_lossy_cache_are_not():
    row = {"context": 16, "same_tokens": 3, "tokens": 5}
    rows = [{**row, "engine": name} for name in ("exkv Cache", "exkv Cache8bit")]
    model = {"shape": "tiny", "dtype": "fp32", "generate": rows}
    assert len(llama.disagreements([model])) == 1
    assert llama.disagreements([{**model, "dtype": "bf16"}]) == []


def test_rounds_with_a_slow_probe_are_disturbed():
    assert disturbed([(10.0, 9.9), (10.0, 7.9), (8.1, 8.0)]) == [1]


def test_every_competitor_comes_first_in_turn():
    assert [rotated("abc", by)[0] for by in range(4)] == ["a", "b", "c", "a"]


def test_a_spread_is_of_all_rounds():
    assert Spread.of([3.0, 1.0, 2.0]).text(1) == "2.0 (1.0..3.0)"


def test_table_cells_line_up():
    lines = markdown(("a", "b"), [("long", "1"), ("x", "1000")]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1] == "| ---- | ---: |"


def test_the_attention_bench_compares_with_torch_and_names_the_machine(tmp_path):
    files = tmp_path / "bench.json", tmp_path / "bench.md"
    command = ["--quick", "--json", str(files[0]), "--markdown", str(files[1])]
    assert attention.main(command) == 0
    result, text = json.loads(files[0].read_text()), files[1].read_text()
    decode = {row["engine"]: row for row in result["decode"]}
    ours = {"exkv bf16", "exkv int8", "exkv bf16 in pages"}
    assert decode.keys() == ours | {"SDPA enable_gqa", "SDPA on groups"}
    assert decode["exkv bf16"]["by_bf16"]["median"] == 1
    for row in (*result["decode"], *result["prefill"]):
        assert row["bandwidth_share"]["min"] > 0
        assert row["by_int8"].keys() == SPREAD
    assert text.startswith(result["machine"]["cpu"])
    assert text.count("SDPA enable_gqa") == 2
    stored = {row["engine"]: row for row in result["store"]}
    assert {name.split()[0] for name in stored} == {"float", "int8", "int4"}
    for row in stored.values():
        assert row["seconds"]["min"] > 0
        assert row["by_append"].keys() == SPREAD
    assert stored["int8 by append_kv"]["by_append"]["median"] == 1
    assert text.count("by its parts") == 3


def test_disturbed_rounds_count_only_where_too_few_are_calm():
    calm, slow = (10.0, 10.0), (5.0, 10.0)
    assert attention.kept({"probes": [calm] * 5 + [slow]}) == [0, 1, 2, 3, 4]
    assert attention.kept({"probes": [calm] * 4 + [slow]}) == [0, 1, 2, 3, 4]


def test_a_bench_whose_packages_are_missing_stops_no_other(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "bench.hf_caches", None)  # importing it is an ImportError
    bench = importlib.import_module("bench.__main__")
    with pytest.raises(SystemExit, match="0"):
        bench.main(["placement", "--help"])
    assert "bench placement" in capsys.readouterr().out
    with pytest.raises(ImportError):
        bench.main(["hf"])
