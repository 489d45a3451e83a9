"""Fixtures of the decode loop's tests: a tiny model with random weights, which no test changes, and
pairs of transformers' and our models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from zlib import crc32

import pytest
from generated import pair_of
from on_cpu import on_cpu
from references import diverse_beams
from tiny import llama, reference, save, save_tokenizer

from exkv import Engine, PagedCache, Tokenizer


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    config = llama(num_hidden_layers=2, eos_token_id=None)
    return save_tokenizer(save(reference(config), tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def tiny_model(tiny_folder):
    return on_cpu(tiny_folder, max_input_len=64)


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_folder):
    return Tokenizer(tiny_folder)


@pytest.fixture
def counted(tiny_model, tiny_tokenizer) -> Iterator[Callable[..., Engine]]:
    """Makes engines with a number of pages of some size, which are counted at the end."""
    made: list[Engine] = []

    def build(pages: int, page: int = 16, **options) -> Engine:
        cache = PagedCache(tiny_model, page * pages, page=page)
        made.append(Engine(tiny_model, cache, tiny_tokenizer, **options))
        return made[-1]

    yield build
    for engine in made:
        engine.close()
        assert not any(engine.pool.holders) and engine.pool.available == engine.pool.pages


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """transformers' model and ours, by the seed of the weights."""
    return {
        seed: pair_of(seed, tmp_path_factory.mktemp(f"weights{seed}"))
        for seed in diverse_beams.SEEDS
    }


@pytest.fixture
def seed(request):
    """The weights' seed for tests without one of their own: each case has one seed, chosen by its
    name, and the cases of a test together have all of them, since all run the same code."""
    return diverse_beams.SEEDS[crc32(request.node.name.encode()) % len(diverse_beams.SEEDS)]


@pytest.fixture
def pair(pairs, seed):
    return pairs[seed]
