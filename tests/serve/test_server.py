"""The server through OpenAI's client and through plain HTTP."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from running import ANSWER, DEMO, LONG, QUESTION, TOKENS, post, stopped_after, until

from exkv import Job
from exkv.serve.server import Connection

ROOT = DEMO.parents[1]


# OpenAI's client ----------------------------------------------------------------------------------


def test_chat_is_answered_with_usage(client, serving):
    answer = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0)
    (choice,) = answer.choices
    assert choice.message.content == ANSWER
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    prompt = len(serving.loaded.engine.tokenizer.encode_chat(QUESTION))
    assert answer.usage.prompt_tokens == prompt
    assert answer.usage.total_tokens == prompt + answer.usage.completion_tokens


def test_stream_has_the_same_text_and_usage(client):
    whole = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0)
    parts = list(
        client.chat.completions.create(
            model="demo",
            messages=QUESTION,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert parts[0].choices[0].delta.role == "assistant"
    texts = [part.choices[0].delta.content or "" for part in parts[:-1]]
    assert "".join(texts) == ANSWER
    assert sum(map(bool, texts)) > 3
    assert parts[-2].choices[0].finish_reason == "stop"
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({part.id for part in parts}) == 1


def test_content_may_be_split_into_parts(client):
    text = QUESTION[0]["content"]
    parts = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
    message = {"role": "user", "content": parts}
    answer = client.chat.completions.create(model="demo", messages=[message], temperature=0)
    assert answer.choices[0].message.content == ANSWER


def test_completions_take_several_prompts_and_choices(client, alone):
    prompts = ["the key is in the", "anna put the red ball"]
    answer = client.completions.create(
        model="demo", prompt=prompts, n=2, max_tokens=6, temperature=0, echo=True
    )
    wanted = [prompt + alone(prompt, 6) for prompt in prompts for _ in range(2)]
    assert [choice.text for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_prompts_may_be_ids_and_stops_end_a_text(client, serving, alone):
    ids = serving.loaded.engine.tokenizer.encode("the key is in the")
    answer = client.completions.create(model="demo", prompt=ids, max_tokens=5, temperature=0)
    assert answer.usage.prompt_tokens == len(ids)
    text = alone("the key is in the", 8)
    stop = text.split()[-1]
    answer = client.completions.create(
        model="demo", prompt="the key is in the", max_tokens=8, temperature=0, stop=[stop]
    )
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_seed_repeats_and_choices_differ(client):
    def drawn(seed):
        answer = client.completions.create(
            model="demo",
            prompt="anna put",
            n=3,
            max_tokens=12,
            temperature=1.5,
            seed=seed,
            extra_body={"top_k": 0, "min_p": 0.01},
        )
        return [choice.text for choice in answer.choices]

    first = drawn(5)
    assert drawn(5) == first
    assert len(set(first)) > 1
    assert drawn(6)[:2] == first[1:]  # each choice has the next seed


def test_json_schema_is_enforced(client):
    schema = {
        "type": "object",
        "properties": {"place": {"enum": ["kitchen", "garden"]}, "sure": {"type": "boolean"}},
        "required": ["place", "sure"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="demo",
        messages=QUESTION,
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content).keys() == {"place", "sure"}


def test_logit_bias_bans_a_token(client, serving):
    (key,) = serving.loaded.engine.tokenizer.encode(" key", add_bos=False)[-1:]
    answer = client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, logit_bias={str(key): -100}
    )
    assert " key" not in answer.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_match_the_models_logits(client, serving, stream):
    """Compared with the logits of one forward call over prompt and answer."""
    options = {"temperature": 0, "logprobs": True, "top_logprobs": 3, "stream": stream}
    answer = client.chat.completions.create(model="demo", messages=QUESTION, **options)
    parts = answer if stream else [answer]
    found = [
        each
        for part in parts
        for each in (part.choices[0].logprobs.content if part.choices[0].logprobs else ())
    ]
    assert b"".join(bytes(each.bytes) for each in found).decode().strip() == ANSWER
    engine, tokenizer = serving.loaded.engine, serving.loaded.engine.tokenizer
    prompt = tokenizer.encode_chat(QUESTION)
    known = {tokenizer.bytes_of(i): i for i in range(7, 1280)}  # pieces after single bytes
    ids = [known[bytes(each.bytes)] for each in found]
    logits = engine.model.forward(torch.tensor([[*prompt, *ids]]))[0].float().log_softmax(-1)
    for place, (token, each) in enumerate(zip(ids, found, strict=True), start=len(prompt) - 1):
        best = logits[place].topk(3)
        assert each.logprob == pytest.approx(logits[place, token].item(), abs=0.05)
        assert [x.logprob for x in each.top_logprobs] == pytest.approx(
            best.values.tolist(), abs=0.05
        )
        assert each.token == each.top_logprobs[0].token


def test_completions_logprobs_format(client):
    options = {"max_tokens": 2, "temperature": 0, "logprobs": 2}
    choice = client.completions.create(model="demo", prompt="the key is", **options).choices[0]
    found = choice.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 2
    assert "".join(found.tokens).strip() == choice.text.strip()
    assert found.text_offset[:2] == [0, len(found.tokens[0])]
    assert all(len(top) == 2 for top in found.top_logprobs)
    with pytest.raises(openai.BadRequestError, match="suffix: exkv has no"):
        client.completions.create(model="demo", prompt="a", suffix="b")


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "exkv"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("temperature", -1, "temperature is -1"),
        ("temprature", 1, "temprature: unknown field"),
        ("n", 999, "n: Input should be less than or equal to 128"),
        ("n", 9, "n is 9, but at most 8 jobs run at once"),
        ("tools", [{"type": "function"}], "tools.0.function: Field required"),
        ("top_logprobs", 2, "top_logprobs needs logprobs"),
        ("top_logprobs", 21, "top_logprobs: Input should be less than or equal to 20"),
        ("logit_bias", {"x": 1}, "logit_bias has the key 'x'"),
        ("logit_bias", {"99999999": 1}, "only 1280 ids"),
        ("messages", [], "messages: List should have at least 1 item"),
        ("response_format", {"type": "json_schema"}, "response_format has no json_schema"),
        ("response_format", {"type": "regex", "pattern": "("}, "grammar can't be followed"),
        ("messages", [{"role": "user", "content": "word " * 2000}], "the context holds 1024"),
    ],
)
def test_invalid_requests_are_refused_with_a_reason(client, field, value, reason):
    body = {"messages": QUESTION, field: value}
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        client.post("/chat/completions", body=body, cast_to=object)
    assert caught.value.body["type"] == "invalid_request_error"


def test_missing_routes_and_features_are_reported(client, address):
    with pytest.raises(openai.InternalServerError, match="makes no embeddings"):
        client.embeddings.create(model="demo", input="x")
    status, body = post(f"{address}/completion", b"{}")  # a route of llama.cpp's server
    assert (status, body["error"]["message"][:29]) == (404, "there is no POST /completion:")
    form = {"content-type": "application/x-www-form-urlencoded"}  # curl's default
    status, body = post(f"{address}/v1/completions", b'{"prompt": "a"}', **form)
    assert (status, "Content-Type: application/json" in body["error"]["message"]) == (400, True)
    assert post(f"{address}/v1/completions", b"{")[0] == 400


def test_too_many_jobs_get_429(client, serving):
    serving.metrics.jobs += 100
    try:
        with pytest.raises(openai.RateLimitError, match="try again later") as caught:
            client.completions.create(model="demo", prompt="a")
        assert caught.value.response.headers["retry-after"] == "1"
    finally:
        serving.metrics.jobs -= 100


def test_idle_connection_times_out(address, monkeypatch):
    """One that sends nothing, or begins a second request and stops."""
    monkeypatch.setattr(Connection, "seconds", 0.3)
    port = int(address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as silent:
        silent.settimeout(60)
        assert silent.recv(1) == b""
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.settimeout(60)
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = b""
        while not received.endswith(b"}"):
            received += slow.recv(1 << 16)
        assert received.startswith(b"HTTP/1.1 200")
        slow.sendall(b"GET /heal")  # never completed
        assert slow.recv(1) == b""


# Tokens and state ---------------------------------------------------------------------------------


def test_tokens_round_trip(address, serving):
    _, found = post(f"{address}/v1/token/encode", b'{"text": "the key"}')
    assert found["tokens"] == serving.loaded.engine.tokenizer.encode("the key")
    assert found["length"] == len(found["tokens"])
    body = json.dumps({"tokens": found["tokens"], "decode_special_tokens": False}).encode()
    assert post(f"{address}/v1/token/decode", body)[1]["text"] == "the key"
    assert post(f"{address}/v1/token/decode", b'{"tokens": [9999999]}')[0] == 400


def test_health_model_and_metrics(address, client, serving):
    client.completions.create(model="demo", prompt="the key", max_tokens=3, temperature=0)
    with urllib.request.urlopen(f"{address}/health") as answer:
        assert json.load(answer) == {"status": "healthy"}
    with urllib.request.urlopen(f"{address}/v1/model") as answer:
        assert json.load(answer)["parameters"]["max_seq_len"] == TOKENS
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    figures = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert (
        float(figures["exkv_generated_tokens_total"]) == serving.loaded.engine.stats.new_tokens > 0
    )
    assert float(figures["exkv_pages_available"]) == float(figures["exkv_pages"]) == TOKENS / 16


def test_state_reports_memory(address, serving):
    with urllib.request.urlopen(f"{address}/v1/state") as answer:
        state = json.load(answer)
    (device,) = state["devices"]
    ledger = serving.loaded.engine.model.report.devices[0].ledger
    assert (device["device"], device["weights"]) == ("cpu", ledger.weights)
    assert state["pages"]["total"] == state["pages"]["available"] == TOKENS // 16
    assert state["host"] == {"pages": 0, "pages_room": 0, "jobs": 0, "jobs_bytes": 0}


def test_state_counts_preempted_jobs(serving):
    engine = serving.loaded.engine
    handle = engine.submit(Job(prompt=[5] * 40))
    while not handle.tokens:
        engine.iterate()
    engine._scheduler._preempt(max(engine._running.jobs))
    page = sum(x[0].nbytes for layer in engine.cache.layers for x in layer.tensors.values())
    host = {"pages": 0, "pages_room": 0, "jobs": 1, "jobs_bytes": 3 * page}
    assert serving.state()["host"] == host
    handle.cancel()
    engine.iterate()
    assert serving.state()["host"]["jobs"] == 0


# Disconnects and load -----------------------------------------------------------------------------


def test_disconnect_cancels_a_streaming_job(client, serving):
    with stopped_after(serving.loaded.engine, 20):
        stream = client.completions.create(
            model="demo", prompt="a", max_tokens=900, stream=True,
            extra_body={"response_format": LONG},
        )  # fmt: skip
        next(iter(stream))
        assert serving.metrics.jobs == 1
        stream.close()
        until(lambda: serving.metrics.jobs == 0)


def test_disconnect_cancels_a_waiting_job(address, serving):
    body = json.dumps({"prompt": "a", "max_tokens": 900, "response_format": LONG}).encode()
    host, port = address.removeprefix("http://").split(":")
    waiting = stopped_after(serving.loaded.engine, 0)
    with waiting, socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        until(lambda: serving.metrics.jobs == 1)
    until(lambda: serving.metrics.jobs == 0)


def test_answers_are_correct_under_load(client, serving, alone):
    """Many clients, a third with a shared prefix; more tokens than there are pages; some
    disconnect, some send invalid requests: every answer equals the one generated alone."""
    source = random.Random(7)
    words = ["the key", "is in", "kitchen", "anna put", "red", "ball", "garden", "where", "tom"]
    shared = " ".join(source.choices(words, k=60))
    before = serving.loaded.engine.stats.put_away

    def prompt(index: int) -> str:
        own = " ".join(source.choices(words, k=source.randrange(3, 60)))
        return f"{shared} {own}" if index % 3 == 0 else own

    requests = [(index, prompt(index), source.randrange(4, 40)) for index in range(48)]

    def ask(request):
        index, text, count = request
        if index % 5 == 1:  # disconnects
            with client.completions.create(
                model="demo", prompt=text, max_tokens=200, stream=True, temperature=0
            ) as stream:
                next(iter(stream), None)
            return None
        if index % 11 == 2:
            with pytest.raises(openai.BadRequestError):
                client.completions.create(model="demo", prompt=text, max_tokens=count, top_p=7)
            return None
        answer = client.completions.create(
            model="demo", prompt=text, max_tokens=count, temperature=0
        )
        return answer.choices[0].text

    with ThreadPoolExecutor(24) as clients:
        answers = list(clients.map(ask, requests))
    for (_, text, count), answer in zip(requests, answers, strict=True):
        assert answer is None or answer == alone(text, count), text
    assert sum(answer is not None for answer in answers) > 30
    assert serving.loaded.engine.stats.most_running > 4
    assert serving.loaded.engine.stats.put_away >= before


# The command --------------------------------------------------------------------------------------


def test_second_sigterm_ends_running_answers(tmp_path):
    key = tmp_path / "key"
    key.write_text("a-key-of-ours\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "exkv", "serve", str(DEMO), "--port", str(port)]
    command += ["--max-seq-len", "1024", "--api-key-file", str(key)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        url = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            assert server.poll() is None, server.stderr.read()
            try:
                return urllib.request.urlopen(f"{url}/health").status == 200
            except OSError:
                return False

        until(answers)
        assert post(f"{url}/v1/completions", b'{"prompt": "a"}')[0] == 401
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="a-key-of-ours", max_retries=0)
        stream = client.completions.create(
            model="demo", prompt="a", max_tokens=900, stream=True,
            extra_body={"response_format": LONG},
        )  # fmt: skip
        parts = iter(stream)
        text = next(parts).choices[0].text
        later = client.completions.create(
            model="demo", prompt="a", max_tokens=1000, stream=True,
            extra_body={"response_format": LONG | {"pattern": "[bcdfghjkmpqvwxz]{990}"}},
        )  # fmt: skip
        server.send_signal(signal.SIGTERM)
        text += "".join(part.choices[0].text for part in parts)
        assert len(text) == 600
        server.send_signal(signal.SIGTERM)
        assert server.wait(180) == 0
        with contextlib.suppress(Exception):  # the stream breaks off
            text += "".join(part.choices[0].text for part in later)
        assert len(text) == 600
        told = server.stderr.read()
        assert f"{url}/v1" in told and "Traceback" not in told
