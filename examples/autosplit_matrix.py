"""Load models over this machine's devices in every way, and check that all ways agree.

``autosplit_matrix.py DIR`` takes a model's folder or a folder of models. It loads each model with
each kind of cache at each length, eagerly and lazily, generates a few tokens, and unloads. Eager
and lazy must give the same device map, bytes and tokens, and unloading must free everything. Exit
status: 0, 1 they differ, 2 invalid input. With ``EXKV_SIM_DEVICES=8M,8M,1G`` in the environment it
runs on simulated devices.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from exkv import CACHES, KVCache, Model, PlacementError
from exkv.devices import allocated_memory, present_devices, resolve_devices
from exkv.loading import DeviceReport
from exkv.sizes import human, parse_sizes

PROMPT_TOKENS = 8


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        folders = model_folders(args.models)
        cases = list(itertools.product(folders, args.caches, args.lengths))
        console = Console(stderr=True)
        pairs = [
            (run(Case(*case, lazy=False), args), run(Case(*case, lazy=True), args))
            for case in track(cases, "Loading", console=console, disable=not console.is_terminal)
        ]
    except (OSError, ValueError) as error:
        print(f"autosplit_matrix.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    Console(width=None if sys.stdout.isatty() else 160).print(table(pairs))
    problems = [problem for pair in pairs for problem in disagreements(*pair)]
    for problem in problems:
        print(f"autosplit_matrix.py: {problem}", file=sys.stderr)
    return 1 if problems else 0


def model_folders(path: Path) -> list[Path]:
    """The folder if it is a model, else the models in it, sorted by name."""
    if (path / "config.json").is_file():
        return [path]
    folders = sorted(file.parent for file in path.glob("*/config.json"))
    if not folders:
        raise FileNotFoundError(f"{path} is no model folder, nor a folder of them (no config.json)")
    return folders


# One row ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """One way to load a model."""

    folder: Path
    cache: str
    length: int
    lazy: bool

    def __str__(self) -> str:
        way = "lazy" if self.lazy else "eager"
        return f"{self.folder.name}, {self.cache} cache of {self.length}, {way}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a case; times in milliseconds.

    Attributes:
        result: what must be equal for lazy and eager, by the names used in messages.
        leaked: bytes still allocated after unloading, on devices that count them.
        fits: whether the model was loaded; if not, ``result`` says which unit didn't fit.
    """

    case: Case
    result: dict[str, object]
    leaked: dict[str, int]
    fits: bool = False
    load_ms: float = 0.0
    token_ms: float = 0.0


def run(case: Case, args: argparse.Namespace) -> Outcome:
    """Load, generate, unload."""
    before = memory(args.devices)
    model = Model(case.folder)
    cache = CACHES[case.cache](model, max_seq_len=case.length, lazy=case.lazy)
    started = time.perf_counter()
    try:
        model.load_autosplit(cache, args.reserve_vram, last_id_only=True, devices=args.devices)
    except PlacementError as error:
        place = {"unit": error.unit, "device": error.device, "bytes needed": error.needed}
        return Outcome(case=case, result=place, leaked=growth(before))
    loaded = time.perf_counter()
    tokens = generate(model, cache, args.tokens)
    ended = time.perf_counter()
    result = {
        "cache map": {layer: str(device) for layer, device in model.cache_map.items()},
        "device map": {unit: str(device) for unit, device in model.device_map.items()},
        "cache bytes": {str(device): size for device, size in cache.nbytes().items()},
        "bytes by device": [totals(row) for row in model.report.devices if row.units],
        "tokens": tokens,
    }
    model.unload()
    return Outcome(
        case=case,
        result=result,
        leaked=growth(before),
        fits=True,
        load_ms=1000 * (loaded - started),
        token_ms=1000 * (ended - loaded) / args.tokens,
    )


def totals(row: DeviceReport) -> tuple[str, int, int | None]:
    """A device's total bytes, predicted and measured."""
    counted = sum(row.measured.values()) if "workspace" in row.measured else None
    return str(row.device), row.ledger.total, counted


def generate(model: Model, cache: KVCache, count: int) -> list[int]:
    """Decode greedily after a prompt that needs no tokenizer."""
    ids = torch.arange(1, PROMPT_TOKENS + 1)[None] % model.config.vocab_size
    tokens: list[int] = []
    while len(tokens) < count:
        logits = model.forward(ids, cache, last_id_only=True)  # (1, 1, vocabulary)
        ids = logits[:, -1].argmax(-1, keepdim=True).cpu()
        tokens.append(int(ids))
    return tokens


def memory(names: Sequence[str] | None) -> dict[torch.device, int]:
    """Allocated bytes on each device that counts them."""
    counts = {
        device: allocated_memory(device) for device in resolve_devices(names or present_devices())
    }
    return {device: count for device, count in counts.items() if count is not None}


