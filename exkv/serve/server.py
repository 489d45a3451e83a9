"""Run the app: address, key, shutdown.

The server listens on loopback by default, and requires a key on any other address. On SIGTERM or
Ctrl-C it accepts no more requests and ends when the running ones are answered; on a second signal
it ends at once.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import secrets
import socket
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .app import build
from .serving import Serving

_CONNECTIONS = 1024
_IDLE_SECONDS = 30  # keep-alive between two requests
_HEAD_SECONDS = 30.0  # to receive a request's first line and headers
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type] # whichever is installed
    """A connection that is closed if no complete request head arrives in time; uvicorn limits
    only the time between two requests."""

    seconds = _HEAD_SECONDS

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._stop_watching()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watching()  # the guard limits the body's time
        elif self._limit is None:
            self._limit = self.loop.call_later(self.seconds, self._time_out)

    def _stop_watching(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _time_out(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class Server(uvicorn.Server):
    """Ends at once on the second signal, whichever it is.

    Args:
        serving: its cluster hosts are readmitted while the server runs.
    """

    def __init__(self, config: uvicorn.Config, serving: Serving) -> None:
        super().__init__(config)
        self._serving = serving

    async def main_loop(self) -> None:
        readmitting = asyncio.create_task(self._serving.readmit_hosts())
        try:
            await super().main_loop()
        finally:
            readmitting.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            # It would log every interrupted request.
            logging.getLogger("uvicorn.error").disabled = True
        self.should_exit = True


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def read_key(file: Path | None, host: str) -> tuple[str | None, bool]:
    """The key that clients must send, and whether it was generated just now.

    Raises:
        ValueError: the file has no key, or one that no header can carry.
        OSError: the file can't be read.
    """
    if file is None:
        return (None, False) if is_loopback(host) else (secrets.token_urlsafe(32), True)
    key = file.read_text("utf-8", errors="replace").strip()
    if not key.isascii() or not key.isprintable() or " " in key or len(key) < 8:
        raise ValueError(
            f"{file} has no valid key: write one line of at least 8 ASCII characters, no spaces"
        )
    return key, False


def allowed_hosts(host: str) -> frozenset[str] | None:
    """Allowed names in the Host header; None for any."""
    return _LOOPBACK | {host.lower()} if is_loopback(host) else None


def bound(host: str, port: int) -> list[socket.socket]:
    """Bind sockets on all addresses of a host name, so that an unavailable address is reported
    before a model is loaded.

    Raises:
        ValueError: the address isn't this machine's, or the port is in use.
    """
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            sockets.append(each := socket.socket(family, kind, protocol))
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            each.bind(address)
    except OSError as error:
        for each in sockets:
            each.close()
        remedy = ": choose another --port" if error.errno == errno.EADDRINUSE else ""
        raise ValueError(f"can't listen on {host}, port {port}: {error.strerror}{remedy}") from None
    return sockets


def config(serving: Serving) -> uvicorn.Config:
    """uvicorn's configuration."""
    return uvicorn.Config(
        build(serving),
        http=Connection,
        log_level="warning",
        limit_concurrency=_CONNECTIONS,
        timeout_keep_alive=_IDLE_SECONDS,
        server_header=False,
        lifespan="off",
    )


def serve(serving: Serving, sockets: list[socket.socket]) -> None:
    """Answer requests on these sockets until a signal ends it."""
    Server(config(serving), serving).run(sockets)
