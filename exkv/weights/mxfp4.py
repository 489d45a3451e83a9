"""Weights of 4-bit floats (e2m1) with a scale of 8 bits, a power of two, for 32 inputs: ``mxfp4``
as gpt-oss has its experts.

A byte holds two numbers, that of the lower place in its low half; w = value * 2^(scale - 127). The
bytes stay as they are on every device.

Sources: OCP's Microscaling Formats specification; transformers' ``integrations/mxfp4.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from exkv.checkpoint import ExpectedTensor, ModelConfig

from .floats import FLOATS
from .format import Layout, Size, Tensors, WeightFormat
from .registry import FormatOf, register
from .settings import Settings, headers_of, names_module
from .source import Slice, Source
from .tiles import TiledFormat

#: Inputs that share a scale.
GROUP = 32
#: What the four bits stand for; the highest is the sign.
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: What the scale's byte stands for.
POWERS = (*(2.0 ** (byte - 127) for byte in range(255)), math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class MXFP4Format(TiledFormat):
    """Blocks of 16 bytes (out, in / 32, 16), and scales (out, in / 32)."""

    names: ClassVar[tuple[str, ...]] = ("blocks", "scales")

    @property
    def name(self) -> str:
        return "mxfp4"

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        layout = self.layout(size).items()
        return {name: ExpectedTensor(shape=shape, dtypes=(kind,)) for name, (shape, kind) in layout}

    def layout(self, size: Size) -> Layout:
        outputs, inputs = size
        if inputs % GROUP:
            raise ValueError(f"mxfp4 needs inputs in groups of {GROUP}; there are {inputs}")
        groups = inputs // GROUP
        return {
            "blocks": ((outputs, groups, GROUP // 2), torch.uint8),
            "scales": ((outputs, groups), torch.uint8),
        }

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(stored)

    def outputs(self, tensors: Tensors) -> int:
        return len(tensors["blocks"])

    def rows(self, tensors: Tensors, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        blocks, scales = tensors["blocks"][ids], tensors["scales"][ids]
        every = torch.tensor(VALUES, device=blocks.device)
        halves = torch.stack((blocks & 15, blocks >> 4), dim=-1)  # (n, groups, 16, 2)
        values = every.index_select(0, halves.flatten().int()).view(*scales.shape, GROUP)
        powers = torch.tensor(POWERS, device=blocks.device)
        factors = powers.index_select(0, scales.flatten().int()).view(*scales.shape, 1)
        return (values * factors).to(dtype).flatten(1)


MXFP4 = register(MXFP4Format())


def formats_of(config: ModelConfig, dtype: torch.dtype) -> FormatOf:
    """The format of each layer: experts are packed, and what the checkpoint has packed, unless the
    settings name them as not to be."""
    settings, headers = Settings.of(config), headers_of(config) or {}
    settings.only("quant_method", "modules_to_not_convert", "dequantize")
    kept = [name.split(".*.")[-1] for name in settings.names("modules_to_not_convert")]

    def format_of(layer: str, size: Size) -> WeightFormat:
        packed = names_module("experts", layer) or f"{layer}.blocks" in headers
        named = any(names_module(name, layer) for name in kept)
        return MXFP4 if packed and not named else FLOATS[dtype]

    return format_of


def sliced_source(name: str, size: tuple[int, int, int], slices: Sequence[Slice]) -> Source:
    """Matrices that lie together, (count, outputs, inputs), under ``name`` with the names of the
    format's tensors behind it."""
    count, *each = size
    outputs, inputs = each
    names = {f"{name}_{tensor}": tensor for tensor in MXFP4.names}
    layout = MXFP4.layout((outputs, inputs))
    expected = {
        stored: ExpectedTensor(shape=(count, *layout[tensor][0]), dtypes=(torch.uint8,))
        for stored, tensor in names.items()
    }

    def convert(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            f"{part.name}.{tensor}": part.of(stored[whole]).contiguous()
            for part in slices
            for whole, tensor in names.items()
        }

    parameters = [f"{part.name}.{tensor}" for part in slices for tensor in MXFP4.names]
    return Source(stored=expected, parameters=tuple(parameters), convert=convert)
