"""The tree is as the formatters and linters want it; `make format` puts it right."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CXX_SUFFIXES = {".cpp", ".h", ".inc", ".cu", ".cuh"}


def clang_format() -> str | None:
    """The one of this environment, whose version pyproject.toml pins; else PATH's."""
    beside = Path(sys.executable).with_name("clang-format")
    return str(beside) if beside.exists() else shutil.which("clang-format")


def check(*command: str) -> None:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, f"`make format` may mend this:\n{result.stdout}{result.stderr}"


def test_ruff_finds_nothing():
    check(sys.executable, "-m", "ruff", "check", ".")


def test_python_is_formatted():
    check(sys.executable, "-m", "ruff", "format", "--check", ".")


@pytest.mark.skipif(clang_format() is None, reason="clang-format isn't installed")
def test_native_code_is_formatted():
    folders = (ROOT / "exkv_ext", ROOT / "tests")
    files = [f for folder in folders for f in folder.rglob("*") if f.suffix in CXX_SUFFIXES]
    check(clang_format(), "--dry-run", "-Werror", *map(str, sorted(files)))


def test_no_two_test_files_have_one_name():
    """pytest imports them by their names alone, and refuses the second where it finds both."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_file_beside_tests_has_the_name_of_a_package_that_somebody_looks_for():
    """pytest puts the folders of tests that are no packages on ``sys.path``."""
    tests = ROOT / "tests"
    beside = {file.parent for file in tests.rglob("test_*.py")} | {tests, ROOT / "examples"}
    folders = [each for each in beside if not (each / "__init__.py").exists()]
    names = {file.stem for folder in folders for file in folder.glob("*.py")}
    asks = Path(find_spec("transformers").origin).parent / "utils" / "import_utils.py"
    sought = set(re.findall(r'_is_package_available\("(\w+)"', asks.read_text()))
    assert {"kernels", "accelerate"} <= sought
    assert names.isdisjoint(sought | sys.stdlib_module_names)
