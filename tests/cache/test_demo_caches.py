"""The trained demo model shows what each cache loses.

Answers and perplexity are compared with full precision, which is compared with transformers. The
bounds leave a margin to what ``python -m tests.bench quality`` measured on other chats.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import toy_world
from bench import quality
from cases import bits_of, forgets
from on_cpu import on_cpu
from transformers import LlamaForCausalLM

from exkv import CACHES, Cache, Cache8bit, Generator, SamplingParams, Tokenizer
from exkv.cache import LayerSpec

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo-model"
GREEDY = SamplingParams.greedy()


@pytest.fixture(scope="module")
def model():
    return on_cpu(DEMO, max_input_len=256)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(DEMO)


@pytest.fixture(scope="module")
def questions():
    return toy_world.heldout(11, 48)


def answers(model, kind, tokenizer, questions) -> list[str]:
    """Greedy answers, eight chats a batch; the chats are of unlike length."""
    generator = Generator(model, kind(model, 2048, 8), tokenizer)
    prompts = [tokenizer.encode_chat([*question.messages]) for question in questions]
    texts = []
    for first in range(0, len(prompts), 8):
        batch = prompts[first : first + 8]
        texts += generator.generate_simple(batch, GREEDY, 24, completion_only=True)
    return texts


def perplexity(model, kind, tokenizer) -> float:
    """On held-out text, each half read through the cache of the half before it."""
    ids = torch.tensor([tokenizer.encode(toy_world.heldout_text(5, 1500))])[:, :1500]
    cache = kind(model, 2048)
    logits = torch.cat([model.forward(part, cache).float() for part in ids.split(250, 1)], 1)
    return F.cross_entropy(logits[0, :-1], ids[0, 1:]).exp().item()


def test_both_caches_know_the_answers_and_8_bits_give_the_same(model, tokenizer, questions):
    full = answers(model, Cache, tokenizer, questions)
    right = [text == question.answer for text, question in zip(full, questions, strict=True)]
    assert sum(right) >= 0.95 * len(questions)
    narrow = answers(model, Cache8bit, tokenizer, questions)
    assert narrow == full


def test_8_bits_cost_less_than_half_a_percent_of_perplexity(model, tokenizer):
    full, narrow = (perplexity(model, kind, tokenizer) for kind in (Cache, Cache8bit))
    assert full < 30
    assert abs(narrow / full - 1) < 0.005


# What each kind loses -----------------------------------------------------------------------------

TOKENS = 768  # of a text
SETTINGS = quality.Settings(seed=2, texts=4, tokens=TOKENS)
#: Bits of keys and of values -> divergence from full precision in nats a token, and the change in
#: perplexity, at most. A store has the bounds of the next narrower one.
LOSSES = {
    (math.inf, math.inf): (1e-5, 0.001),
    (8, 8): (2e-5, 0.002),
    (8, 4): (6e-4, 0.005),
    (4, 4): (2e-3, 0.01),
    (4, 2): (2e-2, 0.03),  # it is the keys that need the bits
    (2, 2): (0.2, 0.25),
}
#: Kinds that have no name of their own.
MIXED = ("8-bit keys, 4-bit values", "4-bit keys, 2-bit values")


def bounds(spec: LayerSpec) -> tuple[float, float]:
    keys, values = bits_of(spec, TOKENS)
    return next(most for (k, v), most in LOSSES.items() if k <= keys and v <= values)


@pytest.fixture(scope="module")
def wide():
    """In float32, so that only the cache rounds."""
    return on_cpu(DEMO, dtype=torch.float32, max_input_len=SETTINGS.chunk)


@pytest.fixture(scope="module")
def texts(wide, tokenizer):
    return quality.Texts(wide, tokenizer, SETTINGS)


@pytest.fixture(scope="module")
def full(texts, wide):
    """The negative log-likelihood of each token, in nats, with a float32 cache."""
    return texts.judge(quality.REFERENCE.build(wide, TOKENS))[0]


@pytest.mark.parametrize("kind", [*CACHES, *MIXED])
def test_a_kind_loses_no_more_than_was_measured(kind, texts, full, wide):
    """Against full precision; a kind that evicts tokens, against floats evicted likewise."""
    cache = quality.MAKES[kind].build(wide, TOKENS)
    spec = cache.layers[0].spec
    surprise, apart = texts.judge(cache)
    beside, forgotten = full, torch.zeros(())
    if forgets(spec, TOKENS):
        floats = Cache(wide, TOKENS, quality.ROWS, retention=spec.retention, dtype=torch.float32)
        beside, forgotten = texts.judge(floats)
    divergence, perplexity = bounds(spec)
    assert apart.mean() - forgotten.mean() <= divergence
    assert (surprise.mean() - beside.mean()).exp().sub(1).abs() <= perplexity


@pytest.mark.parametrize("name", quality.WINDOWS)
def test_window_answers_only_from_its_tokens(name, wide, tokenizer):
    make = quality.WINDOWS[name]
    size = make.options["window_length"]
    near = toy_world.heldout(3, 20, size - 40)  # the value is said some tokens after the question
    far = [item for item in toy_world.heldout(4, 40, 2 * size) if item.distance_tokens > size]
    assert len(far) >= 15
    for items, least, most in ((near, 0.95, 1), (far, 0, 0.05)):  # of 20 rooms, 40 people...
        asked = [quality.Question.of(tokenizer, item) for item in items]
        cache = make.build(wide, max(len(question.ids) for question in asked))
        right = quality.answered(wide, cache, asked, SETTINGS.chunk)
        assert least <= sum(right) / len(right) <= most


def is_answer(tokenizer: Tokenizer, ids: list[int]) -> list[bool]:
    """For each token, whether it is part of the assistant's answer."""
    begin, end = (tokenizer.id_of(mark) for mark in ("<|assistant|>", "<|end|>"))
    found, answering = [], False
    for token in ids:
        found.append(answering)
        answering = token == begin or (answering and token != end)
    return found


