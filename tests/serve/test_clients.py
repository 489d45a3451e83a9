"""Requests as clients send them: captured bodies, and the behaviour that clients rely on."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest
import torch
from running import ANSWER, CAPTURED, DEMO, QUESTION, events, get, post
from transformers import AutoModelForCausalLM

BODIES = [
    pytest.param(each["path"], each["body"], id=f"{file.stem}-{number}")
    for file in sorted(CAPTURED.glob("*.json"))
    for number, each in enumerate(json.loads(file.read_text()))
]
CHAT = {"messages": QUESTION, "temperature": 0}


def chat(address, **fields):
    status, answer = post(f"{address}/v1/chat/completions", {**CHAT, **fields})
    assert status == 200, answer
    return answer["choices"][0]


def check_choices_of_ids(choices, body):
    """One choice per prompt; echoed ones have logprobs of every token but the first."""
    for choice, ids in zip(choices, body["prompt"], strict=True):
        assert choice["finish_reason"]
        if body.get("echo"):
            first, *others = choice["logprobs"]["token_logprobs"]
            assert first is None and len(others) == len(ids) and None not in others


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_captured_requests_are_answered(address, path, body):
    """With settings that keep the answer short, and with everything that was requested."""
    names = ("max_output_tokens", "max_completion_tokens", "max_tokens")
    given = [name for name in names if name in body]
    short = (
        given[0] if given else "max_output_tokens" if path.endswith("responses") else "max_tokens"
    )
    most = min(body.get(short, 64), 64)
    body = {"temperature": 0, **body, short: most}
    if body.get("stream"):
        found = list(events(f"{address}{path}", body))
        assert "error" not in found[0]
        if body.get("stream_options", {}).get("include_usage"):
            made = found[-1]["usage"]["completion_tokens"]
            assert made == most if body.get("ignore_eos") else made
        return
    status, answer = post(f"{address}{path}", body)
    assert status == 200, answer
    if path.endswith("responses"):
        assert answer["status"] in ("completed", "incomplete")
        assert not body.get("ignore_eos") or answer["usage"]["output_tokens"] == most
        return
    if body.get("ignore_eos"):
        assert answer["usage"]["completion_tokens"] == most
    if isinstance(body.get("prompt"), list):
        return check_choices_of_ids(answer["choices"], body)
    (choice,) = answer["choices"]
    forced = body.get("tool_choice", "auto") not in ("auto", "none") or "function_call" in body
    if "text" in choice:
        assert choice["finish_reason"] and choice["text"].startswith(
            body["prompt"] if body.get("echo") else ""
        )
    elif forced:
        message = choice["message"]
        (call,) = message.get("tool_calls") or [{"function": message["function_call"]}]
        assert call["function"]["arguments"].startswith('{"')
    elif body.get("response_format", {}).get("type", "text") != "text":
        assert choice["message"]["content"].lstrip().startswith("{")
    else:
        assert choice["message"]["content"] or choice["message"]["tool_calls"]


# Log-probabilities of a prompt ----------------------------------------------------------------

#: Contexts and continuations, as a multiple-choice task has them.
CONTEXT = "Anna put the key in the kitchen. The key is in the"
CONTINUATIONS = [" kitchen.", " garden.", " blue"]


@pytest.fixture(scope="module")
def reference():
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


def loglikelihoods(reference, ids, context):
    """transformers' log-probabilities, and whether each token after the context is likeliest."""
    with torch.no_grad():
        logits = reference(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    own = logits[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    greedy = logits[:-1].argmax(-1) == torch.tensor(ids[1:])
    return own.tolist(), greedy[context - 1 :].all().item()


@pytest.mark.parametrize("new", [0, 1])
def test_loglikelihoods_match_transformers(address, serving, reference, new):
    """A batch in lm-eval's format: ids, echo, logprobs, one new token."""
    encode = serving.model.engine.tokenizer.encode
    context = encode(CONTEXT)
    batch = [context + encode(each, add_bos=False) for each in CONTINUATIONS] * 2
    body = {"prompt": batch, "max_tokens": new, "logprobs": 1, "echo": True, "temperature": 0}
    status, answer = post(f"{address}/v1/completions", {**body, "seed": 1234})
    assert status == 200, answer
    sums = []
    for ids, choice in zip(batch, answer["choices"], strict=True):
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(ids) + new and found["token_logprobs"][0] is None
        scores = found["token_logprobs"][1 : len(ids)]
        wanted, is_greedy = loglikelihoods(reference, ids, len(context))
        assert scores == pytest.approx(wanted, abs=0.03, rel=0.02)  # the model's are of bf16
        best = [max(top.values()) for top in found["top_logprobs"][len(context) : len(ids)]]
        assert (best == scores[len(context) - 1 :]) == is_greedy
        sums.append(sum(scores[len(context) - 1 :]))
    assert max(range(3), key=lambda i: sums[i]) == 0
    assert answer["usage"]["completion_tokens"] == new * len(batch)


def test_echoed_tokens_and_offsets_match_the_text(address):
    body = {"prompt": CONTEXT, "max_tokens": 2, "logprobs": 0, "echo": True, "temperature": 0}
    _, whole = post(f"{address}/v1/completions", body)
    (choice,) = whole["choices"]
    found = choice["logprobs"]
    assert "".join(found["tokens"][1:]).strip() == choice["text"]  # the first one begins texts
    parts = [each["choices"][0] for each in events(f"{address}/v1/completions", body | STREAM)]
    assert "".join(part["text"] for part in parts) == choice["text"]
    streamed = [part["logprobs"] for part in parts if part["logprobs"]]
    for name in ("tokens", "text_offset", "token_logprobs"):
        assert [x for each in streamed for x in each[name]] == found[name]
    text = "".join(found["tokens"][1:])
    spans = zip(found["text_offset"][1:], found["tokens"][1:], strict=True)
    assert all(text[at:].startswith(token) for at, token in spans)


STREAM = {"stream": True}


# Lengths --------------------------------------------------------------------------------------


def test_minimum_length_is_enforced(address):
    """As benchmarks ask: exactly max_tokens, or at least min_tokens."""

    def tokens(**fields):
        _, answer = post(f"{address}/v1/chat/completions", {**CHAT, "max_tokens": 40, **fields})
        return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

    own, reason = tokens()
    assert own < 15 and reason == "stop"
    assert tokens(ignore_eos=True) == (40, "length")
    assert tokens(ban_eos_token=True) == (40, "length")
    assert 20 <= tokens(min_tokens=20)[0] <= 40
    text = chat(address, min_tokens=20)["message"]["content"]
    assert text.startswith(ANSWER) and len(text) > len(ANSWER)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a"]}}}
    assert tokens(min_tokens=20, response_format=schema)[1] == "stop"  # which allows no more


def test_minus_one_means_random_seed_and_no_token_limit(address):
    drawn = {"prompt": "anna put", "max_tokens": 12, "temperature": 1.5, "seed": -1}
    texts = {post(f"{address}/v1/completions", drawn)[1]["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1
    assert len({chat(address, temperature=1.5, seed=-2)["message"]["content"] for _ in "ab"}) == 1
    assert chat(address, max_tokens=-1)["message"]["content"] == ANSWER


def test_final_assistant_message_is_continued(address):
    begun = [*QUESTION, {"role": "assistant", "content": "The key is in"}]
    assert chat(address, messages=begun)["message"]["content"] == ANSWER[len("The key is in") :]
    assert chat(address, messages=begun, tools=[FIND])["message"]["content"]
    again = chat(address, messages=begun, add_generation_prompt=True)["message"]["content"]
    assert (
        again == chat(address, messages=begun, continue_final_message=False)["message"]["content"]
    )
    assert not again.startswith(" the kitchen")
    body = {"messages": QUESTION, "continue_final_message": True}
    status, answer = post(f"{address}/v1/chat/completions", body)
    assert status == 400 and "needs a last message of the assistant" in answer["error"]["message"]
    _, answer = post(f"{address}/v1/token/encode", {"text": begun})
    assert answer["length"] == len(answer["tokens"])


# Tools ----------------------------------------------------------------------------------------

THING = {
    "type": "object",
    "properties": {"thing": {"enum": ["key"]}},
    "required": ["thing"],
    "additionalProperties": False,
}
FIND = {"type": "function", "function": {"name": "find", "parameters": THING}}
WAIT = {"type": "function", "function": {"name": "wait"}}
NAMED = {"type": "function", "function": {"name": "find"}}


def test_named_tool_is_called_once(address):
    choice = chat(address, tools=[FIND, WAIT], tool_choice=NAMED, max_tokens=200)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["find"]
    assert choice["finish_reason"] == "tool_calls"


def test_only_allowed_tools_are_called(address):
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "wait"}}]}
    choose = {"type": "allowed_tools", "allowed_tools": allowed}
    fields = {"tools": [FIND, WAIT], "parallel_tool_calls": False, "max_tokens": 100}
    choice = chat(address, tool_choice=choose, **fields)
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "wait"
    allowed["tools"][0]["function"]["name"] = "no"
    status, answer = post(
        f"{address}/v1/chat/completions", {**CHAT, "tool_choice": choose, **fields}
    )
    assert status == 400 and "tool_choice allows 'no'" in answer["error"]["message"]


