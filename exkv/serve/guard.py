"""Checks before every route: Host and Origin headers, the key, and the body's size and arrival
time.

A pure ASGI middleware, so that a refused body is never parsed.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
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

#: An unpaired surrogate's JSON escape, in any of JSON's encodings.
_SURROGATE = re.compile(rb"\\\0*u\0*[dD]\0*[89a-fA-F]")

_HOST = re.compile(r"([\w.~!$&'()*+,;=%-]*|\[[\w:.%]+\])(:[0-9]*)?", re.ASCII)

_OPEN = frozenset({"/health", "/favicon.ico", *page.FILES})  # paths that need no key


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on requests.

    Attributes:
        body: bytes of a body.
        body_seconds: seconds in which it must arrive.
        jobs: jobs that may be running or waiting; more are refused with status 429.
        prompt_seconds: seconds to render and tokenize a prompt.
    """

    body: int = 8 << 20
    body_seconds: float = 30.0
    jobs: int = 256
    prompt_seconds: float = 10.0


class Refused(Exception):
    """Raised to refuse a request."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


class Guard:
    """Forwards only requests that are meant for this server, authorized, and not too large.

    Args:
        key: the key that clients must send as ``Authorization: Bearer KEY`` or ``x-api-key: KEY``;
            None for no key.
        hosts: allowed names in the Host header; None for any. On loopback they prevent DNS
            rebinding by web pages.
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
        if _HOST.fullmatch(name) is None:  # building URLs from it would raise
            raise Refused(400, f"the Host header is not a host: {name[:80]!r}")
        if not name.endswith("]"):  # which an IPv6 address without a port does
            name = name.rsplit(":", 1)[0]
        if self._hosts is not None and name.lower() not in self._hosts:
            raise Refused(421, f"this server doesn't answer for host {name[:80]!r}")

    def _check_origin(self, path: str, headers: dict[bytes, bytes]) -> None:
        """Without a key, refuse cross-site requests: they could unload the model, or request a
        plan as the URL of an image, which sends no Origin."""
        if self._key is not None:
            return
        site = headers.get(b"sec-fetch-site", b"none")
        if site not in (b"none", b"same-origin") and path not in _OPEN:
            raise Refused(403, "cross-site requests are refused")
        origin = headers.get(b"origin")
        if origin is not None:
            host = origin.rpartition(b"//")[2]
            if host.lower() != headers.get(b"host", b"").lower():
                name = origin.decode("latin-1")[:80]
                raise Refused(403, f"cross-site requests are refused: origin {name!r}")

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self._key is None or path in _OPEN:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            given = headers.get(b"x-api-key", b"")
        if not hmac.compare_digest(given.strip(), self._key):
            raise Refused(
                401, "send the server's key: Authorization: Bearer KEY", "invalid_api_key"
            )

    async def _with_body(self, receive: Receive, headers: dict[bytes, bytes]) -> Receive:
        """Read the body -> a ``receive`` that returns it as one message."""
        most, stated = self._limits.body, headers.get(b"content-length", b"0")
        seconds = self._limits.body_seconds
        try:
            if not stated.isdigit() or int(stated) > most:
                await asyncio.wait_for(_drain(receive, most), seconds)
            body = await asyncio.wait_for(_read(receive, most), seconds)
        except TimeoutError:
            raise Refused(408, "the request took too long to arrive") from None
        _check_characters(body)
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        return replay


def _check_characters(body: bytes) -> None:
    """Refuse JSON with an unpaired surrogate, which is no character and can't be sent back."""
    if _SURROGATE.search(body) is None:
        return
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.start + 1]
        raise Refused(
            400, f"the request has {half!r}, half a surrogate pair: escape both halves"
        ) from None
    except (ValueError, RecursionError):  # not JSON: the route reports it
        return


async def _read(receive: Receive, most: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Refused(400, "the client disconnected")
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
        if len(body) > most:
            await _drain(receive, most)
    if len(body) > most:
        raise Refused(413, f"the request has more than {most} bytes")
    return bytes(body)


async def _drain(receive: Receive, most: int) -> None:
    """Discard the rest of a body, up to 8 times the limit, and refuse it: unread data would reset
    the connection before the sender reads the refusal."""
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
        (b"connection", b"close"),  # the rest of the body isn't read
    ]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
