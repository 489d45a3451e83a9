"""Whole folders with one file spoilt, each opened in a process of its own that may take a few
seconds and a few GiB: ``python folder_fuzz.py CASES SEED FOLDER...`` prints what went wrong.

A folder must work, or be refused by one of the errors that exkv documents, in a message that names
it and is at most a few lines long. Anything else is a finding: another exception, a signal, a hang.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from exkv import Cache, Model, Tokenizer

SECONDS, BYTES, CHARACTERS = 20, 6 << 30, 1500
VALUES = [None, True, 0, -1, 1, 7, 2**31, 2**32 - 1, 2**63, 2**64, 1e308, 0.5, float("inf")]
VALUES += ["", "a", "x" * 5000, "\ud800", "\x00", [], {}, [[]], [""], {"": 0}, ["x"] * 3000]
VALUES += [{"content": None}, {"String": ""}, {"Regex": "(.*)*"}, "(a+)+$", "Sequence", "float64"]


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Where something is in a JSON value, with at most a few of a long list."""
    found = [path] if path else []
    items = list(value.items()) if isinstance(value, dict) else []
    items = list(enumerate(value)) if isinstance(value, list) else items
    for key, inner in items[:60]:
        found += places(inner, (*path, key))
    return found


def spoil_json(rng: random.Random, data: bytes) -> bytes:
    value = json.loads(data)
    found = places(value)
    if not found:
        return json.dumps(rng.choice(VALUES)).encode()
    *outer, key = rng.choice(found)
    inner = value
    for step in outer:
        inner = inner[step]
    if rng.random() < 0.2:
        del inner[key]
    else:
        inner[key] = rng.choice(VALUES)
    return json.dumps(value).encode()


def spoil_bytes(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 4, 64))):
        if changed:
            place = rng.randrange(min(len(changed), rng.choice((16, 4096, len(changed)))))
            changed[place] = rng.choice((0, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    kept = rng.choice((len(changed), len(changed), rng.randrange(len(changed) + 1)))
    return bytes(changed[:kept])


def spoil(rng: random.Random, file: Path) -> str:
    """Change one file; what was done, in words."""
    how = rng.choice(("json", "json", "json", "bytes", "bytes", "gone", "empty", "fifo", "folder"))
    if how == "json" and file.suffix != ".json":
        how = "bytes"
    data = file.read_bytes()
    file.unlink()
    if how == "fifo":
        os.mkfifo(file)
    elif how == "folder":
        file.mkdir()
    elif how != "gone":
        makers = {"json": spoil_json, "bytes": spoil_bytes, "empty": lambda *_: b""}
        file.write_bytes(makers[how](rng, data))
    return f"{file.name}: {how}"


def use(folder: Path) -> None:
    """All that reads a folder."""
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode("the key is in the kitchen </s>\U0001f600", add_special=False)
    tokenizer.decode(ids)
    if tokenizer.chat_templates:
        tokenizer.apply_chat_template([{"role": "user", "content": "where?"}])
    model = Model(folder)
    cache = Cache(model, 16)
    model.load(devices=["cpu"])
    model.generate(torch.tensor([[1, 2, 3]]), cache=cache, max_new_tokens=2)


def in_child(folder: Path) -> str | None:
    """What is wrong with how this process takes the folder."""
    try:
        use(folder)
    except (ValueError, FileNotFoundError) as error:
        text = str(error)
        if len(text) > CHARACTERS + len(str(folder)) * 3:
            return f"a message of {len(text)} characters: {text[:200]}"
        if "logits holds nan" in text:  # what weights of any bytes may lead to
            return None
        return None if folder.name in text else f"names no file: {type(error).__name__}: {text}"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def outcome(folder: Path) -> str | None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.alarm(SECONDS)
        os.write(writing, (in_child(folder) or "").encode("utf-8", "replace")[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return said or None


def main(cases: int, seed: int, sources: list[Path]) -> None:
    torch.set_num_threads(1)
    rng, findings = random.Random(seed), {}
    for source in sources:  # as they are, they work
        if problem := outcome(source):
            findings[f"{source.name} as it is"] = problem
    for _ in range(cases):
        with tempfile.TemporaryDirectory() as parent:
            source = rng.choice(sources)
            folder = Path(shutil.copytree(source, Path(parent) / "spoilt-folder"))
            state = rng.getstate()
            file = rng.choice(sorted(file for file in folder.iterdir() if file.is_file()))
            what = f"{source.name}/{spoil(rng, file)}"
            if problem := outcome(folder):
                small = file.is_file() and file.stat().st_size < 3000
                shown = file.read_bytes() if small else str(state[1][-1])
                findings.setdefault(f"{what}: {problem[:60]}", f"{problem} {shown!r}")
    print(json.dumps({"cases": cases, "findings": findings}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
