"""What a model writes before it answers: reasoning, told apart from the answer while both are
generated.

Most models put it between two tags (``<think>`` and ``</think>``: DeepSeek, Qwen, GLM, Kimi,
MiniMax), which a chat template may have opened in the prompt already. gpt-oss writes messages on
channels (OpenAI's harmony format), calls of functions among them. Which of these a checkpoint has
is told by its chat template. Tags may be control tokens, which decoded text leaves out unless a job
asks for them (``Job.shown_tokens``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .tokenizer import Tokenizer

_SPACE = " \n\t\r"
#: Tokens at a prompt's end that may open reasoning.
_TAIL = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of what a model writes.

    Attributes:
        reasoning: whether it comes before an answer.
        recipient: what a message is for, such as ``functions.search``; empty for the user.
        begins: whether a message begins with it; only where it has a recipient.
    """

    text: str = ""
    reasoning: bool = False
    recipient: str = ""
    begins: bool = False


class Reader(Protocol):
    """Tells pieces apart as text comes.

    Attributes:
        reasons: whether the text is within reasoning.
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
        markers: texts that must be visible, some of which may be control tokens.
    """

    begin: str = ""
    end: str = ""
    markers: tuple[str, ...] = ()

    def reader(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> Reader:
        """A reader of what follows a prompt, which may have opened the reasoning."""
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
#: Tags, and what of them may be a token; the first whose end a chat template names is the format.
_TAGS = (
    ReasoningFormat("<think>", "</think>", ("<think>", "</think>")),
    ReasoningFormat("[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),  # Magistral
    ReasoningFormat("<seed:think>", "</seed:think>", ("<seed:think>", "</seed:think>")),
    ReasoningFormat(  # Gemma 4
        "<|channel>thought\n", "<channel|>", ("<|channel>", "<channel|>")
    ),
    ReasoningFormat(  # Apertus
        "<|inner_prefix|>", "<|inner_suffix|>", ("<|inner_prefix|>", "<|inner_suffix|>")
    ),
)


def reasoning_format(tokenizer: Tokenizer) -> ReasoningFormat | None:
    """The format of a checkpoint; None for a model that answers at once."""
    sources = [template.source for template in tokenizer.chat_templates.values()]
    if any("<|channel|>" in source and "<|message|>" in source for source in sources):
        return HARMONY
    return next((tags for tags in _TAGS if any(tags.end in source for source in sources)), None)


class TagReader:
    """Reasoning between two tags, at the beginning of a text; a tag that comes later is text.

    Args:
        inside: whether the prompt ends within it.
    """

    def __init__(self, begin: str, end: str, *, inside: bool) -> None:
        self._begin, self._end = begin.rstrip(_SPACE), end
        self.reasons = inside
        self._opened = inside  # nothing to be opened any more
        self._trims = inside  # space is dropped at the beginning of a part
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        self._held += text
        if not self._opened and not self._open():
            return []
        found = []
        if self.reasons:
            reasoning, closed, rest = self._held.partition(self._end)
            certain = len(reasoning) if closed else _certain(reasoning, self._end)
            found += self._taken(reasoning[:certain].rstrip(_SPACE))
            if not closed:
                return found
            self._held, self.reasons, self._trims = rest, False, True
        return found + self._taken(self._held)

    def flush(self) -> list[Piece]:
        self._opened, held = True, self._held
        if self.reasons:
            held = held.rstrip(_SPACE)
        return self._taken(held)

    def _open(self) -> bool:
        """Whether it is known if reasoning comes first; held text may be the beginning of a tag."""
        start = self._held.lstrip(_SPACE)
        if len(start) < len(self._begin) and self._begin.startswith(start):
            return False
        self._opened = True
        if start.startswith(self._begin):
            self._held, self.reasons, self._trims = start[len(self._begin) :], True, True
        return True

    def _taken(self, text: str) -> list[Piece]:
        """A piece of the held text's beginning."""
        self._held = self._held[len(text) :]
        if self._trims:
            text = text.lstrip(_SPACE)
            self._trims = not text
        return [Piece(text=text, reasoning=self.reasons)] if text else []


#: What ends a message's header, and what ends its text.
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|start|>", "<|call|>", "<|return|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")
#: What a header begins with behind the prompt's "<|start|>assistant".
_HEADERS = ("<|", " to=")


class ChannelReader:
    """Messages of the harmony format: ``analysis`` is reasoning, what has a recipient is for that,
    everything else is text. A text without a header is text as a whole."""

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
        return self._said(held) if self._state != "header" else []

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
            found += self._said(self._held[: match.start()])
            self._held, self._state, self.reasons = self._held[match.end() :], "header", False
            return True
        certain = _certain(self._held, *_ENDS)
        found += self._said(self._held[:certain])
        self._held = self._held[certain:]
        return False

    def _said(self, text: str) -> list[Piece]:
        piece = self._piece
        if not text:
            return []
        return [Piece(text=text, reasoning=piece.reasoning, recipient=piece.recipient)]


def _certain(text: str, *tags: str) -> int:
    """How much of a text can't be the beginning of one of the tags."""
    for size in range(min(len(text), max(map(len, tags)) - 1), 0, -1):
        if any(tag.startswith(text[-size:]) for tag in tags):
            return len(text) - size
    return len(text)
