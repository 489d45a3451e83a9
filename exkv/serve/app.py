"""The routes: from a request to jobs of the engine, and back.

A client that goes away ends its jobs. Errors have OpenAI's shape, whatever raised them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.exceptions import HTTPException

from exkv.engine import Engine, Event, Handle, Job
from exkv.generation import SamplingParams
from exkv.model import Model
from exkv.models import Transformer
from exkv.planning.plan import UNBOUNDED
from exkv.version import __version__

from .answers import DONE, Form, RequestError, error_body, event, usage
from .guard import Guard, Limits
from .metrics import Metrics
from .requests import ChatRequest, CompletionRequest, DecodeRequest, EncodeRequest

#: What a step brought one of a request's jobs, and which.
Found: TypeAlias = tuple[int, Event]


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What a server serves.

    Attributes:
        engine: has the model, the cache and the tokenizer.
        name: the model's, as clients see it.
        usual: how tokens are chosen where a request doesn't say.
    """

    engine: Engine
    name: str
    usual: SamplingParams = field(default_factory=SamplingParams)
    limits: Limits = field(default_factory=Limits)
    key: str | None = None
    hosts: frozenset[str] | None = None
    metrics: Metrics = field(default_factory=Metrics)

    def state(self) -> dict[str, Any]:
        """What is where, in bytes, and what is going on."""
        pool, stats = self.engine.pool, self.engine.stats
        return {
            "model": self.name,
            "devices": _devices(self.engine.model),
            "pages": {"total": pool.pages, "available": pool.available, "known": pool.idle},
            "jobs": self.metrics.jobs,
            "generated_tokens": stats.new_tokens,
            "put_away": stats.put_away,
        }

    # Jobs ------------------------------------------------------------------------------------

    def jobs(self, request: ChatRequest | CompletionRequest) -> list[Job]:
        """The jobs that a request asks for, none of them submitted.

        Raises:
            RequestError: it asks for what makes no sense or has no room.
        """
        try:
            prompts, most = request.prompts, request.most
            longest = max(map(self._tokens, prompts))
            room = self.engine.max_tokens - longest + 1  # the last token is never stored
            if room < 1:
                raise RequestError(
                    f"the prompt has {longest} tokens, and the context is of "
                    f"{self.engine.max_tokens}: shorten it",
                    code="context_length_exceeded",
                )
            return request.jobs(prompts, self.usual, min(most or room, room))
        except (ValueError, TypeError) as error:
            raise RequestError(str(error)) from None

    def _tokens(self, prompt: Any) -> int:
        tokenizer = self.engine.tokenizer
        if isinstance(prompt, str):
            return len(tokenizer.encode(prompt))
        if prompt and isinstance(prompt[0], int):
            return len(prompt)
        return len(tokenizer.encode_chat(prompt))

    def check_room_for(self, jobs: int) -> None:
        """RequestError where so many more jobs would have to wait too long."""
        if self.metrics.jobs + jobs > self.limits.jobs:
            raise RequestError(
                f"{self.metrics.jobs} jobs are running or waiting, of {self.limits.jobs} that may: "
                "try again later",
                429,
                "rate_limit_error",
            )

    async def events(self, jobs: Sequence[Job]) -> AsyncGenerator[Found]:
        """What comes of all of these jobs, with their indices, as it comes; jobs end when whoever
        reads it stops."""
        queue: asyncio.Queue[Found | BaseException | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._follow(i, job, queue)) for i, job in enumerate(jobs)]
        try:
            left = len(tasks)
            while left:
                found = await queue.get()
                if found is None:
                    left -= 1
                elif isinstance(found, BaseException):
                    raise found
                else:
                    yield found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(
        self,
        index: int,
        job: Job,
        queue: asyncio.Queue[Found | BaseException | None],
    ) -> None:
        begun = False
        with self.metrics.job():
            try:
                async with contextlib.aclosing(self.engine.stream(job)) as events:
                    async for each in events:
                        begun = True
                        self.metrics.count(each)
                        queue.put_nowait((index, each))
            except Exception as error:  # noqa: BLE001 # whatever ended the job is told its client
                asked_for = isinstance(error, ValueError | TypeError) and not begun
                queue.put_nowait(RequestError(str(error)) if asked_for else error)
            queue.put_nowait(None)


