"""What the package compressed-tensors makes of the same tensors."""

from __future__ import annotations

import pytest
import torch
from packers.compressed import RECIPES
from packers.integers import awq

#: It has no ``g_idx`` any more.
NAMES = [name for name in RECIPES if not name.endswith(("act-order", "mixed"))]


@pytest.mark.parametrize("name", NAMES)
def test_the_packers_write_what_the_package_reads(name):
    """So that the formats, which are held against the packers, are held against it."""
    theirs = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    settings = RECIPES[name].settings
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(1))
    tensors, plain = RECIPES[name].pack("some.layer", weight)
    tensors["weight_scale"] = tensors["weight_scale"].float()
    (group,) = settings["config_groups"].values()
    scheme = quantization.QuantizationScheme(**group)
    compressor = theirs.BaseCompressor.get_value_from_registry(settings["format"])
    assert torch.equal(compressor.decompress(tensors, scheme)["weight"], plain)


def test_its_converter_reads_awq_as_the_packers_write_it():
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters")
    theirs = pytest.importorskip("compressed_tensors.compressors").BaseCompressor
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(1))
    tensors, plain = awq(weight, 64)
    named = {f"some.layer.{part}": values.contiguous() for part, values in tensors.items()}
    made = converters.AutoAWQConverter(group_size=64).process(named)
    made = {name.removeprefix("some.layer."): values for name, values in made.items()}
    made["weight_scale"] = made["weight_scale"].float()
    weights = quantization.QuantizationArgs(
        num_bits=4, symmetric=False, strategy="group", group_size=64
    )
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = theirs.get_value_from_registry("pack-quantized")
    assert torch.equal(compressor.decompress(made, scheme)["weight"], plain)
