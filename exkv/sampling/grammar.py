"""Constrained output: a grammar that a completion must match.

:class:`Grammar` is a JSON schema, a regular expression, a Lark grammar or a choice of texts;
:class:`Follower` walks it for one completion, and gives the allowed tokens. The parser is
llguidance, an extra (``pip install 'exkv[grammar]'``), with its limits of size and of time a token.
Masks are computed in a thread while the model runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from exkv.text import Tokenizer

_LINES = 3  # of llguidance's errors
_ANCHORS = ("", "\x02", "\n", "|", "a", "0")  # no text merges with all of them
#: llguidance's work for one mask, a quarter of its default: all jobs wait for it.
_STEP_FUEL = 50_000
_SPACE = r"( |\n {0,32})?"  # between JSON's parts: compact or indented, but bounded


class ConstraintState(Protocol):
    """Position of one completion in a :class:`Constraint`; methods as of :class:`Follower`."""

    @property
    def is_over(self) -> bool: ...

    def allowed(self, vocab_size: int) -> Tensor: ...

    def take(self, token: int) -> None: ...

    def valid(self, tokens: Sequence[int]) -> list[int]: ...

    def undo(self, tokens: int) -> None: ...


@runtime_checkable
class Constraint(Protocol):
    """Constrains a completion token by token: a :class:`Grammar`, or the user's own code."""

    def follow(self, tokenizer: Tokenizer) -> ConstraintState:
        """Begin a completion in this tokenizer's tokens."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a whole completion must match; made by :meth:`json_schema`, :meth:`regex`, :meth:`lark`
    or :meth:`choice`.

    Attributes:
        kind, text: as llguidance takes them.
    """

    kind: str
    text: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str | None = None) -> Grammar:
        """JSON that is valid under a schema (a dict, or JSON text); None for any object.

        Raises:
            ValueError: the schema is not a JSON object.
        """
        if schema is None:
            schema = {"type": "object"}
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            found = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the JSON schema is not valid JSON: {str(error)[:200]}") from None
        if not isinstance(found, dict):
            raise ValueError(f"the JSON schema is {text[:60]}; it must be an object")
        return cls("json_schema", text)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A text that matches the whole pattern (in the syntax of Rust's regex)."""
        return cls("regex", _checked_text("a regex", pattern))

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """A text that a Lark grammar derives from its rule ``start``."""
        return cls("lark", _checked_text("a Lark grammar", grammar))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of these texts."""
        if isinstance(texts, str) or not texts or not all(isinstance(t, str) and t for t in texts):
            raise ValueError(f"a choice is {texts!r:.60}; it must be a list of texts")
        return cls("lark", "start: " + " | ".join(map(json.dumps, texts)))

    def follow(self, tokenizer: Tokenizer) -> Follower:
        """Walk the grammar in this tokenizer's tokens, for one completion.

        Raises:
            ValueError: not a grammar, or too large.
            ImportError: llguidance isn't installed.
        """
        library = _llguidance()
        made = getattr(library.LLMatcher, f"grammar_from_{self.kind}")(
            self.text, *(({"whitespace_pattern": _SPACE},) if self.kind == "json_schema" else ())
        )
        limits = library.LLParserLimits(step_lexer_fuel=_STEP_FUEL)
        return Follower(library.LLMatcher(_tokens_of(tokenizer), made, log_level=0, limits=limits))


class Follower:
    """A walk through a grammar.

    Attributes:
        is_over: whether only the end of the text can follow.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._check()
        self.is_over = bool(matcher.is_stopped())
        self._mask = self._begun()

    def allowed(self, vocab_size: int) -> Tensor:
        """The tokens that may follow: bool (vocab_size,), on the host.

        Raises:
            ValueError: the grammar became too complex here.
        """
        mask = torch.frombuffer(bytearray(self._mask.result()), dtype=torch.bool)
        self._check()
        return torch.nn.functional.pad(mask[:vocab_size], (0, max(0, vocab_size - len(mask))))

    def take(self, token: int) -> None:
        """Take an allowed token, and begin to compute those that may follow it.

        Raises:
            ValueError: it isn't allowed, or the grammar became too complex here.
        """
        self._mask.result()  # one user at a time
        self._matcher.consume_token(token)
        self._check()
        self.is_over = bool(self._matcher.is_stopped())
        if not self.is_over:
            self._mask = self._begun()

    def valid(self, tokens: Sequence[int]) -> list[int]:
        """Truncate tokens before the first that isn't allowed."""
        self._mask.result()
        return list(tokens[: self._matcher.validate_tokens(list(tokens))])

    def undo(self, tokens: int) -> None:
        """Roll back the last ``tokens`` tokens."""
        if tokens:
            self._mask.result()
            self._matcher.rollback(tokens)
            self._check()
            self.is_over = bool(self._matcher.is_stopped())
            self._mask = self._begun()

    def _check(self) -> None:
        if self._matcher.is_error():
            said = self._matcher.get_error().split("<state>")[0].strip().splitlines()[:_LINES]
            raise ValueError("the grammar can't be followed: " + "\n".join(x[:200] for x in said))

    def _begun(self) -> Future[bytes]:
        return _worker().submit(self._matcher.compute_logit_bias)


@cache
def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="exkv-grammar")


