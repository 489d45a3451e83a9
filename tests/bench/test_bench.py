"""Every bench runs in its smallest setting, writes what it prints, and its JSON has the fields that
readers rely on. No speed is asserted: that is for people to read, beside the machine."""

from __future__ import annotations

import importlib
import json
import signal
import sys
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from cluster_hosts import cluster_of
from simproc import run_sim
from transformers import LlamaConfig

from bench import cluster_kills, engine, harness, hf_caches, kernels, load
from bench.harness import ROOT, Sample, disturbed, in_turns, markdown, rotated, show, spread
from bench.shapes import SHAPES, write_checkpoint
from exkv import Cache, Model

SPREAD = {"median", "min", "max", "n"}
MAIN = importlib.import_module("bench.__main__")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A bench's name -> its exit status, JSON and tables in the smallest setting."""

    @cache
    def run(name: str):
        folder = tmp_path_factory.mktemp("bench")
        files = folder / "figures.json", folder / "figures.md"
        words = [name, "--quick", "--json", str(files[0]), "--markdown", str(files[1])]
        status = MAIN.main([*words, str(ROOT)] if name == "bound" else words)
        return status, json.loads(files[0].read_text()), files[1].read_text()

    return run


NAMES = ("decode", "load", "kernels", "bound", "engine", "hf", "hosts", "limits")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_bench_writes_its_figures_and_prints_its_tables(name, quick):
    status, result, text = quick(name)
    assert status == 0
    assert {"date", "cpu", "cores", "torch", "transformers"} <= result["machine"].keys()
    assert text.startswith(result["machine"]["cpu"]) and text.count("\n|") >= 2
    bench = importlib.import_module(f"bench.{MAIN.BENCHES[name]}")
    assert harness.text_of(bench, result) == text


# The harness ----------------------------------------------------------------------------------


def bench_of(measure) -> SimpleNamespace:
    return SimpleNamespace(
        **{"__name__": "one", "__doc__": "One.", "Settings": kernels.Settings, "measure": measure},
        **{"report": lambda result: [str(result["found"])], "QUICK": {"rounds": 2}},
        wrong=lambda result: ["not five"] * (result["found"] != 5),
    )


def test_settings_are_options_and_what_is_wrong_is_the_exit_status(capsys):
    bench = bench_of(lambda settings: {"found": settings.rounds})
    assert harness.run(bench, ["--rounds", "5"]) == 0
    assert capsys.readouterr().out.endswith("\n\n5\n\n")
    assert harness.run(bench, ["--quick", "--rows", "3", "4"]) == 1
    assert "not five" in capsys.readouterr().err


def test_a_run_that_is_cut_off_leaves_what_it_had(tmp_path):
    def measure(settings):
        yield {"found": 1}
        yield {"found": 2}
        raise KeyboardInterrupt

    files = tmp_path / "figures.json", tmp_path / "figures.md"
    with pytest.raises(KeyboardInterrupt):
        harness.run(bench_of(measure), ["--json", str(files[0]), "--markdown", str(files[1])])
    assert json.loads(files[0].read_text())["found"] == 2
    assert files[1].read_text().endswith("\n\n2\n")


def test_rounds_with_a_slow_probe_are_disturbed():
    probes = [(10.0, 9.9), (10.0, 7.9), (8.1, 8.0)]
    samples = [Sample("a", index, 0, *pair) for index, pair in enumerate(probes)]
    assert disturbed(samples) == {1}


def test_every_competitor_comes_first_in_turn_and_has_a_probe_on_either_side():
    assert [rotated("abc", by)[0] for by in range(4)] == ["a", "b", "c", "a"]
    probes = iter(range(20))
    ways = {name: lambda index, name=name: f"{name}{index}" for name in "ab"}
    found = list(in_turns(ways, 2, lambda: next(probes), warm=1))
    assert [each.value for each in found] == ["a0", "b0", "b1", "a1"]
    assert [(each.before, each.after) for each in found] == [(3, 4), (4, 5), (6, 7), (7, 8)]


def test_a_spread_is_of_all_rounds():
    assert show(spread([3.0, 1.0, 2.0]), 1) == "2.0 (1.0..3.0)"


def test_table_cells_line_up():
    lines = markdown(("a", "b"), [("long", 1), ("x", "1000")]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1] == "| ---- | ---: |"


