"""Text from a model: prefill, decode, stream; the loop that a user of the library would write.

``Generator.stream`` for one prompt as it is written, ``generate_simple`` for one or many at once.
Both run ``_run``: what the cache holds of a prompt already is kept, the rest is prefilled, then
one token a step is sampled for every row that still goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from exkv.cache import KVCache, common_prefix
from exkv.models import Transformer
from exkv.text import StreamDecoder, Tokenizer

from .sampler import SamplingParams, sample


@dataclass(slots=True, kw_only=True)
class GenerationStats:
    """The last run in numbers; times in seconds, tokens over all rows.

    Attributes:
        cached_tokens: tokens of the prompts that the cache held already.
        stop_reasons: for each row ``"eos"``, ``"stop"``, ``"length"`` (num_tokens reached),
            ``"cache_full"``, or ``""`` while it goes on.
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
        if cache.model is not model:
            raise ValueError("the cache was built for another model")
        self.model = model
        self.cache = cache
        self.tokenizer = tokenizer
        self.stats = GenerationStats()

    def warmup(self) -> None:
        """Run one token, so that the first prompt doesn't pay for what happens once (reading
        lazily loaded units, library set-up). The cache is left as it was."""
        before = self.cache.seq_lens
        if before[0] < self.cache.max_seq_len:
            self.model.forward(torch.zeros((1, 1), dtype=torch.int64), self.cache)
            self.cache.crop(before)

    def generate_simple(
        self,
        prompt: str | list[int] | list[str] | list[list[int]],
        settings: SamplingParams | None = None,
        num_tokens: int = 128,
        seed: int | None = None,
        *,
        stop: Sequence[str | int] = (),
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
            completion_only: leave the prompt out of what is returned.
            encode_special_tokens: take special tokens written in the prompt as such.

        Returns:
            The text, or a list of texts if a list of prompts was given.

        Raises:
            ValueError: a prompt that is empty or longer than the cache, or too many prompts.
        """
        single = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int))
        prompts = [prompt] if single else list(prompt)
        run = self._run(
            prompts, settings or SamplingParams(), num_tokens, seed, stop, encode_special_tokens
        )
        rows = [""] * len(prompts)
        for pieces in run:
            rows = [text + piece for text, piece in zip(rows, pieces, strict=True)]
        if not completion_only:
            shown = [p if isinstance(p, str) else self.tokenizer.decode(p) for p in prompts]
            rows = [before + text for before, text in zip(shown, rows, strict=True)]
        return rows[0] if single else rows

    def stream(
        self,
        prompt: str | list[int],
        settings: SamplingParams | None = None,
        num_tokens: int = 128,
        seed: int | None = None,
        *,
        stop: Sequence[str | int] = (),
        encode_special_tokens: bool = True,
    ) -> Iterator[str]:
        """Complete one prompt, yielding text as it is final: never half a character, never the
        beginning of a stop text. Arguments and errors as for :meth:`generate_simple`.

        It may be dropped at any time; the cache then holds what was generated so far, and a
        prompt that begins with the same tokens goes on from there.
        """
        run = self._run(
            [prompt], settings or SamplingParams(), num_tokens, seed, stop, encode_special_tokens
        )
        for (piece,) in run:
            if piece:
                yield piece

    def _encode(self, prompt: str | list[int], special: bool) -> list[int]:
        ids = prompt
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, add_special=special)
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
        prompts: Sequence[str | list[int]],
        settings: SamplingParams,
        num_tokens: int,
        seed: int | None,
        stop: Sequence[str | int],
        special: bool,
    ) -> Iterator[list[str]]:
        """Yield the text that each row gained, a step at a time."""
        if not 0 < len(prompts) <= self.cache.batch_size:
            raise ValueError(
                f"{len(prompts)} prompts, and the cache has batch_size = {self.cache.batch_size}"
            )
        if num_tokens < 1:
            raise ValueError(f"num_tokens is {num_tokens}: it must be at least 1")
        ids = [self._encode(prompt, special) for prompt in prompts]
        stop_ids = {*self.tokenizer.eos_ids, *(s for s in stop if isinstance(s, int))}
        stop_texts = [s for s in stop if isinstance(s, str)]
        rows = [
            _Row(
                ids[index],
                # A text goes on from its prompt's last word; an answer begins on its own.
                self.tokenizer.stream(after=ids[index] if isinstance(prompt, str) else ()),
                StopText(stop_texts),
                stop_ids,
                num_tokens,
                None if seed is None else seed + index,
            )
            for index, prompt in enumerate(prompts)
        ]
        stats = self.stats = GenerationStats(prompt_tokens=sum(map(len, ids)))
        started = time.perf_counter()
        logits = self._prefill(ids)
        while True:
            pieces = self._sample(rows, logits, settings)
            now = time.perf_counter()
            if not stats.new_tokens:
                stats.prefill_seconds, started = now - started, now
            stats.decode_seconds = now - started
            stats.new_tokens = sum(len(row.new_ids) for row in rows)
            stats.stop_reasons = tuple(row.reason for row in rows)
            yield pieces
            if all(row.reason for row in rows):
                return
            logits = self._step(rows)

    def _prefill(self, prompts: list[list[int]]) -> torch.Tensor:
        """Fill the cache; logits (B, 1, vocabulary) of each prompt's last token."""
        held = self.cache.sequences
        # The last token always runs again: its logits are not in the cache.
        keep = [min(common_prefix(ids, held[row]), len(ids) - 1) for row, ids in enumerate(prompts)]
        self.cache.crop(keep)
        self.stats.cached_tokens = sum(keep)
        rest = [ids[kept:] for ids, kept in zip(prompts, keep, strict=True)]
        return self._forward(rest)

    def _step(self, rows: list[_Row]) -> torch.Tensor:
        """Run each row's newest token; a row that has ended brings none."""
        return self._forward([[] if row.reason else row.new_ids[-1:] for row in rows])

    def _forward(self, tokens: list[list[int]]) -> torch.Tensor:
        lengths = [len(ids) for ids in tokens]
        width = max(lengths)
        padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in tokens])
        return self.model.forward(padded, self.cache, new_lens=lengths, last_id_only=True)

    def _sample(
        self, rows: list[_Row], logits: torch.Tensor, settings: SamplingParams
    ) -> list[str]:
        """Choose a token for every row that goes on; the text that each row gained."""
        going = [index for index, row in enumerate(rows) if not row.reason]
        history = [rows[i].history() for i in going] if settings.needs_history else None
        generators = [rows[i].rng for i in going] if rows[0].rng is not None else None
        wanted = logits[:, 0] if len(going) == len(rows) else logits[going, 0]
        chosen = sample(wanted, settings, history, generators).tolist()
        pieces = [""] * len(rows)
        for index, token in zip(going, chosen, strict=True):
            full = self.cache.seq_lens[index] >= self.cache.max_seq_len
            pieces[index] = rows[index].take(token, cache_full=full)
        return pieces


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
    ) -> None:
        self.new_ids: list[int] = []
        self.reason = ""
        self.rng = None if seed is None else torch.Generator().manual_seed(seed)
        self._decoder = decoder
        self._text = text
        self._stop_ids = stop_ids
        self._num_tokens = num_tokens
        # Kept as an array, since the sampler may look at it in every step, as at a tensor; to add a
        # token to that would be a call of an op.
        self._ids = np.empty(len(prompt) + num_tokens, dtype=np.int64)
        self._ids[: len(prompt)] = prompt
        self._length = len(prompt)

    def history(self) -> torch.Tensor:
        """Prompt and completion so far: int64 (tokens,)."""
        return torch.from_numpy(self._ids[: self._length])

    def take(self, token: int, *, cache_full: bool) -> str:
        """Add a token; the text that became final."""
        self.new_ids.append(token)
        self._ids[self._length] = token
        self._length += 1
        if token in self._stop_ids:
            self.reason = "eos"
            return self._text.push(self._decoder.flush()) + self._text.flush()
        piece = self._text.push(self._decoder.push(token))
        if self._text.found:
            self.reason = "stop"
            return piece
        if len(self.new_ids) == self._num_tokens or cache_full:
            self.reason = "cache_full" if cache_full else "length"
            piece += self._text.push(self._decoder.flush())
            piece += self._text.flush()
        return piece


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
