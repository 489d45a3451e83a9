"""docs/from-exllamav2.md says of ExLlamaV2's scripts what ``make upstream`` expects of them."""

from __future__ import annotations

import re
from pathlib import Path

import upstream

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from-exllamav2.md"
ROW = re.compile(r"^\| (\(top\)|examples[a-z/]*) \| (.*) \| (.*) \|$", re.MULTILINE)


def listed() -> dict[str, str]:
    """Script -> what the page says of it: "runs", or how it is refused."""
    said = {}
    for folder, scripts, outcome in ROW.findall(PAGE.read_text()):
        word = "runs" if outcome.startswith("run") else outcome
        names = re.findall(r"`(\w+)`", scripts)
        said |= {name if folder == "(top)" else f"{folder}/{name}": word for name in names}
    return said


def test_the_page_lists_every_script_that_is_run_and_what_it_does():
    expected = {}
    for name, example in upstream.EXAMPLES.items():
        expected[name.split(" ")[0]] = upstream.said_of(example, "").replace("refuses", "refused")
    assert listed() == expected
