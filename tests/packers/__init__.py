"""Writers of quantized checkpoints, from the formats' definitions, element by element where that
is the definition: none of them calls exkv.

A :class:`Recipe` packs matrices; ``write`` makes a folder of it, and says what its tensors stand
for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

#: The tensors of a matrix by their names behind the layer's, and the floats that they stand for.
Packed = tuple[dict[str, torch.Tensor], torch.Tensor]


def every_projection(layer: str) -> bool:
    """The linear layers that tools quantize: those of decoder layers, without routers."""
    return ".layers." in layer and not layer.endswith("block_sparse_moe.gate")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way of quantizing.

    Attributes:
        settings: quantization_config.
        pack: of a layer's name and its matrix (out, in), fp32.
        takes: which layers are quantized; the others stay floats.
        split: whether it is split over devices in the tests: one recipe of those that are alike.
    """

    settings: Mapping[str, Any]
    pack: Callable[[str, torch.Tensor], Packed]
    takes: Callable[[str], bool] = field(default=every_projection)
    split: bool = False


def write(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], recipe: Recipe
) -> dict[str, torch.Tensor]:
    """Write a folder; the floats of its tensors by their names in a model without quantization."""
    written: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        if tensor.dim() != 2 or not recipe.takes(layer):
            written[name] = plain[name] = tensor
            continue
        packed, plain[name] = recipe.pack(layer, tensor)
        assert plain[name].shape == tensor.shape
        written |= {f"{layer}.{part}": values.contiguous() for part, values in packed.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(written, folder / "model.safetensors", {"format": "pt"})
    write_config(folder, {**config, "quantization_config": dict(recipe.settings)})
    return plain


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """config.json of a folder."""
    (folder / "config.json").write_text(json.dumps(config))
