"""Proposals by lookup: the tokens that followed the last ones earlier in prompt or completion
(prompt lookup decoding, Saxena 2023)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from exkv.sampling.bounds import check_count


@dataclass(frozen=True, slots=True, kw_only=True)
class NGrams:
    """Propose by lookup.

    Attributes:
        tokens: most tokens to propose at a time.
        longest: length of the longest n-gram to look up; shorter ones follow, down to one token.

    Raises:
        TypeError, ValueError: not an int from 1 to 1024.
    """

    tokens: int = 10
    longest: int = 3

    def __post_init__(self) -> None:
        for name in ("tokens", "longest"):
            check_count(name, getattr(self, name), 1, 1024, "an int from 1 to 1024")


class NGramIndex:
    """A text, and the last position of each of its n-grams, up to the longest."""

    def __init__(self, longest: int, tokens: Iterable[int] = ()) -> None:
        self._longest = longest
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # the position after them
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        known = self._tokens
        for token in tokens:
            end = len(known)
            for n in range(1, min(self._longest, end) + 1):
                self._after[tuple(known[end - n :])] = end
            known.append(token)

    def propose(self, most: int) -> list[int]:
        """The tokens that followed the longest suffix that occurred before, or none. Repetition
        continues beyond the end: ``b a b`` after ``a b a``."""
        known = self._tokens
        for n in range(min(self._longest, len(known)), 0, -1):
            start = self._after.get(tuple(known[-n:]))
            if start is not None:
                period = len(known) - start
                return [known[start + i % period] for i in range(most)]
        return []