def test_a_bench_whose_packages_are_missing_stops_no_other(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "bench.hf_caches", None)  # importing it is an ImportError
    with pytest.raises(SystemExit, match="0"):
        MAIN.main(["placement", "--help"])
    assert "bench.placement" in capsys.readouterr().out
    with pytest.raises(ImportError):
        MAIN.main(["hf"])


# Kernels --------------------------------------------------------------------------------------


def test_the_kernels_bench_sets_each_way_beside_what_it_replaces(quick):
    _, result, text = quick("kernels")
    ways: dict[str, dict[str, list[str]]] = {}
    for row in result["rows"]:
        ways.setdefault(row["kernel"], {}).setdefault(row["case"], []).append(row["way"])
        assert row["seconds"]["min"] > 0 and row["faster"]["n"] == 2
        assert (row["read"]["min"] > 0) == (
            row["kernel"] in ("decode", "prefill", "linear", "heads")
        )
    ours = ["exkv", "exkv int8", "exkv in pages"]
    assert ways["decode"] == {"4x2x32": ["SDPA enable_gqa", "SDPA on groups", *ours]}
    assert ways["prefill"] == {"4x2x32": ["SDPA enable_gqa", *ours]}
    assert set(ways["store"]) == {f"4x2x32 {kind}" for kind in ("float", "int8", "int4")}
    sizes = [f"{size}, {rows} rows" for size in ("512 x 64", "192 x 64") for rows in (1, 5)]
    assert ways["linear"] == dict.fromkeys(sizes, ["torch", "bf16", "int4", "Q4_0"])
    assert len(ways["sample"]) == 2 * len(kernels.CHAINS)
    assert text.count("times as fast as ") == len(kernels.TABLES)


def test_projections_are_all_that_a_decode_step_reads():
    assert kernels.projections(SHAPES["150M"]) == [
        *((32000, 768), (2048, 768), (768, 2048), (768, 768), (256, 768))
    ]


def test_all_ways_draw_from_the_same_tokens():
    logits = torch.tensor([[0.0, 5.0, 4.0, -1.0]]).expand(2000, -1)
    tokens = kernels.warped(logits, (1.0, 2, 1.0, 0.0))()
    assert set(tokens.flatten().tolist()) == {1, 2}


# Two trees ------------------------------------------------------------------------------------


def test_both_trees_are_measured(quick):
    _, result, _ = quick("bound")
    (row,) = result["rows"]
    assert row["case"] == "Gemma2 fp16 after 32" and row["refused"] == {}
    for name in ("before", "after"):
        assert len(row[name]) == result["settings"]["rounds"]
        assert all(min(spent) > 0 for spent in row[name])
    assert result["before"] == result["after"]


def test_a_case_that_one_tree_does_not_know_is_left_empty():
    rows = [
        {"case": "both", "before": [[2.0, 3.0], [4.0, 9.0]], "after": [[1.0, 3.0], [4.0, 9.0]]},
        {"case": "new", "before": [], "after": [[1.0, 3.0]]},
    ]
    settings = {"rounds": 2, "steps": 2, "layers": 2}
    result = {"settings": settings, "before": "a", "after": "b", "rows": rows}
    bound = importlib.import_module("bench.bound")
    both, new = bound.report(result)[-1].splitlines()[-2:]
    assert both.split("|")[-2].split() == ["1.50", "(1.00..2.00)"]  # each round by its own
    assert new.split("|")[-2].strip() == new.split("|")[2].strip() == "-"


def test_what_is_no_checkout_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        MAIN.main(["bound", str(tmp_path)])
    assert "is no checkout of exkv" in capsys.readouterr().err


# Jobs -----------------------------------------------------------------------------------------


def test_the_engine_bench_measures_each_way(quick):
    _, result, text = quick("engine")
    values = result["values"]
    assert list(values) == ["together", "one by one", "n-grams"]
    for runs in values.values():
        assert len(runs) == 2
        assert all(0 < run["first"] < run["clock"] for run in runs)
    assert all(run["accepted"] <= run["proposed"] > 0 for run in values["n-grams"])
    assert all(run["proposed"] == 0 for run in values["together"])
    for run in values["together"]:
        native, call, whole = run["steps"]
        assert 0 < native < call < whole
    assert "| together" in text


