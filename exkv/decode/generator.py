"""Text from a model, with any cache: ``Generator.stream`` yields one completion,
``generate_simple`` returns one or several. Both run a job for each prompt in a ``Scheduler`` of
their own, in place in the cache's rows (``in_place``): a cached prefix of a prompt is not run
again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeAlias, cast

import torch

from exkv.cache import KVCache
from exkv.models import Transformer
from exkv.sampling import SamplingParams
from exkv.sampling.bounds import check_count
from exkv.sampling.grammar import Grammar
from exkv.sampling.logprobs import TokenLogprobs
from exkv.text import Tokenizer

from .completion import checked_settings
from .in_place import InPlace
from .job import Handle, Job
from .job_chooser import JobChooser
from .new_job import check_parts, new_handle
from .runner import Runner
from .scheduler import Scheduler
from .speculation import MTP, Draft, NGrams, Speculation, check_rollback

#: Text or token ids.
Prompt: TypeAlias = str | Sequence[int]

#: Fields of a job that only an engine reads.
OTHERS = {
    *("approximate_reuse", "max_new_tokens", "on_event", "priority"),
    *("prompt_logprobs", "speculate"),
}


@dataclass(slots=True, kw_only=True)
class GenerationStats:
    """Figures of the last run: times in seconds, tokens over all rows.

    Attributes:
        cached_tokens: prompt tokens that the cache held already.
        stop_reasons: for each row ``"eos"``, ``"stop"``, ``"length"`` (num_tokens reached),
            ``"grammar"`` (complete), ``"cache_full"``, or ``""`` while it runs.
        proposed_tokens, accepted_tokens: by draft or n-grams.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    stop_reasons: tuple[str, ...] = ()
    proposed_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Decode speed over all rows; the first token of each row belongs to the prefill."""
        decoded = self.new_tokens - len(self.stop_reasons)
        return decoded / self.decode_seconds if self.decode_seconds > 0 else 0.0


class Generator:
    """Generates with one model, one cache and one tokenizer.

    Args:
        draft, ngrams: propose tokens, as for :class:`exkv.Engine`.

    Attributes:
        stats: figures of the last run.
        logprobs: of each row's tokens in the last run, if they were asked for.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        tokenizer: Tokenizer,
        *,
        draft: Draft | MTP | str | None = None,
        ngrams: NGrams | int | None = None,
    ) -> None:
        check_parts(model, cache, tokenizer)
        self._speculation = Speculation(model, draft, ngrams)
        if self._speculation.tokens:
            check_rollback(cache)
        self._runner = Runner(model, cache)
        self.tokenizer = tokenizer
        self.stats = GenerationStats()
        self.logprobs: list[list[TokenLogprobs]] = []

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
        """Run one token, so that the first prompt is not slowed down by one-time work (reading
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
        **further: Any,
    ) -> str | list[str]:
        """Complete one prompt, or a list of prompts as one batch.

        Args:
            prompt: text or token ids, or a list of either; rows may differ in length.
            settings: how to sample; None for ``SamplingParams()``.
            num_tokens: most new tokens of each completion.
            seed: makes the run repeatable on any split; row ``i`` draws like a single run with
                ``seed + i``.
            stop: texts and token ids that end a completion and are left out of it, beside the
                model's own end-of-sequence tokens.
            grammar: that each completion must match, see :class:`Grammar`.
            completion_only: return texts without their prompts.
            encode_special_tokens: parse special tokens in the prompt's text.
            further: more fields of :class:`exkv.Job`: ``logprobs``, ``banned_strings``,
                ``token_healing``, ``adapter``, ``guidance_scale`` (which takes two rows of the
                cache for each prompt), ``negative_prompt`` (one for all).

        Returns:
            The text, or a list of texts if a list of prompts was given.

        Raises:
            ValueError: a prompt that is empty or longer than the cache, too many prompts, a number
                out of range, or logits by which no token can be chosen.
            TypeError: an argument of the wrong type.
        """
        single, prompts = _as_prompts(prompt)
        fields = {"stop": stop, "grammar": grammar, **further}
        fields["encode_special_tokens"] = encode_special_tokens
        run = self._run(prompts, settings, num_tokens, seed, fields)
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
        **further: Any,
    ) -> Iterator[str]:
        """Complete one prompt, yielding text as it becomes final: whole characters, and no partial
        stop text. Arguments and errors as for :meth:`generate_simple`.

        The stream may be dropped at any time; the cache then holds what was generated so far, so
        that a prompt with the same prefix continues from there.
        """
        fields = {"stop": stop, "grammar": grammar, **further}
        fields["encode_special_tokens"] = encode_special_tokens
        for (piece,) in self._run([prompt], settings, num_tokens, seed, fields):
            if piece:
                yield piece

    def _run(
        self,
        prompts: Sequence[Prompt],
        settings: SamplingParams | None,
        num_tokens: int,
        seed: int | None,
        fields: Mapping[str, Any],
    ) -> Iterator[list[str]]:
        """Yield each row's new text, step by step; ``fields`` are a job's."""
        if unknown := fields.keys() - (Job.__dataclass_fields__.keys() - OTHERS):
            raise TypeError(f"a Generator has no argument {min(unknown)!r}: see exkv.Job")
        check_count("num_tokens", num_tokens, 1, 2**31 - 1, "an int from 1 to 2**31 - 1")
        if seed is not None:
            check_count("seed", seed, 0, 2**62, "an int from 0 to 2**62, or None")
        usual = Job(
            prompt=(),
            settings=checked_settings(settings),
            max_new_tokens=min(num_tokens, self.cache.max_seq_len + 1),
            **fields,
        )
        seeds = [None if seed is None else seed + row for row in range(len(prompts))]
        jobs = [
            replace(usual, prompt=prompt, seed=each)
            for prompt, each in zip(prompts, seeds, strict=True)
        ]
        scheduler, handles = self.begin(jobs)
        try:
            with self.leased():
                yield from self._steps(scheduler, handles)
        finally:
            scheduler.cancel_all()  # if the run was dropped

    def begin(self, jobs: Sequence[Job]) -> tuple[Scheduler, list[Handle]]:
        """Submit jobs that run together, one in each row of the cache.

        Args:
            jobs: with the same settings, adapter and guidance scale.

        Returns:
            The scheduler, whose steps run under :meth:`leased`, and the handles.

        Raises:
            ValueError, TypeError: as of :meth:`generate_simple`.
        """
        rows = InPlace(self._runner)
        scheduler = Scheduler(rows, JobChooser(rows.is_full), self._speculation)
        handles = self._handles(jobs, scheduler)
        self._runner.adapter = jobs[0].adapter
        for handle in handles:
            scheduler.submit(handle)
        return scheduler, handles

    @contextmanager
    def leased(self) -> Iterator[None]:
        """Hold the cache, and the draft's, for a ``with`` block.

        Raises:
            CacheUseError: one of them is in use.
        """
        draft = self._speculation.draft
        held = nullcontext() if draft is None else draft.leased("a Generator")
        with self._runner.leased("a Generator"), held:
            yield

    def restore(self, handles: Sequence[Handle]) -> None:
        """Recompute tokens of the jobs that the cache lost because it was used in between."""
        parts = [*handles, *(handle.negative for handle in handles if handle.negative)]
        rows = [part.before_newest for part in parts]
        if rows != self.cache.sequences[: len(rows)]:
            self._runner.prefill(rows)

    def _handles(self, jobs: Sequence[Job], scheduler: Scheduler) -> list[Handle]:
        """Handles in the order of rows."""
        self._check_rows(len(jobs), jobs[0].guidance_scale if jobs else 1.0)
        handles = []
        for row, job in enumerate(jobs):
            handles.append(new_handle(job, row, job.seed, self.model, self.tokenizer, scheduler))
            self._check_room(max(len(part.prompt) for part in handles[-1].parts))
        return handles

    def _check_rows(self, prompts: int, guidance_scale: float) -> None:
        rows, there = prompts if guidance_scale == 1 else 2 * prompts, self.cache.batch_size
        if not 0 < rows <= there:
            twice = "" if rows == prompts else f" with guidance_scale, which take {rows} rows"
            raise ValueError(f"{prompts} prompts{twice}, and the cache has batch_size = {there}")

    def _check_room(self, tokens: int) -> None:
        if tokens > self.cache.max_seq_len:
            raise ValueError(
                f"the prompt has {tokens} tokens, and the cache holds max_seq_len = "
                f"{self.cache.max_seq_len}: shorten it, or build a longer cache"
            )

    def _steps(self, scheduler: Scheduler, handles: list[Handle]) -> Iterator[list[str]]:
        stats = self.stats = GenerationStats()
        stats.prompt_tokens = sum(len(part.prompt) for each in handles for part in each.parts)
        self.logprobs = [handle.logprobs for handle in handles]
        started = time.perf_counter()
        while scheduler.busy:
            pieces = [""] * len(handles)
            for event in scheduler.iterate():
                if event.reason == "error":
                    raise _pop_error(event.handle)
                pieces[event.handle.number] += event.text
            now = time.perf_counter()
            if scheduler.stats.steps == 1:
                stats.cached_tokens = scheduler.stats.found_tokens
                stats.prefill_seconds, started = now - started, now
            stats.decode_seconds = now - started
            stats.new_tokens = scheduler.stats.new_tokens
            stats.proposed_tokens = scheduler.stats.proposed_tokens
            stats.accepted_tokens = scheduler.stats.accepted_tokens
            stats.stop_reasons = tuple(handle.reason for handle in handles)
            yield pieces


def _pop_error(handle: Handle) -> BaseException:
    """Take the error from its handle, since the error's frames will hold the handle."""
    error, handle.error = handle.error, None
    assert error is not None
    return error


def _as_prompts(given: Prompt | Sequence[Prompt]) -> tuple[bool, Sequence[Prompt]]:
    """Whether it is a single prompt, and the prompts, unchecked."""
    several = isinstance(given, Sequence) and not isinstance(given, str)
    if several and not (given and isinstance(given[0], int)):
        return False, cast(Sequence[Prompt], given)
    return True, [cast(Prompt, given)]
