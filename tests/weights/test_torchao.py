"""torchao's matrices as packed by the package torchao itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from exkv.weights.torchao import TorchaoFormat, TorchaoFp8Format

FILE = Path(__file__).resolve().parents[1] / "packers/torchao.safetensors"
MATRICES = sorted({name.split("/")[0] for name in load_file(FILE)})


@pytest.mark.parametrize("name", MATRICES)
def test_matrices_are_those_that_torchao_dequantizes(name):
    parts = {
        key.split("/")[1]: value for key, value in load_file(FILE).items() if f"{name}/" in key
    }
    expected = parts.pop("dequantized")
    scale = parts["_weight_scale"]
    if name.startswith("fp8"):
        rows = scale.shape[0] > 1
        format = TorchaoFp8Format(block=(1, expected.shape[1]) if rows else None)
    else:
        bits, group, mapping = name.split()
        shift = "zero" if mapping == "asymmetric" else "symmetric"
        format = TorchaoFormat(bits=int(bits), group=int(group), scale=scale.dtype, shift=shift)
    size = (expected.shape[0], expected.shape[1])
    for key, wanted in format.stored(size).items():
        assert parts[key].shape == wanted.shape and parts[key].dtype in wanted.dtypes
    assert torch.equal(format.dequantize(format.convert(parts), torch.float32), expected)