@cache
def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ImportError(
            "constrained output needs llguidance: pip install 'exkv[grammar]'"
        ) from None
    return llguidance


_KNOWN: WeakKeyDictionary[Tokenizer, Any] = WeakKeyDictionary()


def _tokens_of(tokenizer: Tokenizer) -> Any:
    """llguidance's tokenizer; memoized, since it sorts the vocabulary."""
    if tokenizer not in _KNOWN:
        if not tokenizer.eos_ids:
            raise ValueError(
                f"the tokenizer of {tokenizer.file} has no end-of-text token, which a grammar "
                "needs: set eos_token in tokenizer_config.json"
            )
        library = _llguidance()
        _KNOWN[tokenizer] = library.LLTokenizer(
            library.TokenizerWrapper(_Vocabulary(tokenizer)), eos_token=list(tokenizer.eos_ids)
        )
    return _KNOWN[tokenizer]


class _Vocabulary:
    """What llguidance's TokenizerWrapper reads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [tokenizer.bytes_of(token) for token in range(tokenizer.vocab_size)]
        self._encode = partial(tokenizer.encode, add_bos=False, add_special=False)
        self._by_bytes: dict[bytes, int] = {}
        self._anchors = {anchor: self._encode(anchor) for anchor in _ANCHORS}

    def __call__(self, text: str) -> list[int]:
        """Ids of a text inside another: encoded after an anchor, since sentencepiece inserts a
        space before a text."""
        data = text.encode()
        for anchor, before in self._anchors.items():
            ids = self._encode(anchor + text)
            behind = ids[len(before) :]
            if before == ids[: len(before)] and b"".join(self.tokens[i] for i in behind) == data:
                return behind
        return self._longest(data)

    def _longest(self, data: bytes) -> list[int]:
        """Tokenize greedily by the longest match, for texts that the encoder changes."""
        if not self._by_bytes:
            pairs = ((data, token) for token, data in enumerate(self.tokens) if data)
            special = set(self.special_token_ids)
            self._by_bytes = {data: token for data, token in pairs if token not in special}
        found, at = [], 0
        while at < len(data):
            ends = range(len(data), at, -1)
            end = next((end for end in ends if data[at:end] in self._by_bytes), None)
            if end is None:
                break
            found.append(self._by_bytes[data[at:end]])
            at = end
        return found


def _checked_text(what: str, text: str) -> str:
    if not isinstance(text, str) or not text:
        raise ValueError(f"{what} is {text!r:.60}; it must be a text")
    return text
