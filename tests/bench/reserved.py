"""What a card reserves beyond its ledger's bytes; ``python -m tests.bench reserved``.

From published configs alone: no weight is read, no device touched, nothing timed. A model is
planned on one card that holds it, with a cache of one row. Then a load is replayed by the rules of
torch's caching allocator (``exkv.caching_allocator``), unit by unit: once with an allocation for
every parameter and every tensor of the cache, and once with one for a unit's weights and one for
its part of the cache, as exkv loads. "Planned" is the ledger's line for it, which also has what
calls reserve beyond their workspace.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from exkv import Cache, Model, ModelConfig, place
from exkv.caching_allocator import CachingAllocator, Rules
from exkv.planning.model import ModelShape
from exkv.weights.floats import FLOATS
from exkv.weights.methods import METHODS
from exkv.weights.settings import ROUTERS, stays_float

from .harness import markdown, setting

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }


_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    **_sizes(2048, 6144, 48, 32, 4, 151936),
}
#: The sizes of published configs: Llama 3 8B and 70B, Qwen 2 7B, Qwen 2.5 32B, Qwen3-30B-A3B.
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama 8B": _LLAMA | _sizes(4096, 14336, 32, 32, 8, 128256),
    "Qwen 2 7B": _QWEN | _sizes(3584, 18944, 28, 28, 4, 152064),
    "Qwen 2.5 32B": _QWEN | _sizes(5120, 27648, 64, 40, 8, 152064),
    "70B": _LLAMA | _sizes(8192, 28672, 80, 64, 8, 128256),
    "Qwen3-30B-A3B": _QWEN3_MOE,
}
#: Model, weights, tokens of the cache.
CASES = {
    "Llama 8B bf16": ("Llama 8B", None, 4096),
    "Llama 8B int4": ("Llama 8B", "int4", 4096),
    "Qwen 2 7B int4": ("Qwen 2 7B", "int4", 4096),
    "Qwen 2.5 32B int4, 4k": ("Qwen 2.5 32B", "int4", 4096),
    "Qwen 2.5 32B int4, 20k": ("Qwen 2.5 32B", "int4", 20480),
    "70B int8": ("70B", "int8", 4096),
    "Qwen3-30B-A3B bf16": ("Qwen3-30B-A3B", None, 4096),
    "Qwen3-30B-A3B int4": ("Qwen3-30B-A3B", "int4", 4096),
    "Qwen3-30B-A3B Q4_K": ("Qwen3-30B-A3B", "Q4_K", 4096),
}
_METHOD = "q4_k of a bare config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is planned."""

    cases: tuple[str, ...] = setting(tuple(CASES), choices=CASES)


QUICK = {"cases": ("Llama 8B int4", "Qwen 2 7B int4")}


def measure(settings: Settings) -> dict[str, Any]:
    return {"cases": [_figures(name) for name in settings.cases]}


def _figures(name: str) -> dict[str, Any]:
    config, weights, tokens = CASES[name]
    model = _model(CONFIGS[config], weights)
    cache = Cache(model, tokens)
    (ledger,) = place(model, cache, devices="900G").ledgers
    whole = list(_allocations(model, cache, in_one=False))
    units = list(_allocations(model, cache, in_one=True))
    return {
        "name": name,
        "weights": ledger.weights,
        "cache": ledger.cache,
        "workspace": ledger.workspace,
        "logits": ledger.logits,
        "before": _beyond(whole),
        "after": _beyond(units),
        "segments": ledger.segments,
        "allocator": ledger.allocator,
    }


def _model(config: dict[str, Any], weights: str | None) -> Model:
    read = ModelConfig.from_dict(config)
    if weights != "Q4_K":
        return Model(read, weights=weights)
    _q4_k()
    return Model(replace(read, quantization={"quant_method": _METHOD}))


def _q4_k() -> None:
    """A quantization method: all matrices but the ends and the routers are Q4_K."""
    gguf = importlib.import_module("exkv.weights.gguf")
    made = ModuleType("q4_k")
    format = next(each for each in gguf.FORMATS.values() if each.name == "gguf Q4_K")

    def formats_of(config: ModelConfig, dtype: Any) -> Any:
        def format_of(layer: str, size: Any) -> Any:
            floats = ".layers." not in layer or stays_float(layer, ROUTERS)
            return FLOATS[dtype] if floats else format

        return format_of

    made.formats_of = formats_of
    sys.modules[_METHOD] = made
    METHODS[_METHOD] = _METHOD


def _allocations(model: Model, cache: Cache, *, in_one: bool) -> Iterator[list[int]]:
    """The bytes of each lasting allocation, by unit."""
    for unit in ModelShape.of(model).units:
        weights = [tensor.nbytes for tensor in unit.shapes.values()]
        layer = None if unit.spec.layer is None else cache.layers[unit.spec.layer]
        layout = {} if layer is None else layer.spec.layout(layer.spec.capacity)
        kept = [math.prod(shape) * dtype.itemsize for shape, dtype in layout.values()]
        if in_one:
            rules = Rules()
            yield [
                rules.request_size(sum(map(rules.rounded, each)))
                for each in (weights, kept)
                if each
            ]
        else:
            yield [*weights, *kept]


def _beyond(units: list[list[int]]) -> int:
    """Bytes reserved beyond the rounded bytes that a load asks for."""
    allocator = CachingAllocator()
    asked = [nbytes for unit in units for nbytes in unit]
    for nbytes in asked:
        allocator.allocate(nbytes)
    return allocator.reserved - sum(map(allocator.rules.rounded, asked))


#: Column -> line of the figures.
_COLUMNS = {
    "weights": "weights",
    "cache": "cache",
    "workspace": "workspace",
    "logits": "logits",
    "an allocation a parameter": "before",
    "one a unit": "after",
    "planned, with calls": "allocator",
}


def report(result: dict[str, Any]) -> list[str]:
    rows = [
        [case["name"], *(f"{case[line] / (1 << 20):,.0f}" for line in _COLUMNS.values())]
        for case in result["cases"]
    ]
    note = "*MiB. The last three columns are reserved beyond the ledger's other lines.*"
    return [markdown(["model", *_COLUMNS], rows), note]
