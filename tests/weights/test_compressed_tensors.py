"""compressed-tensors' formats against the package compressed-tensors, for single tensors and a
whole model."""

from __future__ import annotations

import pytest
import torch
from on_cpu import on_cpu
from packers.compressed import RECIPES
from packers.compressor import save_compressed
from packers.integers import awq
from tiny import TINY, llama, mixtral, reference

from exkv import Cache

#: It has no ``g_idx`` any more.
NAMES = [name for name in RECIPES if not name.endswith(("act-order", "mixed", "hadamard"))]


@pytest.mark.parametrize("name", NAMES)
def test_the_packers_write_what_the_package_reads(name):
    """Formats are compared with the packers, and so with the package."""
    theirs = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    settings = RECIPES[name].settings
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(1))
    tensors, plain = RECIPES[name].pack("some.layer", weight)
    if tensors["weight_scale"].dtype != torch.uint8:
        tensors["weight_scale"] = tensors["weight_scale"].float()
    (group,) = settings["config_groups"].values()
    scheme = quantization.QuantizationScheme(**group)
    compressor = theirs.BaseCompressor.get_value_from_registry(settings["format"])
    found = compressor.decompress(tensors, scheme)["weight"]
    if name.split()[1] in ("nvfp4", "mxfp4", "mxfp8"):  # of which they make bfloat16
        assert ((found.float() - plain).abs() <= 2**-8 * plain.abs()).all()
    else:
        assert torch.equal(found, plain)


#: Its presets -> the tiny model that is compressed by each.
PRESETS = {
    **dict.fromkeys(("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "W4AFP8"), llama),
    **dict.fromkeys(("FP8", "FP8_DYNAMIC", "FP8_BLOCK"), llama),
    **dict.fromkeys(("NVFP4", "MXFP4", "MXFP8"), llama),
    "NVFP4A16": TINY["Qwen3MoeForCausalLM"],
    "MXFP4A16": mixtral,
}


@pytest.mark.parametrize("preset", PRESETS)
@torch.no_grad()
def test_folders_that_its_own_compressor_writes_are_read(tmp_path, preset):
    """Mixtures keep routers and experts as floats, and don't name them in ``ignore``."""
    plain = reference(PRESETS[preset](num_hidden_layers=2))
    theirs = save_compressed(reference(plain.config), tmp_path, preset)
    floats = {key: value.float() for key, value in theirs.items() if key in plain.state_dict()}
    changed = [key for key, value in plain.state_dict().items() if not floats[key].equal(value)]
    assert len(changed) == 2 * (7 if PRESETS[preset] is llama else 4) + 3 * (preset == "NVFP4A16")
    plain.load_state_dict(floats)
    ours = on_cpu(tmp_path, dtype=torch.float32)
    ids = torch.randint(3, 320, (1, 30), generator=torch.Generator().manual_seed(1))
    expected = plain(ids).logits
    error = (ours.forward(ids, Cache(ours, 64)) - expected).abs().max() / expected.abs().max()
    assert error < (2e-2 if "NVFP4" in preset else 1e-5)  # which they take to bfloat16


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
