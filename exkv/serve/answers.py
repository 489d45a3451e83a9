"""Response bodies in OpenAI's format: complete answers, stream events, errors."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from exkv.decode import Event, Handle
from exkv.sampling.logprobs import TokenLogprobs
from exkv.text.reasoning import Piece, Reader

from .tools import CallReader, Delta

_FINISH_REASONS = {"eos": "stop", "stop": "stop", "grammar": "stop", "length": "length"}

#: Replaces a log-probability of minus infinity, which JSON lacks.
_LOWEST_LOGPROB = -9999.0

_as_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

DONE = "data: [DONE]\n\n"

#: Headers of a stream.
UNCACHED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class RequestError(Exception):
    """A request that can't be served, reported in OpenAI's error format.

    Attributes:
        status: the HTTP status.
        kind, code: OpenAI's error type and code.
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


def error_line(error: Exception) -> str:
    """One-line description of an error."""
    return f"{type(error).__name__}: {str(error)[:500]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihood:
    """A token's log-probability, and the most likely tokens at its position, as bytes.

    Attributes:
        logprob: None for the first token of a prompt.
        offset: characters of the tokens before it.
    """

    token: bytes
    logprob: float | None
    top: tuple[tuple[bytes, float], ...] = ()
    offset: int = 0

    @classmethod
    def of(cls, found: TokenLogprobs, spell: Callable[[int], bytes], offset: int) -> Likelihood:
        top = tuple((spell(token), logprob) for token, logprob in found.top)
        token = spell(found.token)
        return cls(token=token, logprob=found.logprob, top=top, offset=offset)

    @property
    def text(self) -> str:
        return self.token.decode("utf-8", "replace")

    def as_chat(self) -> dict[str, Any]:
        """One entry of a chat's ``logprobs.content``."""
        top = [_likely(token, logprob) for token, logprob in self.top]
        assert self.logprob is not None, "chats have no echo"
        return {**_likely(self.token, self.logprob), "top_logprobs": top}

    def top_texts(self) -> dict[str, float] | None:
        """Text -> log-probability, of the most likely tokens and of its own."""
        if self.logprob is None:
            return None
        found: dict[str, float] = {}
        for token, logprob in (*self.top, (self.token, self.logprob)):  # the likeliest comes first
            found.setdefault(token.decode("utf-8", "replace"), max(logprob, _LOWEST_LOGPROB))
        return found


def _likely(token: bytes, logprob: float) -> dict[str, Any]:
    finite = max(logprob, _LOWEST_LOGPROB)
    text = token.decode("utf-8", "replace")
    return {"token": text, "logprob": finite, "bytes": list(token)}


def _as_completion(found: Sequence[Likelihood]) -> dict[str, Any]:
    """A completion's ``logprobs``."""
    own = [each.logprob for each in found]
    return {
        "tokens": [each.text for each in found],
        "token_logprobs": [None if x is None else max(x, _LOWEST_LOGPROB) for x in own],
        "top_logprobs": [each.top_texts() for each in found],
        "text_offset": [each.offset for each in found],
    }


class Choice:
    """The output of one job so far, as its client sees it.

    Args:
        text: the text that it begins with.
        reasons: separates reasoning from the answer; None to leave it in the text.
        shows: whether the client wants the reasoning.
        reader: parses tool calls; None without tools.
        marker: the control token that begins calls, if there is one.
        spell: maps a token to its bytes, for log-probabilities.
        echoes: whether ``text`` is the prompt, whose log-probabilities come first.
        only_echoes: whether no new tokens are wanted.

    Attributes:
        logprobs: of its tokens if requested, without the token that ended it, except after an
            echoed prompt: such clients (lm-eval) count the new tokens that they asked for.
        tokens: number of new tokens.
        reasoning: text before the answer.
        reasoning_tokens: number of new tokens of reasoning.
        calls: tool calls in OpenAI's format.
        finish_reason: OpenAI's finish reason; None while it is running.
    """

    def __init__(
        self,
        text: str = "",
        reader: CallReader | None = None,
        marker: int | None = None,
        spell: Callable[[int], bytes] = lambda token: b"",
        echoes: bool = False,
        only_echoes: bool = False,
        reasons: Reader | None = None,
        shows: bool = True,
    ) -> None:
        self.text = text
        self.reasoning, self.reasoning_tokens = "", 0
        self._reasons, self._shows = reasons, shows
        self.logprobs: list[Likelihood] = []
        self.tokens = 0
        self._sent = self._characters = 0
        self._echoes, self._only_echoes = echoes, only_echoes
        self._spell = spell
        self.calls: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.handle: Handle | None = None
        self._reader, self._marker = reader, marker
        self._called: list[Delta] = []  # the start of the call that is being written

    def take(self, each: Event) -> list[Delta]:
        """Add an event -> the deltas that it produced."""
        if self.handle is None and self._echoes:
            self._add_prompt(each.handle)
        self.handle = each.handle
        if self._only_echoes:
            self.finish_reason = "length"
            return []
        self.tokens = len(each.handle.tokens)
        if self._reader is not None and each.token is not None and each.token == self._marker:
            self._reader.mark()
        if self._reasons is None:
            deltas = self._answer_deltas(each.text)
        else:
            pieces = self._reasons.push(each.text)
            self.reasoning_tokens += self._reasons.reasons and each.token is not None
            pieces += self._reasons.flush() if each.reason else []
            deltas = [delta for piece in pieces for delta in self._piece_deltas(piece)]
        if self._reader is not None and each.reason:
            deltas += self._reader.flush()
        if each.logprobs is not None and (each.reason != "eos" or self._echoes):
            self._add_logprobs(each.logprobs)
        for delta in deltas:
            self._add(delta)
        if each.reason:
            ended = _FINISH_REASONS.get(each.reason)
            self.finish_reason = "tool_calls" if self.calls and ended == "stop" else ended
        return deltas

    def _piece_deltas(self, piece: Piece) -> list[Delta]:
        """The deltas of a piece of reasoning, of a call on a channel, or of the answer."""
        if piece.reasoning:
            return [Delta(reasoning=piece.text)] if self._shows else []
        if piece.recipient and self._reader is not None:
            if piece.begins:
                self._called = self._reader.begin(piece.recipient.removeprefix("functions."))
                return self._called
            if self._called:
                return [self._reader.more(piece.text)]
        return self._answer_deltas(piece.text)

    def _answer_deltas(self, text: str) -> list[Delta]:
        if self._reader is not None:
            return self._reader.push(text)
        return [Delta(text=text)] if text else []

    def _add_prompt(self, handle: Handle) -> None:
        """Add the prompt's log-probabilities, if they were requested."""
        if handle.job.prompt_logprobs is not None:
            first = handle.prompt[0]
            self.logprobs.append(Likelihood(token=self._spell(first), logprob=None))
            if self.text.startswith(self.logprobs[0].text):  # a BOS token isn't in the text
                self._characters += len(self.logprobs[0].text)
            for each in handle.prompt_logprobs:
                self._add_logprobs(each)

    def _add_logprobs(self, found: TokenLogprobs) -> None:
        self.logprobs.append(Likelihood.of(found, self._spell, self._characters))
        self._characters += len(self.logprobs[-1].text)

    def unsent(self) -> list[Likelihood]:
        """Log-probabilities not sent yet; marks them as sent."""
        fresh, self._sent = self.logprobs[self._sent :], len(self.logprobs)
        return fresh

    def _add(self, delta: Delta) -> None:
        if delta.call is None:
            self.text += delta.text
            self.reasoning += delta.reasoning
        elif delta.name:
            function = {"name": delta.name, "arguments": ""}
            self.calls.append({"id": delta.id, "type": "function", "function": function})
        else:
            self.calls[delta.call]["function"]["arguments"] += delta.arguments


