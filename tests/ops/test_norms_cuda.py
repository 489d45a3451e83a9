"""The CUDA kernels of norms and gates, emulated or on a GPU, in the same tests as the CPU's."""

from __future__ import annotations

import pytest
import test_norms
import torch
from native import ops_of


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.cuda)], autouse=True)
def backend(request, monkeypatch):
    """The ops that the tests from test_norms use."""
    ops = ops_of(request.param)
    monkeypatch.setattr(test_norms, "rms_norm", ops.rms_norm)
    monkeypatch.setattr(test_norms, "add_rms_norm", ops.add_rms_norm)
    monkeypatch.setitem(test_norms.GATES, "silu", ops.silu_mul_)
    monkeypatch.setitem(test_norms.GATES, "gelu_pytorch_tanh", ops.gelu_mul_)


CHECKS = [
    test_norms.test_any_shapes_norm_is_right_within_rounding,
    test_norms.test_any_shapes_gate_is_right_within_rounding,
    test_norms.test_norm_with_an_exact_sum_is_bit_identical_to_the_reference,
    test_norms.test_adding_first_is_torchs_sum_and_the_norm_of_it,
    test_norms.test_no_access_outside_of_the_tensors,
    test_norms.test_mismatched_arguments_are_refused_by_name_and_number,
    test_norms.test_silu_of_float32_is_right_to_two_units_of_the_last_place,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_cuda_matches_the_cpu(check):
    check()


@pytest.mark.parametrize("dtype", test_norms.DTYPES)
def test_each_type_matches_the_cpu(dtype):
    for offset in (False, True):
        test_norms.test_a_norms_errors_are_at_most_twice_torchs_own(dtype, offset)
    test_norms.test_infinities_nan_and_zeros_propagate_through_norms(dtype)
    test_norms.test_strided_inputs_of_norms_are_read_correctly(dtype)
    for act in test_norms.FUSED:
        test_norms.test_a_gates_errors_are_at_most_twice_torchs_own(dtype, act)
        test_norms.test_extreme_values_propagate_through_gates(dtype, act)
        test_norms.test_strided_gates_are_written_in_place(dtype, act)


def test_more_rows_than_a_grid_is_high():
    gate, up = (torch.randn(65535 + 3, 2, dtype=torch.float32) for _ in range(2))
    out = test_norms.gated("silu", gate, up)
    torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", test_norms.DTYPES)
def test_vectorized_values_are_bit_identical(dtype):
    x, residual = (test_norms.normal(3, 2048, dtype=dtype, seed=seed) for seed in range(2))
    weight = test_norms.normal(2048, dtype=dtype, seed=2)
    apart = [test_norms.poisoned(tensor) for tensor in (x, residual, weight)]
    for act in test_norms.FUSED:
        whole = test_norms.gated(act, x, residual)
        assert torch.equal(whole, test_norms.gated(act, x, apart[1]))
    outs = test_norms.add_rms_norm(x, residual, weight, 1e-5)
    assert all(map(torch.equal, outs, test_norms.add_rms_norm(*apart, 1e-5)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_of_every_16_bit_number_is_rounded_right(dtype):
    test_norms.test_gelu_of_every_16_bit_number_is_rounded_right(dtype)
