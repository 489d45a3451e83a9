"""The harness of all benches: settings as options, interleaved rounds, memory probes,
spreads, tables, and the files that a bench writes.

A bench is a module, of which :func:`run` makes a command. It has

* ``Settings``, a frozen dataclass whose fields are the command's options; it raises ValueError for
  what does not go together;
* ``measure(settings)`` -> figures for JSON, or an iterator of the figures so far, so that a run
  that is cut off leaves what it had;
* ``report(result)`` -> paragraphs of Markdown;
* where wanted ``QUICK``, settings of a run that only shows that it works, and ``wrong(result)`` ->
  errors, in words.

Machines that are shared change from minute to minute, so competitors take turns (:func:`in_turns`),
and what is compared are figures of one round, or shares of what the memory read around a sample.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch

from .folded import folded

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
#: A sample is disturbed where a probe around it is below this share of the run's best.
UNDISTURBED = 0.8


# A bench --------------------------------------------------------------------------------------


def setting(
    default: Any = MISSING, help: str = "", choices: Iterable[str] | None = None, positional=False
) -> Any:
    """A field of settings, and the help of its option."""
    about = {"help": help, "choices": choices and list(choices), "positional": positional}
    return field(default=default, metadata=about)


def run(bench: ModuleType, words: Sequence[str] | None = None) -> int:
    """Measure, print, write files; the exit status."""
    parser = _parser(bench)
    options = vars(parser.parse_args(words))
    files, quick = (options.pop("json"), options.pop("markdown")), options.pop("quick")
    given = getattr(bench, "QUICK", {}) if quick else {}
    given = given | {name: _value(value) for name, value in options.items() if value is not None}
    try:
        settings = bench.Settings(**given)
    except ValueError as reason:
        parser.error(str(reason))
    text, result = "", {}
    found = bench.measure(settings)
    for figures in [found] if isinstance(found, dict) else found:
        device = torch.device(getattr(settings, "device", "cpu"))
        about = {"machine": machine(device), "settings": asdict(settings)}
        result = json.loads(json.dumps(about | figures, default=str))
        text = text_of(bench, result)
        contents = (folded(result) + "\n", text)
        for file, content in zip(files, contents, strict=True):
            if file:
                file.write_text(content)
    print(text)
    wrong = bench.wrong(result) if hasattr(bench, "wrong") else []
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return int(bool(wrong))


def text_of(bench: ModuleType, result: dict[str, Any]) -> str:
    """A result as Markdown."""
    return "\n\n".join([machine_line(result["machine"]), *bench.report(result)]) + "\n"


def _parser(bench: ModuleType) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {bench.__name__}",
        description=bench.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="the smallest: does it run?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there")
    kinds = get_type_hints(bench.Settings)
    for each in fields(bench.Settings):
        name = each.name if each.metadata.get("positional") else _option(each.name)
        parser.add_argument(name, **_told(kinds[each.name], each.metadata))
    return parser


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _told(kind: Any, about: Mapping[str, Any]) -> dict[str, Any]:
    """A field's arguments for argparse."""
    told: dict[str, Any] = {"help": about.get("help")}
    if kind is bool:
        return told | {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is UnionType:
        kind = get_args(kind)[0]
    if get_origin(kind) is tuple:
        told["nargs"] = "+"
        kind = get_args(kind)[0]
    return told | {"type": kind, "choices": about.get("choices")}


def _value(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# Rounds ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """A way's value in a round, and the probe's bytes a second before and after."""

    way: str
    round: int
    value: Any
    before: float = 0.0
    after: float = 0.0

    @property
    def limit(self) -> float:
        return (self.before + self.after) / 2


def in_turns(
    ways: Mapping[str, Callable[[int], Any]],
    rounds: int,
    probe: Callable[[], float] = lambda: 0.0,
    warm: int = 0,
) -> Iterator[Sample]:
    """Call each way with the round's number. Every round begins with another way, so that none
    always finds a warm machine, and the probe runs between any two samples. The first ``warm``
    rounds, with negative numbers, yield nothing."""
    for index in range(-warm, rounds):
        before = probe()
        for name in rotated(list(ways), index):
            value, after = ways[name](index), probe()
            if index >= 0:
                yield Sample(name, index, value, before, after)
            before = after


def rotated(items: Sequence[Any], by: int) -> list[Any]:
    by %= len(items)
    return [*items[by:], *items[:by]]


def by_way(samples: Iterable[Sample]) -> dict[str, list[Any]]:
    """Way -> its values by round."""
    found: dict[str, list[Any]] = {}
    for sample in samples:
        found.setdefault(sample.way, []).append(sample.value)
    return found


def seconds(call: Callable[[], Any], best_of: int = 1, timer=time.perf_counter) -> float:
    """Seconds of a call, the least of ``best_of``."""

    def once() -> float:
        started = timer()
        call()
        return timer() - started

    return min(once() for _ in range(best_of))


def disturbed(samples: Iterable[Sample]) -> set[int]:
    """Rounds with a sample around which the memory was slow."""
    samples = list(samples)
    best = max(max(each.before, each.after) for each in samples)
    return {s.round for s in samples if min(s.before, s.after) < UNDISTURBED * best}


# Figures --------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> dict[str, float]:
    """One figure over all rounds."""
    middle = statistics.median(values)
    return {"median": middle, "min": min(values), "max": max(values), "n": len(values)}


def ratios(values: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Each round's value divided by the same round's base."""
    return spread([value / other for value, other in zip(values, base, strict=True)])


def show(found: Mapping[str, float], digits: int = 2, scale: float = 1.0) -> str:
    """A spread: median (least..most)."""
    middle, low, high = (f"{scale * found[key]:.{digits}f}" for key in ("median", "min", "max"))
    return f"{middle} ({low}..{high})"


def markdown(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table, its first column aligned left and the others right."""
    cells = [list(map(str, row)) for row in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return f"| {' | '.join([row[0].ljust(widths[0]), *rest])} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(cells[0]), line(rule), *map(line, cells[1:])])


# The machine ----------------------------------------------------------------------------------


def machine(device: torch.device = CPU) -> dict[str, Any]:
    """The machine and the versions, for readers of the figures."""
    import transformers

    import exkv
    import exkv_ext

    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "exkv": exkv.__version__,
        "native_modules": [name for name, there in exkv_ext.loaded().items() if there],
        "cpu_kernels": exkv_ext.cpu_isa(),
    }


def cpu_name() -> str:
    """The processor's name, with family and model where the name says little."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        return platform.processor() or platform.machine()
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    found = {name.strip(): value.strip() for name, value in pairs}
    name = found.get("model name", platform.machine())
    if "family" not in name and "cpu family" in found:
        name += f" (family {found['cpu family']} model {found['model']})"
    return name


def machine_line(about: Mapping[str, Any]) -> str:
    native = ", ".join(about["native_modules"]) or "none"
    isa = f" ({about['cpu_kernels']})" if about["cpu_kernels"] else ""
    where = "" if about["device"] == "cpu" else f"{about['device']}; "
    return (
        f"{where}{about['cpu']}, {about['cores']} cores, {about['threads']} threads; "
        f"torch {about['torch']}, transformers {about['transformers']}, exkv {about['exkv']} "
        f"with native modules {native}{isa}; {about['date']}"
    )


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class MemoryProbe:
    """Reads a buffer far larger than any cache. It gives the limit of decoding, and shows whether
    something else uses the machine."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        size = (256 << 20) if device.type == "cpu" else (1 << 30)
        self.buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
        self()

    def __call__(self) -> float:
        """Bytes a second, the best of three reads."""
        return self.buffer.nbytes / seconds(self._read, 3)

    def _read(self) -> None:
        self.buffer.sum()
        synchronize(self.device)


# Processes ------------------------------------------------------------------------------------


def status_bytes(field: str, process: int | str = "self") -> int:
    """A process's ``VmRSS``, ``VmHWM`` or ``RssAnon`` in bytes, from /proc."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{process}/status has no {field} line: this needs Linux")


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """A function's result in a forked process, through JSON; None if it failed, with the traceback
    printed."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        status = 1
        try:
            found = json.dumps(function(*args))
            with os.fdopen(writing, "w") as file:
                file.write(found)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else None
