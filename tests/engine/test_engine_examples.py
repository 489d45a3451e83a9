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


def run(name, *arguments):
    command = [sys.executable, f"examples/{name}.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_banned_word_is_said_in_no_way():
    prompt = "Anna put the key in the"
    done = run("banned_strings", "examples/demo-model", prompt, "CHURCH")
    plain, without = done.stdout.splitlines()
    assert "church" in plain and "church" not in without.lower()
    assert without.startswith(prompt) and len(without) > len(prompt)
    assert run("banned_strings").stderr.startswith("usage: banned_strings.py DIR PROMPT WORD")


def test_answers_are_json_of_the_schema():
    done = run("json_schema", "examples/demo-model", *QUESTIONS)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    for question, line in zip(QUESTIONS, lines, strict=True):
        assert line.startswith(question)
        assert line.split()[-1] in ("kitchen", "garden", "office", "cellar")
    assert run("json_schema").stderr.startswith("usage: json_schema.py DIR QUESTION")


def test_adapters_answer_beside_the_model():
    question = f"{FACTS}Where is the lamp?"
    command = [sys.executable, "examples/adapters.py"]
    folders = ["examples/demo-model", "examples/demo-adapter"]
    done = subprocess.run(
        [*command, *folders, question], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "demo-model: The lamp is in the garden.",
        "demo-adapter: In the garden.",
    ]
    bare = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert bare.returncode == 1 and bare.stderr.startswith("usage: adapters.py DIR ADAPTER")
