"""ggml's packed types: values equal the ``gguf`` package's to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from exkv.checkpoint.gguf.header import TENSOR_TYPES
from exkv.weights.gguf import FORMATS

gguf = pytest.importorskip("gguf", reason="of the test extra, which `make test` installs")


def packed(name: str, rows: int, blocks: int) -> torch.Tensor:
    """Any bytes: codes and scales of all values, infinite ones and those that are none too."""
    generator = torch.Generator().manual_seed(len(name) + blocks)
    nbytes = FORMATS[name].type.nbytes
    made = torch.randint(256, (rows, blocks, nbytes), generator=generator).to(torch.uint8)
    if name == "MXFP4":  # whose largest scales are refused
        made[..., 0] %= 253
    if name == "IQ1_M":  # the same
        made[..., 55] &= 0xBF
    return made.flatten(1)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_of_the_gguf_package_to_the_bit(name):
    stored = packed(name, 64, 3)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(stored.numpy(), gguf.GGMLQuantizationType[name])
    on_device = FORMATS[name].convert({"weight": stored})
    assert sum(tensor.nbytes for tensor in on_device.values()) == stored.nbytes
    found = FORMATS[name].dequantize(on_device, torch.float32).numpy()
    if name == "MXFP4":  # ggml's table has no negative zero
        found = found + 0.0
    numbers = ~np.isnan(expected)
    assert numbers.mean() > 0.9
    assert np.array_equal(np.isnan(found), ~numbers)
    assert np.array_equal(found[numbers].view(np.int32), expected[numbers].view(np.int32))


@pytest.mark.parametrize("number", TENSOR_TYPES)
def test_sizes_of_types_are_ggml_s(number):
    type = TENSOR_TYPES[number]
    ours = gguf.GGMLQuantizationType(number)
    assert (ours.name, gguf.GGML_QUANT_SIZES[ours]) == (type.name, (type.block, type.nbytes))


def test_embedding_unpacks_only_the_requested_rows():
    format, stored = FORMATS["Q6_K"], packed("Q6_K", 300, 2)
    seen = []
    plain = format.unpack

    def unpack(blocks):
        seen.append(len(blocks))
        return plain(blocks)

    object.__setattr__(format, "unpack", unpack)
    try:
        ids = torch.tensor([[7, 299, 7]])
        found = format.embed(ids, {"weight": stored}, torch.float32)
    finally:
        object.__setattr__(format, "unpack", plain)
    assert seen == [6]
    whole = format.dequantize({"weight": stored}, torch.float32)
    assert torch.equal(found.nan_to_num(), whole[ids].nan_to_num())


def test_split_scale_of_nan_is_refused_by_its_place():
    stored = packed("IQ1_M", 4, 3)
    stored.view(-1, 56)[7, 49::2] |= 0xF0
    with pytest.raises(ValueError, match="1 of 12 scales are not finite; the first is number 7"):
        FORMATS["IQ1_M"].convert({"weight": stored})


def test_incomplete_blocks_are_refused():
    with pytest.raises(ValueError, match="rows of 320 numbers are not a multiple of Q4_K"):
        FORMATS["Q4_K"].stored((8, 320))
