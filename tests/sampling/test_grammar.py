"""Constrained output: whatever the logits, the text follows the grammar."""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from on_cpu import on_cpu

from exkv import Cache, Generator, Grammar, SamplingParams, Tokenizer
from exkv.sampling import grammar as grammars

DEMO = Path(__file__).parents[2] / "examples" / "demo-model"
WILD = SamplingParams(temperature=2.0, top_k=0, top_p=1.0)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def generator():
    model = on_cpu(DEMO)
    return Generator(model, Cache(model, max_seq_len=256, batch_size=3), Tokenizer(DEMO))


def completions(generator: Generator, grammar: Grammar, settings=WILD, num_tokens: int = 150):
    """Completions of three prompts, and why each ended."""
    prompts = ["the key is in the", "anna put the red ball", "where is"]
    texts = generator.generate_simple(
        prompts, settings, num_tokens, seed=3, grammar=grammar, completion_only=True
    )
    return texts, generator.stats.stop_reasons


def test_a_json_schema_gives_valid_json(generator):
    texts, reasons = completions(generator, Grammar.json_schema(SCHEMA))
    assert set(reasons) == {"grammar"}
    for text in texts:
        found = json.loads(text)
        assert found.keys() == {"name", "age", "tags"}
        assert isinstance(found["name"], str)
        assert len(found["name"]) <= 12
        assert found["age"] in range(100)
        assert 1 <= len(found["tags"]) <= 3
        assert set(found["tags"]) <= {"a", "b"}
    assert len(set(texts)) == 3


def test_a_regex_is_matched_as_a_whole(generator):
    texts, _ = completions(generator, Grammar.regex(r" [a-z]{3,9}(-\d{2}){1,3}x"))
    assert all(re.fullmatch(r" [a-z]{3,9}(-\d{2}){1,3}x", text) for text in texts)
    texts, reasons = completions(generator, Grammar.regex(r"[0-9]{4}"))
    assert all(re.fullmatch("[0-9]{4}", text) for text in texts)
    assert set(reasons) == {"grammar"}


def test_a_lark_grammar_is_derived_from(generator):
    lark = 'start: pair ("," pair)~2\npair: KEY "=" NUMBER\nKEY: /[a-c]/\nNUMBER: /[0-9]{1,2}/\n'
    texts, _ = completions(generator, Grammar.lark(lark))
    for text in texts:
        assert re.fullmatch(r"[a-c]=\d{1,2}(,[a-c]=\d{1,2}){2}", text)


def test_a_choice_is_the_likelier_of_its_texts(generator):
    asked = Grammar.choice([" kitchen", " garden"])
    texts, _ = completions(generator, asked, SamplingParams.greedy())
    assert set(texts) <= {" kitchen", " garden"}


def test_a_grammar_that_allows_everything_changes_nothing(generator):
    free = generator.generate_simple("the key is in the", SamplingParams.greedy(), 30)
    grammar = Grammar.regex(r"(.|\n)*")
    held = generator.generate_simple(
        "the key is in the", SamplingParams.greedy(), 30, grammar=grammar
    )
    assert held == free


def test_proposed_tokens_are_those_that_the_grammar_allows(generator):
    """Random texts up to the longest allowed, with many repeated tokens."""
    grammar = Grammar.regex("(ab|cd |the key ){20}")
    expected, reasons = completions(generator, grammar)
    cache = Cache(generator.model, max_seq_len=256, batch_size=3)
    proposing = Generator(generator.model, cache, generator.tokenizer, ngrams=4)
    assert completions(proposing, grammar) == (expected, reasons)
    assert 20 < proposing.stats.accepted_tokens < proposing.stats.proposed_tokens


def test_valid_does_not_consume_tokens(generator):
    tokens = [generator.tokenizer.encode(text, add_bos=False) for text in ("abcd", "ef")]
    follower = Grammar.regex("(abcd)+").follow(generator.tokenizer)
    assert follower.valid(tokens[0] + tokens[1]) == tokens[0]
    assert follower.valid([]) == []
    for token in tokens[0]:
        follower.take(token)


def test_a_stream_follows_and_may_stop_early(generator):
    pieces = list(
        generator.stream("where is", WILD, 6, seed=1, grammar=Grammar.regex("[a-z ]{500}"))
    )
    assert re.fullmatch("[a-z ]+", "".join(pieces))
    assert generator.stats.stop_reasons == ("length",)


def test_ids_beyond_the_tokenizers_are_not_allowed(generator):
    follower = Grammar.regex("[a-z]+").follow(generator.tokenizer)
    size = generator.tokenizer.vocab_size
    allowed = follower.allowed(size + 7)
    assert allowed.dtype == torch.bool
    assert not allowed[size:].any()
    for token in range(size):
        text = generator.tokenizer.bytes_of(token).decode(errors="replace")
        if token not in generator.tokenizer.special_ids:
            assert bool(allowed[token]) == bool(re.fullmatch("[a-z]+", text)), text


def test_a_token_that_is_not_allowed_is_refused(generator):
    follower = Grammar.regex("[0-9]+").follow(generator.tokenizer)
    (letter,) = generator.tokenizer.encode("a", add_bos=False)[-1:]
    with pytest.raises(ValueError, match="grammar can't be followed"):
        follower.take(letter)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex("("),
        Grammar.lark("start: nowhere"),
        Grammar.json_schema({"type": "sausage"}),
        Grammar.regex("(a{1000}){1000}(b{1000}){1000}"),
    ],
)
def test_invalid_or_large_grammars_are_refused_and_release_the_cache(generator, grammar):
    with pytest.raises(ValueError, match="the grammar can't be followed") as caught:
        generator.generate_simple("where", None, 4, grammar=grammar)
    assert len(str(caught.value).splitlines()) <= 4
    assert generator.generate_simple("where", None, 1)


@pytest.mark.parametrize("schema", ["[1]", "{", {"a": object()}])
def test_schemas_other_than_json_objects_are_refused(schema):
    with pytest.raises(ValueError, match="the JSON schema is"):
        Grammar.json_schema(schema)


def test_arguments_of_other_types_are_refused(generator):
    with pytest.raises(TypeError, match="grammar is a str; it must be a Grammar"):
        generator.generate_simple("where", None, 4, grammar="[a-z]")
    for make in (Grammar.regex, Grammar.lark, Grammar.choice):
        with pytest.raises(ValueError, match="it must be a"):
            make(())


def test_without_its_library_the_extra_is_named(monkeypatch, generator):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    grammars._llguidance.cache_clear()
    with pytest.raises(ImportError, match=r"pip install 'exkv\[grammar\]'"):
        Grammar.regex("a").follow(generator.tokenizer)
    monkeypatch.undo()
    grammars._llguidance.cache_clear()


def test_matcher_is_not_used_while_it_computes_a_mask():
    """A matcher has one user at a time, and raises for a second."""
    computing, go_on = threading.Event(), threading.Event()

    class Slow:
        def compute_logit_bias(self):
            computing.set()
            go_on.wait(10)
            computing.clear()
            return bytes(4)

        def __getattr__(self, name):
            assert not computing.is_set(), f"{name} while a mask is being computed"
            return lambda *_: False

    follower = grammars.Follower(Slow())
    assert computing.wait(10)
    try:
        assert not follower.is_over
    finally:
        go_on.set()
    follower.take(1)
    assert not follower.is_over
