"""A format of weights that exkv doesn't have: int8 with a scale a row. It shows what a newcomer
writes: this file, and one entry of ``METHODS``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from exkv.checkpoint import ExpectedTensor, ModelConfig
from exkv.weights import FormatOf, Layout, Size, Tensors, WeightFormat, register
from exkv.weights.floats import FLOATS


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows8(WeightFormat):
    """w = weight * scale; on a device the scale is float16, and of one dimension."""

    name: ClassVar[str] = "rows8"
    names: ClassVar[tuple[str, ...]] = ("weight", "scale")

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        scale = ExpectedTensor.of_floats((size[0], 1), torch.float32)
        return {"weight": ExpectedTensor(shape=size, dtypes=(torch.int8,)), "weight_scale": scale}

    def layout(self, size: Size) -> Layout:
        return {"weight": (size, torch.int8), "scale": (size[:1], torch.float16)}

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"weight": stored["weight"], "scale": stored["weight_scale"].flatten()}

    def dequantize(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        return (tensors["weight"].float() * tensors["scale"].float().unsqueeze(-1)).to(dtype)


def formats_of(config: ModelConfig, dtype: torch.dtype) -> FormatOf:
    """Every layer, save those that the settings name."""
    ignored = config.quantization.get("ignore", [])
    return lambda layer, size: FLOATS[dtype] if layer in ignored else register(Rows8())
