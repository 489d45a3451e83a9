"""The benches of the server: the load in short, and what its results say."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from bench import serve, serve_load


def test_a_short_load_is_answered_rightly_though_memory_runs_out(tmp_path):
    files = tmp_path / "load.json", tmp_path / "load.md"
    words = ["--seconds", "2", "--clients", "12", "--requests", "8", "--prompt", "120", "--new"]
    words += ["16", "--oom-every", "10"]
    words += ["--json", str(files[0]), "--markdown", str(files[1])]
    assert serve_load.main(words) == 0
    values = json.loads(files[0].read_text())["values"]
    assert values["counts"]["right"] > 5
    assert values["figures"]["exkv_out_of_memory_total"] > 0
    assert "| right" in files[1].read_text()


def test_what_is_wrong_or_lost_or_leaked_is_no_success():
    fine = {"exkv_pages": 4.0, "exkv_pages_available": 4.0}
    assert serve_load.is_right(serve_load.Outcome(Counter(right=3, dropped=2), figures=fine))
    for name in ("wrong", "lost", "bad, not refused"):
        assert not serve_load.is_right(serve_load.Outcome(Counter({name: 1}), figures=fine))
    gone = fine | {"exkv_pages_available": 3.0}
    assert not serve_load.is_right(serve_load.Outcome(Counter(right=1), figures=gone))
    out = serve_load.Outcome()
    serve_load._judge(out, serve_load.Answered(200, "a", 0.1, 0.2), "b")
    serve_load._judge(out, serve_load.Answered(500, "a"), "a")
    assert out.counts == Counter(wrong=1, lost=1)


def test_a_third_of_the_requests_begin_alike():
    bodies = serve_load.requests_of(serve_load.Load(requests=9))
    starts = Counter(body["prompt"][:200] for body in bodies)
    assert max(starts.values()) == 3


def test_a_killed_run_leaves_the_rounds_that_it_had(tmp_path, monkeypatch):
    def killed(settings):
        run = serve.Run(clock=2.0, cpu=1.5, tokens=settings.tokens, first=0.5)
        yield {"engine": [run], "server": [run]}
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "measured", killed)
    files = tmp_path / "serve.json", tmp_path / "serve.md"
    with pytest.raises(KeyboardInterrupt):
        serve.main(["--json", str(files[0]), "--markdown", str(files[1])])
    values = json.loads(files[0].read_text())["values"]
    assert [[run["cpu"] for run in values[way]] for way in ("engine", "server")] == [[1.5], [1.5]]
    assert "| server" in files[1].read_text() and "512.0" in files[1].read_text()
