"""Texts that must not occur in a completion, however they are tokenized.

Tokens that may begin a banned text are held back. Once a banned text is complete, the completion
rolls back to before the token in which it begins, and that token is forbidden there. As in
ExLlamaV2's ``banned_strings``, case is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence


class BannedStrings:
    """A set of texts to search for.

    Raises:
        TypeError: not a sequence of texts.
        ValueError: an empty one.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        if isinstance(texts, str) or not isinstance(texts, Sequence):
            raise TypeError(f"banned_strings is {texts!r:.60}; it must be a list of texts")
        for text in texts:
            if not isinstance(text, str):
                raise TypeError(f"banned_strings has {text!r:.60}; it must be a list of texts")
            if not text:
                raise ValueError("an empty text in banned_strings would forbid everything")
        folded = {fold(text) for text in texts}
        self._texts = folded
        self._lengths = sorted({len(text) for text in folded})
        self._beginnings = {text[:n] for text in folded for n in range(1, len(text))}
        self._longest = max(self._lengths, default=0)

    def find(self, text: str) -> int | None:
        """Start of the banned text that ends first in a folded text; None if there is none."""
        for end in range(1, len(text) + 1):
            for length in reversed(self._lengths):
                if length <= end and text[end - length : end] in self._texts:
                    return end - length
        return None

    def may_begin(self, text: str) -> int:
        """Start of the suffix of a folded text that may begin a banned text; its length if none
        does."""
        start = max(0, len(text) - self._longest + 1)
        return next(
            (at for at in range(start, len(text)) if text[at:] in self._beginnings), len(text)
        )


def fold(text: str) -> str:
    """Lower case, character by character, so that positions stay the same."""
    return "".join(low if len(low := char.lower()) == 1 else char for char in text)
