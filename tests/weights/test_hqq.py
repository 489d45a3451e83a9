"""HQQ matrices as packed by the package hqq itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from exkv.weights.hqq import HqqFormat

FILE = Path(__file__).resolve().parents[1] / "packers/hqq.safetensors"
MATRICES = sorted({name.split("/")[0] for name in load_file(FILE)})


@pytest.mark.parametrize("name", MATRICES)
def test_matrices_are_those_that_hqq_dequantizes(name):
    """But for an offset, the zero point times the scale, in 16 bits where the file has 16."""
    parts = {key.split("/")[1]: value for key, value in load_file(FILE).items() if name in key}
    bits, group, dtype = name.split()
    scale = torch.float32 if dtype == "float32" else torch.float16
    format = HqqFormat(bits=int(bits), group=int(group), scale=scale, shift="offset")
    expected = parts.pop("dequantized")
    for key, wanted in format.stored(tuple(expected.shape)).items():
        assert parts[key].shape == wanted.shape and parts[key].dtype in wanted.dtypes
    found = format.dequantize(format.convert(parts), torch.float32)
    offset = (parts["zero"].float() * parts["scale"].float()).abs().view(len(expected), -1)
    offset = offset.repeat_interleave(expected.shape[1] // offset.shape[1], 1)
    bound = torch.finfo(scale).eps / 2 * offset + 1e-6 * expected.abs().max()
    assert ((found - expected).abs() <= bound).all()
