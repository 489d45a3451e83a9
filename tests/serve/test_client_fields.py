"""Requests as TabbyAPI's clients send them: every setting each time, under several names."""

from __future__ import annotations

import json

import pytest
from running import ANSWER, QUESTION, post

from exkv.serve.client_fields import translated

#: What SillyTavern 1.13 sends "TabbyAPI" for a text completion, with its samplers switched off.
SILLY = {
    "model": "demo",
    "max_new_tokens": 40,
    "max_tokens": 40,
    "temperature": 0,
    "top_p": 1,
    "typical_p": 1,
    "typical": 1,
    "min_p": 0,
    "repetition_penalty": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_k": 0,
    "skew": 0,
    "min_tokens": 0,
    "add_bos_token": True,
    "smoothing_factor": 0,
    "smoothing_curve": 1,
    "dry_allowed_length": 2,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "dry_sequence_breakers": '["\\n", ":", "\\"", "*"]',
    "dry_penalty_last_n": 0,
    "max_tokens_second": 0,
    "stopping_strings": ["\nUser:", "\nAnna:"],
    "stop": ["\nUser:", "\nAnna:"],
    "truncation_length": 4096,
    "ban_eos_token": False,
    "skip_special_tokens": True,
    "include_reasoning": True,
    "top_a": 0,
    "tfs": 1,
    "mirostat_mode": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "custom_token_bans": "",
    "banned_strings": [],
    "api_type": "tabby",
    "api_server": "http://127.0.0.1:5000/",
    "xtc_threshold": 0.1,
    "xtc_probability": 0,
    "nsigma": 0,
    "top_n_sigma": 0,
    "min_keep": 0,
    "adaptive_target": -0.01,
    "adaptive_decay": 0.9,
    "n": 1,
    "rep_pen": 1,
    "rep_pen_range": 0,
    "repetition_decay": 0,
    "repetition_penalty_range": 0,
    "temperature_last": True,
    "speculative_ngram": False,
    "guidance_scale": 1,
    "negative_prompt": "",
    "grammar_string": "",
    "json_schema": {},
    "repeat_penalty": 1,
    "tfs_z": 1,
    "repeat_last_n": 0,
    "n_predict": 40,
    "num_predict": 40,
    "mirostat": 0,
    "ignore_eos": False,
    "rep_pen_slope": 1,
    "stream": False,
}
PROMPT = f"<|user|> {QUESTION[0]['content']}<|end|><|assistant|>"


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
