"""TabbyAPI on exkv, from a checkout, driven by the openai client: for ``upstream.py``.

Run by the Python of its environment: ``python upstream_tabby.py CHECKOUT MODEL``. It starts
``main.py`` unchanged on two simulated devices, sends it typical requests, and prints a line for
each; it fails if an answer is wrong.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import requests

ROOT = Path(__file__).resolve().parents[2]
_SECONDS = 300  # to start, and for an answer
_ASKED = [{"role": "user", "content": "Anna put the key in the kitchen. Where is the key?"}]
_ANSWER = "The key is in the kitchen."
_CONFIG = """
network: {{host: 127.0.0.1, port: {port}, disable_auth: true}}
model: {{model_dir: {models}, model_name: demo, max_seq_len: 2048, cache_size: 4096}}
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def started(checkout: Path, model: Path) -> Iterator[str]:
    """Start a server with this model in its folder of models -> its address."""
    with tempfile.TemporaryDirectory() as place:
        home, port = Path(place) / "tabbyAPI", free_port()
        shutil.copytree(checkout, home)
        shutil.copytree(model, home / "models" / "demo")
        config = _CONFIG.format(port=port, models=home / "models")
        (home / "config.yml").write_text(config)
        env = {**os.environ, "PYTHONPATH": str(ROOT), "EXKV_SIM_DEVICES": "200M,200M"}
        command = [sys.executable, "-m", "exkv.compat.exllamav2", "main.py"]
        with (home / "log").open("w") as log:
            server = subprocess.Popen(command, cwd=home, env=env, stdout=log, stderr=log)
        try:
            wait_for(f"http://127.0.0.1:{port}", server)
            yield f"http://127.0.0.1:{port}"
        except BaseException:
            print((home / "log").read_text()[-6000:], file=sys.stderr)
            raise
        finally:
            server.terminate()
            server.wait(60)


def wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + _SECONDS
    while time.monotonic() < ends:
        if server.poll() is not None:
            raise RuntimeError(f"main.py ended with {server.returncode}")
        try:
            if requests.get(f"{address}/health", timeout=5).status_code == 200:
                return
        except requests.ConnectionError:
            time.sleep(0.5)
    raise RuntimeError(f"no answer within {_SECONDS} s")


class Asked:
    """The requests; each method returns a summary of the answer, or raises AssertionError."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.client = openai.OpenAI(
            base_url=f"{address}/v1", api_key="none", timeout=_SECONDS, max_retries=0
        )

    def answer(self, **options: Any) -> Any:
        usual: dict[str, Any] = {"model": "demo", "messages": _ASKED, "temperature": 0}
        return self.client.chat.completions.create(**{**usual, "max_tokens": 40, **options})

    def text(self, **options: Any) -> str:
        return str(self.answer(**options).choices[0].message.content)

    def chat(self) -> str:
        found = self.answer()
        assert found.choices[0].message.content == _ANSWER, found
        assert found.choices[0].finish_reason == "stop"
        return _ANSWER

    def stream(self) -> str:
        chunks = list(self.answer(stream=True))
        text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
        assert text == _ANSWER and len(chunks) > 4, text
        return f"the same in {len(chunks)} chunks"

    def logprobs(self) -> str:
        found = self.answer(logprobs=True, top_logprobs=3).choices[0]
        assert found.message.content == _ANSWER, found
        places = [] if found.logprobs is None else found.logprobs.content
        assert all(each.logprob <= 0 for each in places), places
        return f"{len(places)} places" if places else "computed; TabbyAPI returns none"

    def json_schema(self) -> str:
        kind = {"type": "string", "enum": ["kitchen", "hall"]}
        schema = {"type": "object", "properties": {"place": kind}, "required": ["place"]}
        once = {"json_schema": schema, "frequency_penalty": 3.0, "penalty_range": -1}
        text = self.text(extra_body=once, max_tokens=300)  # or it would repeat blanks
        assert json.loads(text)["place"] in kind["enum"], text
        return json.dumps(json.loads(text))

    def regex(self) -> str:
        text = self.text(extra_body={"regex_pattern": "(In|At) the (hall|garden)"})
        assert re.fullmatch("(In|At) the (hall|garden)\\s*", text), text
        return text.strip()

    def dry(self) -> str:
        texts = []
        for more in ({}, {"dry_multiplier": 5.0}, {"dry_multiplier": 5.0, "dry_allowed_length": 2}):
            asked = {"ban_eos_token": True, "dry_base": 0.0, **more}
            texts.append(self.text(extra_body=asked, max_tokens=100))
        assert texts[0] == texts[1] != texts[2], texts
        return "with a base of 0, penalizes n-grams of the allowed length only"

    def min_tokens(self) -> str:
        text = self.text(extra_body={"min_tokens": 30}, max_tokens=60)
        tokens = self.post("/v1/token/encode", text=text, add_bos_token=False)["length"]
        assert tokens >= 29, text
        return f"{tokens} tokens, with a minimum of 30"

    def completion(self) -> str:
        options = {"model": "demo", "prompt": "Anna put the key in the", "max_tokens": 12}
        found = self.client.completions.create(**options, temperature=0)
        assert found.choices[0].text, found
        return repr(found.choices[0].text)

    def tokens(self) -> str:
        ids = self.post("/v1/token/encode", text="Where is the key?")["tokens"]
        text = self.post("/v1/token/decode", tokens=ids)["text"]
        assert text.endswith("Where is the key?"), text
        return f"{len(ids)} tokens and back"

    def too_long(self) -> str:
        try:
            self.answer(messages=[{"role": "user", "content": "key " * 3000}])
        except openai.BadRequestError as error:
            assert "exceeds" in str(error), error
            return "400: longer than the context"
        raise AssertionError("it was answered")

    def dropped_stream_then_unload_and_reload(self) -> str:
        endless = {"ban_eos_token": True}
        chunks = self.answer(stream=True, max_tokens=1500, extra_body=endless)
        next(iter(chunks))
        chunks.close()
        self.post("/v1/model/unload")
        wanted = {"model_name": "demo", "max_seq_len": 1024, "cache_mode": "Q8"}
        load = f"{self.address}/v1/model/load"
        told = requests.post(load, json=wanted, timeout=_SECONDS).text
        lines = [line for line in told.splitlines() if line.startswith("data:")]
        assert '"finished"' in lines[-1], lines[-3:]
        return f"{self.chat()} (Q8, after {len(lines)} messages of loading)"

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        found = requests.post(f"{self.address}{path}", json=body, timeout=_SECONDS)
        assert found.status_code == 200, found.text
        return dict(found.json() or {})


QUESTIONS = (
    *("chat", "stream", "logprobs", "json_schema", "regex", "dry", "min_tokens", "completion"),
    *("tokens", "too_long", "dropped_stream_then_unload_and_reload"),
)


def main(checkout: str, model: str) -> None:
    failed = 0
    with started(Path(checkout), Path(model)) as address:
        asked = Asked(address)
        for name in QUESTIONS:
            question: Callable[[], str] = getattr(asked, name)
            begun = time.monotonic()
            try:
                summary = question()
            except Exception as error:  # noqa: BLE001 # the other requests are sent all the same
                failed, summary = failed + 1, f"FAILED: {type(error).__name__}: {error}"
            print(f"tabbyAPI: {name:32} {time.monotonic() - begun:6.1f} s  {summary}", flush=True)
        if failed:
            raise RuntimeError(f"{failed} of {len(QUESTIONS)} questions")


if __name__ == "__main__":
    main(*sys.argv[1:])
