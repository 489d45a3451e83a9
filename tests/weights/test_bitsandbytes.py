"""bitsandbytes' formats against the package bitsandbytes on the same tensors."""

from __future__ import annotations

import pytest
import torch
from packers.bitsandbytes import RECIPES

from exkv.weights.bitsandbytes import INT8, Bnb4Format

WEIGHT = torch.randn(96, 256, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["nf4", "nf4 nested", "fp4"])
def test_the_packers_write_what_the_package_reads(name):
    """Formats are compared with the packers, and so with the package."""
    theirs = pytest.importorskip("bitsandbytes.functional")
    tensors, plain = RECIPES[name].pack("some.layer", WEIGHT)
    state = {key: values for key, values in tensors.items() if key != "weight"}
    read = theirs.QuantState.from_dict(state, device=torch.device("cpu"))
    found = theirs.dequantize_4bit(tensors["weight"], read)
    assert (found - plain).abs().max() <= 1e-6 * plain.abs().max()


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_what_the_package_writes_is_read(kind, nested):
    theirs = pytest.importorskip("bitsandbytes.functional")
    packed, state = theirs.quantize_4bit(
        WEIGHT, blocksize=64, quant_type=kind, compress_statistics=nested
    )
    stored = {"weight": packed}
    stored |= {f"weight.{key}": values for key, values in state.as_dict(packed=True).items()}
    (name,) = (name for name in stored if "quant_state" in name)
    format = Bnb4Format(kind=kind, block=64, nested=nested, state=len(stored[name]))
    expected = format.stored((96, 256))
    assert {key: tensor.shape for key, tensor in expected.items()} == {
        key: tuple(values.shape) for key, values in stored.items()
    }
    found = format.dequantize(format.convert(stored), torch.float32)
    assert (found - theirs.dequantize_4bit(packed, state)).abs().max() <= 1e-6


def test_int8_is_the_packages():
    theirs = pytest.importorskip("bitsandbytes.functional")
    codes, scale, _ = theirs.int8_vectorwise_quant(WEIGHT.half())
    made = INT8.convert({"weight": codes, "SCB": scale})
    found = INT8.dequantize(made, torch.float32)
    assert (found - theirs.int8_vectorwise_dequant(codes, scale)).abs().max() <= 1e-5
