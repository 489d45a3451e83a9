"""One completion under way: what is chosen token by token becomes text, until something ends it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from exkv.text import StreamDecoder

from .choosable import where_there_is_room
from .grammar import Follower
from .sampler import SamplingParams


class Completion:
    """One completion: its tokens, its random numbers, its text, and why it ended."""

    def __init__(
        self,
        prompt: list[int],
        decoder: StreamDecoder,
        text: StopText,
        stop_ids: set[int],
        num_tokens: int,
        seed: int | None,
        follower: Follower | None,
    ) -> None:
        self.prompt = prompt
        self.new_ids: list[int] = []
        self.reason = ""
        self.history = _History(prompt, len(prompt) + num_tokens)
        self.rng = None if seed is None else torch.Generator().manual_seed(seed)
        self._decoder = decoder
        self._text = text
        self._stop_ids = stop_ids
        self._num_tokens = num_tokens
        self.follower = follower

    def take(self, token: int, *, cache_full: bool) -> str:
        """Add a token; the text that became final."""
        self.new_ids.append(token)
        self.history.add(token)
        if token in self._stop_ids:
            self.reason = "eos"
            return self._text.push(self._decoder.flush()) + self._text.flush()
        piece = self._text.push(self._decoder.push(token))
        self.reason = self._reason_after(token, cache_full)
        if self.reason not in ("", "stop"):
            piece += self._text.push(self._decoder.flush())
            piece += self._text.flush()
        return piece

    def _reason_after(self, token: int, cache_full: bool) -> str:
        """Why it ends with this token, which no text follows from; "" if it doesn't."""
        if self._text.found:
            return "stop"
        if self.follower is not None:
            self.follower.take(token)
            if self.follower.is_over:
                return "grammar"
        if cache_full:
            return "cache_full"
        return "length" if len(self.new_ids) == self._num_tokens else ""


class _History:
    """Prompt and completion so far, where the sampler looks at them.

    Kept as an array, since to add a token to a tensor would be a call of an op in every step; on
    an accelerator, where an op is cheaper than a copy, as a tensor.
    """

    def __init__(self, prompt: Sequence[int], room: int) -> None:
        self._ids = np.empty(room, dtype=np.int64)
        self._ids[: len(prompt)] = prompt
        self._length = len(prompt)
        self._there: Tensor | None = None
        self._arrived = 0

    def add(self, token: int) -> None:
        self._ids[self._length] = token
        self._length += 1

    def on(self, device: torch.device) -> Tensor:
        """int64 (tokens,); on the host where the device has no room."""
        ids = torch.from_numpy(self._ids[: self._length])
        if device.type == "cpu":
            return ids
        try:
            if self._there is None:
                self._there = torch.empty(len(self._ids), dtype=torch.int64, device=device)
        except torch.OutOfMemoryError:
            return ids
        if self._length - self._arrived == 1:
            self._there[self._arrived] = int(self._ids[self._arrived])
        else:
            self._there[self._arrived : self._length] = ids[self._arrived :].to(device)
        self._arrived = self._length
        return self._there[: self._length]


class StopText:
    """Passes text through until a stop text appears; holds back what might become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("an empty text in stop would end every completion at once")
        self._stops = stops
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Add text; what is final of it. After a stop text was found, nothing is."""
        if self.found:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.found, self._held = True, ""
            _, start = min(found)  # the one that is complete first, however the text was cut
            return text[:start]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back and turned out not to be a stop text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def only_allowed(logits: Tensor, followers: Sequence[Follower | None]) -> Tensor:
    """Logits (B, V), -inf where a row's grammar doesn't allow a token."""
    if not any(followers):
        return logits
    allowed = torch.ones(logits.shape, dtype=torch.bool)
    for row, follower in zip(allowed, followers, strict=True):
        if follower is not None:
            row &= follower.allowed(len(row))
    return where_there_is_room(lambda x: x.masked_fill(~allowed.to(x.device), -math.inf), logits)


def read_stops(stop: str | Sequence[str | int]) -> tuple[list[int], list[str]]:
    """Ids and texts that end a completion."""
    stops = [stop] if isinstance(stop, str | int) else list(stop)
    for each in stops:
        if isinstance(each, bool) or not isinstance(each, str | int):
            raise TypeError(f"stop has {each!r}; it must be texts and token ids")
    ids = [each for each in stops if isinstance(each, int)]
    return ids, [each for each in stops if isinstance(each, str)]


def checked_settings(settings: SamplingParams | None) -> SamplingParams:
    if settings is not None and not isinstance(settings, SamplingParams):
        raise TypeError(
            f"settings is a {type(settings).__name__}; it must be SamplingParams: model.generate "
            "takes a GenerationConfig"
        )
    return settings or SamplingParams()
