"""Decoding and prompts of other families' models: ``python -m tests.bench families``.

A random Qwen3-Next, DeepSeek-V3 and Qwen3-MoE, of a tenth of a billion to one billion parameters,
in bf16 beside transformers, and, where llama-cpp-python is installed (``llamacpp.py``), from one
GGUF file in Q8_0, which llama.cpp's own converter writes (``tests/packers/llama_cpp.py``). Each
sample runs its prompt anew, since recurrent states can't be cropped, and then decodes. The share
counts the weights that a token touches, of experts as many as it is routed to, and keys and values.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from exkv import Model

from . import llamacpp
from .decode import Engine, Ours, Theirs
from .harness import MemoryProbe, by_way, in_turns, markdown, setting, show, spread

FLOATS, FILE = "bf16", "Q8_0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured."""

    families: tuple[str, ...] = setting(
        ("Qwen3Next", "DeepseekV3", "Qwen3Moe"), "one after the other"
    )
    contexts: tuple[int, ...] = setting((16, 2048), "tokens of the prompts")
    steps: int = setting(16, "tokens that are decoded behind each")
    rounds: int = 3
    small: bool = setting(False, "models of a few million parameters")

    def __post_init__(self) -> None:
        if unknown := set(self.families) - CONFIGS.keys():
            raise ValueError(f"there are {', '.join(CONFIGS)}, and not {', '.join(unknown)}")


COMMON = {
    "vocab_size": 32000, "hidden_size": 1536, "num_hidden_layers": 16, "num_attention_heads": 12,
    "num_experts_per_tok": 4, "moe_intermediate_size": 512, "max_position_embeddings": 8192,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
SMALL = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
#: Family -> what its config has beside.
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3Next": {
        "num_key_value_heads": 2, "head_dim": 128, "num_experts": 16, "intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "linear_num_key_heads": 8,
        "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
    "DeepseekV3": {
        "intermediate_size": 4096, "n_routed_experts": 16, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 512, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    },
    "Qwen3Moe": {
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 64, "num_experts_per_tok": 8,
        "moe_intermediate_size": 256, "intermediate_size": 512,
    },
}  # fmt: skip


def config_of(family: str, small: bool, others: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Its config; ``others`` are values in place of its own."""
    import transformers

    values = {**COMMON, **CONFIGS[family], **(SMALL if small else {}), **others}
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    return getattr(transformers, f"{family}Config")(**values)


def write(folder: Path, config: Any, kind: str = "q8_0") -> Path:
    """A random checkpoint in bf16, and a file of it in this type where llama.cpp reads one."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    del model
    if config.model_type == "deepseek_v3":  # what the converter asks of a published config.json
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "scoring_func": "sigmoid"}))
    if llamacpp.is_installed():
        import golden
        from packers.llama_cpp import Converter

        converter = Converter(golden.CONVERTER)
        try:
            converter(folder, folder / llamacpp.FILE, kind)
        finally:
            converter.close()
    return folder


def engines(folder: Path, room: int) -> dict[str, Engine]:
    """Each of one row: exkv and transformers of the floats, exkv and llama.cpp of the file."""
    found: dict[str, Engine] = {
        f"exkv, {FLOATS}": Ours(Model(folder), "fp16", room, 1).load("cpu"),
        f"transformers, {FLOATS}": Theirs(folder, torch.bfloat16, 1, "cpu"),
    }
    file = folder / llamacpp.FILE
    if file.exists():
        ours = Model(file, dtype=torch.bfloat16)
        found[f"exkv, {FILE}"] = Ours(ours, "fp16", room, 1).load("cpu")
        threads = torch.get_num_threads()
        found[f"llama.cpp, {FILE}"] = llamacpp.LlamaCpp(file, room, 1, threads, "f16")
    return found


