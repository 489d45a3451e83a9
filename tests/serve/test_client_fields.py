"""Requests as TabbyAPI's clients send them: every setting each time, under several names."""

from __future__ import annotations

import json

import pytest
from running import ANSWER, CAPTURED, post

from exkv.serve.client_fields import translated

#: A text completion of SillyTavern 1.13 for "TabbyAPI", with all samplers off.
SILLY = json.loads((CAPTURED / "sillytavern-1.13.json").read_text())[0]["body"]
PROMPT = SILLY["prompt"]


@pytest.fixture
def text(address):
    """The completion of a prompt with some fields of SillyTavern's changed."""

    def complete(prompt: str = PROMPT, **changes: object) -> str:
        status, body = post(f"{address}/v1/completions", {**SILLY, "prompt": prompt, **changes})
        assert status == 200, body
        return body["choices"][0]["text"].strip()

    return complete


def test_sillytavern_requests_are_answered(text):
    assert text() == ANSWER
    assert text(stop=None, stopping_strings=[" kitchen"]) == "The key is in the"
    assert text(max_tokens=None, max_new_tokens=2) == "The key"


def test_settings_that_are_on_take_effect(text, serving):
    (kitchen,) = serving.model.engine.tokenizer.encode(" kitchen", False)
    assert "kitchen" not in text(banned_strings=["kitchen"])
    assert "kitchen" not in text(custom_token_bans=f"{kitchen}")
    assert text(regex_pattern="[a-z A-Z]{7}") == "The key"
    assert json.loads(text(json_schema={"enum": ["garden", "tower"]})) in ("garden", "tower")
    assert text(guidance_scale=1.5, negative_prompt="The key is in the garden.") == ANSWER
    once = {"dry_multiplier": 50, "dry_allowed_length": 1, "dry_sequence_breakers": []}
    assert text(**once) != ANSWER  # which repeats "in the kitchen"
    assert text(**{**once, "dry_sequence_breakers": [" the", " in", " key", " kitchen"]}) == ANSWER


@pytest.mark.parametrize(
    ("name", "value"),
    [("mirostat_mode", 2), ("best_of", 2), ("modalities", ["audio"]), ("grammar_string", "x")],
)
def test_unknown_setting_is_refused_by_name(address, name, value):
    body = {**SILLY, "prompt": "a", name: value}
    status, answer = post(f"{address}/v1/completions", body)
    assert status == 400
    assert answer["error"]["message"].startswith(f"{name} is {value!r}, and exkv has no such")


def test_two_grammars_are_refused(address):
    body = {"prompt": "a", "regex_pattern": "a", "response_format": {"type": "json_object"}}
    status, answer = post(f"{address}/v1/completions", body)
    assert status == 400
    assert "response_format and regex_pattern" in answer["error"]["message"]


def test_aliases_and_lists_as_strings_are_translated():
    given = {"max_new_tokens": 3, "max_length": 4, "typical": 0.5, "typical_p": 0.9, "seed": 7}
    assert translated(given) == {"max_tokens": 3, "typical_p": 0.9, "seed": 7}
    assert translated({"custom_token_bans": "3,4"}) == {"banned_tokens": [3, 4]}
    breakers = {"dry_sequence_breakers": '"\\n", ":"'}
    assert translated(breakers) == {"dry_sequence_breakers": ["\n", ":"]}
    assert translated({"dry_sequence_breakers": "a, b"}) == {"dry_sequence_breakers": ["a", "b"]}
    assert translated({"banned_tokens": "[" * 100_000}) == {"banned_tokens": ["[" * 100_000]}
    assert translated({"dry_multiplier": 0.0, "dry_base": 0}) == {}
    assert translated({"nsigma": 1.5, "top_n_sigma": None}) == {"top_n_sigma": 1.5}
    assert translated({"top_k": -1}) == {"top_k": 0}
    assert translated([1]) == [1]
