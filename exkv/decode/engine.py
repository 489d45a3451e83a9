"""The engine: takes jobs from any thread, and runs them together in one paged cache."""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncGenerator, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, aclosing

import torch

from exkv.cache import KVCache
from exkv.cache.paging.pool import PagePool
from exkv.errors import Attempt
from exkv.models import Transformer
from exkv.sampling.bounds import check_count
from exkv.text import Tokenizer

from .in_pages import InPages
from .job import Event, Handle, Job
from .job_chooser import JobChooser
from .new_job import check_parts, new_handle
from .scheduler import EngineStats, Scheduler
from .speculation import MTP, Draft, NGrams, Speculation, check_rollback
from .streams import Step, Streams


class Engine:
    """Runs jobs on a model, as many at once as KV pages allow; a context manager.

    >>> cache = PagedCache(model, max_seq_len=16384)  # tokens of all jobs together
    >>> with Engine(model, cache, tokenizer) as engine:
    ...     texts = engine.run([Job(prompt="Once upon a time"), Job(prompt="It was a dark")])

    Args:
        cache: in pages (``PagedCache``, or ``growth=Paged()``). Only the engine uses it until it is
            closed; its rows are reset.
        max_running: jobs that run at once; a guided one counts twice. On a CPU with AVX2 or more,
            up to 16 jobs have the logits that each has alone, to the bit; beyond that, or on other
            devices, the order of summation may differ, so that two nearly equal tokens may swap
            ranks.
        chunk: prompt tokens that run between two decode steps; a chunk never crosses a page.
        away_tokens: upper bound on tokens of preempted jobs, in whole pages: a job is admitted only
            if all admitted jobs but the first could be preempted at their full length. None for no
            bound other than ``max_running`` times :attr:`max_tokens` for each priority in use.
        draft: a smaller model of the same vocabulary with a cache of its own, a row for each job
            that it follows; or ``exkv.MTP()``, or "mtp", for the head of a model that was built
            with ``mtp=True``. The model verifies several of its tokens at once, which changes no
            output.
        ngrams: propose the tokens that followed the last ones earlier in a job's text;
            :class:`exkv.NGrams`, or how many at a time. The draft is used only if there are none.
        thread: an executor with one worker, which runs the steps of :meth:`stream`, preferably the
            one that loaded the model (see ``exkv.decode.streams``); None for one of its own.

    Raises:
        TypeError: a model, cache or tokenizer that isn't exkv's.
        ValueError: a model that is not loaded, a cache that is not in pages or of another model, or
            a number out of range.
        CacheUseError: the cache is in use.
        PlacementError: no room for calls of so many jobs.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        tokenizer: Tokenizer,
        *,
        max_running: int = 16,
        chunk: int = 256,
        away_tokens: int | None = None,
        draft: Draft | MTP | str | None = None,
        ngrams: NGrams | int | None = None,
        thread: Executor | None = None,
    ) -> None:
        check_parts(model, cache, tokenizer)
        _check_pages(cache)
        if not model.loaded:
            raise ValueError("the model is not loaded: call load or load_autosplit first")
        check_count("max_running", max_running, 1, 16_384, "an int from 1 to 16384")
        check_count("chunk", chunk, 1, 2**31 - 1, "an int from 1 to 2**31 - 1")
        if away_tokens is not None:
            check_count("away_tokens", away_tokens, 0, 2**62, "an int of at least 0, or None")
        self.model = model
        self.cache = cache
        self.tokenizer = tokenizer
        speculation = Speculation(model, draft, ngrams, chunk)
        if speculation.tokens:
            check_rollback(cache)
        self.max_running = max_running
        self.draft = draft = speculation.draft
        self._held = ExitStack()  # holds the draft's cache
        if draft is not None:
            self._held.enter_context(draft.leased("an Engine"))
        self._lease = cache.lease("an Engine")
        with self._lease:
            cache.reset()
        self._running = InPages(model, cache, max_running, chunk, speculation.tokens, away_tokens)
        chooser = JobChooser(self._running.is_full)
        self._scheduler = Scheduler(self._running, chooser, speculation)
        self._numbers = itertools.count(1)
        self._stepping = threading.Lock()
        self._streams = Streams(thread)

    @property
    def stats(self) -> EngineStats:
        """Counters since the start."""
        stats, exchange = self._scheduler.stats, self.model.exchange
        if exchange is not None:
            stats.exchanges, stats.exchanged_bytes = exchange.swaps, exchange.moved_bytes
        return stats

    # Jobs ------------------------------------------------------------------------------------

    def submit(self, job: Job) -> Handle:
        """Queue a job; it runs when the engine does. Thread-safe.

        Raises:
            ValueError: an empty prompt, a number out of range, or a job that never fits; the
                message says how many tokens it needs, and how many there are.
            TypeError: a prompt or a setting of the wrong type.
            CacheUseError: the engine is closed, or the model was unloaded.
        """
        self._lease.check()
        if not isinstance(job, Job):
            raise TypeError(f"a job is {job!r:.60}: give Job(prompt=...)")
        seed = torch.Generator().seed() if job.seed is None else job.seed
        number = next(self._numbers)
        handle = new_handle(job, number, seed, self.model, self.tokenizer, self)
        self._check_fits(handle)
        self._scheduler.submit(handle)
        return handle

    def _check_fits(self, handle: Handle) -> None:
        """ValueError for a job that doesn't fit even alone."""
        most, room = handle.job.max_new_tokens, self.max_tokens
        for name, part in zip(("prompt", "negative prompt"), handle.parts, strict=False):
            if part.total > room:
                raise ValueError(
                    f"the {name} has {len(part.prompt)} tokens and max_new_tokens is {most}: the "
                    f"job needs {part.total} tokens, and the cache holds {room}; shorten one of "
                    "them, or give the cache more tokens"
                )
        if handle.negative is None:
            return
        if self.max_running < 2:
            raise ValueError("a job with guidance_scale takes two rows, and max_running is 1")
        needed = sum(-(-part.total // self.pool.size) for part in handle.parts)
        if needed > self.pool.pages:
            raise ValueError(
                f"the job needs {needed} pages for its prompt, its negative prompt and twice "
                f"max_new_tokens = {most}, and the cache has {self.pool.pages}; shorten one of "
                "them, or give the cache more tokens"
            )

    @property
    def pool(self) -> PagePool:
        """The pages that jobs share."""
        assert self.cache.pages is not None
        return self.cache.pages.pool

    @property
    def max_tokens(self) -> int:
        """Upper bound on a job's stored tokens, prompt and completion together."""
        return min(self.cache.max_seq_len, self.pool.pages * self.pool.size)

    @property
    def away(self) -> tuple[int, int]:
        """Number of preempted jobs, and their bytes of host memory."""
        found = [[part.away for part in handle.parts] for handle in [*self._scheduler.away]]
        held = [[each.pages.nbytes for each in parts if each is not None] for parts in found]
        return sum(map(bool, held)), sum(map(sum, held))

    def cancel(self, handle: Handle) -> None:
        """End a job before the next step."""
        self._scheduler.cancel(handle)

    @property
    def busy(self) -> bool:
        """Whether any job is left."""
        return self._scheduler.busy

    def run(self, jobs: Iterable[Job]) -> list[str]:
        """Run jobs to their ends, and return their texts. Errors as of :meth:`submit`, and those
        that ended a job."""
        return [handle.result() for handle in [self.submit(job) for job in jobs]]

    def close(self) -> None:
        """Cancel all jobs, and release the cache and its pages; later uses other than ``close``
        raise CacheUseError."""
        if self._lease.released:
            return
        if self._lease.revoked_by is None:
            with self._stepping, self._lease:
                self._scheduler.cancel_all()
        self._streams.close()
        self.model.keep_usage()
        self._running.free()
        self._lease.release()
        self._held.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Steps -----------------------------------------------------------------------------------

    def iterate(self) -> list[Event]:
        """Run one step, call the jobs' ``on_event``, and return the events.

        Raises:
            CacheUseError: the model was unloaded.
            torch.OutOfMemoryError: the call of a single job ran out of memory twice; nothing is
                lost.
        """
        with self._stepping:
            with self._lease:
                events = self._scheduler.iterate()
            return events + self._notify(events)

    def _notify(self, events: Sequence[Event]) -> list[Event]:
        """Call the jobs' ``on_event`` -> final events of jobs for which it raised."""
        ended: list[Event] = []
        for event in events:
            tell = event.handle.job.on_event
            try:
                if tell is not None:
                    tell(event)
            except Exception as error:  # noqa: BLE001 # ends that job only
                event.handle.error = error
                if not event.handle.done:
                    with self._lease:
                        ended += self._scheduler.end(event.handle, "error")
        return ended

    # Asynchronously --------------------------------------------------------------------------

    async def stream(self, job: Job) -> AsyncGenerator[Event]:
        """Submit a job, and yield its events. Steps run in another thread for all streamed jobs;
        dropping a stream cancels its job. Errors as of :meth:`submit`, and what ended the job or a
        step; out of memory twice with a single job ends that job."""
        async with aclosing(self.stream_steps([job])) as steps:
            async for step in steps:
                for _, event in step:
                    yield event

    def stream_steps(self, jobs: Sequence[Job]) -> AsyncGenerator[Step]:
        """:meth:`stream` for several jobs: yields a step's events with their job indices, or those
        of several steps if the reader is slower. An error of one job cancels the others."""
        return self._streams.steps(self, jobs)

    def fail_streams(self, error: BaseException) -> None:
        """Raise this error in all streams, and cancel their jobs."""
        self._streams.fail(error)

    def iterate_for_streams(self) -> list[Event]:
        """Run one step; out of memory with a single job ends that job, and the others continue."""
        with Attempt() as attempt:
            return self.iterate()
        reason = torch.OutOfMemoryError(attempt.why)
        with self._stepping, self._lease:
            events = self._scheduler.fail_all(reason)
        if not events:
            raise reason
        return events + self._notify(events)


def _check_pages(cache: KVCache) -> None:
    if cache.pages is None:
        raise ValueError(
            f"{cache!r} is not in pages: an engine's jobs share a pool of them. Build "
            "PagedCache(model, max_seq_len=...), or give growth=Paged()"
        )
