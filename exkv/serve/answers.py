"""What clients get, in the shapes of OpenAI's API: whole answers, events of a stream, errors."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from exkv.decode import Event, Handle
from exkv.sampling.logprobs import TokenLogprobs

from .tools import CallReader, Delta

_ENDED = {"eos": "stop", "stop": "stop", "grammar": "stop", "length": "length"}

#: What stands for the logarithm of nothing.
_LEAST = -9999.0

_as_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

DONE = "data: [DONE]\n\n"

#: Headers of a stream.
UNCACHED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class RequestError(Exception):
    """A request that can't be served, in OpenAI's shape.

    Attributes:
        status: of HTTP.
        kind, code: OpenAI's words for what is wrong.
    """

    def __init__(
        self, message: str, status: int = 400, kind: str = "", code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.code = code


def error_body(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def event(content: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {_as_json(content)}\n\n"


def said(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {str(error)[:500]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihood:
    """How likely a token was, and the likeliest in its place with their bytes."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]

    @classmethod
    def of(cls, found: TokenLogprobs, spelt: Callable[[int], bytes]) -> Likelihood:
        top = tuple((spelt(token), logprob) for token, logprob in found.top)
        return cls(token=spelt(found.token), logprob=found.logprob, top=top)

    def as_chat(self) -> dict[str, Any]:
        """As chats have it."""
        top = [_likely(token, logprob) for token, logprob in self.top]
        return {**_likely(self.token, self.logprob), "top_logprobs": top}


def _likely(token: bytes, logprob: float) -> dict[str, Any]:
    finite = max(logprob, _LEAST)  # JSON knows no infinity
    text = token.decode("utf-8", "replace")
    return {"token": text, "logprob": finite, "bytes": list(token)}


def _as_completion(found: Sequence[Likelihood], offset: int) -> dict[str, Any]:
    """As completions have it; ``offset`` is where the first token's text begins."""
    texts = [each.token.decode("utf-8", "replace") for each in found]
    return {
        "tokens": texts,
        "token_logprobs": [max(each.logprob, _LEAST) for each in found],
        "top_logprobs": [
            {token.decode("utf-8", "replace"): max(logprob, _LEAST) for token, logprob in each.top}
            for each in found
        ],
        "text_offset": list(itertools.accumulate(map(len, texts[:-1]), initial=offset))
        if texts
        else [],
    }


class Choice:
    """What has come of one job, as its client sees it.

    Args:
        text: that it begins with.
        reader: finds calls of tools, where there are some.
        marker: the control token that begins calls, if one does.
        spelt: gives the bytes of a token, for its log-probability.

    Attributes:
        logprobs: of its tokens, where they are asked for, but for one that ended it.
        calls: of tools, in OpenAI's shape.
        finish_reason: OpenAI's word for why it ended; None before.
    """

    def __init__(
        self,
        text: str = "",
        reader: CallReader | None = None,
        marker: int | None = None,
        spelt: Callable[[int], bytes] = lambda token: b"",
    ) -> None:
        self.text = text
        self.logprobs: list[Likelihood] = []
        self._told = 0
        self._spelt = spelt
        self.calls: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.handle: Handle | None = None
        self._reader, self._marker = reader, marker

    def take(self, each: Event) -> list[Delta]:
        """What an event brought."""
        self.handle = each.handle
        deltas = [Delta(text=each.text)] if each.text else []
        if self._reader is not None:
            if each.token is not None and each.token == self._marker:
                self._reader.mark()
            deltas = self._reader.push(each.text)
            deltas += self._reader.flush() if each.reason else []
        if each.logprobs is not None and each.reason != "eos":
            self.logprobs.append(Likelihood.of(each.logprobs, self._spelt))
        for delta in deltas:
            self._add(delta)
        if each.reason:
            ended = _ENDED.get(each.reason)
            self.finish_reason = "tool_calls" if self.calls and ended == "stop" else ended
        return deltas

    def untold(self) -> list[Likelihood]:
        """Log-probabilities that no event has had yet; after this one has."""
        fresh, self._told = self.logprobs[self._told :], len(self.logprobs)
        return fresh

    def _add(self, delta: Delta) -> None:
        if delta.call is None:
            self.text += delta.text
        elif delta.name:
            function = {"name": delta.name, "arguments": ""}
            self.calls.append({"id": delta.id, "type": "function", "function": function})
        else:
            self.calls[delta.call]["function"]["arguments"] += delta.arguments


