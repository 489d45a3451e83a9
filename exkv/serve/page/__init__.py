"""The page at ``/``: static files without a build step; start reading at ``main.js``.

Its content security policy allows nothing from other hosts and no inline script or style, so a
model's output can't run even if it were ever parsed as HTML.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response

_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

#: Paths that need no key.
FILES = {
    "/" if file.name == "index.html" else f"/page/{file.name}": file
    for file in sorted(Path(__file__).parent.iterdir())
    if file.suffix in _KINDS
}


def add_page(app: FastAPI) -> None:
    """Add a route for each file."""
    for path, file in FILES.items():
        app.get(path, include_in_schema=False)(_answer(file))


def _answer(file: Path) -> Callable[[], Awaitable[Response]]:
    content, kind = file.read_bytes(), _KINDS[file.suffix]

    async def answer() -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return answer
