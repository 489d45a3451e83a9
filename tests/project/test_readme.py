"""The README's Python blocks run as they stand, and its reading order names real files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_python_blocks_run_one_after_the_other():
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        cwd=ROOT,
        env={**os.environ, "EXKV_SIM_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "The key is in the kitchen." in ran.stdout


def test_the_files_that_it_names_exist():
    named = re.findall(r"`((?:exkv|exkv_ext|examples|tests)/[\w./-]*)`", README)
    assert len(named) > 10
    missing = [name for name in named if not (ROOT / name).exists()]
    assert missing == []


def test_the_line_counts_of_the_reading_order_are_about_right():
    rows = re.findall(r"^\| `(exkv/[\w./]+)` \| (\d+) \|", README, re.MULTILINE)
    assert len(rows) >= 8
    for name, count in rows:
        lines = len((ROOT / name).read_text().splitlines())
        assert abs(lines - int(count)) <= 0.1 * lines, f"{name} has {lines} lines, not {count}"


def test_the_commands_are_those_of_the_makefile():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in re.findall(r"make ([a-z]+)", README):
        assert command in targets
