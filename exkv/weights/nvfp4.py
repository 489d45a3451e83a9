"""NVFP4 as compressed-tensors and ModelOpt store it: 4-bit floats (e2m1) with an 8-bit scale (e4m3)
for 16 inputs and a factor for the matrix.

Two codes in a byte, the first in the low half. w = value * (scale * factor), or value * (scale /
factor) if the file has the factor's inverse. The bytes are the same on every device; there are no
kernels yet, and layers multiply by tiles of dequantized rows.

Sources: compressed-tensors' ``compressors/nvfp4`` and ``converters/modelopt_nvfp4``; ModelOpt's
``qtensor/nvfp4_tensor.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from exkv.checkpoint import ExpectedTensor

from .finite import check_finite
from .format import Layout, Size, Tensors, WeightFormat, picked
from .fp8 import E4M3, float8_values
from .mxfp4 import float4_values
from .tiles import TiledFormat

#: Inputs that share a scale.
GROUP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NVFP4Format(TiledFormat):
    """Codes (out, in / 2), scales (out, in / 16) and a factor.

    Attributes:
        weight: name of the codes in the checkpoint.
        factor: name of the matrix's factor there.
        divides: whether scales are divided by the factor.
        factor_shape: shape of the factor there.
    """

    weight: str
    factor: str
    divides: bool
    factor_shape: tuple[int, ...]
    names: ClassVar[tuple[str, ...]] = ("codes", "scales", "factor")

    @property
    def name(self) -> str:
        return f"nvfp4 {self.weight} {self.factor} {list(self.factor_shape)}"

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        layout = self.layout(size)
        return {
            self.weight: ExpectedTensor(shape=layout["codes"][0], dtypes=(torch.uint8,)),
            "weight_scale": ExpectedTensor(shape=layout["scales"][0], dtypes=(E4M3,)),
            self.factor: ExpectedTensor.of_floats(self.factor_shape, torch.float32),
        }

    def layout(self, size: Size) -> Layout:
        outputs, inputs = size
        if inputs % GROUP:
            raise ValueError(f"nvfp4 needs inputs in groups of {GROUP}; there are {inputs}")
        return {
            "codes": ((outputs, inputs // 2), torch.uint8),
            "scales": ((outputs, inputs // GROUP), E4M3),
            "factor": ((1,), torch.float32),
        }

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        factor = stored[self.factor].float().reshape(1)
        if self.divides and not (1 / factor).isfinite():
            raise ValueError(f"1 of 1 {self.factor} are 0 or not finite: download the model again")
        check_finite(self.factor, factor)
        check_finite("weight_scale", float8_values(stored["weight_scale"].view(torch.uint8)))
        return {"codes": stored[self.weight], "scales": stored["weight_scale"], "factor": factor}

    def part(self, tensors: Tensors, begin: int, end: int) -> dict[str, torch.Tensor] | None:
        codes, scales = tensors["codes"][begin:end], tensors["scales"][begin:end]
        return {"codes": codes, "scales": scales, "factor": tensors["factor"]}

    def of_rows(self, size: Size, rows: torch.Tensor) -> WeightFormat:
        return self

    def take(self, tensors: Tensors, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scales = (picked(tensors[name], rows) for name in ("codes", "scales"))
        return {"codes": codes, "scales": scales, "factor": tensors["factor"]}

    def outputs(self, tensors: Tensors) -> int:
        return len(tensors["codes"])

    def rows(self, tensors: Tensors, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scales = float8_values(tensors["scales"].view(torch.uint8)[ids])  # (n, in / 16)
        factor = tensors["factor"]
        scales = scales / factor if self.divides else scales * factor
        values = float4_values(tensors["codes"][ids]).unflatten(1, (-1, GROUP))
        return values.mul_(scales.unsqueeze(-1)).to(dtype).flatten(1)


COMPRESSED_TENSORS = NVFP4Format(
    weight="weight_packed", factor="weight_global_scale", divides=True, factor_shape=(1,)
)
MODELOPT = NVFP4Format(weight="weight", factor="weight_scale_2", divides=False, factor_shape=())
