"""Stock caches and exkv's under one stock transformers model: decoding, and the peak of memory.

``python -m tests.bench hf``: every round decodes at every context with every cache, beginning with
another one. Peaks are of what torch's ops allocate beside the model while it decodes, the cache
included, counted op by op. transformers' quantized caches are its fp8 one, and those that need
other packages where these are here: ``pip install optimum-quanto hqq`` (the former compiles for
some minutes when it is first used).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    QuantizedCache,
)

from exkv.integrations.transformers import HFCache
from exkv.planning.live_storages import LiveStorages

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
    "stock HQQ 8": ("sdpa", lambda config: QuantizedCache("hqq", config, nbits=8)),
    "exkv 8bit": ("exkv", lambda config: HFCache(config, "8bit")),
    "stock quanto 4": ("sdpa", lambda config: QuantizedCache("quanto", config, nbits=4)),
    "stock HQQ 4": ("sdpa", lambda config: QuantizedCache("hqq", config, nbits=4)),
    "exkv 4bit": ("exkv", lambda config: HFCache(config, "4bit")),
}


class Allocations(LiveStorages, TorchDispatchMode):
    """Counts the storages that ops make, those inside of tensors made of others, too."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # made of others: its own ops come here
        out = func(*args, **(kwargs or {}))
        known = {_key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and _key(x) not in known:
                self.follow(x.untyped_storage())
        return out


def _key(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def served(config: Any) -> tuple[list[str], list[str]]:
    """Names of caches that can be made here, and why others can't."""
    names, reasons = [], []
    for name, (_, make) in CACHES.items():
        try:
            make(config)
        except ImportError as error:
            reasons.append(f"{name} is left out: {str(error).splitlines()[0]}")
        else:
            names.append(name)
    return names, reasons


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
    model(ids, cache=cache, logits_to_keep=1)
    begins()
    started = time.perf_counter()
    for _ in range(tokens):
        model(ids[:, :1], cache=cache)
    return tokens / (time.perf_counter() - started)


def peak(model: PreTrainedModel, name: str, context: int) -> int:
    """Bytes at most, over four tokens behind a prompt of this length."""
    with Allocations() as storages:
        decode(model, name, context, 4, lambda: setattr(storages, "peak", storages.current))
    return storages.peak


def measure(settings: Settings) -> tuple[list[dict[str, Any]], list[str]]:
    """A line for every context and cache, and why some caches have none."""
    model = model_of(settings)
    names, reasons = served(model.config)
    speeds: dict[tuple[int, str], list[float]] = {}
    for index in range(settings.rounds):
        for context in settings.contexts:
            for name in rotated(names, index):
                speed = decode(model, name, context, settings.tokens)
                speeds.setdefault((context, name), []).append(speed)
    base = next(iter(CACHES))
    cases = [
        {
            "context": context,
            "cache": name,
            "tokens_s": asdict(Spread.of(values)),
            "ratio": asdict(ratios(values, speeds[context, base])),
            "peak": peak(model, name, context),
        }
        for (context, name), values in sorted(speeds.items(), key=lambda item: item[0][0])
    ]
    return cases, reasons


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
    (cases, reasons), about = measure(settings), machine(torch.device("cpu"))
    text = "\n".join((as_text(cases, machine_line(about)), *reasons))
    print(text)
    write_outputs(options, {"machine": about, "settings": asdict(settings), "cases": cases}, text)
    return 0
