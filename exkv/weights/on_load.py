"""Float weights that become integers when they are loaded: ``Model(folder, weights="int4")``.

A config for it is that of the float checkpoint with a quantization of its own, which no file has to
state: ``{"quant_method": "on_load", "weights": "int4"}``; see :func:`with_weights`.

Matrices of the layers become integers of 8 or 4 bits in groups of 64, by ``rounding``. The
projection to logits, which every token reads whole and whose errors nothing evens out, has 8 bits;
so has a table of tokens that is tied to it. A table of its own stays: one of its rows is read a
token. Norms and biases stay, and so do the routers of experts, which are small and choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from exkv.checkpoint import ExpectedTensor, ModelConfig
from exkv.checkpoint.facts import facts_of
from exkv.ops.weight_groups import CHUNK

from .floats import FLOATS
from .format import Size, WeightFormat
from .groups import GroupFormat
from .registry import FormatOf, register
from .rounding import rounded
from .settings import stays_float

METHOD = "on_load"
#: What ``weights`` may be -> bits of the layers' matrices.
BITS = {"int8": 8, "int4": 4}
_BITS_OF_HEAD = 8
_GROUP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OnLoad(GroupFormat):
    """The layout of groups, made of a matrix of floats."""

    @property
    def name(self) -> str:
        return f"{self.layout_name} on load"

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        self.layout(size)  # raises for inputs that it cannot have
        return {"weight": ExpectedTensor.of_floats(size, torch.float32)}

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weight = stored["weight"]
        if not weight.isfinite().all():
            raise ValueError("the weights are not all finite; they cannot be made integers")
        made = rounded(weight, self.bits, self.group, self.scale)
        return self.pack(made.codes, made.scale)


def with_weights(config: ModelConfig, weights: str | None) -> ModelConfig:
    """The config with its float weights kept as ``weights`` says; None for as they are.

    Raises:
        ValueError: there is no such way, or the checkpoint is quantized.
    """
    if weights is None:
        return config
    if weights not in BITS:
        raise ValueError(f"weights is {weights!r}; it must be one of {', '.join(BITS)}, or None")
    if config.quantization is not None:
        method = config.quantization.get("quant_method")
        raise ValueError(
            f"{config.path or 'the config'} is quantized already ({method}), and weights is "
            f"{weights!r}; leave weights out, or take the model's unquantized version"
        )
    return replace(config, quantization={"quant_method": METHOD, "weights": weights})


def formats_of(config: ModelConfig, dtype: torch.dtype) -> FormatOf:
    """The format of every layer."""
    assert config.quantization is not None
    weights = config.quantization.get("weights")
    if weights not in BITS:
        raise ValueError(
            f"{config.path or 'the config'}: weights of quantization_config is {weights!r}; it "
            f"must be one of {', '.join(BITS)}"
        )
    facts = facts_of(config)

    def format_of(layer: str, size: Size) -> WeightFormat:
        if layer == facts.head:
            return _format(_BITS_OF_HEAD, size, dtype)
        if layer == facts.table or stays_float(layer):
            return FLOATS[dtype]
        return _format(BITS[weights], size, dtype)

    return format_of


def _format(bits: int, size: Size, dtype: torch.dtype) -> WeightFormat:
    """In the largest groups that the inputs have; floats where there are none."""
    inputs = size[1]
    if inputs % CHUNK:
        return FLOATS[dtype]
    group = CHUNK if inputs % _GROUP else _GROUP
    return register(OnLoad(bits=bits, group=group, scale=torch.float16))
