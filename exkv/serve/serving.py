"""The server's model, which runs requests as engine jobs and can be replaced by another one.

A replacement is planned first, from the new model's small files, into the memory that the old one
will free; if it doesn't fit, the request is refused and nothing changes. Then new requests get
status 503, running jobs finish, the old model is unloaded and the new one loaded. If loading fails
nevertheless, the old one is loaded again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from exkv.decode import Engine, Event, Handle, Job
from exkv.model import Model
from exkv.planning.plan import UNBOUNDED

from .answers import RequestError, error_body, error_line
from .bounds import GrammarTrials
from .guard import Limits
from .hosting import ModelFolder, Prepared, ServedModel, ServeOptions
from .metrics import Metrics

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Events of a request's jobs, each with the job's index in the request.
Found: TypeAlias = list[tuple[int, Event]]

#: Progress messages of a model change; None at its end.
Progress: TypeAlias = "asyncio.Queue[dict[str, Any] | None]"

_REMEDIES = 3  # named in a refusal
_POLL = 1.0  # seconds between two looks for waiting hosts


class Serving:
    """The state behind the routes.

    Args:
        loaded: the model; None for none yet.
        folder: the models that may be loaded instead; None for no others.
        key, hosts: see :class:`exkv.serve.guard.Guard`.
        thread: an executor with one worker, in which models are loaded and run
            (``exkv.decode.streams`` says why in one); None for a new one.
        make: the model's constructor.

    Attributes:
        changing: whether a model is being loaded or unloaded.
        progress: units loaded, and their total number.
    """

    def __init__(
        self,
        loaded: ServedModel | None,
        *,
        folder: ModelFolder | None = None,
        limits: Limits | None = None,
        key: str | None = None,
        hosts: frozenset[str] | None = None,
        thread: ThreadPoolExecutor | None = None,
        make: Callable[..., Model] = Model,
    ) -> None:
        self.loaded = loaded
        self._thread = thread or ThreadPoolExecutor(1, thread_name_prefix="exkv-model")
        self.folder = folder
        self.limits = limits or Limits()
        self.key = key
        self.hosts = hosts
        self.metrics = Metrics()
        self.grammars = GrammarTrials()
        self.changing = False
        self.progress = (0, 0)
        self._answering: set[asyncio.Future[None]] = set()  # one per request, done at its end
        self._started: dict[Handle, float] = {}  # running jobs -> time of the first event
        self._change: asyncio.Task[None] | None = None
        self._make = make
        self._moving = asyncio.Lock()  # held while units move

    @property
    def model(self) -> ServedModel:
        """The loaded model.

        Raises:
            RequestError: there is none, or it is being replaced.
        """
        if self.changing:
            raise RequestError("another model is being loaded: try again later", 503)
        if self.loaded is None:
            raise RequestError(
                "no model is loaded: POST /v1/model/load", 503, code="model_not_loaded"
            )
        return self.loaded

    def close(self) -> None:
        """Unload the model."""
        self.grammars.close()
        if self.loaded is not None:
            self.loaded.unload()
            self.loaded = None
        self._thread.shutdown(wait=False)

    # Jobs ------------------------------------------------------------------------------------

    def check_room_for(self, jobs: int) -> None:
        """Raise RequestError if this many more jobs would exceed ``limits.jobs``."""
        if self.metrics.jobs + jobs > self.limits.jobs:
            raise RequestError(
                f"{self.metrics.jobs} jobs are running or waiting, and at most {self.limits.jobs} "
                "may: try again later",
                429,
                "rate_limit_error",
            )

    async def events(self, model: ServedModel, jobs: Sequence[Job]) -> AsyncGenerator[Found]:
        """Run jobs and yield their events; closing the generator cancels them."""
        if model is not self.model:
            raise RequestError("another model has been loaded since: try again", 503)
        self.check_room_for(len(jobs))
        answering = asyncio.get_running_loop().create_future()
        self._answering.add(answering)
        self.metrics.jobs += len(jobs)
        handles: set[Handle] = set()
        ended = 0
        try:
            async with contextlib.aclosing(model.engine.stream_steps(jobs)) as steps:
                async for found in steps:
                    ended += self._note(found, handles)
                    yield found
        except (ValueError, TypeError) as error:  # a grammar may become too complex at any token
            raise RequestError(str(error)) from None
        finally:
            for _ in range(len(jobs) - ended):
                self.metrics.ended("")
            for handle in handles:
                self._started.pop(handle, None)
            self._answering.discard(answering)
            answering.set_result(None)

    def _note(self, found: Found, handles: set[Handle]) -> int:
        """Record when jobs start and end -> how many ended."""
        ended = 0
        for _, event in found:
            if event.handle not in handles:
                handles.add(event.handle)
                self._started[event.handle] = time.monotonic()
            if event.reason:
                self.metrics.ended(event.reason)
                del self._started[event.handle]
                ended += 1
        return ended

    # State -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The body of ``/v1/state``: memory by device in bytes, pages, and running jobs."""
        loading = list(self.progress) if self.changing else None
        if self.loaded is None:
            empty: dict[str, Any] = {"model": None, "jobs": 0, "devices": [], "running": []}
            return {**empty, "loading": loading, "pages": dict.fromkeys(_PAGES, 0)}
        engine = self.loaded.engine
        pool, stats = engine.pool, engine.stats
        shared = sum(holders > 1 for holders in list(pool.holders))
        pages = zip(_PAGES, (pool.pages, pool.available, pool.idle, shared), strict=True)
        return {
            "model": self.loaded.name,
            "loading": loading,
            "devices": _devices(self.loaded.models),
            "pages": dict(pages),
            "host": _host(engine),
            "jobs": self.metrics.jobs,
            "running": [_job(handle, began) for handle, began in list(self._started.items())],
            "generated_tokens": stats.new_tokens,
            "put_away": stats.put_away,
        }

    async def readmit_hosts(self) -> None:
        """Place units on hosts that joined or came back, while no job is running. Runs until
        cancelled; returns at once on a single machine."""
        while self._make is not Model:
            await asyncio.sleep(_POLL)
            if self.changing or self.loaded is None or self.loaded.engine.busy:
                continue
            async with self._moving:
                if self.loaded is not None:
                    await self._readmit(self.loaded.models[0])

    async def _readmit(self, model: Model) -> None:
        try:
            names = await asyncio.get_running_loop().run_in_executor(self._thread, model.take_in)
        except RuntimeError as error:
            logger.warning("waiting hosts can't be readmitted: %s", error)
            return
        if names:
            logger.warning("%s joined, and now holds units of the model", ", ".join(names))

    # Another model ---------------------------------------------------------------------------

    def prepare(self, path: Path, options: ServeOptions, name: str) -> Prepared:
        """Prepare a model for loading; raises as :class:`Prepared` does."""
        return Prepared(path, options, name, self._make)

    async def prepared(self, make: Callable[[], Prepared]) -> Prepared:
        """A model that fits in place of the loaded one.

        Raises:
            RequestError: why it can't be loaded; nothing has changed.
        """
        if self.changing:
            raise RequestError("a model is being loaded already", 409)
        return await in_new_thread(self._check_fits, make)

    def _check_fits(self, make: Callable[[], Prepared]) -> Prepared:
        try:
            prepared = make()
            answer = prepared.answer(self.leaving)
        except (ValueError, TypeError, OSError) as error:
            raise RequestError(str(error)[:500]) from None
        if not answer.fits:
            remedies = itertools.islice(answer.remedies, _REMEDIES)
            advice = "".join(f"; would fit: {remedy}" for remedy in remedies)
            raise RequestError(f"{prepared.name}: {answer.sentence}{advice}", code="does_not_fit")
        return prepared

    @property
    def leaving(self) -> list[Model]:
        """The models whose memory a new one would get."""
        return [] if self.loaded is None else self.loaded.models

    def load(self, prepared: Prepared, *, now: bool) -> AsyncGenerator[dict[str, Any]]:
        """Start replacing the model -> progress messages in TabbyAPI's format. The change
        goes on if nobody reads them.

        Args:
            now: cancel running jobs instead of waiting for them.

        Raises:
            RequestError: a model is being loaded already.
        """
        if self.changing:
            raise RequestError("a model is being loaded already", 409)
        self.changing, self.progress = True, (0, prepared.units)
        messages: Progress = asyncio.Queue()
        messages.put_nowait(_progress(*self.progress, "processing"))
        self._change = asyncio.create_task(self._replace(prepared, now, messages))
        return _until_none(messages)

    async def _replace(self, prepared: Prepared, now: bool, messages: Progress) -> None:
        old = self.loaded
        try:
            await self._remove(now)
            await self._install(prepared, messages)
        except Exception as error:  # noqa: BLE001 # reported to the client
            reason = f"{prepared.name}: {error_line(error)}"
        else:
            reason = ""
        try:
            if reason:  # outside of except: the traceback's frames would hold tensors
                prepared.unload()
                outcome = await self._restore(old)
                messages.put_nowait(error_body(f"{reason}. {outcome}", "server_error"))
        finally:
            self.changing = False
            messages.put_nowait(None)

    async def unload(self, *, now: bool) -> None:
        """Unload the model and release its memory; raises as :attr:`model` does."""
        self.model  # noqa: B018 # raises if there is none
        self.changing = True
        try:
            await self._remove(now)
        finally:
            self.changing = False

    async def _remove(self, now: bool) -> None:
        """Wait for the jobs to end, then unload the model."""
        if now and self.loaded is not None:
            self.loaded.engine.fail_streams(RequestError("the model is being unloaded", 503))
        while self._answering:
            await asyncio.wait(list(self._answering))
        old, self.loaded = self.loaded, None
        if old is not None:
            async with self._moving:
                await in_new_thread(old.unload)

    async def _install(self, prepared: Prepared, messages: Progress | None = None) -> None:
        """Load a prepared model unit by unit, and serve it."""
        loop, steps = asyncio.get_running_loop(), prepared.load()
        while (step := await loop.run_in_executor(self._thread, next, steps, None)) is not None:
            self.progress = step
            if messages is not None:
                messages.put_nowait(_progress(*step, "processing"))
        self.loaded = await loop.run_in_executor(self._thread, prepared.serve, self._thread)
        if messages is not None:
            messages.put_nowait(_progress(*self.progress, "finished"))

    async def _restore(self, old: ServedModel | None) -> str:
        """Load the previous model again -> a sentence with the outcome."""
        none = "No model is loaded now: POST /v1/model/load"
        if old is None or old.path is None:
            return none
        path, options, name = old.path, old.options, old.name
        try:
            await self._install(await in_new_thread(self.prepare, path, options, name))
        except Exception as error:  # noqa: BLE001 # reported to the client
            return f"{none} ({name} could not be loaded again: {str(error)[:200]})"
        return f"{name} is loaded again"


