"""``/v1/responses``: through OpenAI's client, and by Open Responses' requirements
(https://github.com/openresponses/openresponses, whose compliance cases are rewritten here)."""

from __future__ import annotations

import itertools
import json

import openai
import pytest
from running import ANSWER, QUESTION, events, get, post, until

from exkv.serve.responses import ResponseStore

ASKED = QUESTION[0]["content"]
PLACE = {
    "type": "object",
    "properties": {"place": {"enum": ["kitchen", "garden"]}},
    "required": ["place"],
    "additionalProperties": False,
}
LOOK = {"type": "function", "name": "look", "description": "Look there", "parameters": PLACE}
#: Required fields of the specification's ResponseResource, null or not.
FIELDS = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model"),
    *("previous_response_id", "instructions", "output", "error", "tools", "tool_choice"),
    *("truncation", "parallel_tool_calls", "text", "top_p", "presence_penalty"),
    *("frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata"),
    *("safety_identifier", "prompt_cache_key"),
}


def message(role, text):
    return {"type": "message", "role": role, "content": text}


def checked(body):
    """The response, checked for all required fields."""
    assert body.keys() >= FIELDS
    assert body["object"] == "response" and body["id"].startswith("resp_")
    assert isinstance(body["created_at"], int)
    used = body["usage"]
    assert used["total_tokens"] == used["input_tokens"] + used["output_tokens"]
    assert used["output_tokens_details"] == {"reasoning_tokens": 0}
    assert "cached_tokens" in used["input_tokens_details"]
    for item in body["output"]:
        assert item["status"] in ("completed", "incomplete")
        if item["type"] == "message":
            (part,) = item["content"]
            assert (item["role"], part["type"], part["annotations"]) == (
                "assistant", "output_text", [],
            )  # fmt: skip
        else:
            assert item["type"] == "function_call" and item["call_id"] and item["id"]
            json.loads(item["arguments"])
    return body


# Open Responses -------------------------------------------------------------------------------

CASES = {
    "a message": {"input": [message("user", ASKED)]},
    "a system message": {"input": [message("system", "Be kind."), message("user", ASKED)]},
    "a developer's": {"input": [message("developer", "Be kind."), message("user", ASKED)]},
    "several turns": {
        "input": [message("user", "hello"), message("assistant", "Hi!"), message("user", ASKED)]
    },
    "parts": {"input": [message("user", [{"type": "input_text", "text": ASKED}])]},
    "a text": {"input": ASKED},
    "instructions": {"input": ASKED, "instructions": "Be kind."},
}


@pytest.mark.parametrize("case", CASES)
def test_responses_have_output_and_complete(address, case):
    body = {"model": "demo", "temperature": 0, **CASES[case]}
    status, found = post(f"{address}/v1/responses", body)
    assert status == 200
    assert checked(found)["status"] == "completed"
    assert found["completed_at"] >= found["created_at"]
    assert found["output"][0]["content"][0]["text"]


def test_stream_events_are_ordered_and_numbered(address):
    body = {"model": "demo", "temperature": 0, "stream": True, **CASES["a message"]}
    found = list(events(f"{address}/v1/responses", body))
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    kinds = [kind for kind, _ in itertools.groupby(each["type"] for each in found)]
    assert kinds == [
        f"response.{kind}"
        for kind in (
            "created", "in_progress", "output_item.added", "content_part.added",
            "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
            "completed",
        )
    ]  # fmt: skip
    assert found[0]["response"]["status"] == found[1]["response"]["status"] == "in_progress"
    assert found[0]["response"]["output"] == []
    assert found[2]["item"]["content"] == [] and found[2]["item"]["status"] == "in_progress"
    deltas = [each for each in found if each["type"] == "response.output_text.delta"]
    item = found[2]["item"]["id"]
    assert {(e["item_id"], e["output_index"], e["content_index"]) for e in deltas} == {(item, 0, 0)}
    assert "".join(each["delta"] for each in deltas) == ANSWER
    assert found[-4]["text"] == found[-3]["part"]["text"] == ANSWER
    last = checked(found[-1]["response"])
    assert last["output"] == [found[-2]["item"]]
    assert last["output"][0]["content"][0]["text"] == ANSWER


