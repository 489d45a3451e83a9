"""Filters, which are grammars here: what each lets through is known when it is built.

A filter that decides token by token in Python has no grammar: see ``exkv.sampling.grammar``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from exkv import Grammar
from exkv.compat.exllamav2.gone import Adapter, check_kind, gone, missing_from, refuse_arguments

ExLlamaV2Filter = gone("ExLlamaV2Filter", __name__)


class GrammarFilter(Adapter):
    """What the filters below share.

    Attributes:
        exkv: the :class:`exkv.Grammar` that does the work.
    """

    def __init__(self, model: object, tokenizer: object, grammar: Grammar) -> None:
        self.model, self.tokenizer, self.exkv = model, tokenizer, grammar

    def clone(self, c: object = None) -> GrammarFilter:
        """Itself: a grammar is followed from its beginning wherever it is used."""
        return self


class ExLlamaV2SelectFilter(GrammarFilter):
    """The completion is one of these texts."""

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
    """The completion begins with this text, or one of these."""

    def __init__(
        self, model: object, tokenizer: object, prefix_strings: str | Sequence[str]
    ) -> None:
        texts = [prefix_strings] if isinstance(prefix_strings, str) else list(prefix_strings)
        self.prefix_strings = texts
        begins = "|".join(map(re.escape, texts))
        super().__init__(model, tokenizer, Grammar.regex(f"(?:{begins})(?s:.*)"))


def grammar_of(call: str, filters: Any, prefer_eos: bool = False) -> Grammar | None:
    """The grammar of a list of filters.

    Raises:
        ValueError: more than one filter, or ``filter_prefer_eos``.
        TypeError: something that is none of the filters here.
    """
    refuse_arguments(call, filter_prefer_eos=prefer_eos)
    if not filters:
        return None
    if not isinstance(filters, list):
        raise TypeError(f"{call}: filters is a {type(filters).__name__}; give a list")
    if len(filters) > 1:
        raise ValueError(
            f"{call} got {len(filters)} filters, and takes one: join them to one grammar"
        )
    check_kind("a filter", filters[0], GrammarFilter)
    return filters[0].exkv


__getattr__ = missing_from(__name__)
