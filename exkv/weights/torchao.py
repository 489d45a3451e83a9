"""torchao, as transformers' ``save_pretrained`` writes it to safetensors: integers of 8 to 2 bits
by rows or groups of inputs, and 8-bit floats by rows or matrices.

A weight is stored in parts whose names begin with ``_weight_``: ``qdata``, ``scale`` (out, groups)
and, for integers, ``zero_point`` int8. Integers of any number of bits take a byte each in the
file::

    w = (qdata - zero_point) * scale

and only their bits on a device, in the layout of groups. ``quant_type`` of config.json is the
configuration object that made them, or one for each layer (``FqnToConfig``); its settings of
activations are ignored, they stay floats.

Source: torchao's ``quantization/quantize_/workflows`` and ``prototype/safetensors``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from exkv.checkpoint import ExpectedTensor, ModelConfig
from exkv.ops.weight_groups import PLANES

from .finite import check_finite
from .floats import FLOATS
from .format import Size, WeightFormat
from .fp8 import Fp8Format
from .groups import GroupFormat
from .methods import FormatOf, register
from .settings import Headers, Settings, headers_of

_PREFIX = "_weight_"
#: Configurations of integers -> their keys for bits, groups and zero points; and of 8-bit floats.
_INTEGERS = {
    "Int8WeightOnlyConfig": ("", "granularity", ""),
    "Int8DynamicActivationInt8WeightConfig": ("", "granularity", ""),
    "IntxWeightOnlyConfig": ("weight_dtype", "granularity", "mapping_type"),
    "Int8DynamicActivationIntxWeightConfig": (
        *("weight_dtype", "weight_granularity", "weight_mapping_type"),
    ),
}
_FLOAT8 = ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig")
_BY_LAYER = "FqnToConfig"
_BITS = {f"int{bits}": bits for bits in PLANES}
#: Dtypes of scales; the first is that of 8-bit integers.
_SCALES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchaoFormat(GroupFormat):
    """Integers; ``group`` is 0 for whole rows, ``shift`` "symmetric" or "zero"."""

    @property
    def name(self) -> str:
        return f"torchao-{self.layout_name}"

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        shape, _ = self.layout(size)["scale"]
        return {
            f"{_PREFIX}qdata": ExpectedTensor(shape=size, dtypes=(torch.int8,)),
            f"{_PREFIX}scale": ExpectedTensor.of_floats(shape, self.scale),
            f"{_PREFIX}zero_point": ExpectedTensor(shape=shape, dtypes=(torch.int8,)),
        }

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        qdata, scale, zero = (stored[_PREFIX + part] for part in ("qdata", "scale", "zero_point"))
        check_finite("scale", scale)
        middle = 1 << self.bits - 1
        low, high = (int(end) for end in qdata.aminmax())
        if not -middle <= low <= high < middle:
            raise ValueError(
                f"qdata ranges from {low} to {high}, and {self.bits} bits only from {-middle} to "
                f"{middle - 1}: download the model again"
            )
        if self.shift == "symmetric" and zero.any():
            raise ValueError(
                f"{int(zero.count_nonzero())} of {zero.numel()} zero points are not 0, and "
                "config.json says that the integers are symmetric: download the model again"
            )
        shift = None if self.shift == "symmetric" else zero.int() + middle
        return self.pack((qdata.short() + middle).to(torch.uint8), scale, shift)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchaoFp8Format(Fp8Format):
    """8-bit floats under torchao's names."""

    @property
    def name(self) -> str:
        return f"torchao {Fp8Format.name.__get__(self)}"

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        weight, scale = Fp8Format.stored(self, size).values()
        return {f"{_PREFIX}qdata": weight, f"{_PREFIX}scale": scale}

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weight, scale = (stored[_PREFIX + part] for part in ("qdata", "scale"))
        return Fp8Format.convert(self, {"weight": weight, self.scale_name: scale})


def formats_of(config: ModelConfig, dtype: torch.dtype) -> FormatOf:
    """The format of every layer: bits come from the settings; the headers say which layers are
    quantized, and the scales' dtype."""
    settings, headers = Settings.of(config), headers_of(config)
    settings.only(
        *("quant_method", "quant_type", "modules_to_not_convert", "untie_embedding_weights"),
        "include_input_output_embeddings",
    )
    kinds = settings.part("quant_type")
    kind = None if kinds is None else kinds.part("default")
    if kind is None:
        raise settings.bad("quant_type", "an object with the key 'default'")
    kind_of = _by_layer(kind)
    ignored = settings.names("modules_to_not_convert")
    quantized = settings.quantized(headers, ignored, f"{_PREFIX}qdata")

    def format_of(layer: str, size: Size) -> WeightFormat:
        kind = kind_of(layer)
        if kind is None or not quantized(layer):
            return FLOATS[dtype]
        return register(_format(kind, layer, size, dtype, headers))

    return format_of


def _by_layer(kind: Settings) -> Callable[[str], Settings | None]:
    """From a layer to its configuration: that of its name, else of the first matching pattern, else
    ``_default``; None if it stays floats."""
    if kind.values.get("_type") != _BY_LAYER:
        return lambda layer: kind
    names = _data(kind).part("fqn_to_config")
    if names is None:
        raise kind.bad("_data", "an object with fqn_to_config")

    def of_layer(layer: str) -> Settings | None:
        for name in (f"{layer}.weight", layer):
            if name in names.values:
                return names.part(name)
        for pattern in names.values:
            if pattern.startswith("re:") and (
                re.fullmatch(pattern[3:], f"{layer}.weight") or re.fullmatch(pattern[3:], layer)
            ):
                return names.part(pattern)
        return names.part("_default")

    return of_layer


def _data(kind: Settings) -> Settings:
    found = kind.part("_data")
    if found is None:
        raise kind.bad("_data", "an object")
    return found


def _format(
    kind: Settings, layer: str, size: Size, dtype: torch.dtype, headers: Headers | None
) -> WeightFormat:
    name = kind.choice("_type", (*_INTEGERS, *_FLOAT8))
    data = _data(kind)
    info = (headers or {}).get(f"{layer}.{_PREFIX}scale")
    if name in _FLOAT8:
        _check_dtype(data, "weight_dtype", ("float8_e4m3fn",))
        rows = info is None or info.shape != (1, 1)
        block = (1, size[1]) if rows else None
        return TorchaoFp8Format(block=block)
    of_bits, of_group, of_zero = _INTEGERS[name]
    bits = _BITS[_check_dtype(data, of_bits, tuple(_BITS))] if of_bits else 8
    mapping = data.section(of_zero)
    symmetric = mapping.choice("_data", ("SYMMETRIC", "ASYMMETRIC"), "SYMMETRIC") == "SYMMETRIC"
    scale = _SCALES[0] if of_bits == "" else dtype
    if info is not None and info.dtype in _SCALES:
        scale = info.dtype
    group = _group(data, of_group)
    return TorchaoFormat(
        bits=bits,
        group=0 if group == size[1] else group,
        scale=scale,
        shift="symmetric" if symmetric else "zero",
    )


def _check_dtype(data: Settings, key: str, known: tuple[str, ...]) -> str:
    """A dtype's name, one of these."""
    return str(data.section(key).choice("_data", known, known[0]))


def _group(data: Settings, key: str) -> int:
    """Inputs that share a scale; 0 for whole rows."""
    granularity = data.part(key) or Settings(where=data.where, values={"_type": "PerRow"})
    kind = granularity.choice("_type", ("PerRow", "PerAxis", "PerGroup"))
    if kind != "PerGroup":
        return 0
    return _data(granularity).group_size("group_size") or 0
