"""One completion: decodes its tokens to text, until something ends it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from exkv.errors import Attempt
from exkv.sampling import SamplingParams
from exkv.sampling.banned_strings import BannedStrings, fold
from exkv.sampling.grammar import ConstraintState
from exkv.sampling.logprobs import TokenLogprobs
from exkv.sampling.scores import where_there_is_room
from exkv.text import Tokenizer
from exkv.text.tokenizer import DecoderState, StreamDecoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A final token, and the text that became final with it."""

    token: int
    text: str
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True, kw_only=True)
class _Held:
    """A token that may still be rolled back.

    Attributes:
        piece: the token and text to release.
        end: end of its text within the held text.
        before: the state to roll back to.
    """

    piece: Piece
    end: int
    before: _State


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """The state of a completion before a token."""

    decoder: DecoderState
    stop_held: str
    followed: int


class Completion:
    """The tokens, random generator and text of one completion, and why it ended.

    Args:
        text: finds stop texts.
        seed: of the random numbers; None for torch's generator.
        follower: follows the grammar.
        healed: text that the first token must begin with.
        min_tokens: before this many, a stop id is chosen only if the grammar allows no other
            token.

    Attributes:
        suppressed: banned texts that were rolled back since this was cleared.
    """

    def __init__(
        self,
        prompt: list[int],
        decoder: StreamDecoder,
        text: StopText,
        stop_ids: set[int],
        num_tokens: int,
        seed: int | None,
        follower: ConstraintState | None,
        banned: BannedStrings | None = None,
        healed: Healed | None = None,
        min_tokens: int = 0,
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
        self._followed = 0
        self._banned = banned
        self._forbidden: dict[int, set[int]] = {}  # position -> tokens
        self._held: list[_Held] = []
        self._held_text = ""  # folded
        self._healed = healed
        self._min_tokens = min_tokens if stop_ids else 0
        self.suppressed = ""

    @property
    def is_constrained(self) -> bool:
        """Whether the allowed tokens depend on earlier ones."""
        constraints = (self.follower, self._banned, self._min_tokens or None)
        return any(each is not None for each in constraints)

    def allowed(self, vocab_size: int) -> Tensor | None:
        """The tokens that may come next: bool (vocab_size,) on the host; None for all."""
        forbidden = self._forbidden.get(len(self.new_ids))
        healed = self._healed if not self.new_ids else None
        early = len(self.new_ids) < self._min_tokens
        if self.follower is None and healed is None and not forbidden and not early:
            return None
        if self.follower is not None:
            mask = self.follower.allowed(vocab_size)
        else:
            mask = torch.ones(vocab_size, dtype=torch.bool)
        if healed is not None:
            mask &= healed.allowed(vocab_size)
        if early:
            going = mask.clone()
            going[list(self._stop_ids)] = False
            mask = going if going.any() else mask
        if forbidden:
            mask[list(forbidden)] = False
        return mask

    def take(
        self, token: int, *, cache_full: bool, logprobs: TokenLogprobs | None = None
    ) -> list[Piece]:
        """Add a token, and return what became final. A banned text rolls back instead."""
        state = None if self._banned is None else self._state()
        held_before = len(self._text.held)
        self.new_ids.append(token)
        self.history.add(token)
        self.reason = "eos" if token in self._stop_ids else ""
        text = "" if self.reason else self._decoded(token)
        piece = self._text.push(text)
        self.reason = self.reason or self._reason_after(token, cache_full)
        if self.reason not in ("", "stop"):
            rest = self._decoder.flush()
            piece += self._text.push(rest) + self._text.flush()
            text += rest
        found = Piece(token=token, text=piece, logprobs=logprobs)
        if state is None:
            return [found]
        if self.reason == "stop":  # banned texts don't count in what a stop text cuts off
            taken = held_before + len(text) - len(piece)
            self._held_text, text = (self._held_text + text)[: -taken or None], ""
        return self._checked(found, fold(text), state)

    def _decoded(self, token: int) -> str:
        skip = 0 if self._healed is None or len(self.new_ids) > 1 else len(self._healed.data)
        return self._decoder.push(token, skip)

    def _reason_after(self, token: int, cache_full: bool) -> str:
        """The reason to end after this token; "" to continue."""
        if self._text.found:
            return "stop"
        if self.follower is not None:
            self.follower.take(token)
            self._followed += 1
            if self.follower.is_over:
                return "grammar"
        if cache_full:
            return "cache_full"
        return "length" if len(self.new_ids) == self._num_tokens else ""

    # Banned texts ------------------------------------------------------------------------------

    def _state(self) -> _State:
        return _State(
            decoder=self._decoder.state, stop_held=self._text.held, followed=self._followed
        )

    def _checked(self, piece: Piece, text: str, before: _State) -> list[Piece]:
        """Hold a piece, and return the final ones; rolls back a banned text."""
        assert self._banned is not None
        self._held_text += text
        self._held.append(_Held(piece=piece, end=len(self._held_text), before=before))
        at = self._banned.find(self._held_text)
        if at is not None:
            self._roll_back(at)
            return []
        if self.reason:
            return [held.piece for held in self._held]
        return self._released(self._banned)

    def _released(self, banned: BannedStrings) -> list[Piece]:
        """Release the held tokens in which no banned text can begin any more. Tokens after them may
        be rolled back, so the released text by itself must not begin one, either."""
        safe = banned.may_begin(self._held_text)
        ends = [0, *(held.end for held in self._held)]
        count = next(
            n
            for n in range(len(self._held), -1, -1)
            if ends[n] <= safe and banned.may_begin(self._held_text[: ends[n]]) == ends[n]
        )
        released, self._held = self._held[:count], self._held[count:]
        self._held_text = self._held_text[ends[count] :]
        for held in self._held:
            held.end -= ends[count]
        first_held = len(self.new_ids) - len(self._held)
        self._forbidden = {at: ids for at, ids in self._forbidden.items() if at >= first_held}
        return [held.piece for held in released]

    def _roll_back(self, at: int) -> None:
        """Roll back to before the token at this position of the held text, and forbid it there."""
        index = next(n for n, held in enumerate(self._held) if held.end > at)
        first, count = self._held[index], len(self._held) - index
        self.suppressed += "".join(held.piece.text for held in self._held[index:])
        place = len(self.new_ids) - count
        del self.new_ids[place:], self._held[index:]
        self.history.drop(count)
        self._held_text = self._held_text[: self._held[-1].end if self._held else 0]
        self._forbidden = {at: ids for at, ids in self._forbidden.items() if at <= place}
        self._forbidden.setdefault(place, set()).add(first.piece.token)
        self._decoder.state = first.before.decoder
        self._text.held, self._text.found = first.before.stop_held, False
        if self.follower is not None:
            self.follower.undo(self._followed - first.before.followed)
        self._followed = first.before.followed
        self.reason = ""


class Healed:
    """The text of a prompt's last token, with which the completion's first token must begin."""

    def __init__(self, data: bytes, ids: Sequence[int]) -> None:
        self.data = data
        self._ids = list(ids)

    @classmethod
    def of(cls, prompt: Sequence[int], tokenizer: Tokenizer) -> Healed | None:
        """The healed end of a prompt; None if the prompt is a single token, or ends in a control
        token."""
        last = prompt[-1]
        data = b"" if last in tokenizer.special_ids else tokenizer.bytes_of(last)
        if len(prompt) < 2 or not data:
            return None
        return cls(data, tokenizer.ids_beginning(data))

    def allowed(self, vocab_size: int) -> Tensor:
        """The tokens that begin with the text: bool (vocab_size,)."""
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        mask[self._ids] = True
        return mask


class _History:
    """Prompt and completion so far, for the sampler: an array, since appending to a tensor would
    take an op in every step; on an accelerator, where an op is cheaper than a copy, a tensor."""

    def __init__(self, prompt: Sequence[int], room: int) -> None:
        self._ids = np.empty(room, dtype=np.int64)
        self._ids[: len(prompt)] = prompt
        self._length = len(prompt)
        self._there: Tensor | None = None
        self._arrived = 0

    def add(self, token: int) -> None:
        self._ids[self._length] = token
        self._length += 1

    def drop(self, count: int) -> None:
        """Drop the last tokens."""
        self._length -= count
        self._arrived = min(self._arrived, self._length)

    def on(self, device: torch.device) -> Tensor:
        """int64 (tokens,); on the host if the device is full."""
        ids = torch.from_numpy(self._ids[: self._length])
        if device.type == "cpu":
            return ids
        if self._there is None:
            with Attempt():
                self._there = torch.empty(len(self._ids), dtype=torch.int64, device=device)
        if self._there is None:
            return ids
        if self._length - self._arrived == 1:
            self._there[self._arrived] = int(self._ids[self._arrived])
        else:
            self._there[self._arrived : self._length] = ids[self._arrived :].to(device)
        self._arrived = self._length
        return self._there[: self._length]


class StopText:
    """Passes text through until a stop text appears.

    Attributes:
        held: text that may begin a stop text.
        found: whether one has appeared.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("an empty text in stop would end every completion at once")
        self._stops = stops
        self.held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Add text, and return what is final; nothing after a stop text."""
        if self.found:
            return ""
        text = self.held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.found, self.held = True, ""
            _, start = min(found)  # the first to be complete, however the text is split
            return text[:start]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Release the held text at the end."""
        held, self.held = self.held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of ``text`` that begins ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def only_allowed(logits: Tensor, completions: Sequence[Completion]) -> Tensor:
    """Logits (B, V), -inf for tokens that a row's completion doesn't allow."""
    masks = [completion.allowed(logits.shape[1]) for completion in completions]
    if all(mask is None for mask in masks):
        return logits
    allowed = torch.ones(logits.shape, dtype=torch.bool)
    for row, mask in zip(allowed, masks, strict=True):
        if mask is not None:
            row &= mask
    return where_there_is_room(lambda x: x.masked_fill(~allowed.to(x.device), -math.inf), logits)


def read_stops(stop: str | Sequence[str | int]) -> tuple[list[int], list[str]]:
    """Split stops into token ids and texts."""
    stops = [stop] if isinstance(stop, str | int) else list(stop)
    for each in stops:
        if isinstance(each, bool) or not isinstance(each, str | int):
            raise TypeError(f"stop has {each!r}; it must have texts and token ids only")
    ids = [each for each in stops if isinstance(each, int)]
    return ids, [each for each in stops if isinstance(each, str)]


def checked_settings(settings: SamplingParams | None) -> SamplingParams:
    if settings is not None and not isinstance(settings, SamplingParams):
        raise TypeError(
            f"settings is a {type(settings).__name__}; it must be SamplingParams: model.generate "
            "takes a GenerationConfig"
        )
    return settings or SamplingParams()
