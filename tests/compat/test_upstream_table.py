"""docs/from-exllamav2.md says about ExLlamaV2's scripts what ``make upstream`` expects."""

from __future__ import annotations

import re
from pathlib import Path

import upstream

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from-exllamav2.md"
ROW = re.compile(r"^\| (\(top\)|examples[a-z/]*) \| (.*) \| (.*) \|$", re.MULTILINE)


def listed() -> dict[str, str]:
    """Script -> its outcome on the page: "runs", or how it is refused."""
    outcomes = {}
    for folder, scripts, outcome in ROW.findall(PAGE.read_text()):
        word = "runs" if outcome.startswith("run") else outcome
        names = re.findall(r"`(\w+)`", scripts)
        outcomes |= {name if folder == "(top)" else f"{folder}/{name}": word for name in names}
    return outcomes


def test_page_lists_every_script_and_its_outcome():
    expected = {}
    for name, example in upstream.EXAMPLES.items():
        outcome = upstream.outcome_of(example, "").replace("refuses", "refused")
        expected[name.split(" ")[0]] = outcome
    assert listed() == expected
