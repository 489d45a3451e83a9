"""exkv::sample beside what it replaces; ``python -m tests.bench sample``.

Three ways to a token from the same logits, in turn: the op with its kernel, the op's reference in
torch, and transformers' warpers with ``torch.multinomial``, most of whose time goes into a random
number for each token of the vocabulary. Ratios are of times in one round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from exkv import ops

from .common import (
    DTYPES,
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

OURS, REFERENCE, PEER = "exkv", "reference", "transformers"
Call = Callable[[], torch.Tensor]

#: Name -> the op's temperature, top_k, top_p, min_p.
CHAINS = {
    "top-k 50": (0.8, 50, 1.0, 0.0),
    "top-k 50, top-p 0.9": (0.8, 50, 0.9, 0.0),
    "top-p 0.9": (0.8, 0, 0.9, 0.0),
    "min-p 0.05": (0.8, 0, 1.0, 0.05),
    "none": (0.8, 0, 1.0, 0.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured; logits are normal numbers, three times as wide as the standard's."""

    vocabularies: tuple[int, ...]
    dtypes: tuple[str, ...]
    rows: tuple[int, ...]
    rounds: int


# Measuring ------------------------------------------------------------------------------------


def warped(logits: torch.Tensor, chain: tuple[float, int, float, float]) -> Call:
    """transformers' way: float32 scores, a warper for each step that does something, a draw."""
    import transformers as hf

    temperature, top_k, top_p, min_p = chain
    warpers = hf.LogitsProcessorList([hf.TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(hf.TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(hf.TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(hf.MinPLogitsWarper(min_p))
    return lambda: torch.multinomial(warpers(None, logits.float()).softmax(-1), 1)


def timed(call: Call) -> float:
    """Seconds of one call, the best of three."""
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


def measure_case(
    logits: torch.Tensor, chain: tuple[float, int, float, float], rounds: int
) -> dict[str, Any]:
    """Seconds of each way, and how many times as long as the op the others take."""
    uniforms = torch.rand(len(logits), dtype=torch.float64)
    op, reference = torch.ops.exkv.sample.default, ops.REFERENCES["sample"]
    calls: dict[str, Call] = {
        OURS: lambda: op(logits, uniforms, *chain, 0.0, False),
        REFERENCE: lambda: reference(logits, uniforms, *chain, 0.0, False),
        PEER: warped(logits, chain),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for index in range(rounds):
        for name in rotated(list(calls), index):
            seconds[name].append(timed(calls[name]))
    return {
        "seconds": {name: asdict(Spread.of(values)) for name, values in seconds.items()},
        "ratio": {name: asdict(ratios(seconds[name], seconds[OURS])) for name in (REFERENCE, PEER)},
    }


def run(settings: Settings) -> dict[str, Any]:
    """Every figure, as it is written to JSON."""
    cases: list[dict[str, Any]] = []
    for vocab_size in settings.vocabularies:
        print(f"measuring a vocabulary of {vocab_size}", flush=True)
        for dtype in settings.dtypes:
            for rows in settings.rows:
                logits = (torch.randn(rows, vocab_size) * 3).to(DTYPES[dtype])
                about = {"vocabulary": vocab_size, "dtype": dtype, "rows": rows}
                for name, chain in CHAINS.items():
                    figures = measure_case(logits, chain, settings.rounds)
                    cases.append({**about, "chain": name, **figures})
    return {
        "machine": machine(torch.device("cpu")),
        "settings": asdict(settings),
        "cases": cases,
    }


# Reporting ------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> str:
    """Markdown, a row for each vocabulary, number of rows and chain."""
    headings = (
        "chain",
        "vocabulary",
        "rows",
        f"{OURS}, us",
        f"{REFERENCE} / {OURS}",
        f"{PEER} / {OURS}",
    )
    rows = [
        (
            f"{case['chain']} {case['dtype']}",
            str(case["vocabulary"]),
            str(case["rows"]),
            f"{case['seconds'][OURS]['median'] * 1e6:.0f}",
            *(Spread(**case["ratio"][name]).text(1) for name in (REFERENCE, PEER)),
        )
        for case in result["cases"]
    ]
    parts = [
        machine_line(result["machine"]),
        "Ratios are of times in one round, above 1 exkv is faster. Median (min..max).",
        markdown(headings, rows),
    ]
    return "\n\n".join(parts) + "\n"


# Command --------------------------------------------------------------------------------------

FULL = Settings(vocabularies=(32_000, 128_256), dtypes=("fp32", "bf16"), rows=(1, 8), rounds=7)
QUICK = Settings(vocabularies=(512,), dtypes=("fp32",), rows=(1, 2), rounds=2)


def parse(arguments: Sequence[str] | None) -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="python -m tests.bench sample", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few tokens: does the bench run?")
    add_outputs(parser)
    parser.add_argument("--vocabularies", nargs="+", type=int, help="tokens to choose from")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES)
    parser.add_argument("--rows", nargs="+", type=int, help="rows of logits")
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args(arguments)
    return overridden(QUICK if options.quick else FULL, options), options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    settings, options = parse(arguments)
    result = run(settings)
    write_outputs(options, result, report(result))
    print(f"\n{report(result)}")
    return 0
