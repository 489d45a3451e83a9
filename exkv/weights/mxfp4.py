"""MXFP4: 4-bit floats (e2m1) with an 8-bit scale, a power of two, for 32 inputs. ``quant_method``
``mxfp4`` is gpt-oss's; compressed-tensors and ModelOpt store the same under other names.

Two codes in a byte, the first in the low half; w = value * 2^(scale - 127), and a scale of 255 is
NaN. The bytes are the same on every device.

Sources: OCP's Microscaling Formats specification; transformers' ``integrations/mxfp4.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from exkv.checkpoint import ExpectedTensor, ModelConfig

from .finite import refuse_any
from .floats import FLOATS
from .format import Layout, Size, Tensors, WeightFormat, picked
from .methods import FormatOf, register
from .settings import Settings, headers_of, names_module
from .source import Slice, Source
from .tiles import Packing, TiledFormat, packed_layout

#: Inputs that share a scale.
GROUP = 32
#: Values of the four bits; the highest is the sign.
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: The largest byte of a scale with which all values are finite in float32.
_LARGEST = 252
#: Values of a scale's byte.
POWERS = (*(2.0 ** (byte - 127) for byte in range(255)), math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class MXFP4Format(TiledFormat):
    """Codes (out, in / 2) and scales (out, in / 32).

    Attributes:
        weight: name of the codes in the checkpoint; ``blocks`` are (out, in / 32, 16) there.
        scale: name of the scales there.
    """

    weight: str = "blocks"
    scale: str = "scales"
    names: ClassVar[tuple[str, ...]] = ("blocks", "scales")

    @property
    def name(self) -> str:
        return "mxfp4" if self.weight == "blocks" else f"mxfp4 {self.weight} {self.scale}"

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        outputs, groups = self.layout(size)["scales"][0]
        codes: tuple[int, ...] = (outputs, groups, GROUP // 2)
        if self.weight != "blocks":
            codes = self.layout(size)["blocks"][0]
        return {
            self.weight: ExpectedTensor(shape=codes, dtypes=(torch.uint8,)),
            self.scale: ExpectedTensor(shape=(outputs, groups), dtypes=(torch.uint8,)),
        }

    def layout(self, size: Size) -> Layout:
        outputs, inputs = size
        if inputs % GROUP:
            raise ValueError(f"mxfp4 needs inputs in groups of {GROUP}; there are {inputs}")
        return {
            "blocks": ((outputs, inputs // 2), torch.uint8),
            "scales": ((outputs, inputs // GROUP), torch.uint8),
        }

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        codes, scales = stored[self.weight], stored[self.scale]
        _check_scales(scales)
        return {"blocks": codes.flatten(1) if codes.dim() > 2 else codes, "scales": scales}

    def native(self, size: Size) -> tuple[int, ...] | None:
        return packed_layout(Packing.FLOAT4)

    def part(self, tensors: Tensors, begin: int, end: int) -> dict[str, torch.Tensor] | None:
        return {name: tensors[name][begin:end] for name in self.names}

    def of_rows(self, size: Size, rows: torch.Tensor) -> WeightFormat:
        return self

    def take(self, tensors: Tensors, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: picked(tensors[name], rows) for name in self.names}

    def together(
        self, name: str, size: tuple[int, int, int], slices: Sequence[Slice]
    ) -> Source | None:
        """Tensors named ``name`` with the names of the format's tensors after it."""
        if self.weight != "blocks":
            return None
        count, *each = size
        outputs, inputs = each
        names = {f"{name}_{tensor}": tensor for tensor in self.names}
        stored_each = self.stored((outputs, inputs))
        expected = {
            whole: ExpectedTensor(shape=(count, *stored_each[tensor].shape), dtypes=(torch.uint8,))
            for whole, tensor in names.items()
        }

        def convert(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            _check_scales(stored[f"{name}_scales"])
            return {
                f"{part.name}.{tensor}": part.of(stored[whole]).flatten(1)
                for part in slices
                for whole, tensor in names.items()
            }

        parameters = [f"{part.name}.{tensor}" for part in slices for tensor in self.names]
        return Source(stored=expected, parameters=tuple(parameters), convert=convert)

    def outputs(self, tensors: Tensors) -> int:
        return len(tensors["blocks"])

    def rows(self, tensors: Tensors, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scales = tensors["scales"][ids]
        values = float4_values(tensors["blocks"][ids]).view(*scales.shape, GROUP)
        powers = torch.tensor(POWERS, device=scales.device)
        factors = powers.index_select(0, scales.flatten().int()).view(*scales.shape, 1)
        return (values * factors).to(dtype).flatten(1)


def float4_values(codes: torch.Tensor) -> torch.Tensor:
    """Bytes of two codes each (n, in / 2) -> float32 (n, in)."""
    every = torch.tensor(VALUES, device=codes.device)
    halves = torch.stack((codes & 15, codes >> 4), dim=-1)  # (n, in / 2, 2)
    return every.index_select(0, halves.flatten().int()).view(len(codes), -1)


MXFP4 = register(MXFP4Format())
COMPRESSED_TENSORS = MXFP4Format(weight="weight_packed", scale="weight_scale")
MODELOPT = MXFP4Format(weight="weight", scale="weight_scale")


def _check_scales(scales: torch.Tensor) -> None:
    what = f"scales are above {_LARGEST}, with which weights are not finite"
    refuse_any(scales > _LARGEST, scales, what)


def formats_of(config: ModelConfig, dtype: torch.dtype) -> FormatOf:
    """The format of each layer: experts, and layers that the checkpoint has packed, are MXFP4,
    unless the settings exclude them."""
    settings, headers = Settings.of(config), headers_of(config) or {}
    settings.only("quant_method", "modules_to_not_convert", "dequantize")
    kept = [name.split(".*.")[-1] for name in settings.names("modules_to_not_convert")]

    def format_of(layer: str, size: Size) -> WeightFormat:
        packed = names_module("experts", layer) or f"{layer}.blocks" in headers
        named = any(names_module(name, layer) for name in kept)
        return MXFP4 if packed and not named else FLOATS[dtype]

    return format_of
