"""Proposals by lookup: what followed the last tokens where they came up before, in the prompt or in
what was written since (prompt lookup decoding, Saxena 2023)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from exkv.sampling.bounds import check_count


@dataclass(frozen=True, slots=True, kw_only=True)
class NGrams:
    """Propose by lookup.

    Attributes:
        tokens: proposed at most at a time.
        longest: the last so many tokens are looked for, then one less, down to one.

    Raises:
        TypeError, ValueError: a number that is none, or below 1.
    """

    tokens: int = 10
    longest: int = 3

    def __post_init__(self) -> None:
        for name in ("tokens", "longest"):
            check_count(name, getattr(self, name), 1, 1024, "an int from 1 to 1024")


class NGramIndex:
    """A text, and where each n tokens in a row of it came up last.

    Args:
        longest: n at most.
    """

    def __init__(self, longest: int, tokens: Iterable[int] = ()) -> None:
        self._longest = longest
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # where what followed them lies
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add what comes behind."""
        known = self._tokens
        for token in tokens:
            end = len(known)
            for n in range(1, min(self._longest, end) + 1):
                self._after[tuple(known[end - n :])] = end
            known.append(token)

    def propose(self, most: int) -> list[int]:
        """What followed the longest end of the text that came up before; nothing where none did.

        A text that repeats itself is followed beyond its end: behind ``a b a`` comes ``b a b``.
        """
        known = self._tokens
        for n in range(min(self._longest, len(known)), 0, -1):
            start = self._after.get(tuple(known[-n:]))
            if start is not None:
                period = len(known) - start
                return [known[start + i % period] for i in range(most)]
        return []
