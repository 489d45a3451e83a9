"""Configs, MLPs, experts and native code agree on one table of activations."""

from __future__ import annotations

import pytest
import torch

import exkv_ext
from exkv.checkpoint.model_config import HIDDEN_ACTS
from exkv.ops import REFERENCES
from exkv.ops.activations import ACTIVATIONS, NATIVE, activated, is_native


def test_configs_take_the_activations_of_the_table():
    assert set(HIDDEN_ACTS) == set(ACTIVATIONS)


def test_the_native_side_knows_those_that_the_table_says():
    native = exkv_ext.activations()
    if native is None:
        pytest.skip("the CPU kernels aren't loaded")
    assert native == NATIVE
    assert not is_native("tanh")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_both_forms_of_an_activation_are_one_function(name):
    gate, up = torch.randn(2, 7, 33).unbind()
    expected = ACTIVATIONS[name].apply(gate.clone()) * up
    ACTIVATIONS[name].gate(gate, up)
    torch.testing.assert_close(gate, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_in_place_is_torchs(name, dtype):
    """To two units of the last place of float32 beside its sum's terms, or the rounding of 16
    bits."""
    x = torch.randn(7, 333).mul_(4).to(dtype)
    exact = ACTIVATIONS[name].apply(x.double())
    unit = torch.finfo(dtype).eps
    found = activated(x.clone(), name)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=2 * unit, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_clamped_gate_is_its_formula(dtype):
    gate, up = torch.randn(2, 5, 70).mul_(6).to(dtype).unbind()
    open_, raised = gate.double().clamp(max=7), up.double().clamp(-7, 7) + 1
    exact = open_ * torch.sigmoid(1.702 * open_) * raised
    for op in (torch.ops.exkv.clamped_swiglu_, REFERENCES["clamped_swiglu_"]):
        found = gate.clone()
        op(found, up, 1.702, 7.0)
        torch.testing.assert_close(
            found.double(),
            exact,
            rtol=16 * torch.finfo(dtype).eps,
            atol=1e-5 if dtype == torch.float32 else 2e-2,
        )
