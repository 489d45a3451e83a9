"""The CPU time that the largest models and the most unlike cards take: ``python -m tests.bench
limits``.

Seconds of the process's own time on one core, the least of some runs, since other processes make
the clock's time another. A mixture of 80 layers with 256 experts is built of its config alone, and
of a folder, whose files have the headers of all tensors and holes in place of the data. 82 units
of such a model's size that fill half of the cards, 8 to 80 GB each, all unlike, are placed in any
order; a plan's gap says how far from the best it may be.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exkv import Model, ModelConfig
from exkv.checkpoint import ExpectedTensor
from exkv.checkpoint.safetensors import DTYPES, SINGLE_NAME
from exkv.models import unit_specs
from exkv.planning import Budget, UnitCost
from exkv.planning.plan import OBJECTIVES
from exkv.planning.search.placement import place_units

from .harness import markdown, setting

CONFIG = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
    **{"torch_dtype": "bfloat16", "vocab_size": 151936, "hidden_size": 4096, "head_dim": 128},
    **{"num_attention_heads": 64, "num_key_value_heads": 4, "moe_intermediate_size": 1536},
    **{"num_experts_per_tok": 8, "max_position_embeddings": 32768},
}
#: Kind of folder -> its quantization_config.
FOLDERS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "GPTQ": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
}
UNITS, GB = 82, 1 << 30
QUICK = {"layers": 2, "experts": 8, "cards": (12,), "rounds": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is built and placed."""

    layers: int = 80
    experts: int = 256
    cards: tuple[int, ...] = (12, 14, 24, 48, 64)
    rounds: int = setting(3, "runs of each, of which the least counts")


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    found: dict[str, Any] = {"built": {}, "placed": {}}
    sizes = {"num_hidden_layers": settings.layers, "num_experts": settings.experts}
    config = CONFIG | sizes
    parsed = ModelConfig.from_dict(config)
    found["built"]["config alone"] = {"seconds": _least(lambda: Model(parsed), settings.rounds)}
    for name, quantization in FOLDERS.items():
        with tempfile.TemporaryDirectory() as folder:
            tensors = write_holes(Path(folder), config | {"quantization_config": quantization})
            seconds = _least(lambda folder=folder: Model(folder), settings.rounds)
        found["built"][f"{name} folder"] = {"seconds": seconds, "tensors": tensors}
    yield found
    for count in settings.cards:
        for objective in OBJECTIVES:
            found["placed"].setdefault(str(count), {})[objective] = _placed(
                count, objective, settings.rounds
            )
        yield found


def _least(work: Callable[[], object], rounds: int) -> float:
    """CPU seconds of the fastest run."""
    taken = []
    for _ in range(rounds):
        before = time.process_time()
        work()
        taken.append(time.process_time() - before)
    return min(taken)


def write_holes(folder: Path, config: dict[str, Any]) -> int:
    """A folder whose weights have headers only; the number of its tensors."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    (folder / "config.json").write_text(json.dumps(config))
    specs = unit_specs(ModelConfig.from_dict(config), torch.bfloat16)
    header, end = dict[str, Any](), 0
    for name, expected in _expected(specs):
        begin, dtype = end, expected.dtypes[0]
        end += math.prod(expected.shape) * dtype.itemsize
        header[name] = {
            "dtype": names[dtype],
            "shape": expected.shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    with (folder / SINGLE_NAME).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return len(header)


def _expected(specs: list[Any]) -> Iterator[tuple[str, ExpectedTensor]]:
    for spec in specs:
        for source in spec.sources:
            yield from source.stored.items()


def _placed(count: int, objective: str, rounds: int) -> dict[str, float]:
    """CPU seconds, and the plan's gap."""
    chance = random.Random(count)
    inner = [2 * GB + chance.randrange(1 << 20) for _ in range(UNITS - 2)]
    units = [
        UnitCost(name=f"unit {i}", weights=size, cache=GB // 4, workspace={"meta": GB // 8})
        for i, size in enumerate([GB, *inner, GB])
    ]
    sizes = [8 + 72 * card / (count - 1) for card in range(count)]
    share = 2 * sum(each.weights + each.cache for each in units) / sum(sizes)
    cards = [
        Budget(
            device=torch.device("meta", place),
            capacity=round(share * size),
            bandwidth=1e11 * (1 + chance.randrange(20)),
        )
        for place, size in enumerate(chance.sample(sizes, count))
    ]
    plans = []
    seconds = _least(
        lambda: plans.append(place_units(units, cards, objective=objective, order="any")), rounds
    )
    return {"seconds": seconds, "gap": plans[0].gap}


def report(result: dict[str, Any]) -> list[str]:
    built = [
        (name, each.get("tensors", ""), f"{each['seconds']:.2f}")
        for name, each in result["built"].items()
    ]
    placed = [
        (count, *(_cell(each[objective]) for objective in OBJECTIVES))
        for count, each in result["placed"].items()
    ]
    return [
        markdown(("Model of a", "tensors", "CPU seconds"), built),
        markdown(("unlike cards", *OBJECTIVES), placed),
    ]


def _cell(found: dict[str, float]) -> str:
    gap = f"within {100 * found['gap']:.1f} %" if found["gap"] else "the best"
    return f"{found['seconds']:.2f} s, {gap}"
