"""ModelOpt's NVFP4, as the package compressed-tensors reads it."""

from __future__ import annotations

import pytest
import torch
from packers.modelopt import floats4


def test_the_packers_write_what_another_converter_reads():
    """The format is compared with the packers, and so with the package."""
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters")
    theirs = pytest.importorskip("compressed_tensors.compressors").BaseCompressor
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(1))
    tensors, plain = floats4(weight)
    named = {f"some.layer.{part}": values for part, values in tensors.items()}
    made = converters.ModelOptNvfp4Converter(targets=["some.layer"]).process(named)
    made = {name.removeprefix("some.layer."): values for name, values in made.items()}
    made["weight_global_scale"] = made["weight_global_scale"].reshape(1)
    scheme = quantization.preset_name_to_scheme("NVFP4A16", ["Linear"])
    found = theirs.get_value_from_registry("nvfp4-pack-quantized").decompress(made, scheme)
    error = (found["weight"].float() - plain).abs()
    assert (error <= 2**-8 * plain.abs()).all()  # they compute in bfloat16
