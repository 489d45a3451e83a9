"""Text from a model: prefill, decode, stream; the loop that a user of the library would write.

``Generator.stream`` for one prompt as it is written, ``generate_simple`` for one or many at once.
Both run ``_run`` over a ``Runner``: what the cache holds of a prompt already is kept, the rest is
prefilled, then one token a step is sampled for every row that still goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from exkv.cache import KVCache
from exkv.models import Transformer
from exkv.text import StreamDecoder, Tokenizer

from .choosable import where_there_is_room
from .grammar import Follower, Grammar
from .runner import Runner
from .sampler import SamplingParams, sample_placed
from .validation import check_count

#: A text, or token ids.
Prompt: TypeAlias = str | Sequence[int]


@dataclass(slots=True, kw_only=True)
class GenerationStats:
    """The last run in numbers; times in seconds, tokens over all rows.

    Attributes:
        cached_tokens: tokens of the prompts that the cache held already.
        stop_reasons: for each row ``"eos"``, ``"stop"``, ``"length"`` (num_tokens reached),
            ``"grammar"`` (it allows nothing more), ``"cache_full"``, or ``""`` while it goes on.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    stop_reasons: tuple[str, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Decode speed over all rows; the first token of each row belongs to the prefill."""
        decoded = self.new_tokens - len(self.stop_reasons)
        return decoded / self.decode_seconds if self.decode_seconds > 0 else 0.0


class Generator:
    """Generates with one model, one cache and one tokenizer.

    Attributes:
        stats: numbers of the last run.
    """

    def __init__(self, model: Transformer, cache: KVCache, tokenizer: Tokenizer) -> None:
        given = {"model": model, "cache": cache, "tokenizer": tokenizer}
        for (name, value), kind in zip(
            given.items(), (Transformer, KVCache, Tokenizer), strict=True
        ):
            if not isinstance(value, kind):
                raise TypeError(f"{name} is a {type(value).__name__}; it must be exkv's")
        self._runner = Runner(model, cache)
        self.tokenizer = tokenizer
        self.stats = GenerationStats()

    @property
    def model(self) -> Transformer:
        return self._runner.model

    @property
    def cache(self) -> KVCache:
        return self._runner.cache

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Generator can't be pickled or copied: build another one from a model, a cache and a "
            "tokenizer; cache.save(file) keeps what was generated"
        )

    def warmup(self) -> None:
        """Run one token, so that the first prompt doesn't pay for what happens once (reading
        lazily loaded units, library set-up). The cache is left as it was."""
        before = self.cache.seq_lens
        if before[0] < self.cache.max_seq_len:
            ids = torch.zeros((1, 1), dtype=torch.int64)
            self.model.forward(ids, self.cache, last_id_only=True)
            self.cache.crop(before)

    def generate_simple(
        self,
        prompt: Prompt | Sequence[Prompt],
        settings: SamplingParams | None = None,
        num_tokens: int = 128,
        seed: int | None = None,
        *,
        stop: str | Sequence[str | int] = (),
        grammar: Grammar | None = None,
        completion_only: bool = False,
        encode_special_tokens: bool = True,
    ) -> str | list[str]:
        """Complete one prompt, or a list of prompts as one batch.

        Args:
            prompt: text or token ids, or a list of either; rows may be of unlike length.
            settings: how to sample; None for ``SamplingParams()``.
            num_tokens: the most tokens to generate for each.
            seed: makes the run repeatable on any split; row ``i`` draws as a run alone with
                ``seed + i`` does.
            stop: texts and token ids that end a completion and are left out of it. The model's
                own end-of-sequence tokens always do.
            grammar: what each completion must be, see :class:`Grammar`.
            completion_only: leave the prompt out of what is returned.
            encode_special_tokens: take special tokens written in the prompt as such.

        Returns:
            The text, or a list of texts if a list of prompts was given.

        Raises:
            ValueError: a prompt that is empty or longer than the cache, too many prompts, a number
                that makes no sense, or logits that no token can be chosen by.
            TypeError: an argument that isn't what it should be.
        """
        single, prompts = _as_prompts(prompt)
        run = self._run(prompts, settings, num_tokens, seed, stop, grammar, encode_special_tokens)
        rows = [""] * len(prompts)
        for pieces in run:
            rows = [text + piece for text, piece in zip(rows, pieces, strict=True)]
        if not completion_only:
            shown = [p if isinstance(p, str) else self.tokenizer.decode(p) for p in prompts]
            rows = [before + text for before, text in zip(shown, rows, strict=True)]
        return rows[0] if single else rows

    def stream(
        self,
        prompt: Prompt,
        settings: SamplingParams | None = None,
        num_tokens: int = 128,
        seed: int | None = None,
        *,
        stop: str | Sequence[str | int] = (),
        grammar: Grammar | None = None,
        encode_special_tokens: bool = True,
    ) -> Iterator[str]:
        """Complete one prompt, yielding text as it is final: never half a character, never the
        beginning of a stop text. Arguments and errors as for :meth:`generate_simple`.

        It may be dropped at any time; the cache then holds what was generated so far, and a
        prompt that begins with the same tokens goes on from there.
        """
        run = self._run([prompt], settings, num_tokens, seed, stop, grammar, encode_special_tokens)
        for (piece,) in run:
            if piece:
                yield piece

    def _encode(self, prompt: Prompt, special: bool) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, add_special=special)
        else:
            several = isinstance(prompt, Sequence)
            if not several or not all(isinstance(token, int) for token in prompt):
                raise TypeError(f"a prompt is {prompt!r:.60}: give a text or token ids")
            ids = list(prompt)
        if not ids:
            raise ValueError("a prompt is empty: give at least one token")
        if len(ids) > self.cache.max_seq_len:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, and the cache holds max_seq_len = "
                f"{self.cache.max_seq_len}: shorten it, or build a longer cache"
            )
        return ids

    def _run(
        self,
        prompts: Sequence[Prompt],
        settings: SamplingParams | None,
        num_tokens: int,
        seed: int | None,
        stop: str | Sequence[str | int],
        grammar: Grammar | None,
        special: bool,
    ) -> Iterator[list[str]]:
        """Yield the text that each row gained, a step at a time."""
        settings = _checked_settings(settings).for_tokenizer(self.tokenizer)
        rows = self._rows(prompts, num_tokens, seed, stop, grammar, special)
        with self._runner.leased("a Generator"):
            yield from self._steps(rows, settings)

    def _steps(self, rows: list[_Row], settings: SamplingParams) -> Iterator[list[str]]:
        stats = self.stats = GenerationStats(prompt_tokens=sum(len(row.prompt) for row in rows))
        started = time.perf_counter()
        logits = self._runner.prefill([row.prompt for row in rows])
        stats.cached_tokens = self._runner.cached_tokens
        while True:
            pieces, placed = self._sample(rows, logits, settings)
            del logits  # not to be there beside those of the next step
            now = time.perf_counter()
            if not stats.new_tokens:
                stats.prefill_seconds, started = now - started, now
            stats.decode_seconds = now - started
            stats.new_tokens = sum(len(row.new_ids) for row in rows)
            stats.stop_reasons = tuple(row.reason for row in rows)
            yield pieces
            if all(row.reason for row in rows):
                return
            newest = [row.new_ids[-1] for row in rows]
            logits = self._runner.step(newest, [not row.reason for row in rows], placed)

    def _rows(
        self,
        prompts: Sequence[Prompt],
        num_tokens: int,
        seed: int | None,
        stop: str | Sequence[str | int],
        grammar: Grammar | None,
        special: bool,
    ) -> list[_Row]:
        """A completion for each prompt; errors as of :meth:`generate_simple`."""
        if not 0 < len(prompts) <= self.cache.batch_size:
            raise ValueError(
                f"{len(prompts)} prompts, and the cache has batch_size = {self.cache.batch_size}"
            )
        check_count("num_tokens", num_tokens, 1, 2**31 - 1, "an int from 1 to 2**31 - 1")
        if seed is not None:
            check_count("seed", seed, 0, 2**62, "an int from 0 to 2**62, or None")
        if not isinstance(grammar, Grammar | None):
            raise TypeError(f"grammar is a {type(grammar).__name__}; it must be a Grammar")
        stop_ids, stop_texts = _stops(stop)
        ids = [self._encode(prompt, special) for prompt in prompts]
        return [
            _Row(
                ids[index],
                # A text goes on from its prompt's last word; an answer begins on its own.
                self.tokenizer.stream(after=ids[index] if isinstance(prompt, str) else ()),
                StopText(stop_texts),
                {*self.tokenizer.eos_ids, *stop_ids},
                min(num_tokens, self.cache.max_seq_len + 1),
                None if seed is None else seed + index,
                None if grammar is None else grammar.follow(self.tokenizer),
            )
            for index, prompt in enumerate(prompts)
        ]

    def _sample(
        self, rows: list[_Row], logits: Tensor, settings: SamplingParams
    ) -> tuple[list[str], Tensor | None]:
        """Choose a token for every row that goes on; the text that each row gained, and the tokens
        on the device if they were chosen there for all rows."""
        going = [index for index, row in enumerate(rows) if not row.reason]
        history = (
            [rows[i].history.on(logits.device) for i in going] if settings.needs_history else None
        )
        generators = [rng for i in going if (rng := rows[i].rng) is not None]
        wanted = logits if len(going) == len(rows) else logits[going]
        wanted = _only_allowed(wanted, [rows[i].follower for i in going])
        tokens, placed = sample_placed(wanted, settings, history, generators or None)
        pieces = [""] * len(rows)
        for index, token in zip(going, tokens.tolist(), strict=True):
            full = self.cache.seq_lens[index] >= self.cache.max_seq_len
            pieces[index] = rows[index].take(token, cache_full=full)
        everywhere = len(going) == len(rows) and not placed.is_cpu
        return pieces, placed if everywhere else None


def _only_allowed(logits: Tensor, followers: Sequence[Follower | None]) -> Tensor:
    """Logits (B, V), -inf where a row's grammar doesn't allow a token."""
    if not any(followers):
        return logits
    allowed = torch.ones(logits.shape, dtype=torch.bool)
    for row, follower in zip(allowed, followers, strict=True):
        if follower is not None:
            row &= follower.allowed(len(row))
    return where_there_is_room(lambda x: x.masked_fill(~allowed.to(x.device), -math.inf), logits)


class _Row:
    """One completion under way: its tokens, its random numbers, its text, and why it ended."""

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


def _as_prompts(given: Prompt | Sequence[Prompt]) -> tuple[bool, Sequence[Prompt]]:
    """Whether it is one prompt, and the prompts; each is checked when it is encoded."""
    several = isinstance(given, Sequence) and not isinstance(given, str)
    if several and not (given and isinstance(given[0], int)):
        return False, cast(Sequence[Prompt], given)
    return True, [cast(Prompt, given)]


def _checked_settings(settings: SamplingParams | None) -> SamplingParams:
    if settings is not None and not isinstance(settings, SamplingParams):
        raise TypeError(
            f"settings is a {type(settings).__name__}; it must be SamplingParams: model.generate "
            "takes a GenerationConfig"
        )
    return settings or SamplingParams()


def _stops(stop: str | Sequence[str | int]) -> tuple[list[int], list[str]]:
    """Ids and texts that end a completion."""
    stops = [stop] if isinstance(stop, str | int) else list(stop)
    for each in stops:
        if isinstance(each, bool) or not isinstance(each, str | int):
            raise TypeError(f"stop has {each!r}; it must be texts and token ids")
    ids = [each for each in stops if isinstance(each, int)]
    return ids, [each for each in stops if isinstance(each, str)]
