"""Token healing: where a prompt was cut makes no difference."""

from __future__ import annotations

import pytest
import torch

from exkv import Cache, Engine, Generator, Job, Model, PagedCache, SamplingParams, Tokenizer

GREEDY = SamplingParams.greedy()
TEXT = "anna put the red ball in the gar"


def test_the_first_token_is_the_likeliest_that_begins_with_the_last_ones_text(
    tiny_model, tiny_tokenizer
):
    ids = tiny_tokenizer.encode(TEXT)
    last = tiny_tokenizer.bytes_of(ids[-1])
    logits = tiny_model.forward(torch.tensor([ids[:-1]]), Cache(tiny_model, 128))[0, -1]
    fit = [i for i in range(320) if tiny_tokenizer.bytes_of(i).startswith(last)]
    assert ids[-1] in fit
    expected = max(fit, key=lambda i: logits[i])
    with Engine(tiny_model, PagedCache(tiny_model, 256, page=16), tiny_tokenizer) as engine:
        handle = engine.submit(
            Job(prompt=TEXT, settings=GREEDY, max_new_tokens=6, token_healing=True)
        )
        text = handle.result()
    assert handle.tokens[0] == expected and handle.prompt == ids[:-1]
    generator = Generator(tiny_model, Cache(tiny_model, 128), tiny_tokenizer)
    assert generator.generate_simple(TEXT, GREEDY, 6, token_healing=True) == TEXT + text
    assert TEXT + text == tiny_tokenizer.decode([*ids[:-1], *handle.tokens])


def test_trained_model_completes_a_cut_word():
    model, tokenizer = Model("examples/demo-model"), Tokenizer("examples/demo-model")
    model.load(devices=["cpu"])
    generator = Generator(model, Cache(model, 256), tokenizer)
    begun = "The key is in the kitchen. The lamp is in the garden. The key is in the k"
    assert "itchen" not in generator.generate_simple(begun, GREEDY, 2)[len(begun) :]
    assert generator.generate_simple(begun, GREEDY, 2, token_healing=True) == begun + "itchen."


def test_one_token_alone_and_a_control_token_are_left_as_they_are(tiny_model, tiny_tokenizer):
    generator = Generator(tiny_model, Cache(tiny_model, 128), tiny_tokenizer)
    special = min(tiny_tokenizer.special_ids)
    for prompt in ([7], [7, 8, special]):
        plain = generator.generate_simple(prompt, GREEDY, 5)
        assert generator.generate_simple(prompt, GREEDY, 5, token_healing=True) == plain


@pytest.mark.parametrize("cut", range(1, 8))
def test_healed_text_continues_within_a_character_too(tiny_model, tiny_tokenizer, cut):
    ids = tiny_tokenizer.encode("caf\u00e9 \u6f22\u5b57 the key")[:-cut]
    with Engine(tiny_model, PagedCache(tiny_model, 256, page=16), tiny_tokenizer) as engine:
        handle = engine.submit(
            Job(prompt=ids, settings=GREEDY, max_new_tokens=8, token_healing=True)
        )
        new = handle.result().encode(errors="replace")
    whole = b"".join(map(tiny_tokenizer.bytes_of, [*ids[:-1], *handle.tokens]))
    before = b"".join(map(tiny_tokenizer.bytes_of, ids))
    assert whole.startswith(before)
    assert whole[len(before) :].decode(errors="replace").encode() == new
