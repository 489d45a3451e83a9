"""Tools through OpenAI's client, with a model that wasn't trained on them."""

from __future__ import annotations

import json

import openai
import pytest
from running import ANSWER, QUESTION, post

from exkv import Tokenizer

PLACE = {
    "type": "object",
    "properties": {"thing": {"enum": ["key", "lamp"]}, "deep": {"type": "boolean"}},
    "required": ["thing", "deep"],
    "additionalProperties": False,
}
FIND = {"type": "function", "function": {"name": "find", "parameters": PLACE, "strict": True}}
WAIT = {"type": "function", "function": {"name": "wait", "description": "Do nothing"}}
NAMED = {"type": "function", "function": {"name": "find"}}


def ask(client, **options):
    return client.chat.completions.create(
        model="demo", messages=QUESTION, tools=[FIND, WAIT], temperature=0, **options
    )


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_required_calls_are_made(client, choice):
    answer = ask(client, tool_choice=choice, parallel_tool_calls=False, max_tokens=120)
    (choice_,) = answer.choices
    assert (choice_.message.content, choice_.finish_reason) == (None, "tool_calls")
    (call,) = choice_.message.tool_calls
    assert call.type == "function" and call.id
    if choice is NAMED:
        assert json.loads(call.function.arguments).keys() == {"thing", "deep"}
    assert call.function.name in ("find", "wait")


def test_streamed_calls_begin_with_the_name(client):
    whole = ask(client, tool_choice=NAMED, parallel_tool_calls=False)
    stream = list(ask(client, tool_choice=NAMED, parallel_tool_calls=False, stream=True))
    calls = [call for part in stream for call in part.choices[0].delta.tool_calls or ()]
    assert {call.index for call in calls} == {0}
    assert (calls[0].function.name, calls[0].type) == ("find", "function")
    assert all(call.id is None and call.function.name is None for call in calls[1:])
    written = "".join(call.function.arguments for call in calls)
    assert written == whole.choices[0].message.tool_calls[0].function.arguments
    assert len(calls) > 3
    assert stream[-1].choices[0].finish_reason == "tool_calls"
    assert not any(part.choices[0].delta.content for part in stream)


def test_optional_tools_allow_text_answers(client):
    answer = ask(client, tool_choice="none")
    assert answer.choices[0].message.content == ANSWER
    answer = ask(client, max_tokens=20)
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


def test_calls_and_results_are_part_of_the_prompt(client, serving):
    call = ask(client, tool_choice=NAMED, parallel_tool_calls=False).choices[0].message
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "kitchen"}
    messages = [*QUESTION, call.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=8)
    asked = len(serving.loaded.engine.tokenizer.encode_chat(QUESTION))
    assert answer.usage.prompt_tokens > asked + 20


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice asks for 'required'"),
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, "asks for 'no'"),
        ({"tools": [FIND, FIND]}, "two functions of the same name"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        (
            {"tool_choice": "auto", "response_format": {"type": "json_object"}},
            "response_format excludes tools",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools.0.function.name",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"not": {}}},
                    }
                ],
            },
            "grammar can't be followed",
        ),
    ],
)
def test_invalid_tools_are_refused(client, changes, reason):
    body = {"messages": QUESTION, "tools": [FIND], **changes}
    with pytest.raises(openai.BadRequestError, match=reason):
        client.post("/chat/completions", body=body, cast_to=object)


# Limits on grammars and templates -------------------------------------------------------------


def schema_of(properties: int) -> dict[str, object]:
    many = {f"p{i}": {"type": "string"} for i in range(properties)}
    schema = {"type": "object", "properties": many}
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def test_exploding_grammar_is_refused_and_others_go_on(address, serving):
    body = {"messages": QUESTION, "response_format": schema_of(8000)}
    status, answer = post(f"{address}/v1/chat/completions", body)
    assert status == 400
    assert "takes more than 1 s or too much memory" in answer["error"]["message"]
    body["response_format"] = {"type": "json_object"}
    assert post(f"{address}/v1/chat/completions", body | {"max_tokens": 4})[0] == 200
    long = {"type": "regex", "pattern": "a" * 300_000}
    status, answer = post(f"{address}/v1/chat/completions", body | {"response_format": long})
    assert status == 400 and "more than 262144 bytes" in answer["error"]["message"]


@pytest.mark.parametrize("streamed", [False, True])
def test_grammar_too_complex_at_a_later_token_is_a_client_error(address, serving, streamed):
    body = {"messages": QUESTION, "response_format": schema_of(1000), "stream": streamed}
    status, answer = post(f"{address}/v1/chat/completions", body)
    assert status == 400
    assert "Current row has" in answer["error"]["message"]


def test_template_gets_the_requests_variables_but_not_reserved_ones(client, serving, monkeypatch):
    asked: list[dict[str, object]] = []
    encode = Tokenizer.encode_chat

    def encode_chat(self, messages, **variables):
        asked.append(variables)
        return encode(self, messages, **variables)

    monkeypatch.setattr(Tokenizer, "encode_chat", encode_chat)
    body = {"messages": QUESTION, "max_tokens": 1}
    for name in ("chat_template_kwargs", "template_vars"):
        extra = {name: {"enable_thinking": False}}
        client.post("/chat/completions", body=body | extra, cast_to=object)
        assert asked.pop() == {"enable_thinking": False}
    for name in ("messages", "add_generation_prompt", "template"):
        with pytest.raises(openai.BadRequestError, match=f"can't set '{name}'"):
            extra = {"chat_template_kwargs": {name: []}}
            client.post("/chat/completions", body=body | extra, cast_to=object)


def test_chat_templates_in_requests_are_refused(client):
    body = {"messages": QUESTION, "chat_template": "{{ messages }}"}
    with pytest.raises(openai.BadRequestError, match="chat_template: unknown field"):
        client.post("/chat/completions", body=body, cast_to=object)
