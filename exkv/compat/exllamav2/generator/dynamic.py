"""``ExLlamaV2DynamicGenerator`` over :class:`exkv.Engine`: continuous batching on one cache."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from exkv import Draft, Engine, KVCache
from exkv.cache import Paged
from exkv.compat.exllamav2.cache import ExLlamaV2CacheBase
from exkv.compat.exllamav2.loras import adapter_of
from exkv.compat.exllamav2.missing import (
    Adapter,
    check_kind,
    missing_from,
    placeholder,
    refuse_arguments,
)
from exkv.compat.exllamav2.model import ExLlamaV2
from exkv.compat.exllamav2.tokenizer import ExLlamaV2Tokenizer
from exkv.decode import Event, Handle

from .jobs import ExLlamaV2DynamicJob
from .sampler import Settings

#: Tokens per page.
PAGED_PAGE_SIZE = 256
_MOST_RUNNING = 16

ExLlamaV2MMEmbedding = placeholder("ExLlamaV2MMEmbedding", __name__)


class ExLlamaV2DynamicGenerator(Adapter):
    """Runs jobs, as many at once as there is room for.

    The cache becomes a pool of pages that all jobs share, with the capacity of its rows; its
    contents are lost. An earlier generator without jobs releases its caches.

    Args:
        max_batch_size: jobs that run at once.
        max_seq_len: most tokens of a job; None for the model's.
        max_chunk_size: tokens of a prompt that run between two decode steps.
        draft_model, draft_cache, num_draft_tokens: a smaller model that proposes up to this many
            tokens at a time.
        use_ngram_draft, max_ngram: propose tokens that followed the last ones earlier in the text.
        others: without effect.

    Attributes:
        exkv: the :class:`exkv.Engine` that does the work.
    """

    def __init__(
        self,
        model: ExLlamaV2,
        cache: ExLlamaV2CacheBase,
        tokenizer: ExLlamaV2Tokenizer,
        max_batch_size: int | None = None,
        max_seq_len: int | None = None,
        max_chunk_size: int | None = None,
        max_q_size: int = 8,
        draft_model: ExLlamaV2 | None = None,
        draft_cache: ExLlamaV2CacheBase | None = None,
        num_draft_tokens: int = 4,
        use_ngram_draft: bool = False,
        max_ngram: int = 4,
        max_sampling_threads: int = 16,
        min_sampling_threads: int = 3,
        paged: bool = True,
        filter_background_eval: bool = True,
    ) -> None:
        check_kind("model", model, ExLlamaV2)
        check_kind("cache", cache, ExLlamaV2CacheBase)
        check_kind("tokenizer", tokenizer, ExLlamaV2Tokenizer)
        self.model, self.cache, self.tokenizer = model, cache, tokenizer
        self.draft_model, self.draft_cache = draft_model, draft_cache
        self.num_draft_tokens = num_draft_tokens if draft_model or use_ngram_draft else 0
        self.use_ngram_draft, self.max_ngram = use_ngram_draft, max_ngram
        self.max_batch_size = max_batch_size or _MOST_RUNNING
        self.max_seq_len = max_seq_len or model.config.max_seq_len
        self.max_chunk_size = max_chunk_size or PAGED_PAGE_SIZE
        self.page_size, self.paged = PAGED_PAGE_SIZE, True
        caches = [each for each in (cache, draft_cache) if isinstance(each, ExLlamaV2CacheBase)]
        for each in caches:
            each.take_over(None)
        self.exkv = Engine(
            model.exkv,
            _in_pages(cache),
            tokenizer.exkv,
            max_running=self.max_batch_size,
            chunk=self.max_chunk_size,
            draft=_draft(draft_model, draft_cache, num_draft_tokens),
            ngrams=num_draft_tokens if use_ngram_draft else None,
        )
        for each in caches:
            each.take_over(self)
        self.max_total_tokens = self.exkv.pool.pages * PAGED_PAGE_SIZE
        self.max_pages, self.job_serial = self.exkv.pool.pages, 0
        self.current_loras: list[Any] = []
        self._adapter: str | None = None
        self._jobs: dict[Handle, ExLlamaV2DynamicJob] = {}
        self._begun: set[Handle] = set()
        self._entering = threading.Lock()  # a job enters the engine's queue and ours at once

    # Jobs ---------------------------------------------------------------------------------

    def enqueue(self, job: ExLlamaV2DynamicJob | list[ExLlamaV2DynamicJob]) -> int | list[int]:
        """Submit a job or several -> their serial numbers.

        Raises:
            ValueError: a job can never fit, or has an unsupported setting.
        """
        if isinstance(job, list):
            return [self._enqueue(each) for each in job]
        return self._enqueue(job)

    def _enqueue(self, job: ExLlamaV2DynamicJob) -> int:
        check_kind("job", job, ExLlamaV2DynamicJob)
        if len(job.input_ids) + job.max_new_tokens > self.max_seq_len:
            raise ValueError(
                f"a prompt of {len(job.input_ids)} tokens and max_new_tokens {job.max_new_tokens}, "
                f"but max_seq_len is {self.max_seq_len}: shorten one of them"
            )
        own = job.for_exkv(self.tokenizer, self._adapter)
        with self._entering:
            handle = self.exkv.submit(own)
            serial, self.job_serial = self.job_serial, self.job_serial + 1
            job.begin(self, serial, handle)
            self._jobs[handle] = job
        return serial

    def set_loras(self, loras: Any) -> None:
        """Set the adapter of later jobs; None for none.

        Raises:
            ValueError: more than one, one of another model, or jobs are in the queue.
        """
        if self._jobs:
            raise ValueError(f"{len(self._jobs)} jobs are in the queue: set_loras before or after")
        self._adapter = adapter_of(self.model, loras)
        self.current_loras = (
            [] if loras is None else list(loras) if isinstance(loras, list) else [loras]
        )

    def cancel(self, job: ExLlamaV2DynamicJob) -> None:
        """Drop a job; the next step frees its pages."""
        if self._jobs.pop(job.handle, None) is not None:
            self._begun.discard(job.handle)
            job.handle.cancel()

    def clear_queue(self) -> None:
        """Drop all jobs."""
        for job in list(self._jobs.values()):
            self.cancel(job)
        while self.exkv.busy:
            self.exkv.iterate()

    def num_remaining_jobs(self) -> int:
        return len(self._jobs)

    @property
    def pending_jobs(self) -> list[ExLlamaV2DynamicJob]:
        """Jobs without a token so far."""
        return [job for job in self._jobs.values() if not job.is_prefill_done()]

    @property
    def active_jobs(self) -> list[ExLlamaV2DynamicJob]:
        """Jobs with tokens."""
        return [job for job in self._jobs.values() if job.is_prefill_done()]

    def iterate(self) -> list[dict[str, Any]]:
        """Run one step -> results in ExLlamaV2's format. A job's first one has the stage
        ``"started"``, all others ``"streaming"``.

        Raises:
            ValueError: the error of a failed job, such as logits that allow no token.
        """
        results = self.results()
        for result in results:
            if "error" in result:
                raise result["error"]
        return results

    def results(self) -> list[dict[str, Any]]:
        """:meth:`iterate`, but the last result of a failed job has its error as ``"error"``."""
        for job in list(self._jobs.values()):  # settings may have changed
            job.handle.settings = job.gen_settings.for_jobs(self.tokenizer)
        events = self.exkv.iterate()
        results: list[dict[str, Any]] = []
        with self._entering:
            for event in events:
                results += self._results(event)
            for job in list(self._jobs.values()):
                results += job.suppressed()
        return results

    def _results(self, event: Event) -> list[dict[str, Any]]:
        handle, job = event.handle, self._jobs.get(event.handle)
        if job is None:
            return []
        started = [] if handle in self._begun else [job.about("started")]
        self._begun.add(handle)
        if handle.error is not None:
            self.cancel(job)
            return [*started, job.about("streaming", eos=True) | {"error": handle.error}]
        result = job.result(event, self.tokenizer)
        if result["eos"]:  # a stop text may be found here before the engine finds it
            self.cancel(job)
        return [*started, *job.suppressed(), result]

    # Texts --------------------------------------------------------------------------------

    def warmup(self) -> None:
        """Run a few tokens, so that the first prompt doesn't pay for one-time set-up."""
        self.generate("Once upon a time,", max_new_tokens=4, add_bos=True)

    def generate(
        self,
        prompt: str | tuple[str, str] | Sequence[str | tuple[str, str]],
        max_new_tokens: int,
        min_new_tokens: int = 0,
        seed: int | None = None,
        gen_settings: Settings | Sequence[Settings] | None = None,
        token_healing: bool = False,
        encode_special_tokens: bool = False,
        decode_special_tokens: bool = False,
        stop_conditions: Sequence[int | str | None] | None = None,
        add_bos: bool = False,
        abort_event: threading.Event | None = None,
        completion_only: bool = False,
        filters: list[Any] | None = None,
        filter_prefer_eos: bool = False,
        return_last_results: bool = False,
        embeddings: object = None,
        banned_strings: Sequence[str] | None = None,
    ) -> Any:
        """Complete a text, or several at once.

        Args:
            prompt: a text or a list of texts; if ``gen_settings`` has a ``cfg_scale``, pairs of a
                prompt and a negative prompt.
            seed: of the first prompt; each further one has the next seed.
            gen_settings: one for all, or a list.
            abort_event: once it is set, all jobs are dropped.
            completion_only: return the completions without the prompts.
            filters: a list for the text, or a list of lists.
            return_last_results: also return each job's last result.
            others: see :class:`ExLlamaV2DynamicJob`.

        Returns:
            The text, or a list of texts for a list; None after an abort.

        Raises:
            ValueError: as :meth:`enqueue` does.
        """
        refuse_arguments("generate", embeddings=embeddings)
        texts = list(prompt) if isinstance(prompt, list) else [prompt]
        each: dict[str, list[Any]] = {
            "gen_settings": _for_each("gen_settings", gen_settings, len(texts)),
            "filters": filters or [None] * len(texts) if isinstance(prompt, list) else [filters],
            "seed": [None if seed is None else seed + number for number in range(len(texts))],
        }
        prompts = [[text] if isinstance(text, str) else list(text) for text in texts]
        rows = [self.tokenizer.rows(p, add_bos, False, encode_special_tokens) for p in prompts]
        jobs = [
            ExLlamaV2DynamicJob(
                input_ids=[torch.tensor([ids]) for ids in row],
                max_new_tokens=max_new_tokens,
                min_new_tokens=min_new_tokens,
                token_healing=token_healing,
                filter_prefer_eos=filter_prefer_eos,
                stop_conditions=stop_conditions,
                decode_special_tokens=decode_special_tokens,
                banned_strings=banned_strings,
                **{name: values[number] for name, values in each.items()},
            )
            for number, row in enumerate(rows)
        ]
        last = self._run(jobs, abort_event)
        if last is None:
            return None
        found = [
            ("" if completion_only else text) + job.full_completion
            for (text, *_), job in zip(prompts, jobs, strict=True)
        ]
        shown, results = (found, last) if isinstance(prompt, list) else (found[0], last[0])
        return (shown, results) if return_last_results else shown

    def _run(
        self, jobs: Sequence[ExLlamaV2DynamicJob], abort_event: threading.Event | None
    ) -> list[dict[str, Any]] | None:
        """Run jobs to their end -> the last result of each; None after an abort."""
        self.enqueue(list(jobs))
        last: dict[ExLlamaV2DynamicJob, dict[str, Any]] = {}
        while len(last) < len(jobs):
            last |= {each["job"]: each for each in self.iterate() if each["eos"]}
            if abort_event is not None and abort_event.is_set():
                self.clear_queue()
                return None
        return [last[job] for job in jobs]


