"""A tiny model with random weights, which no test changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tiny import llama, reference, save, save_tokenizer

from exkv import Engine, Model, PagedCache, Tokenizer


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    config = llama(num_hidden_layers=2, eos_token_id=None)
    return save_tokenizer(save(reference(config), tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def tiny_model(tiny_folder):
    model = Model(tiny_folder, max_input_len=64)
    model.load(devices=["cpu"])
    return model


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