def build(serving: Serving) -> FastAPI:
    """The app with all routes, behind its guard."""
    app = FastAPI(title="exkv", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, serving.limits, serving.key, serving.hosts)
    _add_errors(app)
    _add_generation(app, serving)
    _add_tokens(app, serving)
    _add_state(app, serving)
    _add_page(app)
    _add_refusals(app)
    return app


# Generation -----------------------------------------------------------------------------------


def _add_generation(app: FastAPI, serving: Serving) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request, asked: ChatRequest) -> Response:
        return await _generate(serving, request, asked)

    @app.post("/v1/completions")
    async def complete(request: Request, asked: CompletionRequest) -> Response:
        return await _generate(serving, request, asked)


async def _generate(
    serving: Serving, request: Request, asked: ChatRequest | CompletionRequest
) -> Response:
    jobs = serving.jobs(asked)
    serving.check_room_for(len(jobs))
    form = Form(chat=isinstance(asked, ChatRequest), model=asked.model or serving.name)
    echoes = _echoes(serving, asked)
    events = serving.events(jobs)
    first = await _unless_gone(request, anext(events))  # what is wrong with a job is known then
    events = _chained(first, events)
    if asked.stream:
        parts = _streamed(asked, events, form, echoes)
        return StreamingResponse(parts, media_type="text/event-stream", headers=_UNCACHED)
    answer = await _unless_gone(request, _collected(asked, events, form, echoes))
    return JSONResponse(answer)


_UNCACHED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def _echoes(serving: Serving, asked: ChatRequest | CompletionRequest) -> list[str]:
    """What goes before each choice's text."""
    if isinstance(asked, ChatRequest) or not asked.echo:
        return [""] * (len(asked.prompts) * asked.n)
    decode = serving.engine.tokenizer.decode
    texts = [prompt if isinstance(prompt, str) else decode(prompt) for prompt in asked.prompts]
    return [text for text in texts for _ in range(asked.n)]


async def _chained(first: Found, events: AsyncGenerator[Found]) -> AsyncGenerator[Found]:
    """The first, and the rest."""
    async with contextlib.aclosing(events):
        yield first
        async for found in events:
            yield found


async def _collected(
    asked: ChatRequest | CompletionRequest,
    events: AsyncGenerator[Found],
    form: Form,
    echoes: Sequence[str],
) -> dict[str, Any]:
    texts, reasons = list(echoes), [""] * len(echoes)
    handles: dict[int, Handle] = {}
    async with contextlib.aclosing(events):
        async for index, each in events:
            texts[index] += each.text
            reasons[index], handles[index] = each.reason, each.handle
    ordered = [handles[index] for index in range(len(echoes))]
    return form.whole(texts, reasons) | {"usage": usage(ordered, len(asked.prompts))}


async def _streamed(
    asked: ChatRequest | CompletionRequest,
    events: AsyncGenerator[Found],
    form: Form,
    echoes: Sequence[str],
) -> AsyncIterator[str]:
    handles: dict[int, Handle] = {}
    try:
        async with contextlib.aclosing(events):
            for index, echo in enumerate(echoes):
                if form.chat:
                    yield event(form.first(index))
                elif echo:
                    yield event(form.part(index, echo))
            async for index, each in events:
                handles[index] = each.handle
                if each.text or each.reason:
                    yield event(form.part(index, each.text, each.reason))
    except Exception as error:  # noqa: BLE001 # the status has been sent: the stream says it
        yield event(error_body(_said(error), "server_error"))
        return
    if asked.stream_options is not None and asked.stream_options.include_usage:
        ordered = [handles[index] for index in range(len(echoes))]
        yield event(form.last(usage(ordered, len(asked.prompts))))
    yield DONE


