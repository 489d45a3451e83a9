"""The tables of decoding in the docs are what the committed results say."""

from __future__ import annotations

from bench import pages


def test_the_page_has_the_tables_of_the_results_that_it_names():
    text = pages.PAGE.read_text()
    files = pages.named(text)
    assert files
    for table in (table for file in files for table in pages.tables(file)):
        assert table in text, f"python -m tests.bench pages prints what is to be there:\n{table}"


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
    lines = pages.table({"shape": "1.1B", "batch": 8, "rows": ours + theirs + cpp}).splitlines()
    assert lines[0].startswith("| 1.1B, 8 sequences | share |")
    assert lines[1] == "|---|---:|---:|---:|---:|---:|"
    assert lines[2:] == [
        "| `Cache` after 16 tokens | 0.70 (0.60..0.80) | 0.25 | | 2.3 | 0.79 |",
        "| `Cache` after 2,048 | 0.70 (0.60..0.80) | 0.20 | 0.50 | 2.3 | 0.79 |",
        "| `Cache8bit` after 2,048 | 0.60 (0.50..0.70) | | (q8_0) 0.40 | 12 | 10 |",
    ]


def test_an_engine_may_be_missing():
    table = pages.table({"shape": "150M", "batch": 1, "rows": [row("exkv fp16", 16, 0.7)]})
    assert table.splitlines()[0].startswith("| 150M, one sequence |")
    assert table.splitlines()[2] == "| `Cache` after 16 tokens | 0.70 (0.60..0.80) | | | | |"