@pytest.mark.parametrize("name", ["sliding_window 128", "sink 128"])
def test_text_stays_fluent_for_six_windows_and_only_answers_are_lost(
    name, texts, full, wide, tokenizer
):
    """The demo model has no attention sinks (see below), so a window alone is as fluent."""
    past = slice(2 * 128, None)
    rows = [row for batch in texts.batches for row in batch]
    answers = torch.tensor([is_answer(tokenizer, row) for row in rows])[:, 1:][:, past]
    less, _ = texts.judge(quality.WINDOWS[name].build(wide, 768))
    lost = (less - full)[:, past]
    assert lost[~answers].mean().exp() <= 1.12
    assert lost[answers].mean().exp() >= 2


@torch.no_grad()
def test_the_demo_model_has_no_attention_sinks(texts):
    theirs = LlamaForCausalLM.from_pretrained(
        DEMO, dtype=torch.float32, attn_implementation="eager"
    )
    found = theirs(torch.tensor(texts.batches[0][:1]), output_attentions=True).attentions
    first = [layer[..., 256:, :4].sum(-1).mean((0, 2)) for layer in found]  # (H,) each
    assert torch.stack(first).max() < 0.05


# Beside transformers ------------------------------------------------------------------------------


@torch.no_grad()
def test_logits_and_greedy_tokens_are_those_of_transformers(model, tokenizer):
    theirs = LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    wide = on_cpu(DEMO, dtype=torch.float32, max_input_len=64)
    ids = torch.tensor([tokenizer.encode(toy_world.heldout_text(7, 300))])[:, :300]
    expected = theirs(ids).logits
    got = wide.forward(ids, Cache(wide))
    assert ((got - expected).abs().max() / expected.abs().max()).item() < 1e-4


@torch.no_grad()
def test_bf16_greedy_tokens_are_those_of_transformers(model, tokenizer):
    theirs = LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    ids = torch.tensor([tokenizer.encode(toy_world.heldout_text(9, 200))])[:, :200]
    expected = theirs.generate(
        ids, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    cache, token, tokens = Cache(model), ids, []
    for _ in range(64):
        token = model.forward(token, cache, last_id_only=True)[:, 0].argmax(-1, keepdim=True)
        tokens.append(token.item())
    assert tokens == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("kind", CACHES)
def test_a_second_question_only_runs_what_is_new(model, tokenizer, kind):
    generator = Generator(model, CACHES[kind](model, 2048), tokenizer)
    story = "Anna put the key in the kitchen. Tom is in the garden."
    messages = [{"role": "user", "content": story + " Where is the key?"}]
    prompt = tokenizer.encode_chat(messages)
    first = generator.generate_simple(prompt, GREEDY, 24, completion_only=True)
    assert first == "The key is in the kitchen."
    messages += [
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Where is Tom?"},
    ]
    second = generator.generate_simple(
        tokenizer.encode_chat(messages), GREEDY, 24, completion_only=True
    )
    assert second == "Tom is in the garden."
    assert generator.stats.cached_tokens >= len(prompt) + 5
