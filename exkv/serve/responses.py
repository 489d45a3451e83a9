"""``/v1/responses``: OpenAI's Responses API, as Open Responses specifies it.

A request is translated to a chat request, and the chat's output to items and their stream events.
The newest conversations are stored in memory for ``previous_response_id``.
"""

from __future__ import annotations

import contextlib
import copy
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
from pydantic import Field

from .answers import DONE, UNCACHED, Choice, Likelihood, RequestError, error_line, usage
from .generation import Asked, asked_for, begun, while_connected
from .requests import MOST_TEXTS, MOST_TOOLS, ChatRequest, Fields, Function, Name, Text
from .serving import Found, Serving
from .tools import Delta

_STORED = 256  # responses
_STORED_CHARACTERS = 32 << 20  # of their conversations


# Requests -------------------------------------------------------------------------------------


class TextPart(Fields):
    no_effect = frozenset({"annotations", "logprobs"})

    type: Literal["input_text", "output_text", "text"]
    text: Text


class _Item(Fields):
    no_effect = frozenset({"id", "status", "phase", "namespace"})


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | list[TextPart]


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(max_length=256)]
    name: Name
    arguments: Text


class OutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(max_length=256)]
    output: Text | list[TextPart]


class ReasoningText(Fields):
    type: Literal["reasoning_text", "summary_text"]
    text: Text


class ReasoningItem(_Item):
    no_effect = _Item.no_effect | {"encrypted_content"}

    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary or ())


Item: TypeAlias = MessageItem | CallItem | OutputItem | ReasoningItem


class FunctionTool(Function):
    type: Literal["function"]


class ChosenFunction(Fields):
    type: Literal["function"]
    name: Name

    def as_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name}}