def test_older_functions_format(address):
    fields = {"functions": [FIND["function"]], "function_call": {"name": "find"}}
    choice = chat(address, **fields)
    assert choice["finish_reason"] == "function_call"
    call = choice["message"]["function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("find", {"thing": "key"})
    assert "tool_calls" not in choice["message"]
    parts = events(f"{address}/v1/chat/completions", {**CHAT, **fields, "stream": True})
    deltas = [each["choices"][0]["delta"].get("function_call", {}) for each in parts]
    assert "".join(each.get("arguments", "") for each in deltas) == call["arguments"]
    assert [each["name"] for each in deltas if "name" in each] == ["find"]
    told = {"role": "function", "name": "find", "content": "kitchen"}
    called = {"role": "assistant", "content": None, "function_call": call}
    assert chat(address, messages=[*QUESTION, called, told], functions=fields["functions"])


# Other fields, routes and refusals ------------------------------------------------------------


def test_fingerprint_is_stable(address):
    path = f"{address}/v1/chat/completions"
    prints = {post(path, CHAT)[1]["system_fingerprint"], *(
        each["system_fingerprint"] for each in events(path, {**CHAT, "stream": True})
    )}  # fmt: skip
    assert len(prints) == 1 and min(prints).startswith("fp_")


def test_continuous_usage(address):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**CHAT, "stream": True, "stream_options": options}
    counts = [
        each["usage"]["completion_tokens"]
        for each in events(f"{address}/v1/chat/completions", body)
        if "usage" in each
    ]
    assert counts == sorted(counts) and len(counts) > 4


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/responses", "/models"])
def test_routes_exist_without_v1(address, path):
    bodies = {"/chat/completions": CHAT, "/completions": {"prompt": "a"}}
    if path == "/models":
        assert get(f"{address}/models") == get(f"{address}/v1/models")
    else:
        assert post(f"{address}{path}", bodies.get(path, {"input": "a"}))[0] == 200


