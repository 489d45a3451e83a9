"""The bench of linear runs, and its JSON has the fields that readers rely on."""

from __future__ import annotations

import json

from bench import linear, packed
from bench.common import SHAPES


def test_the_quick_bench_measures_every_projection_and_number_of_rows(tmp_path):
    files = tmp_path / "bench.json", tmp_path / "bench.md"
    assert linear.main(["--quick", "--json", str(files[0]), "--markdown", str(files[1])]) == 0
    cases = json.loads(files[0].read_text())["cases"]
    assert {(case["outputs"], case["inputs"]) for case in cases} == {
        *((512, 64), (192, 64), (128, 64), (64, 64), (64, 128), (64, 192))
    }
    assert {case["rows"] for case in cases} == {1, 4}
    for case in cases:
        assert case["ratio"]["n"] == 2
        assert case["share"]["exkv"]["min"] > 0 and case["share"]["torch"]["min"] > 0
    text = files[1].read_text()
    assert text.count("| tiny bf16 |") == len(cases)


def test_projections_are_all_that_a_decode_step_reads():
    shape = SHAPES["150M"]
    assert linear.projections(shape) == [
        *((32000, 768), (2048, 768), (768, 2048), (768, 768), (256, 768))
    ]


def test_packed_weights_are_measured_beside_bf16_ones(tmp_path):
    files = tmp_path / "bench.json", tmp_path / "bench.md"
    arguments = ["--quick", "--json", str(files[0]), "--markdown", str(files[1])]
    assert packed.main(arguments) == 0
    cases = json.loads(files[0].read_text())["cases"]
    assert len(cases) == 2 * 3 and {case["kind"] for case in cases} == {"bf16", "int4", "Q4_0"}
    assert all(case["gflops"]["min"] > 0 and case["share"]["min"] > 0 for case in cases)
    assert files[1].read_text().count("Q4_0 |") == 2