class OnlyAllowed(Fields):
    """All tools stay in the prompt, and only these may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Field(min_length=1, max_length=MOST_TOOLS)]

    def as_chat(self) -> dict[str, Any]:
        allowed = {"mode": self.mode, "tools": [tool.as_chat() for tool in self.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}


class Format(Fields):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Fields):
    format: Format | None = None
    verbosity: str | None = None  # without effect


class Reasoning(Fields):
    no_effect = frozenset({"summary", "generate_summary"})

    effort: Annotated[str, Field(max_length=64)] | None = None


#: Fields of the same name in chat requests.
_AS_IN_CHATS = (
    *("temperature", "top_p", "presence_penalty", "frequency_penalty", "top_k", "min_p"),
    *("repetition_penalty", "seed", "stop", "min_tokens", "ignore_eos"),
)


class ResponsesRequest(Fields):
    """The request body."""

    no_effect = frozenset({"stream_options", "max_tool_calls", "prompt_cache_retention"})

    model: str | None = None
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=4096)]
    instructions: Text | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | OnlyAllowed | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None  # this and the next six: not OpenAI's, but vLLM's and guidellm's
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MOST_TEXTS)] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Annotated[list[str], Field(max_length=64)] | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    truncation: Literal["auto", "disabled"] | None = None  # prompts that don't fit are refused
    background: Literal[False] | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[dict[str, str], Field(max_length=64)] | None = None
    service_tier: str | None = None  # this and the next three have no effect
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None

    def messages(self) -> list[dict[str, Any]]:
        """The input as chat messages; consecutive calls join the message before them, and
        reasoning joins the one after it."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        found: list[dict[str, Any]] = []
        reasoning = ""
        for item in self.input:
            if isinstance(item, ReasoningItem):
                reasoning = item.text
                continue
            message = _as_message(item)
            if reasoning and message["role"] == "assistant":
                message["reasoning_content"], reasoning = reasoning, ""
            after = bool(found) and found[-1]["role"] == "assistant"
            if isinstance(item, CallItem) and after and "reasoning_content" not in message:
                found[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
            else:
                found.append(message)
        return found

    def as_chat(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The body of the chat request.

        Raises:
            ValueError: invalid tools, or a format without its schema.
        """
        wants = "message.output_text.logprobs" in (self.include or ()) or self.top_logprobs
        tools = [tool.model_dump(exclude={"type"}) for tool in self.tools or ()]
        choice = self.tool_choice
        body: dict[str, Any] = {
            "messages": list(messages),
            "max_tokens": self.max_output_tokens,
            "response_format": self._format(),
            "tools": [{"type": "function", "function": tool} for tool in tools] or None,
            "tool_choice": choice
            if choice is None or isinstance(choice, str)
            else choice.as_chat(),
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "parallel_tool_calls": self.parallel_tool_calls,
            "logprobs": True if wants else None,
            "top_logprobs": self.top_logprobs if wants else None,
        }
        body |= {name: getattr(self, name) for name in _AS_IN_CHATS}
        return {name: value for name, value in body.items() if value is not None}

    def _format(self) -> dict[str, Any] | None:
        found = self.text.format if self.text else None
        if found is None or found.type == "text":
            return None
        if found.type == "json_object":
            return {"type": "json_object"}
        if found.schema_ is None:
            raise ValueError("text.format has no schema, which type json_schema requires")
        return {
            "type": "json_schema",
            "json_schema": {"name": found.name or "", "schema": found.schema_},
        }


def _as_message(item: MessageItem | CallItem | OutputItem) -> dict[str, Any]:
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


#: Type and contents of a stream event.
ItemEvent: TypeAlias = tuple[str, dict[str, Any]]


@dataclass(slots=True)
class Output:
    """The items of a response as they are generated, and their stream events."""

    items: list[dict[str, Any]] = field(default_factory=list)
    _open: bool = False

    def take(self, delta: Delta, likely: Sequence[Likelihood]) -> list[ItemEvent]:
        """Add a delta of reasoning, of text or of a call -> its events."""
        if delta.reasoning:
            events = [] if self._is_open("reasoning") else self._begin_reasoning()
            self.items[-1]["content"][0]["text"] += delta.reasoning
            contents = {**self._place(0), "delta": delta.reasoning}
            return [*events, ("response.reasoning_text.delta", contents)]
        if delta.call is None:
            events = [] if self._is_open("message") else self._begin_message()
            part = self.items[-1]["content"][0]
            part["text"] += delta.text
            logprobs = [each.as_chat() for each in likely]
            part["logprobs"] += logprobs
            contents = {**self._place(0), "delta": delta.text, "logprobs": logprobs}
            return [*events, ("response.output_text.delta", contents)]
        if delta.name:
            call = {"call_id": delta.id, "name": delta.name, "arguments": ""}
            return self._begin("function_call", "fc", call)
        self.items[-1]["arguments"] += delta.arguments
        contents = {**self._place(), "delta": delta.arguments}
        return [("response.function_call_arguments.delta", contents)]

    def close(self, status: str = "completed") -> list[ItemEvent]:
        """End the open item -> its last events."""
        if not self._open:
            return []
        self._open, item = False, self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            call = {"name": item["name"], "arguments": item["arguments"]}
            events = [("response.function_call_arguments.done", {**self._place(), **call})]
        elif item["type"] == "reasoning":
            text = {"text": item["content"][0]["text"]}
            events = [("response.reasoning_text.done", {**self._place(0), **text})]
        else:
            part = item["content"][0]
            text = {"text": part["text"], "logprobs": part["logprobs"]}
            events = [
                ("response.output_text.done", {**self._place(0), **text}),
                ("response.content_part.done", {**self._place(0), "part": part}),
            ]
        return [*events, ("response.output_item.done", {**self._index(), "item": item})]

    def _begin(self, kind: str, prefix: str, contents: dict[str, Any]) -> list[ItemEvent]:
        """End the open item and begin another -> their events."""
        events = self.close()
        item = {"type": kind, "id": _id(prefix), "status": "in_progress", **contents}
        self.items.append(item)
        self._open = True
        added = {**self._index(), "item": copy.deepcopy(item)}  # the item keeps growing
        return [*events, ("response.output_item.added", added)]

    def _begin_message(self) -> list[ItemEvent]:
        events = self._begin("message", "msg", {"role": "assistant", "content": []})
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.items[-1]["content"].append(part)
        added = {**self._place(0), "part": copy.deepcopy(part)}
        return [*events, ("response.content_part.added", added)]

    def _begin_reasoning(self) -> list[ItemEvent]:
        events = self._begin("reasoning", "rs", {"summary": [], "content": []})
        self.items[-1]["content"].append({"type": "reasoning_text", "text": ""})
        return events

    def _is_open(self, kind: str) -> bool:
        return self._open and self.items[-1]["type"] == kind

    def _index(self) -> dict[str, Any]:
        return {"output_index": len(self.items) - 1}

    def _place(self, content: int | None = None) -> dict[str, Any]:
        place = {"item_id": self.items[-1]["id"], **self._index()}
        return place if content is None else {**place, "content_index": content}


class Answer:
    """One response.

    Args:
        asked: the request, whose settings the response reports.
        model: the model's name.
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
        """The response object."""
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
            "tools": [
                {**tool.model_dump(), "strict": tool.strict is not False}
                for tool in asked.tools or ()
            ],
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
            "reasoning": asked.reasoning and asked.reasoning.model_dump(),
            "store": asked.store is not False,
            "background": False,
            "service_tier": "default",
            "metadata": asked.metadata or {},
            "safety_identifier": asked.safety_identifier,
            "prompt_cache_key": asked.prompt_cache_key,
        }

    def event(self, kind: str, contents: dict[str, Any]) -> str:
        """The next server-sent event, with its sequence number."""
        body = {"type": kind, "sequence_number": self._sequence, **contents}
        self._sequence += 1
        return f"event: {kind}\ndata: {json.dumps(body, ensure_ascii=False)}\n\n"

    def take(self, choice: Choice, deltas: Sequence[Delta]) -> list[ItemEvent]:
        """Add deltas -> their events."""
        return [each for delta in deltas for each in self.output.take(delta, choice.unsent())]

    def finish(self, choice: Choice) -> tuple[list[ItemEvent], dict[str, Any]]:
        """The last events, and the complete response."""
        cut = choice.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        if self.output.items and self.output.items[-1]["type"] == "message":
            part = self.output.items[-1]["content"][0]
            part["logprobs"] += [each.as_chat() for each in choice.unsent()]
        events = self.output.close(status)
        if not self.output.items:  # nothing was generated
            events = self.output.take(Delta(), ()) + self.output.close()
        found = usage([choice], 1)
        used = {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": found["prompt_tokens_details"],
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": found["completion_tokens_details"],
            "total_tokens": found["total_tokens"],
        }
        return events, self.body(status, used, "max_output_tokens" if cut else None)


# Conversations --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stored:
    messages: list[dict[str, Any]]
    body: dict[str, Any]
    characters: int


class ResponseStore:
    """The newest responses, which later requests can continue.

    Args:
        most: number of responses.
        characters: upper bound on their conversations' total size as JSON.
    """

    def __init__(self, most: int = _STORED, characters: int = _STORED_CHARACTERS) -> None:
        self._most, self._room = most, characters
        self._stored: OrderedDict[str, _Stored] = OrderedDict()

    def add(self, messages: list[dict[str, Any]], body: dict[str, Any]) -> None:
        """Store a response and its conversation; evict the oldest ones to make room."""
        conversation = [*messages, *_as_messages(body["output"])]
        size = len(json.dumps([conversation, body]))
        self._stored[body["id"]] = _Stored(conversation, body, size)
        self._room -= size
        while self._room < 0 or len(self._stored) > self._most:
            self._room += self._stored.popitem(last=False)[1].characters

    def find(self, response: str) -> _Stored:
        """The response with this id.

        Raises:
            RequestError: it isn't stored, or was evicted.
        """
        if response not in self._stored:
            raise RequestError(
                f"there is no response {response[:80]!r} (the newest {self._most} are stored): "
                "send the conversation as input",
                404,
                code="previous_response_not_found",
            )
        self._stored.move_to_end(response)
        return self._stored[response]

    def delete(self, response: str) -> None:
        """Delete a response; raises as :meth:`find` does."""
        self._room += self.find(response).characters
        del self._stored[response]


def _as_messages(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A response's items as messages of the next prompt."""
    found: dict[str, Any] = {"role": "assistant", "content": ""}
    calls = []
    for item in items:
        if item["type"] == "reasoning":
            found["reasoning_content"] = item["content"][0]["text"]
        elif item["type"] == "message":
            found["content"] += item["content"][0]["text"]
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            calls.append({"id": item["call_id"], "function": function})
    return [found | ({"tool_calls": calls} if calls else {})]


# Routes ---------------------------------------------------------------------------------------


def add_responses(app: FastAPI, serving: Serving) -> None:
    """Add the routes."""
    store = ResponseStore()

    @app.post("/responses", include_in_schema=False)
    @app.post("/v1/responses")
    async def respond(request: Request, asked: ResponsesRequest) -> Response:
        model = serving.model
        before = (
            store.find(asked.previous_response_id).messages if asked.previous_response_id else []
        )
        messages = [*before, *asked.messages()]
        carried = await asked_for(serving, _as_chat_request(asked, messages), model)
        answer = Answer(asked, asked.model or model.name)
        events = await begun(serving, request, carried)
        into = store if asked.store is not False else None
        if asked.stream:
            parts = _sse_events(answer, carried, events, into, messages)
            return StreamingResponse(parts, media_type="text/event-stream", headers=UNCACHED)
        return JSONResponse(
            await while_connected(request, _complete(answer, carried, events, into, messages))
        )

    @app.get("/v1/responses/{response}")
    async def found(response: str) -> dict[str, Any]:
        return store.find(response).body

    @app.delete("/v1/responses/{response}")
    async def delete(response: str) -> dict[str, Any]:
        store.delete(response)
        return {"id": response, "object": "response", "deleted": True}


def _as_chat_request(asked: ResponsesRequest, messages: list[dict[str, Any]]) -> ChatRequest:
    """The chat request, with the instructions first; a previous response's do not carry over."""
    if asked.instructions:
        if messages and messages[0]["role"] == "system":
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


async def _complete(
    answer: Answer,
    asked: Asked,
    events: AsyncGenerator[Found],
    store: ResponseStore | None,
    messages: list[dict[str, Any]],
) -> dict[str, Any]:
    (choice,) = asked.choices()
    async with contextlib.aclosing(events):
        async for found in events:
            for _, each in found:
                answer.take(choice, choice.take(each))
    _, body = answer.finish(choice)
    if store is not None:
        store.add(messages, body)
    return body


async def _sse_events(
    answer: Answer,
    asked: Asked,
    events: AsyncGenerator[Found],
    store: ResponseStore | None,
    messages: list[dict[str, Any]],
) -> AsyncIterator[str]:
    (choice,) = asked.choices()
    for kind in ("response.created", "response.in_progress"):
        yield answer.event(kind, {"response": answer.body("in_progress")})
    try:
        async with contextlib.aclosing(events):
            async for found in events:
                taken = (answer.take(choice, choice.take(each)) for _, each in found)
                new = itertools.chain.from_iterable(taken)
                if text := "".join(answer.event(kind, contents) for kind, contents in new):
                    yield text
    except Exception as error:  # noqa: BLE001 # the status is sent already: report in the stream
        failure = {"code": "server_error", "message": error_line(error)}
        yield answer.event("response.failed", {"response": answer.body("failed", error=failure)})
        yield DONE
        return
    last, body = answer.finish(choice)
    for kind, contents in last:
        yield answer.event(kind, contents)
    if store is not None:
        store.add(messages, body)
    yield answer.event(f"response.{body['status']}", {"response": body})
    yield DONE
