"""The engine's examples give the same answers as one conversation at a time."""

from __future__ import annotations

import re
from subprocess import CompletedProcess

import pytest
from apart import run_script

DEMO = "examples/demo-model"
FACTS = "The key is in the kitchen. The lamp is in the garden. "
QUESTIONS = [f"{FACTS}Where is the {thing}?" for thing in ("key", "lamp")]


def run(name: str, *arguments: str) -> CompletedProcess[str]:
    return run_script(f"examples/{name}.py", *arguments)


@pytest.mark.parametrize("name", ["bulk", "async_engine"])
def test_the_answers_are_right(name):
    done = run(name, DEMO, *QUESTIONS)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(
        [
            f"{QUESTIONS[0]} The key is in the kitchen.",
            f"{QUESTIONS[1]} The lamp is in the garden.",
        ]
    )
    bare = run(name)
    assert bare.returncode == 1 and bare.stderr.startswith(f"usage: {name}.py DIR QUESTION")


def test_proposals_change_no_answer_and_are_counted():
    done = run("speculation", DEMO, QUESTIONS[0], DEMO)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert list(lines) == ["without", "n-grams", "draft"]
    assert all(line.startswith("The key is in the kitchen. (") for line in lines.values())
    counts = {name: re.findall(r"\d+", line) for name, line in lines.items()}
    assert counts["without"] == ["0", "0"]
    assert all(0 < int(right) <= int(all_) for right, all_ in (counts["n-grams"], counts["draft"]))


def test_banned_word_never_occurs():
    prompt = "Anna put the key in the"
    done = run("banned_strings", DEMO, prompt, "CHURCH")
    plain, without = done.stdout.splitlines()
    assert "church" in plain and "church" not in without.lower()
    assert without.startswith(prompt) and len(without) > len(prompt)
    assert run("banned_strings").stderr.startswith("usage: banned_strings.py DIR PROMPT WORD")


def test_answers_are_json_of_the_schema():
    done = run("json_schema", DEMO, *QUESTIONS)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    for question, line in zip(QUESTIONS, lines, strict=True):
        assert line.startswith(question)
        assert line.split()[-1] in ("kitchen", "garden", "office", "cellar")
    assert run("json_schema").stderr.startswith("usage: json_schema.py DIR QUESTION")


def test_adapters_answer_beside_the_model():
    question = f"{FACTS}Where is the lamp?"
    done = run("adapters", DEMO, "examples/demo-adapter", question)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "demo-model: The lamp is in the garden.",
        "demo-adapter: In the garden.",
    ]
    bare = run("adapters")
    assert bare.returncode == 1 and bare.stderr.startswith("usage: adapters.py DIR ADAPTER")
