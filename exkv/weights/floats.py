"""Float weights: one tensor of fp32, fp16, bf16 or fp64 for a matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from exkv.checkpoint import ExpectedTensor, ModelConfig
from exkv.ops.bound_run import FLOAT_LAYOUT
from exkv.ops.experts import Routing

from .format import Layout, Size, Tensors, WeightFormat

#: Dtype on a device -> name of the format.
NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatFormat(WeightFormat):
    """The matrix itself, in ``dtype`` on a device and in any float dtype in a checkpoint."""

    dtype: torch.dtype
    names: ClassVar[tuple[str, ...]] = ("weight",)

    @property
    def name(self) -> str:
        return NAMES[self.dtype]

    def native(self, size: Size) -> tuple[int, ...] | None:
        return FLOAT_LAYOUT

    @property
    def arithmetic(self) -> torch.dtype | None:
        return self.dtype

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        return {"weight": ExpectedTensor.of_floats(size, self.dtype)}

    def layout(self, size: Size) -> Layout:
        return {"weight": (size, self.dtype)}

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"weight": stored["weight"]}

    def part(self, tensors: Tensors, begin: int, end: int) -> dict[str, torch.Tensor] | None:
        return {"weight": tensors["weight"][begin:end]}

    def splits_at(self, rows: int) -> bool:
        return True

    def dequantize(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        return tensors["weight"].to(dtype)

    def linear(self, x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.ops.exkv.linear(x, tensors["weight"], bias)

    def linears(
        self, x: torch.Tensor, each: Sequence[Tensors], biases: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        added = [bias for bias in biases if bias is not None]
        if added and len(added) < len(biases):  # the op takes all of them or none
            return WeightFormat.linears(self, x, each, biases)
        return torch.ops.exkv.linears(x, [tensors["weight"] for tensors in each], added)

    def chooses(self, size: Size, dtype: torch.dtype) -> bool:
        return dtype == self.dtype != torch.float64 and size[1] % 8 == 0

    def chosen(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        size: Size,
        each: Sequence[Tensors],
        biases: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        weights = [tensors["weight"] for tensors in each]
        return torch.ops.exkv.expert_products(x, chosen, weights, biases)

    def embed(self, ids: torch.Tensor, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        return torch.embedding(tensors["weight"], ids)

    def experts(
        self,
        x: torch.Tensor,
        routing: Routing,
        matrices: Sequence[Sequence[Tensors]],
        inner: int,
        act: str,
    ) -> torch.Tensor:
        gate, up, down = ([t["weight"] for t in each] for each in zip(*matrices, strict=True))
        return torch.ops.exkv.experts(x, routing.chosen, routing.weights, gate, up, down, act)


FLOATS = {dtype: FloatFormat(dtype=dtype) for dtype in NAMES}


def formats_of(config: ModelConfig, dtype: torch.dtype) -> Callable[[str, Size], WeightFormat]:
    """The format of every layer of a checkpoint that isn't quantized: see ``methods.METHODS``."""
    return lambda layer, size: FLOATS[dtype]
