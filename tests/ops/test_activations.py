"""Configs, MLPs, experts and native code agree on one table of activations."""

from __future__ import annotations

import pytest
import torch

import exkv_ext
from exkv.checkpoint.model_config import HIDDEN_ACTS
from exkv.ops.activations import ACTIVATIONS, is_native


def test_configs_take_the_activations_of_the_table():
    assert set(HIDDEN_ACTS) == set(ACTIVATIONS)


def test_the_native_side_knows_those_that_the_table_says():
    native = exkv_ext.activations()
    if native is None:
        pytest.skip("the CPU kernels aren't loaded")
    assert set(native) == {name for name in ACTIVATIONS if is_native(name)}
    assert not is_native("tanh")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_both_forms_of_an_activation_are_one_function(name):
    gate, up = torch.randn(2, 7, 33).unbind()
    expected = ACTIVATIONS[name].apply(gate.clone()) * up
    ACTIVATIONS[name].gate(gate, up)
    torch.testing.assert_close(gate, expected)
