"""The tables of docs/measured.md are what the committed results say."""

from __future__ import annotations

import pytest
from bench import readme


def test_the_tables_are_what_the_command_makes_of_the_committed_results():
    """Of those that they name, the newest among them."""
    text = readme.PAGE.read_text()
    files = readme.named(text)
    assert readme.newest() in files
    assert readme.renewed(text, files) == text, "run python -m tests.bench readme"


def row(engine: str, context: int, share: float, **times: float) -> dict:
    spread = {"median": share, "min": share - 0.1, "max": share + 0.1, "n": 3}
    names = {"theirs": "transformers", "f16": "llama.cpp f16", "q8": "llama.cpp q8_0"}
    times = {names[name]: value for name, value in times.items()}
    return {"engine": engine, "context": context, "share": spread, "times": times}


def test_a_table_has_a_line_for_each_context_of_the_first_cache_and_one_for_the_others():
    ours = [row("exkv fp16", length, 0.7, theirs=2.345, f16=0.789) for length in (16, 2048)]
    ours += [row("exkv 8bit", length, 0.6, theirs=12.3, q8=9.96) for length in (16, 2048)]
    theirs = [row("transformers", 16, 0.25), row("transformers", 2048, 0.2)]
    cpp = [row("llama.cpp f16", 2048, 0.5), row("llama.cpp q8_0", 2048, 0.4)]
    lines = readme.table({"shape": "1.1B", "batch": 8, "rows": ours + theirs + cpp}).splitlines()
    assert lines[0].startswith("| 1.1B, 8 sequences | share |")
    assert lines[1] == "|---|---:|---:|---:|---:|---:|"
    assert lines[2:] == [
        "| `Cache` after 16 tokens | 0.70 (0.60..0.80) | 0.25 | | 2.3 | 0.79 |",
        "| `Cache` after 2,048 | 0.70 (0.60..0.80) | 0.20 | 0.50 | 2.3 | 0.79 |",
        "| `Cache8bit` after 2,048 | 0.60 (0.50..0.70) | | (q8_0) 0.40 | 12 | 10 |",
    ]


def test_an_older_result_is_one_of_single_sequences_and_an_engine_may_be_missing():
    table = readme.table({"shape": "150M", "rows": [row("exkv fp16", 16, 0.7)]})
    assert table.splitlines()[0].startswith("| 150M, one sequence |")
    assert table.splitlines()[2] == "| `Cache` after 16 tokens | 0.70 (0.60..0.80) | | | | |"


def test_the_command_writes_what_is_between_the_markers_and_nothing_else(tmp_path, capsys):
    begin, end = readme.MARKERS
    file = tmp_path / "page.md"
    file.write_text(f"before\n\n{begin}\nold\n{end}\n\nafter\n")
    assert readme.main(["--page", str(file)]) == 0
    text = file.read_text()
    assert text.startswith(f"before\n\n{begin}\n\n|") and text.endswith(f"*\n\n{end}\n\nafter\n")
    assert "old" not in text and readme.newest().name in text
    assert readme.main(["--page", str(file), str(readme.newest())]) == 0
    assert file.read_text() == text and readme.named(text) == [readme.newest()]
    twice = readme.renewed(text, readme.named(text) * 2)
    assert readme.named(twice) == readme.named(text) * 2


@pytest.mark.parametrize("text", ["", "{0}", "{1} {0}", "{0} {1} {0} {1}"])
def test_a_page_without_one_pair_of_markers_is_refused_and_kept(tmp_path, capsys, text):
    file = tmp_path / "page.md"
    file.write_text(text.format(*readme.MARKERS))
    with pytest.raises(SystemExit):
        readme.main(["--page", str(file)])
    assert "must have one <!-- bench:decode -->" in capsys.readouterr().err
    assert file.read_text() == text.format(*readme.MARKERS)


def test_a_result_that_is_not_in_the_repository_is_refused(tmp_path, capsys):
    file = tmp_path / "figures.json"
    file.write_text(readme.newest().read_text())
    kept = readme.PAGE.read_text()
    (tmp_path / "page.md").write_text(kept)
    with pytest.raises(SystemExit):
        readme.main([str(file), "--page", str(tmp_path / "page.md")])
    assert "figures.json is not in" in capsys.readouterr().err
    assert (tmp_path / "page.md").read_text() == kept
