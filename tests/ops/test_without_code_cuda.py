"""GPUs that the kernels aren't compiled for: the references run there, after one line that says
why."""

from __future__ import annotations

import random

import pytest
import torch
from hostile_calls import MAKERS, WITHOUT_CUDA, Maker, tensors_in
from native import needs_cxx, ops_of

from exkv.ops import REFERENCES

pytestmark = needs_cxx

#: The ops with CUDA kernels.
NAMES = sorted(set(MAKERS) - WITHOUT_CUDA)


@pytest.fixture
def ops():
    ops = ops_of("emulated")
    ops.set_code(False)
    yield ops
    ops.set_code(True)


def copied(arguments):
    if isinstance(arguments, list):
        return [copied(each) for each in arguments]
    return arguments.clone() if isinstance(arguments, torch.Tensor) else arguments


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_serves_an_op(ops, name):
    for seed in range(3):
        torch.manual_seed(seed)
        given = MAKERS[name](Maker(random.Random(seed)))
        ours, expected_in = copied(given), copied(given)
        found, expected = getattr(ops, name)(*ours), REFERENCES[name](*expected_in)
        if expected is None:
            found, expected = tensors_in(ours), tensors_in(expected_in)
        elif isinstance(expected, torch.Tensor):
            found, expected = [found], [expected]
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_one_line_says_why_and_what_to_do(ops, capfd):
    for _ in range(3):
        ops.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-5)
        ops.hadamard(torch.ones(2, 8))
    (message,) = (line for line in capfd.readouterr().err.splitlines() if line)
    assert "have no code for the emulated device" in message
    assert "TORCH_CUDA_ARCH_LIST" in message
