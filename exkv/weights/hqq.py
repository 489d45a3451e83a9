"""HQQ (Badri & Shaji, 2023), as the ``hqq`` package and transformers save it: integers of 8 to 2
bits in groups of a row's inputs, each with a scale and a zero point that are floats.

A weight is ``(code - zero) * scale``. Codes lie in ``W_q`` by groups (out * in / group, group);
those of 4 bits are two to a byte and of 2 bits four, a run of groups in the high bits of all bytes
and the next in those below; of 3 bits ten to an int32, of 5 and 6 bits one to a byte. ``scale`` and
``zero`` (groups, 1) are floats of the dtype in which the model computed. Beside them lie numbers as
scalars: ``nbits``, ``group_size``, ``axis``, ``shape``.

On a device a weight is ``scale * code + offset`` in the layout of groups, with 16-bit scales where
the file has them: the offset ``-zero * scale`` is rounded to a float16, as HQQ rounds
``code - zero`` in its own arithmetic.

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
from .settings import HEAD, Headers, Quantized, Settings, headers_of

#: Bits of a code -> those of a word, and codes in one.
_PACKED = {8: (8, 1), 6: (8, 1), 5: (8, 1), 4: (8, 2), 3: (32, 10), 2: (8, 4)}
#: Scalars beside a matrix, which the settings say too.
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
                f"rows of {size[1]} inputs are no groups of {group}, which HQQ counts across rows "
                "then; exkv reads groups within rows: take another quantized version"
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
                f"the scalars beside W_q say {found} and shape {list(size)}, and config.json and "
                f"the tensors' shapes {needed}: download the model again"
            )
        scale, zero = (stored[name].float().view(size[0], -1) for name in ("scale", "zero"))
        check_finite("scale", scale.to(self.scale))
        check_finite("zero", zero)
        codes = self._codes(stored["W_q"], count)
        if codes.numel() and int(codes.max()) >= 1 << self.bits:
            raise ValueError(
                f"W_q has the code {int(codes.max())}, and {self.bits} bits go to "
                f"{(1 << self.bits) - 1}: download the model again"
            )
        offset = (-zero * scale).to(self.scale)
        check_finite("zero times scale", offset)
        return self.pack(codes.view(size), scale, offset)

    def _codes(self, words: torch.Tensor, count: int) -> torch.Tensor:
        """Of each group, uint8 (count, group)."""
        _, each = _PACKED[self.bits]
        width = self.bits if each > 1 else 8
        shifts = range(width * (each - 1), -1, -width)
        parts = [(words >> shift & (1 << width) - 1).to(torch.uint8) for shift in shifts]
        return torch.cat(parts)[:count]


def formats_of(config: ModelConfig, dtype: torch.dtype) -> FormatOf:
    """The format of every layer: one for all, or one for each kind of layer, which the settings
    name by its path without numbers (``self_attn.q_proj``)."""
    settings, headers = Settings.of(config), headers_of(config)
    settings.only("quant_method", "quant_config", "skip_modules")
    kinds = settings.part("quant_config") or Settings(where=settings.where, values={})
    ignored = settings.names("skip_modules") if "skip_modules" in settings.values else (HEAD,)
    for_all = None if _is_by_kind(kinds) else _read(kinds)
    by_kind = {} if for_all else {name: _of_kind(kinds, name) for name in kinds.values}
    quantized = Quantized(where=settings.where, ignored=ignored, markers=("W_q",), headers=headers)

    def format_of(layer: str, size: Size) -> WeightFormat:
        found = for_all or by_kind.get(_kind(layer))
        if not quantized(layer) or (found is None and headers is None):
            return FLOATS[dtype]
        if found is None:
            if f"{layer}.W_q" not in (headers or {}):
                return FLOATS[dtype]
            raise ValueError(
                f"{kinds.where}: nothing is said of {_kind(layer)}, and the checkpoint has "
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
    """A layer's path without numbers, as ``self_attn.q_proj``."""
    parts = layer.split(".")
    return ".".join(
        part for part in parts if part not in ("model", "layers") and not part.isdigit()
    )


def _of_kind(kinds: Settings, name: str) -> tuple[int, int] | None:
    settings = kinds.part(name)
    return None if settings is None else _read(settings)


def _read(settings: Settings) -> tuple[int, int]:
    """Bits, and inputs of a group, 0 for all of a row."""
    settings.only("weight_quant_params", "scale_quant_params", "zero_quant_params", "offload_meta")
    for name in ("scale_quant_params", "zero_quant_params"):
        if settings.values.get(name) is not None:
            raise settings.bad(name, "null: exkv reads scales and zero points that are floats")
    settings.choice("offload_meta", (False,), False)
    weights = settings.part("weight_quant_params") or Settings(where=settings.where, values={})
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
