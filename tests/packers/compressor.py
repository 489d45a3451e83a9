"""Folders that the package compressed-tensors writes itself, as llm-compressor has it do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

compressors = pytest.importorskip("compressed_tensors.compressors")
quantization = pytest.importorskip("compressed_tensors.quantization")
utils = pytest.importorskip("compressed_tensors.quantization.utils")


def save_compressed(model: torch.nn.Module, folder: Path, preset: str) -> dict[str, torch.Tensor]:
    """Quantize a model in place by one of the package's presets, round to nearest, and save it.

    Returns:
        What the package itself makes of the weights, by their names in the model.
    """
    scheme = quantization.preset_name_to_scheme(preset, ["Linear"])
    _fit(scheme.weights)
    config = quantization.QuantizationConfig(config_groups={"group": scheme}, ignore=["lm_head"])
    quantization.apply_quantization_config(model, config)
    for module in model.modules():
        if utils.is_module_quantized(module):
            _calibrate(module)
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    return dict(model.state_dict())


def _fit(weights: Any) -> None:
    """Groups and blocks that tiny matrices have."""
    if weights.group_size == 128:
        weights.group_size = 32
    if weights.block_structure:
        weights.block_structure = [32, 32]


def _calibrate(module: torch.nn.Module) -> None:
    """Scales and zero points for the range of the weights."""
    args, whole = module.quantization_scheme.weights, None
    parts = _parts(module.weight.data, args)
    low, high = parts.amin(-1), parts.amax(-1)
    if args.strategy == "tensor_group":
        whole = utils.generate_gparam(low.min().reshape(1), high.max().reshape(1))
        module.weight_global_scale.data.copy_(whole)
    scale, zero = utils.calculate_qparams(low, high, args, whole)
    assert scale.shape == module.weight_scale.shape
    module.weight_scale.data.copy_(scale)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zero)


def _parts(weight: torch.Tensor, args: Any) -> torch.Tensor:
    """What shares a scale, in the last dimension."""
    if args.strategy == "tensor":
        return weight.reshape(1, -1)
    if args.strategy == "channel":
        return weight.unsqueeze(1)
    if args.strategy == "block":
        high, wide = args.block_structure
        blocks = weight.unflatten(1, (-1, wide)).unflatten(0, (-1, high))
        return blocks.transpose(1, 2).flatten(2)
    return weight.unflatten(1, (-1, args.group_size))
