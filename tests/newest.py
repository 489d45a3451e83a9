"""What fails under the newest releases, by the package that makes it fail: ``make newest``.

Runs the tests in this environment, in which every package is the newest, and compares versions with
``tests/constraints.txt``. Tests that fail are run again with one package after the other put back
to its pinned version: those that pass then fail because of that package. Arguments go to pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TESTS = Path(__file__).resolve().parent
PINS = TESTS / "constraints.txt"
#: Where the plugin below writes the node ids of tests that failed.
REPORT = "EXKV_NEWEST_REPORT"


def pinned(text: str) -> dict[str, str]:
    """Version by package of a constraints file's text, for the Python that runs."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    pins = map(Requirement, filter(None, lines))
    here = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in here}


def installed() -> dict[str, str]:
    """Version by package of this environment, without local labels such as ``+cpu``."""
    paths = sorted({sysconfig.get_path(kind) for kind in ("purelib", "platlib")})
    found = ((canonicalize_name(d.name), d.version) for d in distributions(path=paths))
    return {name: version.partition("+")[0] for name, version in found}


def moved(pins: Mapping[str, str], versions: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Pinned and installed version of each package where they differ."""
    both = sorted(pins.keys() & versions.keys())
    return {name: (pins[name], versions[name]) for name in both if pins[name] != versions[name]}


def pytest_runtest_logreport(report) -> None:
    """Write down a test that failed; this file is the runs' pytest plugin."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ and REPORT in os.environ:
        with open(os.environ[REPORT], "a") as file:
            file.write(report.nodeid + "\n")


def failing(arguments: Sequence[str]) -> list[str]:
    """Node ids of the tests that fail, of those that pytest's arguments select."""
    with tempfile.NamedTemporaryFile("r") as file:
        outer = {name: value for name, value in os.environ.items() if "XDIST" not in name}
        environment = {
            **outer,
            REPORT: file.name,
            "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-p", "newest", "-n", "2", "--dist", "worksteal"]
        subprocess.run([*command, *arguments], cwd=TESTS.parent, env=environment)
        return sorted(set(file.read().splitlines()))


def install(name: str, version: str) -> bool:
    """Put this version of a package in place of another."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
    return subprocess.run([*command, "--no-deps", f"{name}=={version}"]).returncode == 0


def by_package(
    failed: Iterable[str], changes: Mapping[str, tuple[str, str]]
) -> dict[str, list[str]]:
    """The tests that pass once a package alone is at its pinned version, by that package; those
    that none mends under ""."""
    left, found = list(failed), {}
    for name, (pin, newest) in changes.items():
        if not left:
            break
        if install(name, pin):
            still = set(failing(left))
            found[name] = [test for test in left if test not in still]
            left = [test for test in left if test in still]
        install(name, newest)
    return {**found, "": left}


def report(causes: Mapping[str, list[str]], changes: Mapping[str, tuple[str, str]]) -> str:
    """The list that ``make newest`` ends with."""
    lines = [f"{name} {pin} -> {newest}" for name, (pin, newest) in changes.items()]
    lines = ["newer than their pins:", *(f"  {line}" for line in lines or ["nothing"]), ""]
    for name, tests in causes.items():
        if tests:
            title = f"{name} {changes[name][1]}" if name else "no package by itself"
            lines += [f"failing because of {title}: {len(tests)}", *(f"  {t}" for t in tests)]
    return "\n".join(lines if any(causes.values()) else [*lines, "nothing fails"])


def main(arguments: Sequence[str]) -> None:
    changes = moved(pinned(PINS.read_text()), installed())
    print("\n" + report(by_package(failing(arguments), changes), changes))


if __name__ == "__main__":
    main(sys.argv[1:])