async def _unless_gone(request: Request, answer: Any) -> Any:
    """The answer, unless its client goes away first, which ends it."""
    working = asyncio.ensure_future(answer)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestError("the client has gone", 499)
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# Tokens ---------------------------------------------------------------------------------------


def _add_tokens(app: FastAPI, serving: Serving) -> None:
    tokenizer = serving.engine.tokenizer

    @app.post("/v1/token/encode")
    async def encode(asked: EncodeRequest) -> dict[str, Any]:
        try:
            if isinstance(asked.text, list):
                ids = tokenizer.encode_chat([message.plain() for message in asked.text])
            else:
                bos = None if asked.add_bos_token else False
                ids = tokenizer.encode(asked.text, bos, asked.encode_special_tokens)
        except ValueError as error:
            raise RequestError(str(error)) from None
        return {"tokens": ids, "length": len(ids)}

    @app.post("/v1/token/decode")
    async def decode(asked: DecodeRequest) -> dict[str, str]:
        try:
            skipped = not asked.decode_special_tokens
            return {"text": tokenizer.decode(asked.tokens, skip_special=skipped)}
        except ValueError as error:
            raise RequestError(str(error)) from None


# What is there --------------------------------------------------------------------------------


def _add_state(app: FastAPI, serving: Serving) -> None:
    engine = serving.engine
    card = {"id": serving.name, "object": "model", "created": 0, "owned_by": "exkv"}
    size = {"max_seq_len": engine.max_tokens, "cache_size": engine.max_tokens}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != serving.name:
            raise RequestError(f"there is no model {name[:80]!r}", 404, code="model_not_found")
        return card

    @app.get("/v1/model")
    async def loaded() -> dict[str, Any]:
        return {**card, "parameters": size}

    @app.get("/v1/state")
    async def state() -> dict[str, Any]:
        return serving.state()

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        text = serving.metrics.text(engine)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _devices(model: Transformer) -> list[dict[str, Any]]:
    """What the plan says of each device that holds units."""
    report = model.report if isinstance(model, Model) else None
    found = []
    for row in report.devices if report else ():
        lines = {line: getattr(row.ledger, line) for line in ("weights", "cache", "workspace")}
        capacity = row.ledger.budget.capacity
        of = 0 if capacity == UNBOUNDED else capacity
        found.append({"device": str(row.device), **lines, "of": of})
    return found


def _add_page(app: FastAPI) -> None:
    text = Path(__file__).with_name("page.html").read_text("utf-8")

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        # Styles of elements, which the bars' widths are, can't carry a nonce.
        policy = (
            f"default-src 'none'; connect-src 'self'; script-src 'nonce-{nonce}'; "
            f"style-src-elem 'nonce-{nonce}'; style-src-attr 'unsafe-inline'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        headers = {"Content-Security-Policy": policy, "Cache-Control": "no-store"}
        return HTMLResponse(text.replace("NONCE", nonce), headers=headers)


# Errors ---------------------------------------------------------------------------------------

_NOT_HERE = {
    "/v1/embeddings": "exkv serves language models; it makes no embeddings",
    "/v1/responses": "use /v1/chat/completions",
    "/v1/model/load": "start `exkv serve` with another model",
    "/v1/model/unload": "end the server",
}


def _add_refusals(app: FastAPI) -> None:
    for path, why in _NOT_HERE.items():

        @app.post(path, include_in_schema=False)
        async def refuse(why: str = why) -> None:
            raise RequestError(why, 501, "not_implemented")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> JSONResponse:
        body = error_body(str(error), error.kind, error.code)
        return JSONResponse(body, error.status, _again(error.status))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(error_body(_first_of(error), "invalid_request_error"), 400)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(
            error_body(str(error.detail), "invalid_request_error"), error.status_code
        )

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(_said(error), "server_error"), 500)


def _again(status: int) -> dict[str, str]:
    return {"Retry-After": "1"} if status == 429 else {}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"


def _first_of(error: RequestValidationError) -> str:
    """The first thing that is wrong with a request, in one line."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["type"] == "extra_forbidden":
        return f"{place} is no field of this request that exkv knows"
    return f"{place}: {first['msg']}"[:500]
