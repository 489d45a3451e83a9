"""Gathers what ``check.sh`` left in its folder into one JSON file and one table.

``python tests/gpu/report.py WORK OUT [NAME]`` writes NAME.json and NAME.md (``gpu-check``) in OUT.
WORK holds ``phases`` (name, exit status or ``left-out``, seconds), ``kernels.json`` (see
``check_kernels.py``), ``tests.xml`` (pytest's junit file, its properties are figures),
``measure-PART.json`` (see ``measure.py``), ``decode.json`` and ``load.json`` of the benches, and a
log for each phase. What is missing because its phase failed or was left out is missing from the
result. Exits 1 if a phase failed.
"""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that it runs as a file too

from tests.bench import decode, load  # noqa: E402
from tests.bench.harness import cpu_name, markdown  # noqa: E402

#: Of a failed phase's log.
LAST_LINES = 30


def machine() -> dict[str, Any]:
    about: dict[str, Any] = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="minutes"),
        "name": platform.node(),
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [],
    }
    if torch.cuda.is_available():
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        about["gpus"] = [{"name": d.name, "bytes": d.total_memory} for d in devices]
        about["driver"] = _output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        )
    return about


def _output(*command: str) -> str | None:
    """What a command prints; None where there is no such command, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def phases(work: Path) -> list[dict[str, Any]]:
    rows = []
    for line in (work / "phases").read_text().splitlines():
        name, status, seconds = line.split()
        row: dict[str, Any] = {"name": name, "status": status, "seconds": int(seconds)}
        if status != "left-out":
            row["status"] = int(status)
        if row["status"]:
            row["log"] = (work / f"{name}.log").read_text().splitlines()[-LAST_LINES:]
        rows.append(row)
    return rows


def cases_of(file: Path) -> list[dict[str, Any]]:
    """Each test's name, outcome, seconds, and the figures that it recorded."""
    if not file.exists():
        return []
    return [_case(case) for case in ElementTree.parse(file).iter("testcase")]


def _case(case: ElementTree.Element) -> dict[str, Any]:
    # A test that fails and whose tear-down fails too has both; either is a failure.
    kinds = ("failure", "error", "skipped")
    found = [(kind, node) for kind in kinds if (node := case.find(kind)) is not None]
    outcome, node = found[0] if found else ("passed", None)
    row: dict[str, Any] = {
        "name": case.get("name"),
        "outcome": outcome,
        "seconds": float(case.get("time", 0)),
        "figures": {p.get("name"): _number(p.get("value")) for p in case.iter("property")},
    }
    if node is not None:
        row["message"] = node.get("message")
    return row


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def tables(result: dict[str, Any]) -> str:
    """The same for people."""
    about = result["machine"]
    gpus = ", ".join(f"{g['name']} ({g['bytes'] / 2**30:.0f} GiB)" for g in about["gpus"])
    parts = [
        f"# GPU check, {about['date']}",
        f"{about['name']}: {gpus or 'no GPU'}; driver {about.get('driver')}, "
        f"torch {about['torch']}, Python {about['python']}; {about['cpu']}",
        markdown(
            ("phase", "exit status", "seconds"),
            [(p["name"], str(p["status"]), str(p["seconds"])) for p in result["phases"]],
        ),
        *_failures(result),
        *_measurements(result["measurements"]),
        *_kernels(result["kernels"]),
        *_test_tables(result["tests"]),
    ]
    for bench in (decode, load):
        if found := result[bench.__name__.rpartition(".")[2]]:
            parts += ["## Beside transformers", *bench.report(found)]
    return "\n\n".join(parts) + "\n"


def _failures(result: dict[str, Any]) -> list[str]:
    logs = ["\n".join(["```", *p["log"], "```"]) for p in result["phases"] if p["status"]]
    return [f"## Failed, or left out\n\n{log}" for log in logs]


def _measurements(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What ``measure.py`` predicted and measured, a table for each part."""
    parts = []
    for part, rows in found.items():
        table = [
            (row["name"], row["unit"], _short(row["predicted"]), _short(row["measured"]))
            for row in rows
        ]
        headings = ("", "unit", "predicted", "measured")
        parts += [f"## Predicted and measured: {part}", markdown(headings, table)]
    return parts


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:.4g}"


def _kernels(found: dict[str, Any] | None) -> list[str]:
    """What ``check_kernels.py`` measured."""
    if found is None:
        return []
    rows = [(name, f"{error:.2g}") for name, error in found["errors"].items()]
    parts = ["## Kernels beside their references", markdown(("op", "largest difference"), rows)]
    if not found["bandwidths"]:
        return parts
    rows = [(name, f"{share:.2f}") for name, share in found["bandwidths"].items()]
    return [*parts, markdown(("decode reads", "of a copy's bandwidth"), rows)]


def _test_tables(cases: list[dict[str, Any]]) -> list[str]:
    outcomes = [case["outcome"] for case in cases]
    counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in sorted(set(outcomes)))
    rows = [
        (f"{case['name']}: {name}", f"{value:g}" if abs(value) < 100 else f"{value:,.0f}")
        for case in cases
        for name, value in case["figures"].items()
        if isinstance(value, float)
    ]
    parts = [f"## Tests: {counts or 'none ran'}"]
    return [*parts, markdown(("figure (sizes in bytes)", "value"), rows)] if rows else parts


def main(work: Path, out: Path, name: str = "gpu-check") -> int:
    result = {
        "machine": machine(),
        "phases": phases(work),
        "measurements": {
            file.stem.removeprefix("measure-"): json.loads(file.read_text())
            for file in sorted(work.glob("measure-*.json"), key=lambda file: file.stat().st_mtime)
        },
        "kernels": _json(work / "kernels.json"),
        "tests": cases_of(work / "tests.xml"),
        "decode": _json(work / "decode.json"),
        "load": _json(work / "load.json"),
    }
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    text = tables(result)
    (out / f"{name}.md").write_text(text)
    print(text)
    return int(any(phase["status"] not in (0, "left-out") for phase in result["phases"]))


def _json(file: Path) -> Any:
    return json.loads(file.read_text()) if file.exists() else None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))