def usage(choices: Sequence[Choice], prompts: int) -> dict[str, Any]:
    """Tokens of a request's jobs; each prompt counts once, however many choices it has."""
    handles = [choice.handle for choice in choices if choice.handle is not None]
    each = max(len(handles) // prompts, 1)
    asked = sum(len(handle.prompt) for handle in handles[::each])
    written = sum(len(handle.tokens) for handle in handles)
    found = sum(handle.cached_tokens for handle in handles[::each])
    return {
        "prompt_tokens": asked,
        "completion_tokens": written,
        "total_tokens": asked + written,
        "prompt_tokens_details": {"cached_tokens": found},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The shape of one request's answers.

    Attributes:
        chat: whether it is a chat, not a completion.
        model: the name that is given back.
    """

    chat: bool
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer with all choices, but for the usage."""
        found = [
            {
                **self._written(choice),
                **self._choice(index, choice.finish_reason, self._logprobs(choice.logprobs)),
            }
            for index, choice in enumerate(choices)
        ]
        return self._about(part=False) | {"choices": found}

    def first(self, index: int) -> dict[str, Any]:
        """The beginning of a streamed choice of a chat."""
        return self._part(index, {"delta": {"role": "assistant", "content": ""}})

    def part(self, index: int, delta: Delta, likely: Sequence[Likelihood] = ()) -> dict[str, Any]:
        """What a step brought a choice."""
        logprobs = self._logprobs(likely)
        if not self.chat:
            return self._part(index, {"text": delta.text}, logprobs=logprobs)
        if delta.call is None:
            return self._part(index, {"delta": {"content": delta.text}}, logprobs=logprobs)
        call: dict[str, Any] = {"index": delta.call}
        if delta.name:
            call |= {"id": delta.id, "type": "function"}
            call["function"] = {"name": delta.name, "arguments": ""}
        else:
            call["function"] = {"arguments": delta.arguments}
        return self._part(index, {"delta": {"tool_calls": [call]}}, logprobs=logprobs)

    def end(
        self, index: int, reason: str | None, likely: Sequence[Likelihood] = ()
    ) -> dict[str, Any]:
        """The last event of a choice."""
        found: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        return self._part(index, found, reason, self._logprobs(likely))

    def last(self, used: dict[str, Any]) -> dict[str, Any]:
        """The event that has the usage, and no choice."""
        return self._about(part=True) | {"choices": [], "usage": used}

    def _about(self, part: bool) -> dict[str, Any]:
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": kind + (".chunk" if part and self.chat else ""),
            "created": self.created,
            "model": self.model,
        }

    def _part(
        self,
        index: int,
        found: dict[str, Any],
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {**found, **self._choice(index, reason, logprobs)}
        return self._about(part=True) | {"choices": [choice]}

    def _logprobs(self, found: Sequence[Likelihood]) -> dict[str, Any] | None:
        if not found:
            return None
        if self.chat:
            return {"content": [each.as_chat() for each in found], "refusal": None}
        return _as_completion(found, 0)

    def _written(self, choice: Choice) -> dict[str, Any]:
        if not self.chat:
            return {"text": choice.text}
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message |= {"content": choice.text or None, "tool_calls": choice.calls}
        return {"message": message}

    def _choice(
        self, index: int, reason: str | None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {"index": index, "logprobs": logprobs, "finish_reason": reason}
