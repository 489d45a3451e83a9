"""The Python blocks of README.md and docs/ run as they are, and files named there exist."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
#: A Python block, and what it prints where that is shown right behind it.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
PAGES_WITH_CODE = [page for page in [ROOT / "README.md", *PAGES] if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: page.stem)
def test_the_python_blocks_run_one_after_the_other_and_print_what_is_shown(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = page.read_text()
    names: dict = {}
    for block in BLOCK.finditer(text):
        printed = io.StringIO()
        line = text[: block.start()].count("\n") + 2
        code = compile("\n" * (line - 1) + block[1], str(page), "exec")  # errors name the line
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert block[2] is None or printed.getvalue() == block[2], f"{page}:{line}"


def test_the_pages_for_newcomers_have_code():
    names = {page.stem for page in PAGES_WITH_CODE}
    assert names >= {"README", "tutorial", "caches", "planning"}
    assert names >= {"from-exllamav2", "from-transformers"}


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_the_files_that_it_names_exist(page):
    named = re.findall(
        r"`((?:exkv|exkv_ext|examples|tests|docs)/[\w./-]*[\w/])(?: [^`]*)?`", page.read_text()
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_the_commands_are_those_of_the_makefile(page):
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in re.findall(r"make ([a-z]+)", "\n".join(code_of(page.read_text()))):
        assert command in targets


def code_of(text: str) -> list[str]:
    """What is in backticks, and in blocks of code."""
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return blocks + re.findall(r"`([^`\n]+)`", text)


def test_the_reading_order_is_of_files_that_exist():
    listed = re.findall(
        r"^   (exkv/\S+)$", (ROOT / "docs/how-it-works.md").read_text(), re.MULTILINE
    )
    assert len(listed) > 20
    assert [name for name in listed if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_links_between_pages_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_figures_in_the_readme_are_those_of_the_page():
    """README.md repeats some lines of the tables that the bench writes."""
    lines = re.findall(r"^\| `Cache\w*` after .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert lines
    measured = (ROOT / "docs/measured.md").read_text().splitlines()
    assert [line for line in lines if line not in measured] == []
