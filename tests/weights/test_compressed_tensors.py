"""What the package compressed-tensors makes of the same tensors."""

from __future__ import annotations

import pytest
import torch
from packers.compressed import RECIPES

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