def test_a_server_writes_what_the_engine_writes(tmp_path):
    pytest.importorskip("gguf", reason="of the test extra, which `make test` installs")
    file = tmp_path / "figures.json"
    words = ["--quick", "--allowed", "0", "--new", "6", "--ways", "together", "server"]
    assert harness.run(engine, [*words, "--json", str(file)]) == 0
    values = json.loads(file.read_text())["values"]
    assert [run["tokens"] for run in values["together"] + values["server"]] == [12] * 4
    assert all(0 < run["first"] < run["clock"] and run["asking"] > 0 for run in values["server"])


def test_prompts_have_in_common_what_is_said():
    settings = engine.Settings(shape="tiny", prompt=40, shared=30)
    first, second, *_ = engine.random_prompts(settings, 1)
    assert len(first) == len(second) == 40 and first[:30] == second[:30] and first != second


# Opening, and transformers' caches ------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int8", "EXL2", "Q4_0"])
def test_a_checkpoint_of_a_kind_is_opened_with_packed_weights(tmp_path, kind):
    if kind in load.BLOCKS:
        pytest.importorskip("gguf", reason="of the test extra, which `make test` installs")
    model = Model(load.write(tmp_path / kind, kind, SHAPES["tiny"]))
    model.load_autosplit(Cache(model, max_seq_len=8), devices=["cpu"])
    formats = [
        layer.format.name for layer in model.units[1].module.modules() if hasattr(layer, "format")
    ]
    assert len(formats) == 7 and not {"bf16", "fp32"} & set(formats)


def test_opening_has_a_row_for_each_kind_and_transformers(quick):
    _, result, text = quick("load")
    assert list(result["bytes"]) == ["exkv bf16", "exkv int4", "transformers bf16"]
    for name in result["bytes"]:
        assert all(min(result["values"][name][figure]) > 0 for figure in load.FIGURES)
        assert text.count(f"| {name} ") == 1


def test_exkvs_caches_take_less_under_transformers(quick):
    _, result, _ = quick("hf")
    cases, reasons = {case["cache"]: case for case in result["cases"]}, result["left_out"]
    assert list(cases) == hf_caches.served(LlamaConfig())[0]
    assert len(cases) + len(reasons) == len(hf_caches.CACHES)
    assert all("pip install" in reason for reason in reasons)
    assert cases["exkv 8bit"]["peak"] < cases["stock fp8"]["peak"]
    assert cases["exkv dynamic"]["peak"] < cases["stock dynamic"]["peak"]


# Hosts that are killed ------------------------------------------------------------------------


def killed(folder: str) -> list[dict[str, object]]:
    write_checkpoint(cluster_kills.Path(folder), cluster_kills.SHAPE, torch.float32)
    want = cluster_kills.expected(folder)
    cluster = cluster_of("24M", "24M", "24M", timeout=5.0, spares=1)
    plan = [("kill -9", signal.SIGKILL, "host2")]
    with cluster_kills.loaded(folder, cluster) as model:
        (found,) = cluster_kills.signalled(model, want, plan)
    return [found.wrong, found.hung, found.off < 1e-4, found.back is not None, found.paused > 0]


def test_a_killed_host_changes_no_token_and_is_taken_in_again(tmp_path):
    assert run_sim(killed, "", args=[str(tmp_path)]) == [0, False, True, True, True]


def test_a_table_has_a_line_for_each_kind_of_event():
    common = {"what": "kill -9", "off": 1e-6, "hung": False}
    found = [
        {**common, "host": "host1", "wrong": 0, "paused": 0.5, "back": 1.0},
        {**common, "host": "host2", "wrong": 2, "paused": 1.5, "back": 3.0},
        {"what": "driver killed", "host": "driver", "wrong": 0, "off": 0.0, "hung": True}
        | {"paused": 9.0, "back": None},
    ]
    (table,) = cluster_kills.report({"outcomes": found})
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    kills = ["kill -9", "2", "2", "1e-06", "0", "1.0 (0.5..1.5)", "2.0 (1.0..3.0)"]
    assert lines[2:] == [kills, ["driver killed", "1", "0", "0e+00", "1", "9.0 (9.0..9.0)", ""]]
    assert len(cluster_kills.wrong({"outcomes": found})) == 2
