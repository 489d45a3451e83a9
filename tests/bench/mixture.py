"""A mixture of a billion parameters in 4 bits, with experts in host memory, beside llama.cpp:
``python -m tests.bench mixture``.

A random Qwen3-MoE of which a token touches a fifth. llama.cpp's converter writes its floats, its
quantizer makes the file of them, and both read that. exkv decodes on the CPU, and on a simulated
card with part of the experts, or all, in host memory: card and host then take turns on the same
cores and the same memory, in real time, so that what is measured beside the CPU alone is what
parting a layer costs. The share counts the bytes of the file that a token touches, of experts as
many as it is routed to, and keys and values. Needs llama-cpp-python, see ``llamacpp.py``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from exkv import Model, sim
from exkv.checkpoint.gguf.contents import GGUFContents

from . import families, llamacpp
from .decode import Engine, Ours
from .harness import MemoryProbe, by_way, in_turns, markdown, ratios, setting, show, spread

FAMILY = "Qwen3Moe"
SHAPE = {
    "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 256,
}  # fmt: skip
SMALL = {"vocab_size": 512, "num_hidden_layers": 2, "hidden_size": 256, "num_experts": 16}
#: Where the experts are -> "none", "half" and "all" in host memory, as ``host_experts.py`` has it.
PLACES = {"cpu": None, "half": "half", "host": "none"}
NAMES = {
    "cpu": "exkv, CPU",
    "half": "exkv, card, half of the experts on the host",
    "host": "exkv, card, all experts on the host",
}
RIVAL = "llama.cpp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured."""

    kind: str = setting("Q4_K_M", "of llama.cpp's mixtures of types")
    places: tuple[str, ...] = setting(tuple(PLACES), "where exkv has the experts", PLACES)
    contexts: tuple[int, ...] = setting((16, 2048), "tokens of the prompts")
    steps: int = setting(32, "tokens that are decoded behind each")
    rounds: int = 5
    folder: Path | None = setting(None, "keep the file there, and take it from there")
    small: bool = setting(False, "a model of a few million parameters")

    def __post_init__(self) -> None:
        if not llamacpp.is_installed():
            raise ValueError("mixture needs llama-cpp-python and gguf, see llamacpp.py")


def write(folder: Path, settings: Settings) -> Path:
    """The file, unless it is there."""
    file = folder / f"model-{settings.kind}.gguf"
    if not file.exists():
        families.write(folder, config_of(settings.small), "f32")
        llamacpp.quantize(folder, settings.kind)
        (folder / llamacpp.FILE).unlink()
    return file


def config_of(small: bool) -> Any:
    return families.config_of(FAMILY, False, {**SHAPE, **(SMALL if small else {})})


def engines(file: Path, settings: Settings) -> dict[str, Engine]:
    """Each of one row."""
    import host_experts

    room = max(settings.contexts) + settings.steps + 2
    found: dict[str, Engine] = {}
    for place in settings.places:
        ours = Ours(Model(file, dtype=torch.bfloat16), "fp16", room, 1)
        if (hosted := PLACES[place]) is None:
            ours.load("cpu")
        else:
            way = partial(ours.load, "sim:0")
            host_experts.load(ours.model, ours.cache, hosted, way=way)
        found[NAMES[place]] = ours
    found[RIVAL] = llamacpp.LlamaCpp(file, room, 1, torch.get_num_threads(), "f16")
    return found


def touched_bytes(file: Path, config: Any) -> float:
    """Bytes of the file that a token reads: all but the table of embeddings, and of experts its
    own."""
    share = config.num_experts_per_tok / config.num_experts
    tensors = {name: placed.tensor.nbytes for name, placed in GGUFContents(file).tensors.items()}
    table = tensors["token_embd.weight"]
    return sum(n * (share if "_exps" in name else 1) for name, n in tensors.items()) - table


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield all results so far after each context."""
    if set(settings.places) - {"cpu"}:
        sim.enable("8G")
    config, probe, rows = config_of(settings.small), MemoryProbe(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as scratch:
        file = write(settings.folder or Path(scratch), settings)
        touched = touched_bytes(file, config)
        found = engines(file, settings)
        for context in settings.contexts:
            rows += rows_of(found, config, touched, context, settings, probe)
            yield {"llama_cpp": llamacpp.version(), "touched": touched, "rows": rows}
        for engine in found.values():
            engine.close()


def rows_of(
    found: dict[str, Engine],
    config: Any,
    touched: float,
    context: int,
    settings: Settings,
    probe: MemoryProbe,
) -> Iterator[dict[str, Any]]:
    """A row for each engine."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, config.vocab_size, (1, context), generator=generator)
    ways = {
        name: partial(families.sample, engine, ids, settings.steps)
        for name, engine in found.items()
    }
    samples = list(in_turns(ways, settings.rounds, probe))
    values, limits = by_way(samples), dict[str, list[float]]()
    for each in samples:
        limits.setdefault(each.way, []).append(each.limit)
    nbytes = touched + families.kv_bytes(config) * context
    for name, of in values.items():
        rates = {what: [value[what] for value in of] for what in ("decode", "prompt")}
        theirs = {what: [value[what] for value in values[RIVAL]] for what in rates}
        shares = [
            r * nbytes / limit for r, limit in zip(rates["decode"], limits[name], strict=True)
        ]
        yield {
            "engine": name,
            "context": context,
            "share": spread(shares),
            **{what: spread(of) for what, of in rates.items()},
            **{f"{what}_times": ratios(of, theirs[what]) for what, of in rates.items()},
        }


def report(result: dict[str, Any]) -> list[str]:
    asked = result["settings"]
    headings = ("", "context", "share", "tokens/s", "×", "prompt, tokens/s", "×")
    cells = [
        (
            row["engine"], f"{row['context']:,}", show(row["share"]), show(row["decode"], 1),
            show(row["decode_times"]), show(row["prompt"], 1), show(row["prompt_times"]),
        )
        for row in result["rows"]
    ]  # fmt: skip
    return [
        f"A mixture in {asked['kind']} of which a token touches {result['touched'] / 1e6:,.0f} MB. "
        "Share: bytes touched x tokens a second, of what the memory probe reads; ×: beside "
        f"llama.cpp in the same round; median (min..max) of {asked['rounds']} rounds of "
        f"{asked['steps']} tokens. llama.cpp: llama-cpp-python {result['llama_cpp']}.",
        markdown(headings, cells),
    ]


QUICK = {"contexts": (8,), "steps": 2, "rounds": 1, "small": True}