def touched(config: Any) -> int:
    """Parameters that a token reads: all but the embedding table, and of experts its own."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    count = getattr(config, "n_routed_experts", None) or config.num_experts
    table = sizes["model.embed_tokens.weight"]
    return sum(sizes.values()) - table - routed + routed * config.num_experts_per_tok // count


def sample(engine: Engine, ids: Tensor, steps: int, index: int) -> dict[str, float]:
    """Tokens a second of a prompt (1, T), and of decoding behind it."""
    started = time.perf_counter()
    engine.prefill(ids)
    prompt = time.perf_counter()
    tokens = engine.step([3])
    first = time.perf_counter()
    for _ in range(steps):
        tokens = engine.step(tokens)
    ended = time.perf_counter()
    return {"prompt": ids.shape[1] / (prompt - started), "decode": steps / (ended - first)}


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield all results so far after each family."""
    probe, models = MemoryProbe(), []
    for family in settings.families:
        config = config_of(family, settings.small)
        with tempfile.TemporaryDirectory() as scratch:
            folder = write(Path(scratch), config)
            found = engines(folder, max(settings.contexts) + settings.steps + 2)
            models.append(
                {
                    "family": family,
                    "touched": touched(config),
                    "rows": [
                        row
                        for context in settings.contexts
                        for row in rows_of(found, config, context, settings, probe)
                    ],
                }
            )
            for engine in found.values():
                engine.close()
            del found, engine
            gc.collect()
        yield {"llama_cpp": llamacpp.version(), "models": models}


def rows_of(
    found: dict[str, Engine], config: Any, context: int, settings: Settings, probe: MemoryProbe
) -> Iterator[dict[str, Any]]:
    """A row for each engine: medians over the rounds."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, config.vocab_size, (1, context), generator=generator)
    ways = {name: partial(sample, each, ids, settings.steps) for name, each in found.items()}
    samples = list(in_turns(ways, settings.rounds, probe))
    limits: dict[str, list[float]] = {each.way: [] for each in samples}
    for each in samples:
        limits[each.way].append(each.limit)
    for name, values in by_way(samples).items():
        itemsize = 2 if name.endswith(FLOATS) else 34 / 32
        nbytes = touched(config) * itemsize + kv_bytes(config) * context
        pairs = zip(values, limits[name], strict=True)
        yield {
            "engine": name,
            "context": context,
            "prompt": spread([value["prompt"] for value in values]),
            "decode": spread([value["decode"] for value in values]),
            "share": spread([value["decode"] * nbytes / limit for value, limit in pairs]),
        }


def kv_bytes(config: Any) -> int:
    """Bytes that a token of the context has, in 16 bits: keys and values, or the latent vector."""
    if hasattr(config, "kv_lora_rank"):
        return config.num_hidden_layers * 2 * (config.kv_lora_rank + config.qk_rope_head_dim)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    full = kinds.count("full_attention")
    return full * 4 * config.num_key_value_heads * config.head_dim


def report(result: dict[str, Any]) -> list[str]:
    version = result.get("llama_cpp")
    parts = [
        "Share: bytes that a token touches x tokens a second, of what the memory probe reads; "
        "times: decoding and prompts beside the engine of the same weights that isn't exkv; median "
        f"(min..max).{f' llama.cpp: llama-cpp-python {version}.' if version else ''}"
    ]
    for model in result["models"]:
        of = {(row["engine"], row["context"]): row for row in model["rows"]}
        headings = (model["family"], "context", "share", "tokens/s", "×", "prompt, tokens/s", "×")
        cells = []
        for (name, context), row in of.items():
            weights = name.rpartition(", ")[2]
            rivals = [key for key in of if key[0].endswith(weights) and "exkv" not in key[0]]
            rival = of[next((key for key in rivals if key[1] == context), (name, context))]
            times = [
                f"{row[what]['median'] / rival[what]['median']:.2f}"
                for what in ("decode", "prompt")
            ]
            cells.append(
                (name, f"{context:,}", show(row["share"]), show(row["decode"], 1), times[0],
                 show(row["prompt"], 1), times[1])
            )  # fmt: skip
        parts.append(f"{model['touched'] / 1e6:,.0f} million parameters touched:\n\n"
                     + markdown(headings, cells))  # fmt: skip
    return parts


QUICK = {"families": ("Qwen3Next",), "contexts": (8,), "steps": 2, "rounds": 1, "small": True}