def _in_pages(cache: ExLlamaV2CacheBase) -> KVCache:
    """Convert the cache to a pool of pages, with the same storage and capacity."""
    old = cache.exkv
    tokens = old.batch_size * old.max_seq_len // PAGED_PAGE_SIZE * PAGED_PAGE_SIZE
    if old.pages is not None:
        return old
    if not tokens:
        raise ValueError(
            f"the cache has room for {old.batch_size * old.max_seq_len} tokens: the dynamic "
            f"generator needs at least {PAGED_PAGE_SIZE}"
        )
    specs = [
        replace(layer.spec, batch_size=1, max_seq_len=tokens, growth=Paged(PAGED_PAGE_SIZE))
        for layer in old.layers
    ]
    old.free()
    try:
        cache.exkv, cache.pads = KVCache.of(cache.model.exkv, specs), ()
    except BaseException:
        old.allocate(cache.model.exkv.cache_map)
        raise
    return cache.exkv


def _draft(model: ExLlamaV2 | None, cache: ExLlamaV2CacheBase | None, tokens: int) -> Draft | None:
    if model is None:
        return None
    check_kind("draft_model", model, ExLlamaV2)
    check_kind("draft_cache", cache, ExLlamaV2CacheBase)
    assert cache is not None
    return Draft(model.exkv, cache.exkv, tokens=tokens)


def _for_each(name: str, given: Any, count: int) -> list[Any]:
    """One value per prompt."""
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count:
        raise ValueError(
            f"{name} has {len(given)} entries for {count} prompts: give one per prompt"
        )
    return given


__getattr__ = missing_from(__name__)
