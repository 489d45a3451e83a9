"""Requests for text: from chats and prompts to jobs, and from their events to answers.

A client that disconnects cancels its jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from exkv.decode import Job
from exkv.sampling import Grammar
from exkv.text import Tokenizer
from exkv.text.reasoning import Reader, ReasoningFormat, reasoning_format

from .answers import (
    DONE,
    UNCACHED,
    Choice,
    Form,
    RequestError,
    error_body,
    error_line,
    event,
    usage,
)
from .bounds import in_time
from .hosting import ServedModel
from .requests import ChatRequest, CompletionRequest, StreamOptions
from .serving import Found, Serving
from .tools import CallFormat, CallReader, Delta, Tools, encode_chat, format_of


def add_generation(app: FastAPI, serving: Serving) -> None:
    """Add the routes, and llama.cpp's aliases without ``/v1``."""

    @app.post("/chat/completions", include_in_schema=False)
    @app.post("/v1/chat/completions")
    async def chat(request: Request, asked: ChatRequest) -> Response:
        return await _generate(serving, request, asked)

    @app.post("/completions", include_in_schema=False)
    @app.post("/v1/completions")
    async def complete(request: Request, asked: CompletionRequest) -> Response:
        return await _generate(serving, request, asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request's jobs, not submitted yet, and what formatting their answers needs.

    Attributes:
        prompts: number of prompts.
        echoes: the prompt that each choice begins with; None for none.
        only_echoes: whether no new tokens are wanted.
        tools: the tools that may be called.
        reasoning: how the answers' reasoning is marked; None to leave it in the content.
        shows_reasoning: whether the client wants it.
    """

    model: ServedModel
    jobs: list[Job]
    prompts: int = 1
    echoes: Sequence[str | None] = (None,)
    only_echoes: bool = False
    tools: Tools | None = None
    reasoning: ReasoningFormat | None = None
    shows_reasoning: bool = True

    def choices(self) -> list[Choice]:
        """The jobs' choices, still empty."""
        tokenizer = self.model.engine.tokenizer
        form = format_of(tokenizer)
        return [
            Choice(
                text or "",
                reader=self._call_reader(form),
                marker=tokenizer.id_of(form.begin) if form.special else None,
                spell=_spelling(tokenizer),
                echoes=text is not None,
                only_echoes=self.only_echoes,
                reasons=self._reasoning_reader(job),
                shows=self.shows_reasoning,
            )
            for text, job in zip(self.echoes, self.jobs, strict=True)
        ]

    def _reasoning_reader(self, job: Job) -> Reader | None:
        if self.reasoning is None:
            return None
        prompt = cast(list[int], job.prompt)  # of a chat
        return self.reasoning.reader(self.model.engine.tokenizer, prompt)

    def _call_reader(self, form: CallFormat) -> CallReader | None:
        if self.tools is None:
            return None
        reader = CallReader(self.tools.schemas, None if self.tools.parallel else 1)
        if self.tools.forced and form.special:
            reader.mark()
        return reader


def _spelling(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """Map a token to its bytes, and a control token to its name."""

    def spell(token: int) -> bytes:
        found = tokenizer.bytes_of(token)
        known = found or token >= tokenizer.vocab_size
        return found if known else tokenizer.piece_of(token).encode()

    return spell


async def asked_for(
    serving: Serving, request: ChatRequest | CompletionRequest, model: ServedModel | None = None
) -> Asked:
    """Prepare a request's jobs, within limits of time and size.

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
    tokenizer, tools, reasoning = model.engine.tokenizer, None, None
    if request.n > (rows := model.engine.max_running):
        raise ValueError(f"n is {request.n}, but at most {rows} jobs run at once")
    grammar = request.grammar()
    echoes: list[str | None] = [None] * request.choices
    prompts: list[Any]
    if isinstance(request, ChatRequest):
        tools = request.chosen()
        if tools is not None:
            if grammar is not None:
                raise ValueError("response_format excludes tools: set tool_choice to none")
            grammar = tools.grammar(format_of(tokenizer))
        messages = [each.plain() for each in request.messages]
        prompts = [encode_chat(tokenizer, messages, tools, **request.template_variables())]
        if grammar is None and request.reasoning_format != "none":
            reasoning = reasoning_format(tokenizer)
    else:
        prompts = request.prompts
        if request.echo:
            echoes = _echoes(tokenizer, prompts, request.n)
    room, encode = _room(model, prompts), partial(tokenizer.encode, add_bos=False)
    most, wanted = room, request.most
    if wanted == 0 and None in echoes:
        raise ValueError("max_tokens is 0: ask for at least 1, or set echo")
    if wanted is not None:
        most = min(wanted, room) or 1  # a job generates at least one token
    jobs = request.jobs(prompts, model.usual, most, grammar, encode)
    if reasoning is not None:
        shown = reasoning.shown_tokens(tokenizer)
        jobs = [replace(job, shown_tokens=shown) for job in jobs]
    return Asked(
        model=model,
        jobs=jobs,
        prompts=len(prompts),
        echoes=echoes,
        only_echoes=wanted == 0,
        tools=tools,
        reasoning=reasoning,
        shows_reasoning=isinstance(request, ChatRequest) and request.include_reasoning,
    )


def _room(model: ServedModel, prompts: Sequence[Any]) -> int:
    """Upper bound on new tokens; RequestError if a prompt fills the context."""
    engine = model.engine
    encode = engine.tokenizer.encode
    lengths = [len(encode(p) if isinstance(p, str) else p) for p in prompts]
    if 0 in lengths:
        raise ValueError("a prompt is empty: give a text, or at least one token id")
    longest = max(lengths)
    room = engine.max_tokens - longest + 1  # the last token is never stored
    if room < 1:
        raise RequestError(
            f"the prompt has {longest} tokens, but the context holds {engine.max_tokens}: "
            "shorten it",
            code="context_length_exceeded",
        )
    return room


def _echoes(tokenizer: Tokenizer, prompts: Sequence[str | list[int]], n: int) -> list[str | None]:
    """The text that each choice begins with."""
    texts = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts]
    return [text for text in texts for _ in range(n)]


async def _generate(
    serving: Serving, request: Request, asked: ChatRequest | CompletionRequest
) -> Response:
    carried = await asked_for(serving, asked)
    form = Form(
        chat=isinstance(asked, ChatRequest),
        model=asked.model or carried.model.name,
        fingerprint=carried.model.fingerprint,
        functions=isinstance(asked, ChatRequest) and asked.functions is not None,
    )
    events = await begun(serving, request, carried)
    if asked.stream:
        parts = _sse_events(asked, events, form, carried)
        return StreamingResponse(parts, media_type="text/event-stream", headers=UNCACHED)
    return JSONResponse(await while_connected(request, _complete(events, form, carried)))


async def begun(serving: Serving, request: Request, asked: Asked) -> AsyncGenerator[Found]:
    """Submit a request's jobs -> their events. Returns at the first one, so that an error before
    it becomes the response's status."""
    events = serving.events(asked.model, asked.jobs)
    first = await while_connected(request, anext(events))
    if any(each.handle.error is not None for _, each in first):
        await anext(events)  # raises it

    async def all_events() -> AsyncGenerator[Found]:
        async with contextlib.aclosing(events):
            yield first
            async for found in events:
                yield found

    return all_events()


async def _complete(events: AsyncGenerator[Found], form: Form, asked: Asked) -> dict[str, Any]:
    choices = asked.choices()
    async with contextlib.aclosing(events):
        async for found in events:
            for index, each in found:
                choices[index].take(each)
    return form.whole(choices) | {"usage": usage(choices, asked.prompts)}


async def _sse_events(
    request: ChatRequest | CompletionRequest,
    events: AsyncGenerator[Found],
    form: Form,
    asked: Asked,
) -> AsyncIterator[str]:
    choices = asked.choices()
    options = request.stream_options or StreamOptions()
    try:
        async with contextlib.aclosing(events):
            for index, choice in enumerate(choices):
                if form.chat:
                    yield event(form.first(index))
                elif choice.text:
                    yield event(form.part(index, Delta(text=choice.text)))
            async for found in events:
                parts = [*_deltas(found, choices, form)]
                if options.continuous_usage_stats:
                    used = {"usage": usage(choices, asked.prompts)}
                    parts = [part | used for part in parts]
                if parts:
                    yield "".join(map(event, parts))  # one write, which costs more than its text
    except Exception as error:  # noqa: BLE001 # the status is sent already: report in the stream
        yield event(error_body(error_line(error), "server_error"))
        return
    if options.include_usage:
        yield event(form.last(usage(choices, asked.prompts)))
    yield DONE


def _deltas(found: Found, choices: Sequence[Choice], form: Form) -> Iterator[dict[str, Any]]:
    """The stream's events for these engine events."""
    for index, each in found:
        choice = choices[index]
        for delta in choice.take(each):
            yield form.part(index, delta, choice.unsent())
        if each.reason:
            yield form.end(index, choice.finish_reason, choice.unsent())


async def while_connected(request: Request, answer: Any) -> Any:
    """Await the answer; cancel it if its client disconnects.

    Raises:
        RequestError: the client has disconnected.
    """
    working = asyncio.ensure_future(answer)
    disconnect = asyncio.create_task(_wait_disconnect(request))
    try:
        await asyncio.wait({working, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestError("the client disconnected", 499)
        return working.result()
    finally:
        for task in (working, disconnect):
            task.cancel()
        await asyncio.gather(working, disconnect, return_exceptions=True)


async def _wait_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
