"""Requests for text: from chats and prompts to jobs, and from their events to answers.

A client that goes away ends its jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from exkv.decode import Job
from exkv.sampling import Grammar
from exkv.text import Tokenizer

from .answers import DONE, UNCACHED, Choice, Form, RequestError, error_body, event, said, usage
from .bounds import in_time
from .hosting import ServedModel
from .requests import ChatRequest, CompletionRequest
from .serving import Found, Serving
from .tools import CallReader, Delta, Tools, encode_chat, format_of


def add_generation(app: FastAPI, serving: Serving) -> None:
    """The routes."""

    @app.post("/v1/chat/completions")
    async def chat(request: Request, asked: ChatRequest) -> Response:
        return await _generate(serving, request, asked)

    @app.post("/v1/completions")
    async def complete(request: Request, asked: CompletionRequest) -> Response:
        return await _generate(serving, request, asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request as it is carried out.

    Attributes:
        jobs: none of them submitted.
        prompts: how many there are.
        echoes: what each choice begins with.
        tools: that may be called.
    """

    model: ServedModel
    jobs: list[Job]
    prompts: int = 1
    echoes: Sequence[str] = ("",)
    tools: Tools | None = None

    def choices(self) -> list[Choice]:
        """What will come of the jobs, as yet empty."""
        tokenizer = self.model.engine.tokenizer
        spelt = _spelling(tokenizer)
        if self.tools is None:
            return [Choice(text, spelt=spelt) for text in self.echoes]
        form, most = format_of(tokenizer), None if self.tools.parallel else 1
        marker = tokenizer.id_of(form.begin) if form.special else None
        found = []
        for text in self.echoes:
            reader = CallReader(form, self.tools.names, most)
            if self.tools.choice != "auto":
                reader.mark()
            found.append(Choice(text, reader, marker, spelt))
        return found


def _spelling(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """Gives a token's bytes; a control token's name."""

    def spelt(token: int) -> bytes:
        found = tokenizer.bytes_of(token)
        known = found or token >= tokenizer.vocab_size
        return found if known else tokenizer.piece_of(token).encode()

    return spelt


async def asked_for(
    serving: Serving, request: ChatRequest | CompletionRequest, model: ServedModel | None = None
) -> Asked:
    """What a request asks for, within limits of time and size.

    Raises:
        RequestError: it makes no sense or has no room.
    """
    model = model or serving.model
    limits = serving.limits
    try:
        prepared = await in_time(
            lambda: _prepared(model, request), limits.prompt_seconds, "the prompt"
        )
        grammar = prepared.jobs[0].grammar
        if isinstance(grammar, Grammar):
            await serving.grammars.check(grammar)
    except (ValueError, TypeError) as error:
        raise RequestError(str(error)) from None
    return prepared


def _prepared(model: ServedModel, request: ChatRequest | CompletionRequest) -> Asked:
    tokenizer, tools = model.engine.tokenizer, None
    grammar, echoes = request.grammar(), [""] * request.choices
    prompts: list[Any]
    if isinstance(request, ChatRequest):
        tools = request.chosen()
        if tools is not None:
            if grammar is not None:
                raise ValueError("response_format beside tools: give tool_choice none with it")
            grammar = tools.grammar(format_of(tokenizer))
        messages = [each.plain() for each in request.messages]
        prompts = [encode_chat(tokenizer, messages, tools, **request.template_variables())]
    else:
        prompts = request.prompts
        if request.echo:
            echoes = _echoes(tokenizer, prompts, request.n)
    room, encode = _room(model, prompts), partial(tokenizer.encode, add_bos=False)
    most = min(request.most or room, room)
    jobs = request.jobs(prompts, model.usual, most, grammar, encode)
    return Asked(model=model, jobs=jobs, prompts=len(prompts), echoes=echoes, tools=tools)


def _room(model: ServedModel, prompts: Sequence[Any]) -> int:
    """New tokens, at most; RequestError where there are none."""
    engine = model.engine
    encode = engine.tokenizer.encode
    longest = max(len(encode(p) if isinstance(p, str) else p) for p in prompts)
    room = engine.max_tokens - longest + 1  # the last token is never stored
    if room < 1:
        raise RequestError(
            f"the prompt has {longest} tokens, and the context is of {engine.max_tokens}: "
            "shorten it",
            code="context_length_exceeded",
        )
    return room


def _echoes(tokenizer: Tokenizer, prompts: Sequence[str | list[int]], n: int) -> list[str]:
    """What goes before each choice's text."""
    texts = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts]
    return [text for text in texts for _ in range(n)]


async def _generate(
    serving: Serving, request: Request, asked: ChatRequest | CompletionRequest
) -> Response:
    carried = await asked_for(serving, asked)
    form = Form(chat=isinstance(asked, ChatRequest), model=asked.model or carried.model.name)
    events = await begun(serving, request, carried)
    if asked.stream:
        parts = _streamed(asked, events, form, carried)
        return StreamingResponse(parts, media_type="text/event-stream", headers=UNCACHED)
    return JSONResponse(await unless_gone(request, _collected(events, form, carried)))


async def begun(serving: Serving, request: Request, asked: Asked) -> AsyncGenerator[Found]:
    """The events of a request's jobs, once there are some: what is wrong with a job is known
    then."""
    events = serving.events(asked.model, asked.jobs)
    first = await unless_gone(request, anext(events))
    if any(each.handle.error is not None for _, each in first):
        await anext(events)  # raises it
    return _chained(first, events)


async def _chained(first: Found, events: AsyncGenerator[Found]) -> AsyncGenerator[Found]:
    """The first, and the rest."""
    async with contextlib.aclosing(events):
        yield first
        async for found in events:
            yield found


async def collected(events: AsyncGenerator[Found], choices: Sequence[Choice]) -> None:
    """Let these choices take all events."""
    async with contextlib.aclosing(events):
        async for found in events:
            for index, each in found:
                choices[index].take(each)


async def _collected(events: AsyncGenerator[Found], form: Form, asked: Asked) -> dict[str, Any]:
    choices = asked.choices()
    await collected(events, choices)
    return form.whole(choices) | {"usage": usage(choices, asked.prompts)}


async def _streamed(
    request: ChatRequest | CompletionRequest,
    events: AsyncGenerator[Found],
    form: Form,
    asked: Asked,
) -> AsyncIterator[str]:
    choices = asked.choices()
    try:
        async with contextlib.aclosing(events):
            for index, choice in enumerate(choices):
                if form.chat:
                    yield event(form.first(index))
                elif choice.text:
                    yield event(form.part(index, Delta(text=choice.text)))
            async for found in events:
                if text := "".join(_told(found, choices, form)):
                    yield text  # at once: a write costs more than what it writes
    except Exception as error:  # noqa: BLE001 # the status has been sent: the stream says it
        yield event(error_body(said(error), "server_error"))
        return
    if request.stream_options is not None and request.stream_options.include_usage:
        yield event(form.last(usage(choices, asked.prompts)))
    yield DONE


def _told(found: Found, choices: Sequence[Choice], form: Form) -> Iterator[str]:
    """The events of some steps."""
    for index, each in found:
        choice = choices[index]
        for delta in choice.take(each):
            yield event(form.part(index, delta, choice.untold()))
        if each.reason:
            yield event(form.end(index, choice.finish_reason, choice.untold()))


async def unless_gone(request: Request, answer: Any) -> Any:
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