def usage(choices: Sequence[Choice], prompts: int) -> dict[str, Any]:
    """Token counts of a request's jobs; a prompt with several choices counts once."""
    handles = [choice.handle for choice in choices if choice.handle is not None]
    each = max(len(handles) // prompts, 1)
    asked = sum(len(handle.prompt) for handle in handles[::each])
    written = sum(choice.tokens for choice in choices)
    found = sum(handle.cached_tokens for handle in handles[::each])
    reasoning = sum(choice.reasoning_tokens for choice in choices)
    return {
        "prompt_tokens": asked,
        "completion_tokens": written,
        "total_tokens": asked + written,
        "prompt_tokens_details": {"cached_tokens": found},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The response format of one request.

    Attributes:
        chat: chat or plain completion.
        model: the model name to report.
        fingerprint: identifies the model and its options.
        functions: whether calls are in OpenAI's older ``functions`` format.
    """

    chat: bool
    model: str
    fingerprint: str = ""
    functions: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The complete response with all choices, without usage."""
        found = [
            {
                **self._written(choice),
                **self._choice(index, choice.finish_reason, self._logprobs(choice.logprobs)),
            }
            for index, choice in enumerate(choices)
        ]
        return self._about(part=False) | {"choices": found}

    def first(self, index: int) -> dict[str, Any]:
        """The first event of a chat's streamed choice."""
        return self._part(index, {"delta": {"role": "assistant", "content": ""}})

    def part(self, index: int, delta: Delta, likely: Sequence[Likelihood] = ()) -> dict[str, Any]:
        """The event for one delta of a choice."""
        logprobs = self._logprobs(likely)
        found = {"delta": self._chat_delta(delta)} if self.chat else {"text": delta.text}
        return self._part(index, found, logprobs=logprobs)

    def _chat_delta(self, delta: Delta) -> dict[str, Any]:
        if delta.reasoning:
            return {"reasoning_content": delta.reasoning}
        if delta.call is None:
            return {"content": delta.text}
        function = {**({"name": delta.name} if delta.name else {}), "arguments": delta.arguments}
        if self.functions:
            return {"function_call": function}
        begins = {"id": delta.id, "type": "function"} if delta.name else {}
        return {"tool_calls": [{"index": delta.call, **begins, "function": function}]}

    def end(
        self, index: int, reason: str | None, likely: Sequence[Likelihood] = ()
    ) -> dict[str, Any]:
        """The last event of a choice."""
        found: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        return self._part(index, found, reason, self._logprobs(likely))

    def last(self, used: dict[str, Any]) -> dict[str, Any]:
        """The event with the usage, and no choice."""
        return self._about(part=True) | {"choices": [], "usage": used}

    def _about(self, part: bool) -> dict[str, Any]:
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": kind + (".chunk" if part and self.chat else ""),
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
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
        return _as_completion(found)

    def _written(self, choice: Choice) -> dict[str, Any]:
        if not self.chat:
            return {"text": choice.text}
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls and self.functions:
            called = choice.calls[0]["function"]
            message |= {"content": choice.text or None, "function_call": called}
        elif choice.calls:
            message |= {"content": choice.text or None, "tool_calls": choice.calls}
        return {"message": message}

    def _choice(
        self, index: int, reason: str | None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        if self.functions and reason == "tool_calls":
            reason = "function_call"
        return {"index": index, "logprobs": logprobs, "finish_reason": reason}
