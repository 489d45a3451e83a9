"""Linear layers by packed weights beside bf16 ones; ``python -m tests.bench packed``.

Each figure is of one thread: arithmetic, 2 x rows x outputs x inputs a product, and the rate at
which weights are read, as a share of what the memory probe reads before and after. Enough weights
of a shape are read in turn that none is in cache when its turn comes; time is the thread's own, so
that neighbours who take the processor count for nothing.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from exkv.weights.floats import FLOATS
from exkv.weights.format import Tensors, WeightFormat
from exkv.weights.gguf import FORMATS
from exkv.weights.methods import register
from exkv.weights.on_load import BITS, OnLoad

from .common import (
    SHAPES,
    MemoryProbe,
    Spread,
    add_outputs,
    machine,
    machine_line,
    markdown,
    overridden,
    ratios,
    rotated,
    write_outputs,
)
from .linear import projections
from .load import ROOT

sys.path.insert(0, str(ROOT / "tests"))  # for the packers

PLAIN = "bf16"
GROUP = 64
KINDS = (PLAIN, *BITS, *FORMATS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured: of each model the ``sizes`` largest matrices; a sample reads at least
    ``megabytes`` of weights."""

    shapes: tuple[str, ...]
    sizes: int
    kinds: tuple[str, ...]
    rows: tuple[int, ...]
    rounds: int
    megabytes: int


def made(kind: str, size: tuple[int, int], seed: int) -> tuple[WeightFormat, Tensors]:
    """A random matrix of a kind."""
    generator = torch.Generator().manual_seed(seed)
    if kind == PLAIN:
        plain = torch.randn(size, generator=generator).to(torch.bfloat16)
        return FLOATS[torch.bfloat16], {"weight": plain}
    if kind in FORMATS:
        from packers.blocks import random_blocks

        blocks = random_blocks(kind, size, 1e-3, generator)
        return FORMATS[kind], FORMATS[kind].convert({"weight": blocks})
    format = register(OnLoad(bits=BITS[kind], group=GROUP, scale=torch.float16))
    codes, scale = format.layout(size).values()
    return format, {
        "codes": torch.randint(256, codes[0], generator=generator, dtype=torch.uint8),
        "scale": torch.rand(scale[0], generator=generator).to(scale[1]),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Matrices of one size and kind."""

    format: WeightFormat
    matrices: Sequence[Tensors]
    nbytes: int

    @classmethod
    def of(cls, kind: str, size: tuple[int, int], megabytes: int) -> Held:
        """As many as take so many megabytes, one at least."""
        format, first = made(kind, size, 0)
        nbytes = sum(part.nbytes for part in first.values())
        others = range(1, -(-(megabytes << 20) // nbytes))
        matrices = [first, *(made(kind, size, seed)[1] for seed in others)]
        return cls(format=format, matrices=matrices, nbytes=nbytes * len(matrices))

    def seconds(self, x: torch.Tensor) -> float:
        """Of the processor for x by all of them; the best of three."""
        best = float("inf")
        for _ in range(3):
            started = time.thread_time()
            for tensors in self.matrices:
                self.format.linear(x, tensors, None)
            best = min(best, time.thread_time() - started)
        return best


@torch.no_grad()
def measure(size: tuple[int, int], settings: Settings, probe: MemoryProbe) -> list[dict[str, Any]]:
    """Every kind and number of rows with matrices of one size, in turns."""
    kinds = dict.fromkeys((PLAIN, *settings.kinds))
    held = {kind: Held.of(kind, size, settings.megabytes) for kind in kinds}
    return [case for rows in settings.rows for case in _cases(rows, size, held, settings, probe)]


def _cases(
    rows: int,
    size: tuple[int, int],
    held: Mapping[str, Held],
    settings: Settings,
    probe: MemoryProbe,
) -> Iterator[dict[str, Any]]:
    x = torch.randn(rows, size[1]).to(torch.bfloat16)
    speeds: dict[str, list[float]] = {kind: [] for kind in held}
    shares: dict[str, list[float]] = {kind: [] for kind in held}
    for index in range(settings.rounds):
        before = probe()
        for kind in rotated(list(held), index):
            took, after = held[kind].seconds(x), probe()
            products = rows * size[0] * size[1] * len(held[kind].matrices)
            speeds[kind].append(2e-9 * products / took)
            shares[kind].append(2 * held[kind].nbytes / took / (before + after))
            before = after
    for kind in held:
        yield {
            **{"outputs": size[0], "inputs": size[1], "rows": rows, "kind": kind},
            "gflops": asdict(Spread.of(speeds[kind])),
            "share": asdict(Spread.of(shares[kind])),
            "ratio": asdict(ratios(speeds[kind], speeds[PLAIN])),
        }


def run(settings: Settings) -> dict[str, Any]:
    """Every figure, as it is written to JSON."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        probe = MemoryProbe(torch.device("cpu"))
        each = (projections(SHAPES[shape])[: settings.sizes] for shape in settings.shapes)
        sizes = dict.fromkeys(itertools.chain(*each))
        cases = [case for size in sizes for case in measure(size, settings, probe)]
        about = machine(torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)
    return {"machine": about, "settings": asdict(settings), "cases": cases}


def report(result: dict[str, Any]) -> str:
    """Markdown, a row for each size, number of rows and kind."""
    rows = [
        (
            f"{case['outputs']} x {case['inputs']}",
            *(str(case["rows"]), case["kind"]),
            Spread(**case["gflops"]).text(1),
            *(Spread(**case[key]).text() for key in ("share", "ratio")),
        )
        for case in result["cases"]
    ]
    headings = ("out x in", "rows", "weights", "GFLOP/s", "read", f"beside {PLAIN}")
    about = (
        "One thread, median (min..max). Read: weights read a second, as a share of what the memory "
        f"probe reads around the sample. Beside {PLAIN}: times as fast, in one round."
    )
    return f"{machine_line(result['machine'])}\n\n{about}\n\n{markdown(headings, rows)}\n"


FULL = Settings(
    shapes=("1.1B",),
    sizes=9,
    kinds=("int8", "int4", "Q8_0", "Q4_0", "Q4_K", "Q6_K"),
    rows=(1, 4, 8, 16),
    rounds=5,
    megabytes=64,
)
QUICK = Settings(
    shapes=("tiny",), sizes=2, kinds=("int4", "Q4_0"), rows=(5,), rounds=1, megabytes=0
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench packed", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny weights: does the bench run?")
    add_outputs(parser)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="models")
    parser.add_argument("--sizes", type=int, help="so many of a model's matrices, the largest")
    parser.add_argument("--kinds", nargs="+", choices=KINDS)
    parser.add_argument("--rows", nargs="+", type=int, help="rows of x, e.g. tokens of a batch")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--megabytes", type=int, help="weights that a sample reads at least")
    options = parser.parse_args(arguments)
    result = run(overridden(QUICK if options.quick else FULL, options))
    write_outputs(options, result, report(result))
    print(report(result))
    return 0
