"""Texts that must not come up in a completion, in whatever tokens they are written.

While the end of a text may be the beginning of a banned one, it is held back, with its tokens. Once
a banned text is complete, the completion goes back to before the token in which it begins, and that
token is forbidden at that place. (ExLlamaV2's ``banned_strings``; letters count alike in upper and
lower case, as there.)
"""

from __future__ import annotations

from collections.abc import Sequence


class BannedStrings:
    """The texts, ready to be looked for.

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
        """Where in a folded text the banned one begins that is complete first."""
        for end in range(1, len(text) + 1):
            for length in reversed(self._lengths):
                if length <= end and text[end - length : end] in self._texts:
                    return end - length
        return None

    def threatened(self, text: str) -> int:
        """From where on a folded text may be the beginning of a banned one."""
        start = max(0, len(text) - self._longest + 1)
        return next(
            (at for at in range(start, len(text)) if text[at:] in self._beginnings), len(text)
        )


def fold(text: str) -> str:
    """In lower case, character by character, so that places in it stay what they are."""
    return "".join(low if len(low := char.lower()) == 1 else char for char in text)
