"""What tests of the decode loop share: a tiny model with random weights, which no test changes, and
transformers' models beside ours."""

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
    """Makes engines with so many pages of such a size, which are counted at the end."""
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
