"""The CUDA kernel of rotary positions, emulated or on a GPU, in the same tests as the CPU's."""

from __future__ import annotations

import pytest
import test_rope
import torch
from native import ops_of


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.cuda)], autouse=True)
def backend(request, monkeypatch):
    """The op that the tests from test_rope use."""
    monkeypatch.setattr(test_rope, "rope", ops_of(request.param).rope)


def test_any_shapes_turn_is_transformers_own_to_the_bit():
    test_rope.test_any_shapes_turn_is_transformers_own_to_the_bit()


def test_rope_is_a_complex_rotation():
    test_rope.test_rope_is_a_complex_rotation()


@pytest.mark.parametrize("dtype", test_rope.DTYPES)
def test_infinities_and_nan_propagate(dtype):
    test_rope.test_infinities_and_nan_propagate(dtype)


@pytest.mark.parametrize("dtype", test_rope.DTYPES)
def test_strided_heads_are_read_correctly(dtype):
    test_rope.test_strided_heads_are_read_correctly(dtype)


def test_no_access_outside_of_the_tensors():
    test_rope.test_no_access_outside_of_the_tensors()


def test_mismatched_arguments_are_refused_by_name_and_number():
    test_rope.test_mismatched_arguments_are_refused_by_name_and_number()


@pytest.mark.parametrize("dtype", test_rope.DTYPES)
@pytest.mark.parametrize("width", [64, 32])
def test_features_that_are_moved_together_give_the_same_bits_as_by_themselves(dtype, width):
    """As models have them: 16 bytes at a time, all features rotated or some."""
    q, k = (test_rope.normal(2, 3, n, 64, dtype=dtype, seed=n) for n in (6, 2))
    cos, sin = test_rope.unlike(2, 3, width, dtype)
    outs = test_rope.rope(q, k, cos, sin)
    assert test_rope.equal(outs, test_rope.transformers_rope(q, k, cos, sin))
    apart = map(test_rope.poisoned, (q, k, cos, sin))
    assert test_rope.equal(test_rope.rope(*apart), outs)


def test_heads_larger_than_a_thread_block():
    q, k = (test_rope.normal(1, 1, n, 128, dtype=torch.float32, seed=n) for n in (40, 3))
    cos, sin = test_rope.factors(1, 1, 128, torch.float32)
    outs = test_rope.rope(q, k, cos, sin)
    assert test_rope.equal(outs, test_rope.transformers_rope(q, k, cos, sin))
