"""EXL3's codebooks and bit streams equal ExLlamaV3's kernels' reading to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from packers.exl3 import decode, tile_values

from exkv.weights.exl3 import CODEBOOKS, TrellisFormat


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_a_codebook_has_the_kernels_values_for_every_state(codebook):
    format = TrellisFormat(words=64, codebook=codebook)
    found = format._values(torch.device("cpu")).numpy()
    assert np.array_equal(found.view(np.int16), decode(np.arange(1 << 16), codebook).view(np.int16))


def test_the_first_codebook_spreads_as_exllamav3_says():
    """``codebook_scale`` of its quantizer."""
    values = TrellisFormat(words=64, codebook="3inst")._values(torch.device("cpu"))
    assert abs(values.double().std(unbiased=False).item() - 1.24371088) < 1e-7


@pytest.mark.parametrize("words", range(16, 129, 8))
def test_tiles_of_any_bits_are_read_as_the_kernel_reads_them(words):
    format = TrellisFormat(words=words, codebook="mul1")
    generator = torch.Generator().manual_seed(words)
    trellis = torch.randint(-(2**15), 2**15, (2, 3, words), generator=generator).short()
    tiles = tile_values(trellis.flatten(0, 1).numpy().view(np.uint16), "mul1")
    expected = tiles.reshape(2, 3, 16, 16).transpose(0, 3, 1, 2).reshape(32, 48)
    found = format.dequantize({"trellis": trellis}, torch.float32).numpy()
    assert np.array_equal(found, expected.astype(np.float32))
    ids = torch.tensor([31, 4, 17])
    some = format.rows({"trellis": trellis}, ids, torch.float32)
    assert np.array_equal(some.numpy(), found[ids.numpy()])