def test_calls_are_streamed_as_items(address):
    body = {"input": ASKED, "tools": [LOOK], "tool_choice": "required", "stream": True}
    body["parallel_tool_calls"] = False
    found = list(events(f"{address}/v1/responses", body))
    kinds = [kind for kind, _ in itertools.groupby(each["type"] for each in found)]
    assert kinds == [
        f"response.{kind}"
        for kind in (
            "created", "in_progress", "output_item.added", "function_call_arguments.delta",
            "function_call_arguments.done", "output_item.done", "completed",
        )
    ]  # fmt: skip
    assert found[2]["item"]["type"] == "function_call" and found[2]["item"]["name"] == "look"
    written = "".join(each["delta"] for each in found if each["type"].endswith("arguments.delta"))
    assert json.loads(written).keys() == {"place"}
    assert found[-3]["arguments"] == written
    (item,) = checked(found[-1]["response"])["output"]
    assert item["arguments"] == written


# OpenAI's client ------------------------------------------------------------------------------


def test_previous_response_id_continues_a_conversation(client, address):
    first = client.responses.create(model="demo", input=ASKED, temperature=0)
    assert first.output_text == ANSWER
    again = client.responses.create(
        model="demo", input="Where is the key?", previous_response_id=first.id, temperature=0
    )
    whole = client.responses.create(
        model="demo",
        input=[
            {"role": "user", "content": ASKED},
            *first.output,
            {"role": "user", "content": "Where is the key?"},
        ],
        temperature=0,
    )
    assert again.output_text == whole.output_text
    assert again.usage.input_tokens == whole.usage.input_tokens
    assert again.previous_response_id == first.id
    assert client.responses.retrieve(first.id).output_text == ANSWER
    client.responses.delete(first.id)
    for asked in (first.id, client.responses.create(model="demo", input="a", store=False).id):
        with pytest.raises(openai.NotFoundError, match="send the conversation as input"):
            client.responses.create(model="demo", input="a", previous_response_id=asked)
        assert get(f"{address}/v1/responses/{asked}")[0] == 404


def test_calls_and_their_results_are_input_items(client):
    asked = {"model": "demo", "tools": [LOOK], "temperature": 0}
    response = client.responses.create(
        input=ASKED, tool_choice={"type": "function", "name": "look"}, parallel_tool_calls=False,
        **asked,
    )  # fmt: skip
    (call,) = response.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "it is there"}
    answer = client.responses.create(
        input=[{"role": "user", "content": ASKED}, call, result], max_output_tokens=8, **asked
    )
    assert answer.usage.input_tokens > response.usage.input_tokens + 10
    assert answer.status in ("completed", "incomplete")


def test_schemas_are_enforced_and_truncation_is_reported(client):
    form = {"type": "json_schema", "name": "p", "schema": PLACE, "strict": True}
    answer = client.responses.create(model="demo", input=ASKED, text={"format": form})
    assert json.loads(answer.output_text).keys() == {"place"}
    assert answer.text.format.type == "json_schema"
    cut = client.responses.create(model="demo", input=ASKED, max_output_tokens=3, temperature=0)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output[0].status == "incomplete"


def test_logprobs_come_with_the_text(client):
    with client.responses.stream(
        model="demo", input=ASKED, temperature=0, top_logprobs=2,
        include=["message.output_text.logprobs"],
    ) as stream:  # fmt: skip
        streamed = [each for each in stream if each.type == "response.output_text.delta"]
        final = stream.get_final_response()
    logprobs = final.output[0].content[0].logprobs
    assert "".join(each.token for each in logprobs).strip() == ANSWER
    assert all(len(each.top_logprobs) == 2 for each in logprobs)
    assert sum(len(each.logprobs) for each in streamed) == len(logprobs)


def test_disconnect_cancels_a_responses_job(client, serving):
    stream = client.responses.create(
        model="demo", input="a", stream=True, tools=[LOOK], tool_choice="required"
    )
    next(iter(stream))
    stream.close()
    until(lambda: serving.metrics.jobs == 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        (
            {"input": [message("user", [{"type": "input_image", "image_url": "data:x"}])]},
            "input",
        ),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format has no schema"),
        ({"tool_choice": "required"}, "tool_choice asks for 'required'"),
        ({"temperature": -1}, "temperature is -1"),
        ({"input": "word " * 2000}, "the context holds 1024"),
    ],
)
def test_invalid_responses_requests_are_refused(address, changes, reason):
    status, answer = post(f"{address}/v1/responses", {"input": "a", **changes})
    assert status == 400 and reason in answer["error"]["message"]


def test_newest_responses_are_stored():
    store = ResponseStore(most=3, characters=4000)
    for number in range(5):
        store.add([{"role": "user", "content": "x"}], {"id": str(number), "output": []})
    for gone in "01":
        with pytest.raises(Exception, match="no response"):
            store.find(gone)
    assert [store.find(there).body["id"] for there in "234"] == ["2", "3", "4"]
    store.add([{"role": "user", "content": "x" * 3900}], {"id": "5", "output": []})
    with pytest.raises(Exception, match="no response"):
        store.find("2")
    assert store.find("5")
