"""The CUDA ops query and launch on their tensors' device only, shown with two unlike emulated
devices."""

from __future__ import annotations

import random

import pytest
import torch
from hostile_calls import MAKERS, WITHOUT_CUDA, Maker, tensors_in
from native import ops_of

CALLS = 3


@pytest.fixture
def ops():
    emulated = ops_of("emulated")
    emulated.make_unlike(True)
    yield emulated
    emulated.place_tensors(0, 0)
    emulated.make_unlike(False)


def results(ops, name: str, seed: int) -> list[torch.Tensor]:
    """The results of one valid call, or the tensors that it writes."""
    torch.manual_seed(seed)
    arguments = MAKERS[name](Maker(random.Random(f"{name} {seed}")))
    found = getattr(ops, name)(*arguments)
    if found is None:
        return tensors_in(arguments)
    return [found] if isinstance(found, torch.Tensor) else list(found)


@pytest.mark.parametrize("name", sorted(set(MAKERS) - WITHOUT_CUDA))
def test_ops_query_and_run_only_on_their_tensors_device(ops, name):
    for seed in range(CALLS):
        ops.place_tensors(1, 1)
        expected = results(ops, name, seed)
        _, before = ops.wrong_device()
        ops.place_tensors(1, 0)
        found = results(ops, name, seed)
        assert ops.wrong_device() == (0, before)  # and the current device is what it was
        assert all(
            torch.equal(a.nan_to_num(), b.nan_to_num())
            for a, b in zip(expected, found, strict=True)
        )


def test_questions_to_the_wrong_device_are_counted(ops):
    _, before = ops.wrong_device()
    ops.place_tensors(1, 0)
    splits = ops.decode_splits(1, 8, 8, 64, 4096, 8, 4)  # no op: it has no device of its own
    assert splits > 1 and ops.wrong_device() == (0, before + 1)
