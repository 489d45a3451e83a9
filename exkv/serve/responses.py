"""``/v1/responses``: OpenAI's Responses API, and what Open Responses makes of it.

A request becomes one for a chat; what comes of that becomes items, and their events where it is
streamed. Conversations are kept in memory for ``previous_response_id``, the newest ones only.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from .answers import DONE, UNCACHED, Choice, Likelihood, RequestError, said, usage
from .generation import Asked, asked_for, begun, unless_gone
from .requests import MOST_TOOLS, ChatRequest, Function, Name, Text
from .serving import Found, Serving
from .tools import Delta

_KEPT = 256  # responses
_KEPT_CHARACTERS = 32 << 20  # of their conversations


# Requests -------------------------------------------------------------------------------------


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TextPart(_Fields):
    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class MessageItem(_Fields):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | list[TextPart]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(_Fields):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(max_length=256)]
    name: Name
    arguments: Text
    id: str | None = None
    status: str | None = None


class OutputItem(_Fields):
    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(max_length=256)]
    output: Text | list[TextPart]
    id: str | None = None
    status: str | None = None


Item: TypeAlias = MessageItem | CallItem | OutputItem


class FunctionTool(Function):
    type: Literal["function"]


class ChosenFunction(_Fields):
    type: Literal["function"]
    name: Name


class Format(_Fields):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(_Fields):
    format: Format | None = None
    verbosity: str | None = None  # without effect


class StreamOptions(_Fields):
    include_obfuscation: bool = False  # without effect


class ResponsesRequest(_Fields):
    """What is asked. Fields that a model here has no use for may be null."""

    model: str | None = None
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=4096)]
    instructions: Text | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    reasoning: None = None
    max_tool_calls: None = None
    metadata: Annotated[dict[str, str], Field(max_length=64)] | None = None
    service_tier: str | None = None  # this and the others: without effect
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None

    def messages(self) -> list[dict[str, Any]]:
        """The input as messages of a chat; calls in a row are one message's, with the text before
        them."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        found: list[dict[str, Any]] = []
        for item in self.input:
            message = _as_message(item)
            if isinstance(item, CallItem) and found and found[-1]["role"] == "assistant":
                found[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
            else:
                found.append(message)
        return found

    def as_chat(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The body of a request for a chat.

        Raises:
            ValueError: tools that make no sense, or a format without its schema.
        """
        wants = self.include is not None or self.top_logprobs
        tools = [tool.model_dump(exclude={"type"}) for tool in self.tools or ()]
        choice = self.tool_choice
        body: dict[str, Any] = {
            "messages": list(messages),
            "max_tokens": self.max_output_tokens,
            "response_format": self._format(),
            "tools": [{"type": "function", "function": tool} for tool in tools] or None,
            "tool_choice": {"type": "function", "function": {"name": choice.name}}
            if isinstance(choice, ChosenFunction)
            else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "logprobs": True if wants else None,
            "top_logprobs": self.top_logprobs if wants else None,
        }
        for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty"):
            body[name] = getattr(self, name)
        return {name: value for name, value in body.items() if value is not None}

    def _format(self) -> dict[str, Any] | None:
        found = self.text.format if self.text else None
        if found is None or found.type == "text":
            return None
        if found.type == "json_object":
            return {"type": "json_object"}
        if found.schema_ is None:
            raise ValueError("text.format has no schema, which its type needs")
        return {
            "type": "json_schema",
            "json_schema": {"name": found.name or "", "schema": found.schema_},
        }


def _as_message(item: Item) -> dict[str, Any]:
    if isinstance(item, CallItem):
        call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if isinstance(item, OutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)}
    role = "system" if item.role == "developer" else item.role
    return {"role": role, "content": _joined(item.content)}


def _joined(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


# Answers --------------------------------------------------------------------------------------


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


@dataclass(slots=True)
class Output:
    """The items of a response as they come, and their events: type and contents."""

    items: list[dict[str, Any]] = field(default_factory=list)
    _open: bool = False

    def take(self, delta: Delta, likely: Sequence[Likelihood]) -> list[tuple[str, dict[str, Any]]]:
        """What a piece of text or of a call adds."""
        if delta.call is None:
            events = [] if self._open and self._last("message") else self._begin_message()
            part = self.items[-1]["content"][0]
            part["text"] += delta.text
            logprobs = [each.as_chat() for each in likely]
            part["logprobs"] += logprobs
            told = {"delta": delta.text, "logprobs": logprobs}
            return [*events, ("response.output_text.delta", {**self._place(0), **told})]
        if delta.name:
            return self._begin_call(delta)
        self.items[-1]["arguments"] += delta.arguments
        told = {**self._place(), "delta": delta.arguments}
        return [("response.function_call_arguments.delta", told)]

    def close(self, status: str = "completed") -> list[tuple[str, dict[str, Any]]]:
        """The end of the item that is open."""
        if not self._open:
            return []
        self._open, item = False, self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            told = {**self._place(), "name": item["name"], "arguments": item["arguments"]}
            events = [("response.function_call_arguments.done", told)]
        else:
            part = item["content"][0]
            told = {"text": part["text"], "logprobs": part["logprobs"]}
            events = [
                ("response.output_text.done", {**self._place(0), **told}),
                ("response.content_part.done", {**self._place(0), "part": part}),
            ]
        return [*events, ("response.output_item.done", {**self._index(), "item": item})]

    def _begin_message(self) -> list[tuple[str, dict[str, Any]]]:
        events = self.close()
        item = {"type": "message", "id": _id("msg"), "status": "in_progress", "role": "assistant"}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.items.append({**item, "content": []})
        self._open = True
        added = _copied({**self._index(), "item": self.items[-1]})
        events.append(("response.output_item.added", added))
        events.append(("response.content_part.added", _copied({**self._place(0), "part": part})))
        self.items[-1]["content"].append(part)
        return events

    def _begin_call(self, delta: Delta) -> list[tuple[str, dict[str, Any]]]:
        events = self.close()
        item = {"type": "function_call", "id": _id("fc"), "call_id": delta.id, "name": delta.name}
        self.items.append({**item, "arguments": "", "status": "in_progress"})
        self._open = True
        told = _copied({**self._index(), "item": self.items[-1]})
        return [*events, ("response.output_item.added", told)]

    def _last(self, kind: str) -> bool:
        return bool(self.items) and self.items[-1]["type"] == kind

    def _index(self) -> dict[str, Any]:
        return {"output_index": len(self.items) - 1}

    def _place(self, content: int | None = None) -> dict[str, Any]:
        place = {"item_id": self.items[-1]["id"], **self._index()}
        return place if content is None else {**place, "content_index": content}


def _copied(value: dict[str, Any]) -> dict[str, Any]:
    """As it is now: items go on growing."""
    return json.loads(json.dumps(value))


class Answer:
    """One response.

    Args:
        asked: the request, whose settings it names again.
        model: its name.
    """

    def __init__(self, asked: ResponsesRequest, model: str) -> None:
        self.id = _id("resp")
        self.output = Output()
        self._asked, self._model = asked, model
        self._created = int(time.time())
        self._sequence = 0

    def body(
        self,
        status: str,
        used: dict[str, Any] | None = None,
        incomplete: str | None = None,
        error: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """All of it."""
        asked = self._asked
        text = asked.text.model_dump(by_alias=True, exclude_none=True) if asked.text else {}
        choice = asked.tool_choice or "auto"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": incomplete and {"reason": incomplete},
            "model": self._model,
            "output": self.output.items,
            "usage": used,
            "instructions": asked.instructions,
            "previous_response_id": asked.previous_response_id,
            "tools": [_as_told(tool) for tool in asked.tools or ()],
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "text": {"format": {"type": "text"}} | text,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "presence_penalty": asked.presence_penalty or 0.0,
            "frequency_penalty": asked.frequency_penalty or 0.0,
            "top_logprobs": asked.top_logprobs or 0,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "truncation": "disabled",
            "reasoning": None,
            "store": asked.store is not False,
            "background": False,
            "service_tier": "default",
            "metadata": asked.metadata or {},
            "safety_identifier": asked.safety_identifier,
            "prompt_cache_key": asked.prompt_cache_key,
        }

    def event(self, kind: str, contents: dict[str, Any]) -> str:
        """The next one, with its number."""
        told = {"type": kind, "sequence_number": self._sequence, **contents}
        self._sequence += 1
        return f"event: {kind}\ndata: {json.dumps(told, ensure_ascii=False)}\n\n"

    def take(self, choice: Choice, deltas: Sequence[Delta]) -> list[tuple[str, dict[str, Any]]]:
        """What a step brought, as events."""
        return [told for delta in deltas for told in self.output.take(delta, choice.untold())]

    def ended(self, choice: Choice) -> tuple[list[tuple[str, dict[str, Any]]], dict[str, Any]]:
        """The last events, and the whole."""
        cut = choice.finish_reason == "length"
        if self.output.items and self.output.items[-1]["type"] == "message":
            part = self.output.items[-1]["content"][0]
            part["logprobs"] += [each.as_chat() for each in choice.untold()]
        events = self.output.close("incomplete" if cut else "completed")
        if not self.output.items:  # nothing was written
            events = self.output.take(Delta(), ()) + self.output.close()
        found = usage([choice], 1)
        used = {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": found["prompt_tokens_details"],
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": found["total_tokens"],
        }
        status = "incomplete" if cut else "completed"
        return events, self.body(status, used, "max_output_tokens" if cut else None)


def _as_told(tool: FunctionTool) -> dict[str, Any]:
    found = tool.model_dump()
    return {**found, "strict": tool.strict is not False}


# Conversations --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kept:
    messages: list[dict[str, Any]]
    body: dict[str, Any]
    characters: int


class Kept:
    """Responses that can be gone on from, the newest ones."""

    def __init__(self, most: int = _KEPT, characters: int = _KEPT_CHARACTERS) -> None:
        self._most, self._room = most, characters
        self._found: OrderedDict[str, _Kept] = OrderedDict()

    def keep(self, messages: list[dict[str, Any]], body: dict[str, Any]) -> None:
        """Keep a response and the conversation up to its end; the oldest ones go for it."""
        all_of_it = [*messages, *_as_messages(body["output"])]
        size = len(json.dumps([all_of_it, body]))
        self._found[body["id"]] = _Kept(all_of_it, body, size)
        self._room -= size
        while self._room < 0 or len(self._found) > self._most:
            self._room += self._found.popitem(last=False)[1].characters

    def find(self, response: str) -> _Kept:
        """The one with this id.

        Raises:
            RequestError: it isn't there, or not any longer.
        """
        if response not in self._found:
            raise RequestError(
                f"there is no response {response[:80]!r} (any longer: the newest {self._most} are "
                "kept); give the conversation as input",
                404,
                code="previous_response_not_found",
            )
        self._found.move_to_end(response)
        return self._found[response]

    def drop(self, response: str) -> None:
        """Forget it; errors as of :meth:`find`."""
        self._room += self.find(response).characters
        del self._found[response]


def _as_messages(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was answered, as the next prompt has it."""
    found: dict[str, Any] = {"role": "assistant", "content": ""}
    calls = []
    for item in items:
        if item["type"] == "message":
            found["content"] += item["content"][0]["text"]
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            calls.append({"id": item["call_id"], "function": function})
    return [found | ({"tool_calls": calls} if calls else {})]


# Routes ---------------------------------------------------------------------------------------


def add_responses(app: FastAPI, serving: Serving) -> None:
    """The routes."""
    kept = Kept()

    @app.post("/v1/responses")
    async def respond(request: Request, asked: ResponsesRequest) -> Response:
        model = serving.model
        before = (
            kept.find(asked.previous_response_id).messages if asked.previous_response_id else []
        )
        messages = [*before, *asked.messages()]
        carried = await asked_for(serving, _as_chat_request(asked, messages), model)
        answer = Answer(asked, asked.model or model.name)
        events = await begun(serving, request, carried)
        keeping = kept if asked.store is not False else None
        if asked.stream:
            parts = _streamed(answer, carried, events, keeping, messages)
            return StreamingResponse(parts, media_type="text/event-stream", headers=UNCACHED)
        return JSONResponse(
            await unless_gone(request, _whole(answer, carried, events, keeping, messages))
        )

    @app.get("/v1/responses/{response}")
    async def found(response: str) -> dict[str, Any]:
        return kept.find(response).body

    @app.delete("/v1/responses/{response}")
    async def drop(response: str) -> dict[str, Any]:
        kept.drop(response)
        return {"id": response, "object": "response", "deleted": True}


def _as_chat_request(asked: ResponsesRequest, messages: list[dict[str, Any]]) -> ChatRequest:
    """Instructions come first; those of a response before are not carried on."""
    if asked.instructions:
        if messages[0]["role"] == "system":
            both = f"{asked.instructions}\n\n{messages[0]['content']}"
            messages = [{"role": "system", "content": both}, *messages[1:]]
        else:
            messages = [{"role": "system", "content": asked.instructions}, *messages]
    try:
        body = asked.as_chat(messages)
        chat = ChatRequest.model_validate(body)
    except ValueError as error:
        raise RequestError(str(error)[:500]) from None
    return chat


async def _whole(
    answer: Answer,
    asked: Asked,
    events: AsyncGenerator[Found],
    kept: Kept | None,
    messages: list[dict[str, Any]],
) -> dict[str, Any]:
    (choice,) = asked.choices()
    async with contextlib.aclosing(events):
        async for found in events:
            for _, each in found:
                answer.take(choice, choice.take(each))
    _, body = answer.ended(choice)
    if kept is not None:
        kept.keep(messages, body)
    return body


async def _streamed(
    answer: Answer,
    asked: Asked,
    events: AsyncGenerator[Found],
    kept: Kept | None,
    messages: list[dict[str, Any]],
) -> AsyncIterator[str]:
    (choice,) = asked.choices()
    for kind in ("response.created", "response.in_progress"):
        yield answer.event(kind, {"response": answer.body("in_progress")})
    try:
        async with contextlib.aclosing(events):
            async for found in events:
                taken = (answer.take(choice, choice.take(each)) for _, each in found)
                told = itertools.chain.from_iterable(taken)
                if text := "".join(answer.event(kind, contents) for kind, contents in told):
                    yield text
    except Exception as error:  # noqa: BLE001 # the status has been sent: the stream says it
        wrong = {"code": "server_error", "message": said(error)}
        yield answer.event("response.failed", {"response": answer.body("failed", error=wrong)})
        yield DONE
        return
    last, body = answer.ended(choice)
    for kind, contents in last:
        yield answer.event(kind, contents)
    if kept is not None:
        kept.keep(messages, body)
    yield answer.event(f"response.{body['status']}", {"response": body})
    yield DONE
