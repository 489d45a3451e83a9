"""The guard before the routes (hosts, keys, sizes, time), and the server's own key and hosts."""

from __future__ import annotations

import asyncio
import json

import pytest

from exkv.serve.guard import Guard, Limits
from exkv.serve.server import allowed_hosts, bound, is_loopback, read_key

KEY = "the-right-key"


async def echo(scope, receive, send):
    """Answer with the request's body."""
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def ask(path="/v1/x", chunks=(b"",), *, seconds=0.0, hosts=None, key=None, limits=None, **headers):
    """Status and body of the answer, the guard's or the app's."""
    return asked(list(chunks), path, seconds, hosts, key, limits, headers)


def asked(left, path, seconds, hosts, key, limits, headers):
    """The same for a body in chunks; unread ones stay in ``left``."""
    sent = []

    async def run():
        async def receive():
            await asyncio.sleep(seconds)
            body = left.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(left)}

        async def send(message):
            sent.append(message)

        pairs = [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
        scope = {"type": "http", "path": path, "headers": pairs}
        await Guard(echo, limits or Limits(), key, hosts)(scope, receive, send)

    asyncio.run(run())
    return sent[0]["status"], sent[1]["body"]


@pytest.mark.parametrize("host", [b"\xff]", b"[::1", b"a b", b"a/b", b"a:x"])
def test_invalid_host_headers_are_refused(host):
    assert ask(host=host)[0] == 400
    for good in (b"", b"localhost", b"exkv.local:5000", b"[::1]:80", b"127.0.0.1", b"[fe80::1]"):
        assert ask(host=good)[0] == 200


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be"])
def test_unpaired_surrogates_are_refused(encoding):
    for text in ('{"a": "\\ud800"}', '{"\\uDFFF": 1}', '["\\ud83d\\ud83d"]'):
        status, body = ask(chunks=[text.encode(encoding)])
        assert (status, b"half a surrogate pair" in body) == (400, True)
    for text in ('{"a": "\\ud83d\\ude00"}', '{"a": "\\\\ud800"}', "no JSON \\ud800", "[" * 9000):
        assert ask(chunks=[text.encode(encoding)])[0] == 200


def test_chunked_body_is_forwarded_whole():
    assert ask(chunks=[b"a", b"bc", b""]) == (200, b"abc")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": b"Bearer the-right-key"}, 200),
        ({"authorization": b"bearer  the-right-key "}, 200),
        ({"x_api_key": b"the-right-key"}, 200),
        ({"authorization": b"Bearer the-right-ke"}, 401),
        ({"authorization": b"Basic the-right-key"}, 401),
        ({"x_api_key": "schlüssel".encode()}, 401),
        ({}, 401),
    ],
)
def test_key_is_required(headers, status):
    found, body = ask(key=KEY, **headers)
    assert found == status
    assert status == 200 or json.loads(body)["error"]["type"] == "invalid_api_key"
    assert ask("/health", key=KEY)[0] == 200  # which needs no key


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"localhost:5000", 200),
        (b"127.0.0.1", 200),
        (b"[::1]:5000", 200),
        (b"[::1]", 200),
        (b"LocalHost", 200),
        (b"evil.example:5000", 421),
        (b"", 421),
    ],
)
def test_only_local_host_names_are_answered(host, status):
    assert ask(hosts=allowed_hosts("127.0.0.1"), host=host)[0] == status


@pytest.mark.parametrize(
    ("origin", "key", "status"),
    [
        (b"http://localhost:5000", None, 200),
        (b"http://localhost:5001", None, 403),
        (b"https://evil.example", None, 403),
        (b"null", None, 403),
        (b"https://a.proxy", KEY, 200),
    ],
)
def test_foreign_origins_need_a_key(origin, key, status):
    headers = {"host": b"localhost:5000", "origin": origin, "x_api_key": KEY.encode()}
    assert ask(key=key, **headers)[0] == status


@pytest.mark.parametrize(
    ("path", "site", "key", "status"),
    [
        ("/v1/plan", b"cross-site", None, 403),  # a foreign page's <img>, which sends no Origin
        ("/v1/plan", b"same-site", None, 403),
        ("/v1/plan", b"same-origin", None, 200),
        ("/v1/plan", b"none", None, 200),
        ("/v1/plan", b"cross-site", KEY, 200),
        ("/", b"cross-site", None, 200),  # a link from another site
    ],
)
def test_cross_site_requests_need_a_key(path, site, key, status):
    assert ask(path, key=key, sec_fetch_site=site, x_api_key=KEY.encode())[0] == status


def test_rest_of_a_large_body_is_drained():
    """Otherwise its sender gets a reset instead of the answer."""
    for headers in ({"content_length": b"48"}, {}):
        for sent, left in ((8, 0), (1000, 1000 - 17)):
            chunks = [b"123456"] * sent
            status, _ = asked(chunks, "/", 0.0, None, None, Limits(body=10), headers)
            assert status == 413 and abs(len(chunks) - left) <= 4


def test_large_body_is_refused():
    small = Limits(body=10)
    assert ask(limits=small, content_length=b"11")[0] == 413
    assert ask(limits=small, content_length=b"x")[0] == 413
    assert ask(chunks=[b"123456", b"123456", b""], limits=small)[0] == 413
    assert ask(chunks=[b"1234567890"], limits=small, content_length=b"10")[0] == 200


def test_slow_body_times_out():
    limits = Limits(body_seconds=0.05)
    assert ask(chunks=[b"a"] * 50, seconds=0.02, limits=limits)[0] == 408


def test_public_address_gets_a_key(tmp_path):
    assert read_key(None, "127.0.0.1") == (None, False)
    made, new = read_key(None, "0.0.0.0")
    assert new
    assert len(made) > 30
    assert read_key(None, "0.0.0.0")[0] != made
    file = tmp_path / "key"
    file.write_text("  12345678\n")
    assert read_key(file, "127.0.0.1") == ("12345678", False)
    for bad in ("", "short", "two words here", "ünicode-key"):
        file.write_text(bad)
        with pytest.raises(ValueError, match="has no valid key"):
            read_key(file, "0.0.0.0")
    file.write_bytes(b"\xff\xfe no text at all")
    with pytest.raises(ValueError, match="has no valid key"):
        read_key(file, "0.0.0.0")
    with pytest.raises(OSError, match="missing"):
        read_key(tmp_path / "missing", "0.0.0.0")


def test_unavailable_address_is_reported():
    (taken,) = bound("127.0.0.1", 0)
    with taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"127.0.0.1, port {port}: .* choose another --port"):
            bound("127.0.0.1", port)
    with pytest.raises(ValueError, match=r"can't listen on 203\.0\.113\.1, port 0"):
        bound("203.0.113.1", 0)


def test_loopback_addresses_are_recognized():
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "192.168.1.4", "::", "example.org")))
    assert allowed_hosts("0.0.0.0") is None
