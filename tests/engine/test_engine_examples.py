"""The engine's examples answer as one conversation at a time does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FACTS = "The key is in the kitchen. The lamp is in the garden. "
QUESTIONS = [f"{FACTS}Where is the {thing}?" for thing in ("key", "lamp")]


@pytest.mark.parametrize("name", ["bulk", "async_engine"])
def test_the_answers_are_right(name):
    command = [sys.executable, f"examples/{name}.py", "examples/demo-model", *QUESTIONS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == sorted(
        [
            f"{QUESTIONS[0]} The key is in the kitchen.",
            f"{QUESTIONS[1]} The lamp is in the garden.",
        ]
    )
    bare = subprocess.run(command[:2], cwd=ROOT, capture_output=True, text=True)
    assert bare.returncode == 1 and bare.stderr.startswith(f"usage: {name}.py DIR QUESTION")


def test_proposals_change_no_answer_and_are_counted():
    demo = "examples/demo-model"
    command = [sys.executable, "examples/speculation.py", demo, QUESTIONS[0], demo]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert list(lines) == ["without", "n-grams", "draft"]
    assert all(line.startswith("The key is in the kitchen. (") for line in lines.values())
    counts = {name: re.findall(r"\d+", line) for name, line in lines.items()}
    assert counts["without"] == ["0", "0"]
    assert all(0 < int(right) <= int(all_) for right, all_ in (counts["n-grams"], counts["draft"]))
