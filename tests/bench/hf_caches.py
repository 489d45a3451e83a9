"""Stock caches and exkv's under one stock transformers model: decoding, and the peak of memory.

``python -m tests.bench hf``: every round decodes at every context with every cache, beginning with
another one. Peaks are of what torch's ops allocate beside the model while it decodes, the cache
included, counted op by op. transformers' quantized cache is its fp8 one: it needs no package.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    QuantizedCache,
)

from exkv.integrations.transformers import HFCache
from exkv.integrations.transformers.placing import Storages

from .common import (
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

#: Name -> attention, and a cache; the first is what others are set beside.
CACHES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "stock dynamic": ("sdpa", lambda config: DynamicCache(config=config)),
    "exkv dynamic": ("exkv", lambda config: HFCache(config, "dynamic")),
    "stock fp8": ("sdpa", lambda config: QuantizedCache("fp8", config)),
    "exkv 8bit": ("exkv", lambda config: HFCache(config, "8bit")),
    "exkv 4bit": ("exkv", lambda config: HFCache(config, "4bit")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured: contexts in tokens, tokens decoded at each, and rounds."""

    contexts: tuple[int, ...] = (512, 2048)
    tokens: int = 16
    rounds: int = 5
    layers: int = 6
    hidden: int = 512


def model_of(settings: Settings) -> PreTrainedModel:
    """A Llama with heads of 64, two query heads a key head, in float32."""
    heads = settings.hidden // 64
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=settings.hidden,
        intermediate_size=2 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=max(settings.contexts) + settings.tokens,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    name: str,
    context: int,
    tokens: int,
    begins: Callable[[], None] = lambda: None,
) -> float:
    """Tokens a second behind a prompt of this length, after which ``begins`` is called."""
    implementation, make = CACHES[name]
    model.set_attn_implementation(implementation)
    cache = make(model.config)
    ids = torch.arange(context).view(1, -1) % 4000 + 3
    model(ids, past_key_values=cache, logits_to_keep=1)
    begins()
    started = time.perf_counter()
    for _ in range(tokens):
        model(ids[:, :1], past_key_values=cache)
    return tokens / (time.perf_counter() - started)


def peak(model: PreTrainedModel, name: str, context: int) -> int:
    """Bytes at most, over four tokens behind a prompt of this length."""
    with Storages() as storages:
        decode(model, name, context, 4, lambda: setattr(storages, "peak", storages.current))
    return storages.peak


def measure(settings: Settings) -> list[dict[str, Any]]:
    """A line for every context and cache."""
    model = model_of(settings)
    speeds: dict[tuple[int, str], list[float]] = {}
    for index in range(settings.rounds):
        for context in settings.contexts:
            for name in rotated(list(CACHES), index):
                speed = decode(model, name, context, settings.tokens)
                speeds.setdefault((context, name), []).append(speed)
    base = next(iter(CACHES))
    return [
        {
            "context": context,
            "cache": name,
            "tokens_s": asdict(Spread.of(values)),
            "ratio": asdict(ratios(values, speeds[context, base])),
            "peak": peak(model, name, context),
        }
        for (context, name), values in sorted(speeds.items(), key=lambda item: item[0][0])
    ]


def as_text(cases: Sequence[dict[str, Any]], line: str) -> str:
    rows = [
        [
            f"{case['context']}, {case['cache']}",
            Spread(**case["tokens_s"]).text(1),
            Spread(**case["ratio"]).text(),
            f"{case['peak'] / (1 << 20):.1f}",
        ]
        for case in cases
    ]
    headings = ["context, cache", "tokens/s", f"by {next(iter(CACHES))}", "peak, MiB"]
    return f"{line}.\n\nMedian, least and most of the rounds:\n\n{markdown(headings, rows)}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench hf", description=__doc__)
    parser.add_argument("--contexts", type=int, nargs="+")
    for name in ("tokens", "rounds", "layers", "hidden"):
        parser.add_argument(f"--{name}", type=int)
    add_outputs(parser)
    options = parser.parse_args(arguments)
    settings = overridden(Settings(), options)
    cases, about = measure(settings), machine(torch.device("cpu"))
    text = as_text(cases, machine_line(about))
    print(text)
    write_outputs(options, {"machine": about, "settings": asdict(settings), "cases": cases}, text)
    return 0
