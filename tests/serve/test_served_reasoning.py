"""Reasoning through the server: a grammar makes the demo model write what others would."""

from __future__ import annotations

import re
from dataclasses import replace

import openai
import pytest

from exkv import Grammar
from exkv.serve.requests import ChatRequest
from exkv.text.chat_template import ChatTemplate

QUESTION = [{"role": "user", "content": "Where is the key?"}]
THOUGHT = "<think>\nthe key\n</think>\n\nin the kitchen"
FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {"type": "object", "properties": {"thing": {"type": "string"}}},
    },
}
CALLED = (
    "<|channel|>analysis<|message|>the key<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.find <|constrain|>json<|message|>{"thing": "key"}<|call|>'
)


@pytest.fixture
def writes(serving, monkeypatch):
    """Make the model write a text, with certain words in its chat template."""

    def change(text: str, words: str) -> None:
        tokenizer, jobs = serving.loaded.engine.tokenizer, ChatRequest.jobs
        template = tokenizer.chat_templates["default"]
        source = f"{template.source}{{# {words} #}}"
        monkeypatch.setattr(
            tokenizer, "chat_templates", {"default": ChatTemplate(source, tokenizer.file)}
        )
        grammar = Grammar.regex(re.escape(text))
        monkeypatch.setattr(
            ChatRequest,
            "jobs",
            lambda *arguments: [replace(job, grammar=grammar) for job in jobs(*arguments)],
        )

    return change


def ask(client, **changes):
    body = {"model": "demo", "messages": QUESTION, "max_tokens": 200, **changes}
    return client.chat.completions.create(**body)


def streamed(client, **changes):
    """Reasoning and content of a stream."""
    reasoning = content = ""
    for part in ask(client, stream=True, **changes):
        delta = part.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", "") or ""
        content += delta.content or ""
    return reasoning, content


def test_reasoning_is_separate_from_the_answer(client, writes):
    writes(THOUGHT, "</think>")
    answer = ask(client)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("the key", "in the kitchen")
    told = answer.usage.completion_tokens_details.reasoning_tokens
    assert 0 < told < answer.usage.completion_tokens
    assert streamed(client) == ("the key", "in the kitchen")


def test_reasoning_can_stay_in_the_content_or_be_left_out(client, writes):
    writes(THOUGHT, "</think>")
    for form, found in (
        ({"reasoning_format": "none"}, ("", THOUGHT)),
        ({"include_reasoning": False}, ("", "in the kitchen")),
    ):
        assert streamed(client, extra_body=form) == found
        message = ask(client, extra_body=form).choices[0].message
        assert message.content == found[1] and not hasattr(message, "reasoning_content")


def test_text_of_models_without_reasoning_is_unchanged(client, writes):
    writes(THOUGHT, "")
    assert streamed(client) == ("", THOUGHT)


@pytest.mark.parametrize("stream", [False, True])
def test_gpt_oss_calls_functions_on_a_channel(client, writes, stream):
    writes(CALLED, "<|channel|> <|message|>")
    if not stream:
        choice = ask(client, tools=[FIND]).choices[0]
        assert choice.message.reasoning_content == "the key" and not choice.message.content
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("find", '{"thing": "key"}')
        assert choice.finish_reason == "tool_calls"
        return
    parts = [part.choices[0] for part in ask(client, tools=[FIND], stream=True)]
    calls = [call for part in parts for call in part.delta.tool_calls or ()]
    assert [call.function.name for call in calls if call.function.name] == ["find"]
    assert "".join(call.function.arguments for call in calls) == '{"thing": "key"}'
    assert parts[-1].finish_reason == "tool_calls"


def test_reasoning_items_round_trip(client, writes):
    writes(THOUGHT, "</think>")
    answer = client.responses.create(model="demo", input="Where is the key?")
    thought, said = answer.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "the key")
    assert (said.type, answer.output_text) == ("message", "in the kitchen")
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    back = [each.model_dump(exclude_none=True) for each in answer.output]
    asked = [{"role": "user", "content": "Where is the key?"}, *back]
    more = [*asked, {"role": "user", "content": "And the lamp?"}]
    again = client.responses.create(model="demo", input=more)
    assert again.output_text == "in the kitchen"
    after = client.responses.create(
        model="demo", input="And the lamp?", previous_response_id=answer.id
    )
    assert after.usage.input_tokens == again.usage.input_tokens
    kinds = [each.type for each in client.responses.create(model="demo", input="Hi", stream=True)]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")


def test_reasoning_alone_is_refused_as_input(client):
    with pytest.raises(openai.BadRequestError, match="messages"):
        client.responses.create(
            model="demo", input=[{"type": "reasoning", "id": "rs", "summary": []}]
        )
