"""The registry of weight formats, and the formats of a checkpoint's layers.

``METHODS`` maps a config.json's ``quant_method`` to a file of this package. There,
``formats_of(config, dtype)`` reads the settings and returns a function from a layer's name and size
to its format, since formats differ within a checkpoint: some layers are floats, some have more bits
than others.
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

#: A layer's name in the checkpoint (``model.layers.0.mlp.up_proj``) and its matrix's size -> its
#: format.
FormatOf = Callable[[str, Size], WeightFormat]

#: ``quant_method`` of config.json's quantization_config -> the module with its ``formats_of``; None
#: for a checkpoint that isn't quantized.
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
    """Register the format under its name; formats with parameters are registered when built.

    Returns:
        The format, or the equal one that was registered before.

    Raises:
        ValueError: another format has this name.
    """
    known = _formats.setdefault(format.name, format)
    if known != format:
        raise ValueError(f"{known} has the name {format.name!r} already: give {format} another")
    return known


def format_named(name: str) -> WeightFormat:
    """The format registered under this name."""
    return _formats[name]


def formats() -> Mapping[str, WeightFormat]:
    """Name -> format, of all formats registered so far."""
    return MappingProxyType(_formats)


def formats_of(config: ModelConfig, dtype: torch.dtype) -> FormatOf:
    """The formats of this config's layers, for computation in ``dtype``.

    Raises:
        ValueError: an unknown quantization method.
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