async def in_new_thread(call: Callable[..., T], *args: Any) -> T:
    """Run a slow call in a thread of its own, which ends with the call, as do the thread's OpenMP
    workers."""
    thread = ThreadPoolExecutor(1)
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, call, *args)
    finally:
        thread.shutdown(wait=False)


async def _until_none(messages: Progress) -> AsyncGenerator[dict[str, Any]]:
    while (each := await messages.get()) is not None:
        yield each


_PAGES = ("total", "available", "known", "shared")


def _host(engine: Engine) -> dict[str, int]:
    """Host memory in bytes: for cached pages, used and in total, and for preempted jobs."""
    layers, (jobs, away) = engine.cache.layers, engine.away
    room = sum(layer.tier_bytes() for layer in layers)
    used = sum(engine.pool.in_tiers)
    pages = engine.pool.tier_capacity
    return {
        "pages": room * used // pages if pages else 0,
        "pages_room": room,
        "jobs": jobs,
        "jobs_bytes": away,
    }


def _progress(module: int, modules: int, status: str) -> dict[str, Any]:
    return {"model_type": "model", "module": module, "modules": modules, "status": status}


def _job(handle: Handle, began: float) -> dict[str, Any]:
    """A running or preempted job; tokens per second are counted from its first token."""
    seconds, new = time.monotonic() - began, len(handle.tokens)
    return {
        "id": handle.number,
        "prompt_tokens": len(handle.prompt),
        "cached_tokens": handle.cached_tokens,
        "new_tokens": new,
        "tokens_per_second": round((new - 1) / seconds, 2) if new > 1 and seconds else 0.0,
        "in_host_memory": handle.away is not None,
    }


def _devices(models: Sequence[Model]) -> list[dict[str, Any]]:
    """Planned bytes per device that holds units, summed over models; the workspace is their
    maximum, since calls run one at a time."""
    found: dict[str, dict[str, Any]] = {}
    reports = [report for model in models if (report := model.full_report())]
    for row in [row for report in reports for row in report.devices]:
        capacity = row.ledger.budget.capacity
        name = str(row.ledger.place)
        device = found.setdefault(name, {"weights": 0, "cache": 0, "workspace": 0})
        device |= {
            "device": name,
            "weights": device["weights"] + row.ledger.weights,
            "cache": device["cache"] + row.ledger.cache,
            "workspace": max(device["workspace"], row.ledger.workspace),
            "of": 0 if capacity == UNBOUNDED else capacity,
        }
    return list(found.values())
