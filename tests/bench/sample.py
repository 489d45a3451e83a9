"""exkv::sample beside what it replaces: ``python -m tests.bench sample``.

Three ways to a token from the same logits, in turn: the op with its kernel, the op's reference in
torch, and transformers' warpers with ``torch.multinomial``, most of whose time goes into a random
number for each token of the vocabulary. Ratios are of times in one round.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exkv import ops

from .harness import by_way, in_turns, markdown, ratios, seconds, setting, show, spread
from .shapes import DTYPES

OURS, REFERENCE, PEER = "exkv", "reference", "transformers"
Chain = tuple[float, int, float, float]

#: Name -> the op's temperature, top_k, top_p, min_p.
CHAINS: dict[str, Chain] = {
    "top-k 50": (0.8, 50, 1.0, 0.0),
    "top-k 50, top-p 0.9": (0.8, 50, 0.9, 0.0),
    "top-p 0.9": (0.8, 0, 0.9, 0.0),
    "min-p 0.05": (0.8, 0, 1.0, 0.05),
    "none": (0.8, 0, 1.0, 0.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured; logits are normal numbers, three times as wide as the standard's."""

    vocabularies: tuple[int, ...] = setting((32_000, 128_256), "tokens to choose from")
    dtypes: tuple[str, ...] = setting(("fp32", "bf16"), choices=DTYPES)
    rows: tuple[int, ...] = setting((1, 8), "of logits")
    rounds: int = 7


def warped(logits: Tensor, chain: Chain) -> Callable[[], Tensor]:
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


def measure_case(logits: Tensor, chain: Chain, rounds: int) -> dict[str, Any]:
    """Seconds of each way, and how many times as long as the op the others take."""
    uniforms = torch.rand(len(logits), dtype=torch.float64)
    op, reference = torch.ops.exkv.sample.default, ops.REFERENCES["sample"]
    calls = {
        OURS: lambda: op(logits, uniforms, *chain, 0.0, False),
        REFERENCE: lambda: reference(logits, uniforms, *chain, 0.0, False),
        PEER: warped(logits, chain),
    }
    ways = {name: lambda _, call=call: seconds(call, 3) for name, call in calls.items()}
    found = by_way(in_turns(ways, rounds, warm=1))
    return {
        "seconds": {name: spread(values) for name, values in found.items()},
        "ratio": {name: ratios(found[name], found[OURS]) for name in (REFERENCE, PEER)},
    }


def measure(settings: Settings) -> dict[str, Any]:
    """Every figure."""
    found = []
    for vocab, dtype, rows in itertools.product(
        settings.vocabularies, settings.dtypes, settings.rows
    ):
        logits = (torch.randn(rows, vocab) * 3).to(DTYPES[dtype])
        for name, chain in CHAINS.items():
            about = {"vocabulary": vocab, "dtype": dtype, "rows": rows, "chain": name}
            found.append(about | measure_case(logits, chain, settings.rounds))
    return {"cases": found}


def report(result: dict[str, Any]) -> list[str]:
    """A row for each vocabulary, number of rows and chain."""
    headings = ("chain", "vocabulary", "rows", f"{OURS}, us")
    rows = [
        (
            *(f"{case['chain']} {case['dtype']}", case["vocabulary"], case["rows"]),
            f"{case['seconds'][OURS]['median'] * 1e6:.0f}",
            *(show(case["ratio"][name], 1) for name in (REFERENCE, PEER)),
        )
        for case in result["cases"]
    ]
    return [
        "Ratios are of times in one round, above 1 exkv is faster. Median (min..max).",
        markdown((*headings, f"{REFERENCE} / {OURS}", f"{PEER} / {OURS}"), rows),
    ]


QUICK = {"vocabularies": (512,), "dtypes": ("fp32",), "rows": (1, 2), "rounds": 2}
