"""Requests for text: from chats and prompts to jobs, and from their events to answers.

A client that goes away ends its jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from exkv.engine import Handle, Job
from exkv.text import Tokenizer

from .answers import DONE, UNCACHED, Form, RequestError, error_body, event, said, usage
from .hosting import ServedModel
from .requests import ChatRequest, CompletionRequest
from .serving import Found, Serving


def add_generation(app: FastAPI, serving: Serving) -> None:
    """The routes."""

    @app.post("/v1/chat/completions")
    async def chat(request: Request, asked: ChatRequest) -> Response:
        return await _generate(serving, request, asked)

    @app.post("/v1/completions")
    async def complete(request: Request, asked: CompletionRequest) -> Response:
        return await _generate(serving, request, asked)


def jobs_of(model: ServedModel, request: ChatRequest | CompletionRequest) -> list[Job]:
    """The jobs that a request asks for, none of them submitted.

    Raises:
        RequestError: it asks for what makes no sense or has no room.
    """
    engine = model.engine
    try:
        prompts, most = request.prompts, request.most
        longest = max(_length(engine.tokenizer, prompt) for prompt in prompts)
        room = engine.max_tokens - longest + 1  # the last token is never stored
        if room < 1:
            raise RequestError(
                f"the prompt has {longest} tokens, and the context is of "
                f"{engine.max_tokens}: shorten it",
                code="context_length_exceeded",
            )
        return request.jobs(prompts, model.usual, min(most or room, room))
    except (ValueError, TypeError) as error:
        raise RequestError(str(error)) from None


def _length(tokenizer: Tokenizer, prompt: Any) -> int:
    if isinstance(prompt, str):
        return len(tokenizer.encode(prompt))
    if prompt and isinstance(prompt[0], int):
        return len(prompt)
    return len(tokenizer.encode_chat(prompt))


async def _generate(
    serving: Serving, request: Request, asked: ChatRequest | CompletionRequest
) -> Response:
    model = serving.model
    jobs = jobs_of(model, asked)
    form = Form(chat=isinstance(asked, ChatRequest), model=asked.model or model.name)
    echoes = _echoes(model, asked)
    events = serving.events(model, jobs)
    first = await _unless_gone(request, anext(events))  # what is wrong with a job is known then
    events = _chained(first, events)
    if asked.stream:
        parts = _streamed(asked, events, form, echoes)
        return StreamingResponse(parts, media_type="text/event-stream", headers=UNCACHED)
    answer = await _unless_gone(request, _collected(asked, events, form, echoes))
    return JSONResponse(answer)


def _echoes(model: ServedModel, asked: ChatRequest | CompletionRequest) -> list[str]:
    """What goes before each choice's text."""
    if isinstance(asked, ChatRequest) or not asked.echo:
        return [""] * (len(asked.prompts) * asked.n)
    decode = model.engine.tokenizer.decode
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
        yield event(error_body(said(error), "server_error"))
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
