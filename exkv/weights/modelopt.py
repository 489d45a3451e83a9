"""NVIDIA's ModelOpt: 4-bit floats (NVFP4, MXFP4) and 8-bit floats (FP8, MXFP8).

``quant_algo`` names the algorithm, or for ``MIXED_PRECISION`` that of each of ``quantized_layers``;
the checkpoint's headers say which layers are floats. Settings of activations, keys and values are
ignored.

- NVFP4: ``weight`` uint8 (out, in / 2), ``weight_scale`` e4m3 (out, in / 16), ``weight_scale_2``.
- MXFP4: ``weight`` uint8 (out, in / 2), ``weight_scale`` uint8 (out, in / 32), powers of two.
- FP8: ``weight`` e4m3 (out, in), ``weight_scale`` a float for the matrix or for each row.
- MXFP8: ``weight`` e4m3 (out, in), ``weight_scale`` uint8 (out, in / 32), powers of two.

Sources: ModelOpt's ``export/convert_hf_config.py`` and ``quantization/qtensor``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase

import torch

from exkv.checkpoint import ModelConfig

from . import mxfp4, nvfp4
from .floats import FLOATS
from .format import Size, WeightFormat
from .fp8 import MXFP8_ROWS, Fp8Format, format_found
from .methods import FormatOf, register
from .settings import Headers, Settings, headers_of

#: Ignored settings; ``config_groups`` repeat ``quant_algo``.
_OF_OTHERS = (
    *("quant_method", "producer", "config_groups", "group_size"),
    *("kv_cache_scheme", "kv_cache_quant_algo"),
)
_MIXED = "MIXED_PRECISION"
_SCALE = "weight_scale"


def formats_of(config: ModelConfig, dtype: torch.dtype) -> FormatOf:
    """The format of every layer."""
    settings, headers = Settings.of(config), headers_of(config)
    settings.only(*_OF_OTHERS, "quant_algo", "quantized_layers", "ignore", "exclude_modules")
    algorithm_of = _algorithms(settings)
    ignored = settings.names("ignore") + settings.names("exclude_modules")
    quantized = settings.quantized(headers, ignored, _SCALE)

    def format_of(layer: str, size: Size) -> WeightFormat:
        algorithm = algorithm_of(layer)
        named = any(fnmatchcase(layer, pattern) for pattern in ignored)
        if algorithm is None or (named and headers is None) or not quantized(layer):
            return FLOATS[dtype]
        return register(_KINDS[algorithm](layer, size, headers))

    return format_of


def _algorithms(settings: Settings) -> Callable[[str], str | None]:
    """From a layer's name to its algorithm, a key of ``_KINDS``; None for floats."""
    known = (*_KINDS, _MIXED)
    whole = _algorithm(settings, known)
    if whole != _MIXED:
        return lambda layer: whole
    layers = settings.part("quantized_layers") or settings
    found = {}
    for name in layers.values:
        each = layers.part(name)
        if each is None:
            raise layers.bad(name, "an object with a quant_algo")
        found[name] = _algorithm(each, tuple(_KINDS))
    return found.get


def _algorithm(settings: Settings, known: tuple[str, ...]) -> str:
    """The algorithm, in capitals; ModelOpt 0.46 writes some in lower case."""
    value = settings.values.get("quant_algo")
    if not isinstance(value, str) or value.upper() not in known:
        raise settings.bad("quant_algo", f"one of {', '.join(known)}")
    return value.upper()


def _nvfp4(layer: str, size: Size, headers: Headers | None) -> WeightFormat:
    found = None if headers is None else headers.get(f"{layer}.{nvfp4.MODELOPT.factor}")
    return nvfp4.MODELOPT if found is None else replace(nvfp4.MODELOPT, factor_shape=found.shape)


def _fp8(layer: str, size: Size, headers: Headers | None) -> WeightFormat:
    if headers is None:
        return Fp8Format(block=None, scale_name=_SCALE, scale_shape=())
    return format_found(layer, size, None, headers)


def _fp8_rows(layer: str, size: Size, headers: Headers | None) -> WeightFormat:
    if headers is None:
        return Fp8Format(block=(1, size[1]), scale_name=_SCALE, scale_shape=size[:1])
    return format_found(layer, size, (1, size[1]), headers)


#: ``quant_algo`` -> function that makes a layer's format. A new algorithm is an entry.
_KINDS: dict[str, Callable[[str, Size, Headers | None], WeightFormat]] = {
    "NVFP4": _nvfp4,
    "W4A16_NVFP4": _nvfp4,
    "W4A8_NVFP4_FP8": _nvfp4,
    "MXFP4": lambda *_: mxfp4.MODELOPT,
    "W4A8_MXFP4_FP8": lambda *_: mxfp4.MODELOPT,
    "FP8": _fp8,
    "FP8_PER_CHANNEL_PER_TOKEN": _fp8_rows,
    "MXFP8": lambda *_: MXFP8_ROWS,
}
