"""A tiny model with random weights, which no test changes."""

from __future__ import annotations

import pytest
from tiny import llama, reference, save, save_tokenizer

from exkv import Model, Tokenizer


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
