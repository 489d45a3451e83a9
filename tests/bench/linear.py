"""exkv::linear beside torch's F.linear at decoding's row counts; ``python -m tests.bench linear``.

Each figure is the rate at which weights are read, as a share of what the memory probe reads before
and after it, on average. Enough weights of a shape are read in turn that none is in cache when its
turn comes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

import exkv.ops  # noqa: F401  (defines torch.ops.exkv.linear)

from .common import (
    DTYPES,
    SHAPES,
    MemoryProbe,
    Shape,
    Spread,
    add_outputs,
    disturbed,
    machine,
    machine_line,
    markdown,
    overridden,
    ratios,
    rotated,
    write_outputs,
)

OURS, PEER = "exkv", "torch"
Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured; a sample reads at least ``megabytes`` of weights."""

    shapes: tuple[str, ...]
    dtypes: tuple[str, ...]
    rows: tuple[int, ...]
    rounds: int
    megabytes: int


def projections(shape: Shape) -> list[tuple[int, int]]:
    """(out, in) of a model's linear layers, each once, the largest first."""
    tensors = {name: size for name, size in shape.tensors().items() if "embed" not in name}
    return sorted({size for size in tensors.values() if len(size) == 2}, reverse=True)


# Measuring ------------------------------------------------------------------------------------


def sample(call: Call, x: torch.Tensor, weights: torch.Tensor) -> float:
    """Bytes of weights (count, out, in) that are read a second; best of three, as the probe."""
    best = 0.0
    for _ in range(3):
        started = time.perf_counter()
        for weight in weights:
            call(x, weight)
        best = max(best, weights.nbytes / (time.perf_counter() - started))
    return best


@torch.no_grad()
def measure_case(
    x: torch.Tensor, weights: torch.Tensor, rounds: int, probe: MemoryProbe
) -> dict[str, Any]:
    """Both read the same weights in turn; a probe comes between any two samples."""
    ours = torch.ops.exkv.linear.default
    calls: dict[str, Call] = {OURS: lambda x, w: ours(x, w, None), PEER: F.linear}
    rates: dict[str, list[float]] = {name: [] for name in calls}
    shares: dict[str, list[float]] = {name: [] for name in calls}
    probes = []
    for call in calls.values():
        call(x, weights[0])
    for round_index in range(rounds):
        before = probe()
        for name in rotated(list(calls), round_index):
            rates[name].append(sample(calls[name], x, weights))
            after = probe()
            shares[name].append(2 * rates[name][-1] / (before + after))
            probes.append((before, after))
            before = after
    return {
        "ratio": asdict(ratios(rates[OURS], rates[PEER])),
        "share": {name: asdict(Spread.of(values)) for name, values in shares.items()},
        "bytes_per_second": {name: asdict(Spread.of(values)) for name, values in rates.items()},
        "disturbed": len(disturbed(probes)),
        "samples": len(probes),
    }


def run(settings: Settings) -> dict[str, Any]:
    """Every figure, as it is written to JSON."""
    device = torch.device("cpu")
    probe = MemoryProbe(device)
    cases: list[dict[str, Any]] = []
    for shape in settings.shapes:
        for dtype in settings.dtypes:
            print(f"measuring {shape} {dtype}", flush=True)
            for outputs, inputs in projections(SHAPES[shape]):
                nbytes = outputs * inputs * DTYPES[dtype].itemsize
                count = -(-(settings.megabytes << 20) // nbytes)
                weights = torch.randn(1, outputs, inputs).to(DTYPES[dtype]).repeat(count, 1, 1)
                for rows in settings.rows:
                    x = torch.randn(rows, inputs).to(DTYPES[dtype])
                    about = {"shape": shape, "dtype": dtype, "rows": rows}
                    about |= {"outputs": outputs, "inputs": inputs}
                    cases.append(about | measure_case(x, weights, settings.rounds, probe))
    return {"machine": machine(device), "settings": asdict(settings), "cases": cases}


# Reporting ------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> str:
    """Markdown, a row for each shape of weights and number of rows."""
    headings = ("model", "out x in", "rows", f"{OURS} / {PEER}", f"{OURS} read", f"{PEER} read")
    rows = [
        (
            f"{case['shape']} {case['dtype']}",
            f"{case['outputs']} x {case['inputs']}",
            str(case["rows"]),
            Spread(**case["ratio"]).text(),
            *(Spread(**case["share"][name]).text() for name in (OURS, PEER)),
        )
        for case in result["cases"]
    ]
    noisy = sum(case["disturbed"] for case in result["cases"])
    samples = sum(case["samples"] for case in result["cases"])
    parts = [
        machine_line(result["machine"]),
        "Ratios are of rates in one round, above 1 exkv is faster. Read: weights read a second, "
        "as a share of what the memory probe reads around the sample. Median (min..max).",
        markdown(headings, rows),
        f"Disturbed samples (the memory probe was slow): {noisy} of {samples}.",
    ]
    return "\n\n".join(parts) + "\n"


# Command --------------------------------------------------------------------------------------

FULL = Settings(
    shapes=("150M", "1.1B"),
    dtypes=("bf16", "fp32"),
    rows=(1, 2, 4, 8, 12, 16),
    rounds=5,
    megabytes=128,
)
QUICK = Settings(shapes=("tiny",), dtypes=("bf16",), rows=(1, 4), rounds=2, megabytes=1)


def parse(arguments: Sequence[str] | None) -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="python -m tests.bench linear", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny weights: does the bench run?")
    add_outputs(parser)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="models")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES)
    parser.add_argument("--rows", nargs="+", type=int, help="rows of x, e.g. tokens of a batch")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--megabytes", type=int, help="weights that a sample reads at least")
    options = parser.parse_args(arguments)
    return overridden(QUICK if options.quick else FULL, options), options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    settings, options = parse(arguments)
    result = run(settings)
    write_outputs(options, result, report(result))
    print(f"\n{report(result)}")
    return 0
