"""What tests of generation share: transformers' models beside ours."""

from __future__ import annotations

from zlib import crc32

import pytest
from generated import pair_of
from references import diverse_beams


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """transformers' model and ours, by the seed of their weights."""
    return {
        seed: pair_of(seed, tmp_path_factory.mktemp(f"weights{seed}"))
        for seed in diverse_beams.SEEDS
    }


@pytest.fixture
def seed(request):
    """Weights of a test that names none: all run the same code, so each case has one of them, which
    its name decides, and the cases of a test have all of them."""
    return diverse_beams.SEEDS[crc32(request.node.name.encode()) % len(diverse_beams.SEEDS)]


@pytest.fixture
def pair(pairs, seed):
    return pairs[seed]
