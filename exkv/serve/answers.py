"""What clients get, in the shapes of OpenAI's API: whole answers, events of a stream, errors."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from exkv.engine import Handle

_ENDED = {"eos": "stop", "stop": "stop", "grammar": "stop", "length": "length"}

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
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def said(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {str(error)[:500]}"


def finish_reason(reason: str) -> str | None:
    """OpenAI's word for why a job ended."""
    return _ENDED.get(reason)


def usage(handles: Sequence[Handle], prompts: int) -> dict[str, Any]:
    """Tokens of a request's jobs; each prompt counts once, however many choices it has."""
    each = len(handles) // prompts
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

    def whole(self, texts: Sequence[str], reasons: Sequence[str]) -> dict[str, Any]:
        """The answer with all choices, but for the usage."""
        choices = [
            {**self._written(text, whole=True), **self._choice(index, reason)}
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return self._about(part=False) | {"choices": choices}

    def first(self, index: int) -> dict[str, Any]:
        """The beginning of a streamed choice of a chat."""
        delta = {"delta": {"role": "assistant", "content": ""}}
        return self._about(part=True) | {"choices": [{**delta, **self._choice(index, "")}]}

    def part(self, index: int, text: str, reason: str = "") -> dict[str, Any]:
        """What a step brought a choice."""
        written = self._written(text, whole=False)
        return self._about(part=True) | {"choices": [{**written, **self._choice(index, reason)}]}

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

    def _written(self, text: str, whole: bool) -> dict[str, Any]:
        if not self.chat:
            return {"text": text}
        if whole:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"delta": {"content": text} if text else {}}

    def _choice(self, index: int, reason: str) -> dict[str, Any]:
        return {"index": index, "logprobs": None, "finish_reason": finish_reason(reason)}
