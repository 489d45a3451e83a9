"""Text from a model: prefill, decode, stream; the loop that a user of the library would write.

``Generator.stream`` for one prompt as it is written, ``generate_simple`` for one or many at once.
Both run ``_run`` over a ``Runner``: what the cache holds of a prompt already is kept, the rest is
prefilled, then one token a step is sampled for every row that still goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias, cast

import torch
from torch import Tensor

from exkv.cache import KVCache
from exkv.models import Transformer
from exkv.text import Tokenizer

from .completion import Completion, StopText, checked_settings, only_allowed, read_stops
from .grammar import Grammar
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
        settings = checked_settings(settings).for_tokenizer(self.tokenizer)
        rows = self._rows(prompts, num_tokens, seed, stop, grammar, special)
        with self._runner.leased("a Generator"):
            yield from self._steps(rows, settings)

    def _steps(self, rows: list[Completion], settings: SamplingParams) -> Iterator[list[str]]:
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
    ) -> list[Completion]:
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
        stop_ids, stop_texts = read_stops(stop)
        ids = [self._encode(prompt, special) for prompt in prompts]
        return [
            Completion(
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
        self, rows: list[Completion], logits: Tensor, settings: SamplingParams
    ) -> tuple[list[str], Tensor | None]:
        """Choose a token for every row that goes on; the text that each row gained, and the tokens
        on the device if they were chosen there for all rows."""
        going = [index for index, row in enumerate(rows) if not row.reason]
        history = (
            [rows[i].history.on(logits.device) for i in going] if settings.needs_history else None
        )
        generators = [rng for i in going if (rng := rows[i].rng) is not None]
        wanted = logits if len(going) == len(rows) else logits[going]
        wanted = only_allowed(wanted, [rows[i].follower for i in going])
        tokens, placed = sample_placed(wanted, settings, history, generators or None)
        pieces = [""] * len(rows)
        for index, token in zip(going, tokens.tolist(), strict=True):
            full = self.cache.seq_lens[index] >= self.cache.max_seq_len
            pieces[index] = rows[index].take(token, cache_full=full)
        everywhere = len(going) == len(rows) and not placed.is_cpu
        return pieces, placed if everywhere else None


def _as_prompts(given: Prompt | Sequence[Prompt]) -> tuple[bool, Sequence[Prompt]]:
    """Whether it is one prompt, and the prompts; each is checked when it is encoded."""
    several = isinstance(given, Sequence) and not isinstance(given, str)
    if several and not (given and isinstance(given[0], int)):
        return False, cast(Sequence[Prompt], given)
    return True, [cast(Prompt, given)]
