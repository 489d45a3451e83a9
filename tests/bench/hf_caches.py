"""Stock caches and exkv's under one stock transformers model: decoding, and the peak of memory.

``python -m tests.bench hf``: every round decodes at every context with every cache. Peaks are of
what torch's ops allocate beside the model while it decodes, the cache included, counted op by op.
transformers' quantized caches are its fp8 one, and those that need other packages where these are
here: ``pip install optimum-quanto hqq`` (the former compiles for some minutes when it is first
used).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
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

from .harness import by_way, in_turns, markdown, ratios, seconds, setting, show, spread

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
BASE = next(iter(CACHES))


class Allocations(LiveStorages, TorchDispatchMode):
    """Counts the storages that ops allocate, also those inside of wrapper subclasses."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # made of others: its own ops come here
        out = func(*args, **(kwargs or {}))
        known = {_key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and _key(x) not in known:
                self.follow(x.untyped_storage())
        return out


def _key(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def served(config: Any) -> tuple[list[str], list[str]]:
    """Names of caches that can be built here, and why others can't."""
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
    """What is measured."""

    contexts: tuple[int, ...] = setting((512, 2048), "tokens")
    tokens: int = setting(16, "decoded at each")
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
def decode(model: PreTrainedModel, name: str, context: int) -> Callable[[int], None]:
    """A function that decodes ``tokens`` tokens after a prompt of this length."""
    implementation, make = CACHES[name]
    model.set_attn_implementation(implementation)
    cache = make(model.config)
    ids = torch.arange(context).view(1, -1) % 4000 + 3
    model(ids, cache=cache, logits_to_keep=1)

    @torch.no_grad()
    def steps(count: int) -> None:
        for _ in range(count):
            model(ids[:, :1], cache=cache)

    return steps


def speed(model: PreTrainedModel, name: str, context: int, tokens: int, index: int = 0) -> float:
    """Tokens a second."""
    return tokens / seconds(partial(decode(model, name, context), tokens))


def peak(model: PreTrainedModel, name: str, context: int) -> int:
    """Peak bytes over four tokens."""
    with Allocations() as storages:
        steps = decode(model, name, context)
        storages.peak = storages.current
        steps(4)
    return storages.peak


def measure(settings: Settings) -> dict[str, Any]:
    """A case for every context and cache, and why some caches are left out."""
    model = model_of(settings)
    names, reasons = served(model.config)
    cases = []
    for context in settings.contexts:
        how = (context, settings.tokens)
        found = by_way(
            in_turns({n: partial(speed, model, n, *how) for n in names}, settings.rounds)
        )
        for name in names:
            figures = {"tokens_s": spread(found[name]), "ratio": ratios(found[name], found[BASE])}
            about = {"context": context, "cache": name, "peak": peak(model, name, context)}
            cases.append(about | figures)
    return {"cases": cases, "left_out": reasons}


def report(result: dict[str, Any]) -> list[str]:
    rows = [
        [f"{case['context']}, {case['cache']}", show(case["tokens_s"], 1), show(case["ratio"])]
        + [f"{case['peak'] / (1 << 20):.1f}"]
        for case in result["cases"]
    ]
    table = markdown(["context, cache", "tokens/s", f"by {BASE}", "peak, MiB"], rows)
    return ["Median, least and most of the rounds:", table, *result["left_out"]]


QUICK = {"contexts": (500,), "tokens": 1, "rounds": 1, "layers": 2, "hidden": 128}