def growth(before: dict[torch.device, int]) -> dict[str, int]:
    now = {device: allocated_memory(device) for device in before}
    return {str(d): now[d] - size for d, size in before.items() if now[d] != size}


# All rows -----------------------------------------------------------------------------------------


def disagreements(eager: Outcome, lazy: Outcome) -> Iterator[str]:
    """Describe what is wrong with a pair of rows, a sentence each."""
    for row in (eager, lazy):
        for device, size in row.leaked.items():
            yield f"{row.case}: {device} holds {size:+,} bytes after unloading"
    if eager.fits != lazy.fits:
        fits, does_not = (eager, lazy) if eager.fits else (lazy, eager)
        yield f"{fits.case}: fits, but {does_not.case} doesn't: no room for {does_not.result}"
        return
    for part, value in eager.result.items():
        if value != lazy.result[part]:
            yield f"{eager.case}: {part} is {value}; lazy: {lazy.result[part]}"


def table(pairs: Sequence[tuple[Outcome, Outcome]]) -> Table:
    made = Table(title="eager and lazy, predicted (measured)")
    for heading in ("model", "cache", "way", "layers", "in all, by device"):
        made.add_column(heading)
    for heading in ("load", "token", "same"):
        made.add_column(heading, justify="right")
    for pair in pairs:
        wrong = bool(list(disagreements(*pair)))
        for row in pair:
            made.add_row(*cells(row, wrong))
        made.add_section()
    return made


def cells(row: Outcome, wrong: bool) -> Iterator[str]:
    case = row.case
    yield case.folder.name
    yield f"{case.cache} {case.length}"
    yield "lazy" if case.lazy else "eager"
    if not row.fits:
        yield from (f"no room for {row.result['unit']} on {row.result['device']}", "", "", "")
    else:
        yield layer_ranges(row.result["cache map"])
        yield "\n".join(map(predicted_and_measured, row.result["bytes by device"]))
        yield f"{row.load_ms:.1f} ms"
        yield f"{row.token_ms:.2f} ms"
    yield "NO" if wrong else "yes"


def layer_ranges(cache_map: dict[int, str]) -> str:
    """``{0: "cuda:0", 1: "cuda:0", 2: "cuda:1"}`` -> ``cuda:0 0-1``, ``cuda:1 2``."""
    lines = []
    for device, run in itertools.groupby(sorted(cache_map), cache_map.get):
        layers = list(run)
        many = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])
        lines.append(f"{device} {many}")
    return "\n".join(lines)


def predicted_and_measured(totals: tuple[str, int, int | None]) -> str:
    device, predicted, measured = totals
    return f"{device} {human(predicted)}" + ("" if measured is None else f" ({human(measured)})")


# Flags --------------------------------------------------------------------------------------------


class Flags(argparse.ArgumentParser):
    """Report an invalid flag in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n")


#: Upper bound for tokens of a cache: more positions than any model has.
MOST_TOKENS = 1 << 27


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    flags = Flags(description="Load models in every way, and compare.", allow_abbrev=False)
    add = flags.add_argument
    add("models", type=Path, metavar="MODELS_DIR", help="a model's folder, or a folder of models")
    add("--caches", type=caches, default=list(CACHES), metavar="KINDS", help=",".join(CACHES))
    add("--lengths", type=counts, default=[256, 1024], metavar="TOKENS", help="256,1024")
    add("--tokens", type=count, default=16, metavar="N", help="tokens to generate (16)")
    add("--devices", type=lambda text: text.split(","), metavar="NAMES", help="cuda:0,cpu (all)")
    add("--reserve-vram", type=sizes, metavar="SIZES", help="memory to leave free: 256M, or 1G,64M")
    args = flags.parse_args(argv)
    if min(args.lengths) < PROMPT_TOKENS + args.tokens:
        flags.error(f"--lengths must hold {PROMPT_TOKENS + args.tokens} tokens (--tokens)")
    return args


def caches(text: str) -> list[str]:
    if unknown := set(text.split(",")) - set(CACHES):
        known = ", ".join(CACHES)
        raise argparse.ArgumentTypeError(f"unknown kind {min(unknown)!r}; known are {known}")
    return text.split(",")


def count(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= MOST_TOKENS:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not a whole number from 1 to {MOST_TOKENS}"
        )
    return int(text)


def counts(text: str) -> list[int]:
    return [count(piece) for piece in text.split(",")]


def sizes(text: str) -> int | list[int]:
    """Parse one size for every device, or a list of sizes."""
    try:
        parsed = parse_sizes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return parsed if "," in text else parsed[0]


if __name__ == "__main__":
    sys.exit(main())
