"""Filters, which determine the tokens that may come next.

``ExLlamaV2Filter`` is the base class, from which lm-format-enforcer and formatron derive theirs.
ExLlamaV2's own two filters are implemented by exkv's grammars. :class:`Filters` combines several
into the constraint of one exkv job.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exkv import Grammar, Tokenizer
from exkv.compat.exllamav2.missing import Adapter, missing_from
from exkv.sampling.grammar import ConstraintState


class ExLlamaV2Filter(Adapter):
    """Base class: a subclass has ``begin``, ``feed`` and ``next``."""

    #: ``next`` may return lists instead of sets.
    allow_return_type_list = True
    sequence_str = ""

    def __init__(self, model: object, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer

    def clone(self, c: ExLlamaV2Filter | None = None) -> ExLlamaV2Filter:
        """Copy the filter, into ``c`` if that is given."""
        if c is None:
            return copy.copy(self)
        vars(c).update(vars(self))
        return c

    def begin(self, prefix_str: str) -> None:
        """Begin a completion."""
        raise NotImplementedError(f"{type(self).__name__} has no begin(prefix_str)")

    def feed(self, token: Tensor) -> None:
        """Take the chosen token, int64 (1, 1)."""
        raise NotImplementedError(f"{type(self).__name__} has no feed(token)")

    def next(self) -> tuple[Collection[int] | None, Collection[int] | None]:
        """The allowed tokens (None for all), and those of them that end the completion."""
        raise NotImplementedError(f"{type(self).__name__} has no next()")

    def use_background_worker(self) -> bool:
        """Without effect: exkv calls filters when it needs them."""
        return False

    def can_mask_logits(self) -> bool:
        """Without effect: exkv calls :meth:`next`."""
        return False


class GrammarFilter(ExLlamaV2Filter):
    """A filter that is implemented by an exkv grammar.

    Attributes:
        exkv: the :class:`exkv.Grammar` that does the work.
    """

    def __init__(self, model: object, tokenizer: Any, grammar: Grammar) -> None:
        super().__init__(model, tokenizer)
        self.exkv = grammar

    def begin(self, prefix_str: str = "") -> None:
        self._state = self.exkv.follow(self.tokenizer.exkv)

    def feed(self, token: Tensor) -> None:
        self._state.take(int(token))

    def next(self) -> tuple[list[int], list[int]]:
        if self._state.is_over:
            return [], []
        allowed = self._state.allowed(self.tokenizer.config.vocab_size)
        return allowed.nonzero().flatten().tolist(), []


class ExLlamaV2SelectFilter(GrammarFilter):
    """Makes the completion one of these texts."""

    def __init__(
        self,
        model: object,
        tokenizer: object,
        options: Sequence[str],
        case_insensitive: bool = False,
    ) -> None:
        self.options, self.case_insensitive = list(options), case_insensitive
        if case_insensitive:
            grammar = Grammar.regex(f"(?i:{'|'.join(map(re.escape, self.options))})")
        else:
            grammar = Grammar.choice(self.options)
        super().__init__(model, tokenizer, grammar)


class ExLlamaV2PrefixFilter(GrammarFilter):
    """Makes the completion begin with this text, or with one of these."""

    def __init__(
        self, model: object, tokenizer: object, prefix_strings: str | Sequence[str]
    ) -> None:
        texts = [prefix_strings] if isinstance(prefix_strings, str) else list(prefix_strings)
        self.prefix_strings = texts
        begins = "|".join(map(re.escape, texts))
        super().__init__(model, tokenizer, Grammar.regex(f"(?:{begins})(?s:.*)"))


@dataclass(frozen=True, slots=True)
class Filters:
    """Several filters as one constraint, which allows the tokens that all of them allow.

    Attributes:
        prefer_eos: end as soon as all filters allow it.
    """

    filters: tuple[Any, ...]
    prefer_eos: bool

    def follow(self, tokenizer: Tokenizer) -> _Following:
        states = [
            each.exkv.follow(tokenizer) if isinstance(each, GrammarFilter) else _PythonFilter(each)
            for each in self.filters
        ]
        return _Following(states, tokenizer.eos_ids if self.prefer_eos else ())


class _Following:
    """One completion under several constraints."""

    def __init__(self, states: Sequence[ConstraintState], preferred: Sequence[int]) -> None:
        self._states, self._preferred = states, list(preferred)

    @property
    def is_over(self) -> bool:
        return any(state.is_over for state in self._states)

    def allowed(self, vocab_size: int) -> Tensor:
        masks = [state.allowed(vocab_size) for state in self._states]
        mask = torch.stack(masks).all(0)
        ends = torch.zeros_like(mask)
        ends[[token for token in self._preferred if token < vocab_size]] = True
        return mask & ends if (mask & ends).any() else mask

    def take(self, token: int) -> None:
        for state in self._states:
            state.take(token)

    def valid(self, tokens: Sequence[int]) -> list[int]:
        for state in self._states:
            tokens = state.valid(tokens)
        return list(tokens)

    def undo(self, tokens: int) -> None:
        for state in self._states:
            state.undo(tokens)


class _PythonFilter:
    """One completion under a filter that is written in Python."""

    def __init__(self, wrapped: Any) -> None:
        self._filter = wrapped
        self._fed: list[int] = []
        self._ends: frozenset[int] = frozenset()
        self.is_over = False
        wrapped.begin("")

    def allowed(self, vocab_size: int) -> Tensor:
        passed, ends = self._filter.next()
        self._ends = frozenset(ends or ())
        if passed is None:
            return torch.ones(vocab_size, dtype=torch.bool)
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        mask[[token for token in passed if token < vocab_size]] = True
        return mask

    def take(self, token: int) -> None:
        self.is_over = token in self._ends
        self._fed.append(token)
        self._filter.feed(torch.tensor([[token]]))

    def valid(self, tokens: Sequence[int]) -> list[int]:
        return list(tokens)

    def undo(self, tokens: int) -> None:
        kept, self._fed = self._fed[: len(self._fed) - tokens], []
        self._filter.begin("")
        for token in kept:
            self._filter.next()
            self.take(token)
        self.is_over = False


def filters_of(call: str, filters: Any, prefer_eos: bool = False) -> Filters | None:
    """The constraint of a list of filters; None for no filters.

    Raises:
        TypeError: an entry is not a filter.
    """
    if not filters:
        return None
    if not isinstance(filters, list | tuple):
        raise TypeError(f"{call}: filters is a {type(filters).__name__}; give a list")
    for each in filters:
        if not all(hasattr(each, name) for name in ("begin", "feed", "next")):
            raise TypeError(f"{call}: {each!r:.60} is not a filter: it has no begin, feed and next")
    return Filters(tuple(filters), prefer_eos)


__getattr__ = missing_from(__name__)
