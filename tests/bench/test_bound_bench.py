"""The bench of two trees runs, and says what each took."""

from __future__ import annotations

import json

import pytest
from bench import bound


def test_it_measures_both_trees_and_writes_what_it_prints(tmp_path, capsys):
    files = tmp_path / "figures.json", tmp_path / "figures.md"
    command = [str(bound.ROOT), "--quick", "--json", str(files[0]), "--markdown", str(files[1])]
    assert bound.main(command) == 0
    assert files[1].read_text() in capsys.readouterr().out
    result = json.loads(files[0].read_text())
    assert [row["case"] for row in result["rows"]] == [case.name for case in bound.QUICK.cases]
    for row in result["rows"]:
        assert row["refused"] == {}
        for name in ("before", "after"):
            assert len(row[name]) == bound.QUICK.rounds
            assert all(min(spent) > 0 for spent in row[name])
    assert result["before"] == result["after"]


def test_a_case_that_one_tree_does_not_know_is_left_empty():
    rows = [
        {"case": "both", "before": [[2.0, 3.0], [4.0, 9.0]], "after": [[1.0, 3.0], [4.0, 9.0]]},
        {"case": "new", "before": [], "after": [[1.0, 3.0]]},
    ]
    about = bound.machine(bound.torch.device("cpu"))
    settings = {"rounds": 2, "steps": 2, "layers": 2}
    result = {"machine": about, "settings": settings, "before": "a", "after": "b", "rows": rows}
    both, new = bound.report(result).splitlines()[-2:]
    assert both.split("|")[-2].split() == ["1.50", "(1.00..2.00)"]  # each round by its own
    assert new.split("|")[-2].strip() == new.split("|")[2].strip() == "-"


def test_what_is_no_checkout_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        bound.main([str(tmp_path)])
    assert "is no checkout of exkv" in capsys.readouterr().err
