"""The CUDA kernels that pack, unpack and transform, emulated or on a GPU, in the same tests as the
CPU's."""

from __future__ import annotations

import pytest
import test_kv_formats
import torch
from native import emulated, ops_of

from exkv.ops import REFERENCES


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.cuda)], autouse=True)
def backend(request, monkeypatch):
    """The ops that the tests from test_kv_formats use."""
    monkeypatch.setattr(test_kv_formats, "kernels", ops_of(request.param))
    return test_kv_formats.kernels


def test_every_float16_pattern_gives_the_reference_bits(backend):
    test_kv_formats.check_every_float16_pattern(step=7 if emulated(backend) else 1)


def test_any_shape_type_and_magnitude_gives_the_reference_bits():
    test_kv_formats.check_any_shape()


@pytest.mark.parametrize("dtype", test_kv_formats.DTYPES)
@pytest.mark.parametrize("dim", [128, 256, 512, 3 * 1024, 2048])
def test_a_transform_within_a_warp_or_a_block_of_threads_gives_the_reference_bits(
    backend, dim, dtype
):
    x = torch.randn(3, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)
    assert test_kv_formats.same(backend.hadamard(x), REFERENCES["hadamard"](x))


def test_a_larger_transform_is_refused_with_the_number(backend):
    with pytest.raises(RuntimeError, match="4096 values .* blocks of 4096, .* has at most 2048"):
        backend.hadamard(torch.randn(1, 4096))
    backend.hadamard(torch.randn(1, 4097))  # odd: nothing to transform
