"""The engine: who runs, a step at a time.

A step runs one chunk of one prompt at most, and one token of every job that decodes. Jobs wait in
order of priority, then of arrival. Where pages run out, the last one in that order is put away:
what it has stored goes to host memory, and comes back as it was once there is room. So every job
that was taken ends with the tokens that it gives alone.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from exkv import devices
from exkv.cache import KVCache
from exkv.cache.pages import PagePool
from exkv.generation.completion import (
    Completion,
    StopText,
    checked_settings,
    only_allowed,
    read_stops,
)
from exkv.generation.sampler import SamplingParams, check_bias, sample
from exkv.generation.validation import check_count
from exkv.models import Transformer
from exkv.text import Tokenizer

from .job import Event, Handle, Job
from .running import Running

T = TypeVar("T")


@dataclass(slots=True)
class EngineStats:
    """What an engine has done so far.

    Attributes:
        steps: that it made.
        prompt_tokens: of the jobs that ended their prompts, of which ``found_tokens`` were found in
            pages.
        new_tokens: that were chosen.
        put_away: how many times a job had to leave its pages.
        most_running: jobs that ran at once.
    """

    steps: int = 0
    prompt_tokens: int = 0
    found_tokens: int = 0
    new_tokens: int = 0
    put_away: int = 0
    most_running: int = 0


class Engine:
    """Runs jobs on a model, as many at once as pages allow; a context manager.

    >>> cache = PagedCache(model, max_seq_len=16384)  # tokens of all jobs together
    >>> with Engine(model, cache, tokenizer) as engine:
    ...     texts = engine.run([Job(prompt="Once upon a time"), Job(prompt="It was a dark")])

    Args:
        cache: in pages (``PagedCache``, or ``growth=Paged()``). The engine alone uses it until it
            is closed; what its rows held is forgotten.
        max_running: jobs that run at once. On a CPU with AVX2 or more a job's tokens are those that
            it gives alone, to the bit of their logits, for up to 16; beyond that, or on other
            devices, sums may be taken in another order, so that two tokens that are nearly as
            likely may change places.
        chunk: tokens of a prompt that are run between two tokens of the jobs that decode; a chunk
            never crosses the end of a page.

    Attributes:
        stats: what it has done so far.

    Raises:
        TypeError: a model, cache or tokenizer that is none of exkv's.
        ValueError: a cache that is not in pages or of another model, or a number that makes no
            sense.
        CacheUseError: somebody else uses the cache.
        PlacementError: there is no room for the calls of so many jobs.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        tokenizer: Tokenizer,
        *,
        max_running: int = 16,
        chunk: int = 256,
    ) -> None:
        _check(model, cache, tokenizer)
        check_count("max_running", max_running, 1, 16_384, "an int from 1 to 16384")
        check_count("chunk", chunk, 1, 2**31 - 1, "an int from 1 to 2**31 - 1")
        self.model = model
        self.cache = cache
        self.tokenizer = tokenizer
        self.stats = EngineStats()
        self._lease = cache.lease("an Engine")
        with self._lease:
            cache.reset()
        self._running = Running(model, cache, max_running, chunk)
        self._waiting: list[Handle] = []  # a heap
        # What other threads ask for, until the next step.
        self._submitted: deque[Handle] = deque()
        self._cancelled: deque[Handle] = deque()
        self._numbers = 0
        self._stepping = threading.Lock()
        self._listeners: dict[Handle, asyncio.Queue[Event | BaseException]] = {}
        self._driver: asyncio.Task[None] | None = None

    # Jobs ------------------------------------------------------------------------------------

    def submit(self, job: Job) -> Handle:
        """Take a job; it runs when the engine does. Any thread may call it.

        Raises:
            ValueError: a prompt that is empty, a number that makes no sense, or a job that never
                fits; the message says how many tokens it needs, and how many there are.
            TypeError: a prompt or a setting that is none.
        """
        completion = self._completion(job)
        self._numbers += 1
        handle = Handle(self, job, self._numbers, completion)
        room = self.max_tokens
        if handle.total > room:
            raise ValueError(
                f"the prompt has {len(handle.prompt)} tokens and max_new_tokens is "
                f"{job.max_new_tokens}: the job needs {handle.total} tokens, and the cache holds "
                f"{room}; shorten one of them, or give the cache more tokens"
            )
        self._submitted.append(handle)
        return handle

    @property
    def pool(self) -> PagePool:
        """The pages that jobs share."""
        assert self.cache.pages is not None
        return self.cache.pages.pool

    @property
    def max_tokens(self) -> int:
        """The most tokens that a job may have stored, prompt and completion together."""
        return min(self.cache.max_seq_len, self.pool.pages * self.pool.size)

    def _completion(self, job: Job) -> Completion:
        """What the job begins with; errors as of :meth:`submit`."""
        if not isinstance(job, Job):
            raise TypeError(f"a job is {job!r:.60}: give Job(prompt=...)")
        checked_settings(job.settings)
        check_bias(job.settings.token_bias, self.model.config.vocab_size)
        check_count("max_new_tokens", job.max_new_tokens, 1, 2**31 - 1, "an int from 1")
        if job.seed is not None:
            check_count("seed", job.seed, 0, 2**62, "an int from 0 to 2**62, or None")
        stop_ids, stop_texts = read_stops(job.stop)
        ids = self._encode(job)
        seed = torch.Generator().seed() if job.seed is None else job.seed
        return Completion(
            ids,
            self.tokenizer.stream(after=ids if isinstance(job.prompt, str) else ()),
            StopText(stop_texts),
            {*self.tokenizer.eos_ids, *stop_ids},
            job.max_new_tokens,
            seed,
            None if job.grammar is None else job.grammar.follow(self.tokenizer),
        )

    def _encode(self, job: Job) -> list[int]:
        prompt = job.prompt
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, add_special=job.encode_special_tokens)
        else:
            ids = [part for part in prompt if isinstance(part, int)]
            messages = [part for part in prompt if not isinstance(part, int)]
            if ids and messages:
                raise TypeError("a prompt has token ids and messages: give one or the other")
            ids = self.tokenizer.encode_chat(messages) if messages else ids
        if not ids:
            raise ValueError("a prompt is empty: give at least one token")
        size = self.model.config.vocab_size
        if not 0 <= min(ids) <= max(ids) < size:
            raise ValueError(f"a prompt has ids outside the vocabulary of {size}")
        return ids

    def cancel(self, handle: Handle) -> None:
        """End a job before the next step: see :meth:`Handle.cancel`."""
        self._cancelled.append(handle)

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._submitted or self._cancelled or self._waiting or self._running.jobs)

    def run(self, jobs: Iterable[Job]) -> list[str]:
        """The texts of these jobs, once all have ended; errors as of :meth:`submit`, and those
        that ended a job."""
        return [handle.result() for handle in [self.submit(job) for job in jobs]]

    def close(self) -> None:
        """Cancel what is left, and let go of the cache and its pages."""
        if self._lease.revoked_by is None:
            for handle in [*self._submitted, *self._waiting, *self._running.jobs]:
                self.cancel(handle)
            with self._stepping, self._lease:
                self._cancel()
        self._running.free()
        self._lease.release()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Steps -----------------------------------------------------------------------------------

    def iterate(self) -> list[Event]:
        """Make one step, and tell the jobs' callbacks: what it brought.

        Raises:
            CacheUseError: the model was unloaded.
            torch.OutOfMemoryError: a call of one job alone has no room; nothing is lost.
        """
        with self._stepping:
            with self._lease:
                events = self._cancel()
                self._admit()
                events += self._step()
            self.stats.steps += 1
            self.stats.found_tokens = self._running.found_tokens
            return events + self._tell(events)

    def _step(self) -> list[Event]:
        events: list[Event] = []
        running = self._running
        self.stats.most_running = max(self.stats.most_running, len(running.jobs))
        filled = running.filling
        logits = self._in_memory(running.fill)
        if filled is not None and logits is not None:
            self.stats.prompt_tokens += len(filled.prompt)
            events += self._choose([filled], logits)
        # Whose prompt has just ended has a token for this step, too.
        while running.pages_missing():
            self._put_last_away()
        if running.decoding:
            logits = self._in_memory(running.decode)
            if logits is not None:
                events += self._choose(list(running.decoding), logits)
        return events

    def _cancel(self) -> list[Event]:
        """End the jobs that are to be cancelled, and line up those that are new."""
        while self._submitted:
            heapq.heappush(self._waiting, self._submitted.popleft())
        events = []
        while self._cancelled:
            handle = self._cancelled.popleft()
            if not handle.done:
                events.append(self._end(handle, "cancelled"))
        return events

    def _admit(self) -> None:
        """Let those who wait begin, in their order, as long as there is room for them; jobs of a
        lower priority make room."""
        running = self._running
        while self._waiting:
            first = self._waiting[0]
            if first.done:
                heapq.heappop(self._waiting)
            elif running.can_begin(first):
                running.begin(heapq.heappop(self._waiting))
            elif not self._make_way(first):
                return

    def _make_way(self, first: Handle) -> bool:
        """A job of a lower priority leaves for this one; False where none is in its way."""
        running = self._running
        in_its_way = running.jobs
        if running.filling is not None and not running.can_decode(first):
            in_its_way = [running.filling]
        if not in_its_way or max(in_its_way).job.priority >= first.job.priority:
            return False
        self._put_away(max(in_its_way))
        return True

    def _put_last_away(self) -> None:
        """The youngest job of the lowest priority leaves its pages, and waits."""
        self._put_away(max(self._running.jobs))

    def _put_away(self, last: Handle) -> None:
        self._running.put_away(last)
        heapq.heappush(self._waiting, last)
        self.stats.put_away += 1

    def _in_memory(self, call: Callable[[], T]) -> T | None:
        """The result of a call of the model; None where it ran out of memory, and one job less may
        try again in the next step."""
        try:
            return call()
        except torch.OutOfMemoryError:
            if len(self._running.jobs) < 2:
                raise
        # Here the error's traceback, whose frames hold the call's tensors, is gone.
        devices.release_idle_memory()
        self._put_last_away()
        return None

    def _choose(self, jobs: Sequence[Handle], logits: Tensor) -> list[Event]:
        """A token for each of these jobs, from logits (jobs, V)."""
        alike: dict[SamplingParams, list[int]] = {}
        for index, handle in enumerate(jobs):
            alike.setdefault(handle.job.settings, []).append(index)
        events = []
        for settings, rows in alike.items():
            chosen = self._sampled([jobs[i] for i in rows], logits[rows], settings)
            for index, token in zip(rows, chosen, strict=True):
                events.append(self._take(jobs[index], token))
        return events

    def _sampled(
        self, jobs: Sequence[Handle], logits: Tensor, settings: SamplingParams
    ) -> Sequence[int | ValueError]:
        """Tokens, or why there is none for a job."""
        settings = settings.for_tokenizer(self.tokenizer)
        rows = [handle.completion for handle in jobs]
        history = None
        if settings.needs_history:
            history = [row.history.on(logits.device) for row in rows]
        states = [row.rng.get_state() for row in rows if row.rng is not None]
        logits = only_allowed(logits, [row.follower for row in rows])
        try:
            drawn = sample(logits, settings, history, [row.rng for row in rows if row.rng])
            return drawn.tolist()
        except ValueError as error:
            if len(jobs) == 1:
                return [error]
        for row, state in zip(rows, states, strict=True):  # one of them has no token: which?
            assert row.rng is not None
            row.rng.set_state(state)
        pairs = ([handle] for handle in jobs)
        return [self._sampled(one, logits[i : i + 1], settings)[0] for i, one in enumerate(pairs)]

    def _take(self, handle: Handle, token: int | ValueError) -> Event:
        if isinstance(token, ValueError):
            handle.error = token
            return self._end(handle, "error")
        text = handle.completion.take(token, cache_full=False)
        handle.text += text
        self.stats.new_tokens += 1
        reason = handle.completion.reason
        if reason:
            self._end(handle, reason)
        return Event(handle=handle, text=text, token=token, reason=reason)

    def _end(self, handle: Handle, reason: str) -> Event:
        """The job has ended, wherever it is: its pages are free, here or in host memory."""
        handle.reason = reason
        handle.away = handle.last_page = None
        if handle in self._running.jobs:
            self._running.leave(handle)
        return Event(handle=handle, reason=reason)

    def _tell(self, events: Sequence[Event]) -> list[Event]:
        """Call the jobs' own functions; the ends of jobs whose function raised."""
        ended = []
        for event in events:
            tell = event.handle.job.on_event
            try:
                if tell is not None:
                    tell(event)
            except Exception as error:  # noqa: BLE001 # whatever it is, it is that job's
                event.handle.error = error
                if not event.handle.done:
                    with self._lease:
                        ended.append(self._end(event.handle, "error"))
        return ended

    # Asynchronously --------------------------------------------------------------------------

    async def stream(self, job: Job) -> AsyncGenerator[Event]:
        """Submit a job, and yield its events. Steps run in another thread, for all jobs that are
        streamed; a stream that is dropped cancels its job. Errors as of :meth:`submit`, and what
        ended the job or a step."""
        handle = self.submit(job)
        queue: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._listeners[handle] = queue
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            while True:
                event = await queue.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
                if event.reason:
                    break
            if handle.error is not None:
                raise handle.error
        finally:
            del self._listeners[handle]
            if not handle.done:
                handle.cancel()

    async def _drive(self) -> None:
        """Run steps as long as there is anything to do."""
        try:
            while self.busy:
                for event in await asyncio.to_thread(self.iterate):
                    if event.handle in self._listeners:
                        self._listeners[event.handle].put_nowait(event)
        except BaseException as error:
            for queue in self._listeners.values():
                queue.put_nowait(error)
            raise


def _check(model: Transformer, cache: KVCache, tokenizer: Tokenizer) -> None:
    given = {"model": model, "cache": cache, "tokenizer": tokenizer}
    for (name, value), kind in zip(given.items(), (Transformer, KVCache, Tokenizer), strict=True):
        if not isinstance(value, kind):
            raise TypeError(f"{name} is a {type(value).__name__}; it must be exkv's")
    if cache.model is not model:
        raise ValueError("the cache was built for another model")
    if cache.pages is None:
        raise ValueError(
            f"{cache!r} is not in pages: an engine's jobs share a pool of them. Build "
            "PagedCache(model, max_seq_len=...), or give growth=Paged()"
        )
