"""The formats that are known, and which of them a checkpoint's layers have.

``METHODS`` maps what a config.json calls its way of quantizing to a file of this package. There,
``formats_of(config, dtype)`` reads the settings and answers with a function from a layer's name and
size to its format, since a checkpoint may have layers of many: some left as floats, some in more
bits than others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from exkv.checkpoint import ModelConfig
from exkv.checkpoint.files import quoted

from .floats import FLOATS
from .format import Size, WeightFormat

#: From a layer's name in the checkpoint (``model.layers.0.mlp.up_proj``) and the size of its
#: matrix to its format.
FormatOf = Callable[[str, Size], WeightFormat]

#: ``quant_method`` of config.json's quantization_config -> the module with its ``formats_of``;
#: None is the checkpoint that isn't quantized.
METHODS: dict[str | None, str] = {
    None: f"{__package__}.floats",
    "gptq": f"{__package__}.gptq",
    "awq": f"{__package__}.awq",
    "compressed-tensors": f"{__package__}.compressed_tensors",
    "bitsandbytes": f"{__package__}.bitsandbytes",
    "exl2": f"{__package__}.exl2",
    "exl3": f"{__package__}.exl3",
    "hqq": f"{__package__}.hqq",
    "torchao": f"{__package__}.torchao",
    "fp8": f"{__package__}.fp8",
    "fbgemm_fp8": f"{__package__}.fp8",
    "mxfp4": f"{__package__}.mxfp4",
    "modelopt": f"{__package__}.modelopt",
    "gguf": f"{__package__}.gguf",
    "on_load": f"{__package__}.on_load",
}

_formats: dict[str, WeightFormat] = {}


def register(format: WeightFormat) -> WeightFormat:
    """Make the format known by its name; values with parameters register when they are made.

    Returns:
        the format, or the equal one that was registered before.

    Raises:
        ValueError: another one has this name.
    """
    known = _formats.setdefault(format.name, format)
    if known != format:
        raise ValueError(f"the name {format.name!r} is that of {known}: {format} needs another")
    return known


def format_named(name: str) -> WeightFormat:
    """The format registered by this name."""
    return _formats[name]


def formats() -> Mapping[str, WeightFormat]:
    """Name -> format, of all that are registered by now."""
    return MappingProxyType(_formats)


def formats_of(config: ModelConfig, dtype: torch.dtype) -> FormatOf:
    """The formats of this config's layers, for arithmetic in ``dtype``.

    Raises:
        ValueError: it is quantized by a method that isn't known.
    """
    settings = config.quantization
    method = None if settings is None else settings.get("quant_method")
    if settings is not None and not (isinstance(method, str) and method in METHODS):
        known = ", ".join(filter(None, METHODS)) or "none yet"
        raise ValueError(
            f"{config.path or 'the config'}: quantization_config (quant_method {quoted(method)}) "
            f"is not supported; known are: {known}. Take the model's unquantized version"
        )
    return importlib.import_module(METHODS[method]).formats_of(config, dtype)


for _format in FLOATS.values():
    register(_format)
