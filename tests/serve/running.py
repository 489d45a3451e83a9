"""A server in a thread of this process, and helpers for its clients."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from exkv import Engine
from exkv.decode import Event
from exkv.serve.server import bound, config
from exkv.serve.serving import Serving

DEMO = Path(__file__).parents[2] / "examples" / "demo-model"
CAPTURED = Path(__file__).parent / "captured"
QUESTION = [{"role": "user", "content": "Anna put the key in the kitchen. Where is the key?"}]
ANSWER = "The key is in the kitchen."
TOKENS = 1024
LONG = {"type": "regex", "pattern": "[a-z ]{600}"}  # a fixed, long answer


@contextlib.contextmanager
def running(serving: Serving) -> Iterator[str]:
    """Run the server -> its address."""
    server, sockets = uvicorn.Server(config(serving)), bound("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=(sockets,))
    address = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    thread.start()
    until(lambda: server.started)
    try:
        yield address
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def stopped_after(engine: Engine, steps: int) -> Iterator[None]:
    """Limit the engine to ``steps`` steps within this block: a job that begins in it doesn't end
    before the block does, however slow the machine is."""
    left, step, over = threading.Semaphore(steps), engine.iterate, threading.Event()

    def iterate() -> list[Event]:
        while not (over.is_set() or left.acquire(timeout=0.05)):
            pass
        return step()

    engine.iterate = iterate
    try:
        yield
    finally:
        over.set()
        del engine.iterate


def until(happened: Callable[[], bool]) -> None:
    """Wait up to three minutes."""
    deadline = time.monotonic() + 180
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def post(url: str, body: bytes | dict[str, Any], **headers: str) -> tuple[int, Any]:
    """POST -> status and JSON."""
    headers = {"content-type": "application/json", **headers}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return _answer(urllib.request.Request(url, data, headers))


def get(url: str) -> tuple[int, Any]:
    return _answer(urllib.request.Request(url))


def _answer(request: urllib.request.Request) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def events(url: str, body: dict[str, Any]) -> Iterator[Any]:
    """POST -> the contents of each server-sent event."""
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(url, json.dumps(body).encode(), headers)
    ) as answer:
        for line in answer:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line.removeprefix(b"data: "))
