"""HQQ (Badri & Shaji, 2023), as the ``hqq`` package and transformers save it: integers of 8 to 2
bits in groups of a row's inputs, each with a float scale and a float zero point.

A weight is ``(code - zero) * scale``. ``W_q`` has the codes by groups (out * in / group, group):
two to a byte for 4 bits and four for 2 bits, with one run of groups in the high bits of all bytes
and the next in those below; ten to an int32 for 3 bits; one to a byte for 5 and 6 bits. ``scale``
and ``zero`` (groups, 1) are floats of the model's dtype. Scalars beside them repeat the settings:
``nbits``, ``group_size``, ``axis``, ``shape``.

On a device a weight is ``scale * code + offset`` in the layout of groups, with 16-bit scales if the
file has them: the offset ``-zero * scale`` is rounded to float16, as HQQ rounds ``code - zero`` in
its own arithmetic.

Source: hqq's ``core/quantize.py`` and ``core/bitpack.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from exkv.checkpoint import ExpectedTensor, ModelConfig

from .finite import check_finite
from .floats import FLOATS
from .format import Size, WeightFormat
from .groups import GroupFormat
from .methods import FormatOf, register
from .settings import HEAD, Headers, Settings, headers_of

#: Bits of a code -> bits of a word, and codes in a word.
_PACKED = {8: (8, 1), 6: (8, 1), 5: (8, 1), 4: (8, 2), 3: (32, 10), 2: (8, 4)}
#: Scalars beside a matrix that repeat the settings.
_SCALARS = ("nbits", "group_size", "axis")


@dataclass(frozen=True, slots=True, kw_only=True)
class HqqFormat(GroupFormat):
    """Groups along a row's inputs; ``group`` is 0 for whole rows."""

    @property
    def name(self) -> str:
        return f"hqq-{self.layout_name}"

    def stored(self, size: Size) -> dict[str, ExpectedTensor]:
        group = self.group or size[1]
        if size[1] % group:
            raise ValueError(
                f"rows of {size[1]} inputs are not a multiple of groups of {group}, so that HQQ's "
                "groups cross rows; exkv reads groups within rows: take another quantized version"
            )
        self.layout(size)  # raises for inputs that it cannot have
        count = size[0] * size[1] // group
        word, codes = _PACKED[self.bits]
        shape = (math.ceil(count / codes), group)
        floats = ExpectedTensor.of_floats((count, 1), self.scale)
        return {
            "W_q": ExpectedTensor(shape=shape, dtypes=(torch.uint8 if word == 8 else torch.int32,)),
            **{"scale": floats, "zero": floats},
            **{name: ExpectedTensor(shape=(), dtypes=(torch.int32,)) for name in _SCALARS},
            "shape": ExpectedTensor(shape=(2,), dtypes=(torch.int64,)),
        }

    def convert(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        size = tuple(stored["shape"].tolist())
        group = stored["W_q"].shape[1]
        count = len(stored["scale"])
        found = {name: int(stored[name]) for name in _SCALARS}
        needed = {"nbits": self.bits, "group_size": group, "axis": 1}
        if found != needed or math.prod(size) != count * group or size[1] % group:
            raise ValueError(
                f"the scalars beside W_q are {found} with shape {list(size)}, but config.json and "
                f"the tensors' shapes mean {needed}: download the model again"
            )
        scale, zero = (stored[name].float().view(size[0], -1) for name in ("scale", "zero"))
        check_finite("scale", scale.to(self.scale))
        check_finite("zero", zero)
        codes = self._codes(stored["W_q"], count)
        if codes.numel() and int(codes.max()) >= 1 << self.bits:
            raise ValueError(
                f"W_q has the code {int(codes.max())}, above the {(1 << self.bits) - 1} of "
                f"{self.bits} bits: download the model again"
            )
        offset = (-zero * scale).to(self.scale)
        check_finite("zero times scale", offset)
        return self.pack(codes.view(size), scale, offset)

    def _codes(self, words: torch.Tensor, count: int) -> torch.Tensor:
        """Codes of each group, uint8 (count, group)."""
        _, each = _PACKED[self.bits]
        width = self.bits if each > 1 else 8
        shifts = range(width * (each - 1), -1, -width)
        parts = [(words >> shift & (1 << width) - 1).to(torch.uint8) for shift in shifts]
        return torch.cat(parts)[:count]


def formats_of(config: ModelConfig, dtype: torch.dtype) -> FormatOf:
    """The format of every layer: one for all, or one for each kind of layer, named by its path
    without numbers (``self_attn.q_proj``)."""
    settings, headers = Settings.of(config), headers_of(config)
    settings.only("quant_method", "quant_config", "skip_modules")
    kinds = settings.section("quant_config")
    ignored = settings.names("skip_modules") if "skip_modules" in settings.values else (HEAD,)
    for_all = None if _is_by_kind(kinds) else _read(kinds)
    by_kind = {} if for_all else {name: _of_kind(kinds, name) for name in kinds.values}
    quantized = settings.quantized(headers, ignored, "W_q")

    def format_of(layer: str, size: Size) -> WeightFormat:
        found = for_all or by_kind.get(_kind(layer))
        if not quantized(layer) or (found is None and headers is None):
            return FLOATS[dtype]
        if found is None:
            if f"{layer}.W_q" not in (headers or {}):
                return FLOATS[dtype]
            raise ValueError(
                f"{kinds.where} has no entry for {_kind(layer)}, and the checkpoint has "
                f"{layer}.W_q: they contradict each other, download the model again"
            )
        bits, group = found
        group = 0 if group == size[1] else group
        scale = _scale_dtype(layer, headers)
        return register(HqqFormat(bits=bits, group=group, scale=scale, shift="offset"))

    return format_of


def _is_by_kind(kinds: Settings) -> bool:
    return bool(kinds.values) and "weight_quant_params" not in kinds.values


def _kind(layer: str) -> str:
    """A layer's path without numbers, such as ``self_attn.q_proj``."""
    parts = layer.split(".")
    return ".".join(
        part for part in parts if part not in ("model", "layers") and not part.isdigit()
    )


def _of_kind(kinds: Settings, name: str) -> tuple[int, int] | None:
    settings = kinds.part(name)
    return None if settings is None else _read(settings)


def _read(settings: Settings) -> tuple[int, int]:
    """Bits, and inputs of a group; 0 for whole rows."""
    settings.only("weight_quant_params", "scale_quant_params", "zero_quant_params", "offload_meta")
    for name in ("scale_quant_params", "zero_quant_params"):
        if settings.values.get(name) is not None:
            raise settings.bad(name, "null: exkv reads float scales and zero points only")
    settings.choice("offload_meta", (False,), False)
    weights = settings.section("weight_quant_params")
    weights.only(
        *("nbits", "channel_wise", "group_size", "optimize", "round_zero", "axis", "view_as_float")
    )
    weights.choice("channel_wise", (True,), True)
    weights.choice("view_as_float", (False,), False)
    weights.choice("axis", (1,), 1)
    bits = weights.choice("nbits", _PACKED, 4)
    return bits, weights.group_size("group_size") or 0


def _scale_dtype(layer: str, headers: Headers | None) -> torch.dtype:
    """float16 for files of 16-bit floats."""
    info = (headers or {}).get(f"{layer}.scale")
    return torch.float32 if info is not None and info.dtype == torch.float32 else torch.float16
