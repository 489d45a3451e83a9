"""The load on a server in short, and what its results say."""

from __future__ import annotations

import json
from collections import Counter

from bench import harness, serve_load
from bench.serving import Answered


def test_a_short_load_is_answered_rightly_though_memory_runs_out(tmp_path):
    files = tmp_path / "load.json", tmp_path / "load.md"
    words = ["--quick", "--json", str(files[0]), "--markdown", str(files[1])]
    assert harness.run(serve_load, words) == 0
    result = json.loads(files[0].read_text())
    assert result["counts"]["right"] > 5
    assert result["figures"]["exkv_out_of_memory_total"] > 0
    assert result["processes"].keys() == {"server"}
    assert "| right" in files[1].read_text()


def mistakes(stages: int = 1, **outcome: object) -> list[str]:
    fine = {"exkv_pages": 4.0, "exkv_pages_available": 4.0}
    out = serve_load.Outcome(**{"figures": fine, **outcome})
    return serve_load.mistakes_of(serve_load.Settings(stages=stages), out)


def test_what_is_wrong_or_lost_or_leaked_or_grows_is_no_success():
    assert mistakes(counts=Counter(right=3, dropped=2)) == []
    for name in ("wrong", "lost", "bad, not refused"):
        assert mistakes(counts=Counter({name: 1})) == [f"{name}: 1"]
    gone = {"exkv_pages": 4.0, "exkv_pages_available": 3.0}
    assert mistakes(figures=gone) == ["pages leaked: 1"]
    assert mistakes(processes={"server": [(10, 3), (10, 4)]}) == []
    assert len(mistakes(processes={"server": [(10, 3), (10, 30)]})) == 1
    assert len(mistakes(processes={"server": [(10, 3), (10 + (64 << 20), 3)]})) == 1
    assert len(mistakes(stages=3, processes={"server": [(10, 3), (10, 3)]})) == 1


def test_an_answer_is_counted_by_its_text():
    out = serve_load.Outcome()
    serve_load.judge(out, Answered(200, "a", 0.1, 0.2), "b")
    serve_load.judge(out, Answered(500, "a"), "a")
    assert out.counts == Counter(wrong=1, lost=1)


def test_a_third_of_the_requests_begin_alike():
    bodies = serve_load.requests_of(serve_load.Settings(requests=9))
    starts = Counter(body["prompt"][:200] for body in bodies)
    assert max(starts.values()) == 3
