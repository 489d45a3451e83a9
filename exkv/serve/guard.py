"""What is checked before every route: the host that was meant, the key, the size of a body, and
how long it takes to arrive.

A pure ASGI middleware, since what it refuses must not be read first.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from . import page
from .answers import error_body

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_OPEN = frozenset({"/health", "/favicon.ico", *page.FILES})  # without a key


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one client may ask of the server.

    Attributes:
        body: bytes of a request.
        body_seconds: in which it must have arrived.
        jobs: that may be running or waiting; more are told to come again.
        prompt_seconds: that it may take to make tokens of a prompt.
    """

    body: int = 8 << 20
    body_seconds: float = 30.0
    jobs: int = 256
    prompt_seconds: float = 10.0


class Refused(Exception):
    """A request that goes no further."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


class Guard:
    """Lets requests through to an app that are meant for it, authorised and not too large.

    Args:
        key: that clients must send as ``Authorization: Bearer KEY`` or ``x-api-key: KEY``; None for
            no key.
        hosts: names under which the server may be asked; None for any. On the loopback address they
            keep out what a web page sends there under a name of its own.
    """

    def __init__(self, app: App, limits: Limits, key: str | None, hosts: frozenset[str] | None):
        self._app = app
        self._limits = limits
        self._key = None if key is None else key.encode()
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            headers = {name: value for name, value in reversed(scope["headers"])}
            self._check_host(headers.get(b"host", b""))
            self._check_origin(scope["path"], headers)
            self._check_key(scope["path"], headers)
            receive = await self._with_body(receive, headers)
        except Refused as refused:
            return await _refuse(send, refused)
        await self._app(scope, receive, send)

    def _check_host(self, host: bytes) -> None:
        name = host.decode("latin-1")
        if not name.endswith("]"):  # an IPv6 address without a port
            name = name.rsplit(":", 1)[0]
        if self._hosts is not None and name.lower() not in self._hosts:
            raise Refused(421, f"this server isn't {name[:80]!r}")

    def _check_origin(self, path: str, headers: dict[bytes, bytes]) -> None:
        """Without a key, a page from elsewhere may not ask: it could unload the model, or have
        something planned by what it takes for an image, which has no origin."""
        if self._key is not None:
            return
        site = headers.get(b"sec-fetch-site", b"none")
        if site not in (b"none", b"same-origin") and path not in _OPEN:
            raise Refused(403, "a page from elsewhere may not ask here")
        origin = headers.get(b"origin")
        if origin is not None:
            _, _, meant = origin.rpartition(b"//")
            if meant.lower() != headers.get(b"host", b"").lower():
                raise Refused(403, f"a page of {origin.decode('latin-1')[:80]!r} may not ask here")

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self._key is None or path in _OPEN:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            given = headers.get(b"x-api-key", b"")
        if not hmac.compare_digest(given.strip(), self._key):
            raise Refused(
                401, "give the server's key: Authorization: Bearer KEY", "invalid_api_key"
            )

    async def _with_body(self, receive: Receive, headers: dict[bytes, bytes]) -> Receive:
        """Read the body, and give it to the app as one message."""
        most, stated = self._limits.body, headers.get(b"content-length", b"0")
        seconds = self._limits.body_seconds
        try:
            if not stated.isdigit() or int(stated) > most:
                await asyncio.wait_for(_refuse_body(receive, most), seconds)
            body = await asyncio.wait_for(_read(receive, most), seconds)
        except TimeoutError:
            raise Refused(408, "the request took too long to arrive") from None
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        return replay


async def _read(receive: Receive, most: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Refused(400, "the client has gone")
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
        if len(body) > most:
            await _refuse_body(receive, most)
    if len(body) > most:
        raise Refused(413, f"the request has more than {most} bytes")
    return bytes(body)


async def _refuse_body(receive: Receive, most: int) -> None:
    """Let the rest of a body go by, some times what is allowed: where it is left unread, the
    connection is reset and its sender never reads the refusal."""
    left = 8 * most
    while left > 0:
        message = await receive()
        left -= max(len(message.get("body", b"")), 1)
        if not message.get("more_body"):
            break
    raise Refused(413, f"the request has more than {most} bytes")


async def _refuse(send: Send, refused: Refused) -> None:
    body = json.dumps(error_body(str(refused), refused.kind)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),  # what is left of the body isn't read
    ]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
