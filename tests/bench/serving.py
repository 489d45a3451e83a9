"""Servers that benches start, and a client that takes little of their processors."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from .harness import ROOT, status_bytes


class Server:
    """A server's process.

    Args:
        command: makes its command line from the port.
        log: file of its output.
    """

    def __init__(
        self, command: Callable[[int], Sequence[str]], log: Path, env: Mapping[str, str] = {}
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command(self.port), cwd=ROOT, env=env, stdout=file, stderr=file
            )
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server has ended: {log.read_text()[-2000:]}")
            try:
                self.get("health")
                return
            except OSError:
                time.sleep(0.05)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{path}") as answer:
            return answer.read().decode()

    def figures(self) -> dict[str, float]:
        """Its metrics, by name."""
        lines = self.get("metrics").splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def memory(self) -> int:
        """Resident bytes of its process."""
        return status_bytes("VmRSS", self.process.pid)

    def processor_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """Kill it at once (SIGKILL)."""
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def running(
    command: Callable[[int], Sequence[str]], env: Mapping[str, str] = {}
) -> Iterator[Server]:
    """A running server, ended at the exit of the context."""
    with tempfile.TemporaryDirectory() as folder:
        found = Server(command, Path(folder) / "log", env)
        try:
            yield found
        finally:
            if found.process.poll() is None:
                found.kill()


class Answered(NamedTuple):
    """Status, text, seconds to the first part and to the end, and the stated new tokens."""

    status: int
    text: str = ""
    first: float = 0.0
    whole: float = 0.0
    tokens: int = 0


class _Reader(asyncio.Protocol):
    """Takes in what a server sends, and looks into it once all is there: whoever asks has the
    processors of the server that is measured, which it wakes for every event."""

    def __init__(self, drop_after: int) -> None:
        self.received = bytearray()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first = 0.0  # when the first event came
        self._left = drop_after

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        if not self.first and b"data: {" in data:
            self.first = time.perf_counter()
        if self._left > 0:
            self._left -= data.count(b"data: {")
            if self._left <= 0:
                self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


async def ask(port: int, body: bytes, drop_after: int = -1) -> Answered:
    """Send a completion's request -> its answer; dropped after some events, -1 for never."""
    started = time.perf_counter()
    loop = asyncio.get_running_loop()
    transport, reader = await loop.create_connection(lambda: _Reader(drop_after), "127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
    head += "\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
    transport.write(head.encode() + body)
    try:
        await reader.ended
    finally:
        transport.close()
    whole, first = time.perf_counter() - started, max(reader.first - started, 0.0)
    if drop_after >= 0:
        return Answered(0, first=first)
    lines = bytes(reader.received).splitlines() or [b"closed 0"]
    text, tokens = "", 0
    for line in lines:
        if line.startswith(b"data: {"):
            found = json.loads(line.removeprefix(b"data: "))
            if "error" in found:
                return Answered(500, str(found["error"])[:500])
            tokens = (found.get("usage") or {}).get("completion_tokens", tokens)
            text += found["choices"][0]["text"] if found.get("choices") else ""
    return Answered(int(lines[0].split()[1]), text, first, whole, tokens)
