"""Reasoning: split a model's output into reasoning and answer while it is generated.

Most models put reasoning between two tags (``<think>`` and ``</think>``: DeepSeek, Qwen, GLM, Kimi,
MiniMax); the prompt may end with the first one. gpt-oss writes messages on channels (OpenAI's
harmony format), function calls included. The chat template reveals a checkpoint's format. Tags may
be control tokens, which decoding skips unless a job asks for them (``Job.shown_tokens``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from .tokenizer import Tokenizer

_SPACE = " \n\t\r"
#: Number of tokens at a prompt's end that are searched for an open tag.
_TAIL = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of a model's output.

    Attributes:
        reasoning: whether it is reasoning.
        recipient: a message's recipient, such as ``functions.search``; empty for the user.
        begins: whether it begins a message that has a recipient.
    """

    text: str = ""
    reasoning: bool = False
    recipient: str = ""
    begins: bool = False


class Reader(Protocol):
    """Splits streamed text into pieces.

    Attributes:
        reasons: whether the current text is reasoning.
    """

    reasons: bool

    def push(self, text: str) -> list[Piece]:
        """Add text -> the pieces that are certain now."""

    def flush(self) -> list[Piece]:
        """The remaining pieces at the end."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How reasoning is marked.

    Attributes:
        begin, end: tags around it; both empty for channels.
        markers: texts that the reader must see even if they are control tokens.
    """

    begin: str = ""
    end: str = ""
    markers: tuple[str, ...] = ()

    def reader(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> Reader:
        """A reader of the output after a prompt, which may end with the opening tag."""
        if not self.end:
            return ChannelReader()
        tail = tokenizer.decode(prompt[-_TAIL:], skip_special=False).rstrip(_SPACE)
        return TagReader(self.begin, self.end, inside=tail.endswith(self.begin.rstrip(_SPACE)))

    def shown_tokens(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The markers that are control tokens."""
        ids = {tokenizer.id_of(marker) for marker in self.markers}
        return tuple(sorted(tokenizer.special_ids & ids))


#: gpt-oss: https://cookbook.openai.com/articles/openai-harmony
HARMONY = ReasoningFormat(
    markers=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
)


def _tags(begin: str, end: str) -> ReasoningFormat:
    return ReasoningFormat(begin, end, (begin, end))


#: Formats with tags; the first one whose end tag occurs in a chat template applies.
_TAGS = (
    _tags("<think>", "</think>"),
    _tags("[THINK]", "[/THINK]"),  # Magistral
    _tags("<seed:think>", "</seed:think>"),
    ReasoningFormat("<|channel>thought\n", "<channel|>", ("<|channel>", "<channel|>")),  # Gemma 4
    _tags("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
)


def reasoning_format(tokenizer: Tokenizer) -> ReasoningFormat | None:
    """A checkpoint's format, from its chat templates; None for a model without reasoning."""
    sources = [template.source for template in tokenizer.chat_templates.values()]
    if any("<|channel|>" in source and "<|message|>" in source for source in sources):
        return HARMONY
    return next((tags for tags in _TAGS if any(tags.end in source for source in sources)), None)


class TagReader:
    """Reads reasoning between two tags at the beginning of the output; later tags are text.

    Args:
        inside: whether the prompt has opened the reasoning.
    """

    def __init__(self, begin: str, end: str, *, inside: bool) -> None:
        self._begin, self._end = begin.rstrip(_SPACE), end
        self.reasons = inside
        self._opened = inside  # whether an opening tag is no longer possible
        self._trims = inside  # whether to drop leading space
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        self._held += text
        if not self._opened and not self._open():
            return []
        found = []
        if self.reasons:
            reasoning, closed, rest = self._held.partition(self._end)
            certain = len(reasoning) if closed else _certain(reasoning, self._end)
            found += self._release(reasoning[:certain].rstrip(_SPACE))
            if not closed:
                return found
            self._held, self.reasons, self._trims = rest, False, True
        return found + self._release(self._held)

    def flush(self) -> list[Piece]:
        self._opened, held = True, self._held
        if self.reasons:
            held = held.rstrip(_SPACE)
        return self._release(held)

    def _open(self) -> bool:
        """Look for the opening tag; False while the held text may be its beginning."""
        start = self._held.lstrip(_SPACE)
        if len(start) < len(self._begin) and self._begin.startswith(start):
            return False
        self._opened = True
        if start.startswith(self._begin):
            self._held, self.reasons, self._trims = start[len(self._begin) :], True, True
        return True

    def _release(self, text: str) -> list[Piece]:
        """Take this beginning off the held text -> its piece."""
        self._held = self._held[len(text) :]
        if self._trims:
            text = text.lstrip(_SPACE)
            self._trims = not text
        return [Piece(text=text, reasoning=self.reasons)] if text else []


#: The end of a message's header, and the ends of its text.
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|start|>", "<|call|>", "<|return|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")
#: Beginnings of a header, which follows the prompt's "<|start|>assistant".
_HEADERS = ("<|", " to=")


class ChannelReader:
    """Reads messages of the harmony format: ``analysis`` is reasoning, messages with a recipient
    are for it, everything else is text, as is output without a header."""

    def __init__(self) -> None:
        self.reasons = False
        self._held = ""
        self._state = "start"  # then "header", "message"
        self._piece = Piece()

    def push(self, text: str) -> list[Piece]:
        self._held += text
        found: list[Piece] = []
        while self._held and getattr(self, f"_read_{self._state}")(found):
            pass
        return found

    def flush(self) -> list[Piece]:
        held, self._held = self._held, ""
        return self._pieces(held) if self._state != "header" else []

    def _read_start(self, found: list[Piece]) -> bool:
        if any(len(self._held) < len(h) and h.startswith(self._held) for h in _HEADERS):
            return False
        self._state = "header" if self._held.startswith(_HEADERS) else "message"
        return True

    def _read_header(self, found: list[Piece]) -> bool:
        header, ended, rest = self._held.partition(_MESSAGE)
        if not ended:
            return False
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self.reasons = channel is not None and channel[1] == "analysis" and recipient is None
        to = recipient[1] if recipient else ""
        self._piece = Piece(reasoning=self.reasons, recipient=to)
        if to:
            found.append(Piece(recipient=to, begins=True))
        self._held, self._state = rest, "message"
        return True

    def _read_message(self, found: list[Piece]) -> bool:
        if match := _END.search(self._held):
            found += self._pieces(self._held[: match.start()])
            self._held, self._state, self.reasons = self._held[match.end() :], "header", False
            return True
        certain = _certain(self._held, *_ENDS)
        found += self._pieces(self._held[:certain])
        self._held = self._held[certain:]
        return False

    def _pieces(self, text: str) -> list[Piece]:
        return [replace(self._piece, text=text)] if text else []


def _certain(text: str, *tags: str) -> int:
    """Length of the text before a suffix that may be the beginning of a tag."""
    for size in range(min(len(text), max(map(len, tags)) - 1), 0, -1):
        if any(tag.startswith(text[-size:]) for tag in tags):
            return len(text) - size
    return len(text)
