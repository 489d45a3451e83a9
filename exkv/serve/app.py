"""The app and its routes.

``generation`` and ``responses`` answer requests for text, ``models`` lists and loads models; here
are the other routes, and what all routes share: the guard, and errors in OpenAI's format.
"""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from exkv.version import __version__

from .answers import RequestError, error_body, error_line
from .bounds import in_time
from .generation import add_generation
from .guard import Guard
from .models import add_models
from .page import add_page
from .requests import DecodeRequest, EncodeRequest
from .responses import add_responses
from .serving import Serving
from .tools import encode_chat


def build(serving: Serving) -> FastAPI:
    """Build the app: all routes, behind the guard."""
    app = FastAPI(title="exkv", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, serving.limits, serving.key, serving.hosts)
    _add_errors(app)
    add_generation(app, serving)
    add_responses(app, serving)
    add_models(app, serving)
    _add_tokens(app, serving)
    _add_state(app, serving)
    add_page(app)
    _add_refusals(app)
    _describe_errors(app)
    return app


# Tokens ---------------------------------------------------------------------------------------


def _add_tokens(app: FastAPI, serving: Serving) -> None:
    @app.post("/v1/token/encode")
    async def encode(asked: EncodeRequest) -> dict[str, Any]:
        tokenizer = serving.model.engine.tokenizer

        def encoded() -> list[int]:
            if isinstance(asked.text, list):
                messages = [message.plain() for message in asked.text]
                return encode_chat(tokenizer, messages, continue_final_message=asked.continues)
            bos = None if asked.add_bos_token else False
            return tokenizer.encode(asked.text, bos, asked.encode_special_tokens)

        try:
            ids = await in_time(encoded, serving.limits.prompt_seconds, "the text")
        except ValueError as error:
            raise RequestError(str(error)) from None
        return {"tokens": ids, "length": len(ids)}

    @app.post("/v1/token/decode")
    async def decode(asked: DecodeRequest) -> dict[str, str]:
        tokenizer, skipped = serving.model.engine.tokenizer, not asked.decode_special_tokens
        try:
            return {"text": tokenizer.decode(asked.tokens, skip_special=skipped)}
        except ValueError as error:
            raise RequestError(str(error)) from None


# State ----------------------------------------------------------------------------------------


def _add_state(app: FastAPI, serving: Serving) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @app.get("/v1/state")
    async def state() -> dict[str, Any]:
        return serving.state()

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        engine = None if serving.loaded is None else serving.loaded.engine
        text = serving.metrics.text(engine)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")


# Errors ---------------------------------------------------------------------------------------


def _add_refusals(app: FastAPI) -> None:
    @app.post("/embeddings", include_in_schema=False)
    @app.post("/v1/embeddings", include_in_schema=False)
    async def refuse() -> None:
        raise RequestError(
            "exkv serves language models; it makes no embeddings", 501, "not_implemented"
        )


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> JSONResponse:
        body = error_body(str(error), error.kind, error.code)
        later = {"Retry-After": "1"} if error.status in (429, 503) else {}
        return JSONResponse(body, error.status, later)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(error_body(_first_error(error), "invalid_request_error"), 400)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code == 404:
            route = f"{request.method} {request.url.path[:80]}"
            message = f"there is no {route}: GET /openapi.json lists all routes"
        body = error_body(message, "invalid_request_error")
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(error_line(error), "server_error"), 500)


def _first_error(error: RequestValidationError) -> str:
    """The most specific validation error, in one line."""
    errors = error.errors()
    first = errors[0]
    # For a union, the branch that got furthest into the value, preferably with the right type.
    if any(_BRANCH.match(str(part)) for part in first["loc"]):
        field = _fields_of(first)
        branches = [each for each in errors if _fields_of(each)[: len(field)] == field]
        first = max(branches, key=lambda e: (len(_fields_of(e)), not e["type"].endswith("_type")))
    place = ".".join(_fields_of(first))
    if first["type"] == "extra_forbidden":
        return f"{place}: unknown field"
    if not place and first["type"] in ("model_attributes_type", "dict_type"):
        return "the body must be a JSON object, with Content-Type: application/json"
    message = first["msg"].removeprefix("Value error, ")
    return (f"{place}: {message}" if place else message)[:500]


#: How pydantic marks the branch of a union in an error's location: a type's or schema's name.
_BRANCH = re.compile(r"^([A-Z]|str$|int$|bool$|float$|[a-z-]+\[|constrained-)")


def _fields_of(error: dict[str, Any]) -> list[str]:
    """An error's location in the body, without the branches of unions."""
    parts = map(str, error["loc"])
    return [part for part in parts if part != "body" and not _BRANCH.match(part)]


# OpenAPI --------------------------------------------------------------------------------------

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": "null"},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
#: Error statuses of all routes, and of those with a body.
_STATUSES = {
    400: "The request is invalid; the message names the field.",
    401: "The key is missing or wrong.",
    403: "The request comes from a page of another site.",
    421: "The server doesn't answer for this host.",
}
_BODY_STATUSES = {
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    429: "Too many jobs are running or waiting: Retry-After says when to try again.",
    503: "No model is loaded, or it is being replaced: Retry-After says when to try again.",
}


def _describe_errors(app: FastAPI) -> None:
    """Describe the actual error responses in ``/openapi.json``, in place of FastAPI's own 422."""

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schema["components"]["schemas"]["Error"] = _ERROR
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
            for operation in [each for path in schema["paths"].values() for each in path.values()]:
                operation["responses"].pop("422", None)
                statuses = _STATUSES | (_BODY_STATUSES if "requestBody" in operation else {})
                operation["responses"] |= {
                    str(code): _error_response(why) for code, why in statuses.items()
                }
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]


def _error_response(why: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": why, "content": {"application/json": {"schema": schema}}}