def test_openapi_describes_actual_errors(address):
    schema = get(f"{address}/openapi.json")[1]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            assert "422" not in operation["responses"], path
            statuses = {"400", "401"} | ({"413", "429", "503"} if method == "post" else set())
            assert not statuses - operation["responses"].keys() or "requestBody" not in operation
    assert "HTTPValidationError" not in json.dumps(schema)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{address}/v1/chat/completions")
    assert (caught.value.code, caught.value.headers["Allow"]) == (405, "POST")


ITSELF = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type: Input "),
        ({"stop": ["x"] * 65}, "stop: List should have at most 64 items"),
        ({"stop": [1]}, "stop.0: Input should be a valid string"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function: Field required"),
        ({"messages": None}, "messages: Field required"),
        ({"response_format": ITSELF}, "a $ref refers only to itself"),
        ({"model": "\ud800"}, "half a surrogate pair"),
        ({"metadata": {"\udfff": "x"}}, "half a surrogate pair"),
        ({"prompt_cache_key": "a\ud800b"}, "half a surrogate pair"),
    ],
)
def test_invalid_fields_are_named(address, fields, reason):
    status, answer = post(f"{address}/v1/chat/completions", {**CHAT, **fields})
    assert status == 400
    assert reason in answer["error"]["message"]


@pytest.mark.parametrize("prompt", [[], [[]], ["a", []]])
def test_empty_prompt_is_refused(address, prompt):
    status, answer = post(f"{address}/v1/completions", {"prompt": prompt})
    assert status == 400 and "empty" in answer["error"]["message"]
