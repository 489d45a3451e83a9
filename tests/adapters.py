"""Adapters in PEFT's files for tests, and their oracle: the model that they are merged into."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

PREFIX = "base_model.model."


def linears_of(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Modules whose name ends with one of these."""
    found = {
        path: module
        for path, module in model.named_modules()
        if path.split(".")[-1] in names and isinstance(module, nn.Linear | nn.Embedding)
    }
    assert {path.split(".")[-1] for path in found} == set(names)
    return found


def write_adapter(
    folder: Path,
    modules: Mapping[str, nn.Module | tuple[int, int]],
    *,
    rank: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tensors: Mapping[str, torch.Tensor | None] | None = None,
    **config: Any,
) -> Path:
    """Random halves for each module (or (out, in)); a scale of 1.5.

    Args:
        tensors: others than these, by name; None to leave one out.
        config: fields of adapter_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ranks, random = config.get("rank_pattern", {}), torch.Generator().manual_seed(seed)
    stored: dict[str, torch.Tensor | None] = {}
    for path, module in modules.items():
        size = module if isinstance(module, tuple) else tuple(module.weight.shape)
        (outputs, inputs), r = size, ranks.get(path.split(".")[-1], rank)
        embedding = isinstance(module, nn.Embedding)
        if embedding:
            outputs, inputs = inputs, outputs
        ends = ("lora_embedding_A", "lora_embedding_B")
        ends = ends if embedding else ("lora_A.weight", "lora_B.weight")
        for end, shape in zip(ends, ((r, inputs), (outputs, r)), strict=True):
            half = torch.randn(shape, generator=random) * 0.1
            stored[f"{PREFIX}{path}.{end}"] = half.to(dtype)
    stored |= tensors or {}
    save_file(
        {name: tensor for name, tensor in stored.items() if tensor is not None},
        folder / "adapter_model.safetensors",
    )
    values = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 1.5 * rank,
        "target_modules": sorted({path.split(".")[-1] for path in modules}),
        "bias": "none",
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def merged(model: nn.Module, folder: Path) -> nn.Module:
    """A copy of transformers' model with W + scale B A in the place of each W."""
    model = copy.deepcopy(model)
    config = json.loads((folder / "adapter_config.json").read_text())
    stored = load_file(folder / "adapter_model.safetensors")
    for name, a in stored.items():
        if not (end := re.search(r"\.lora_(embedding_)?A(\.weight)?$", name)):
            continue
        path = name[: end.start()].removeprefix(PREFIX)
        b, last = stored[name.replace("_A", "_B")], path.split(".")[-1]
        rank, alpha = a.shape[0], config.get("alpha_pattern", {}).get(last, config["lora_alpha"])
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        change = scale * (b.double() @ a.double())
        weight = model.get_submodule(path).weight
        weight.data += (change.T if end[1] else change).to(weight.dtype)
    return model
