"""What a server does with its model: jobs of the engine for requests, and another model in place
of the one that is there.

A model is changed in this order: the new one's small files are read and its plan is made, as if the
old one had left; what doesn't fit is refused, and nothing has changed. Then new requests are told
to wait, jobs that run come to their ends, the old model is unloaded and the new one loaded. Where
that fails all the same, the old one is loaded again.
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

from .answers import RequestError, error_body
from .bounds import GrammarTrials
from .guard import Limits
from .hosting import LoadOptions, ModelFolder, Prepared, ServedModel
from .metrics import Metrics

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: What steps brought a request's jobs, with their places.
Found: TypeAlias = list[tuple[int, Event]]

#: What a client hears of a change of models; None at its end.
Said: TypeAlias = "asyncio.Queue[dict[str, Any] | None]"

_REMEDIES = 3  # that a refusal names
_LOOK = 1.0  # seconds between two looks at which hosts wait


class Serving:
    """What a server serves.

    Args:
        loaded: the model that answers, None for none yet.
        folder: the models that may be loaded in its place; None for no others.
        key, hosts: as of :class:`exkv.serve.guard.Guard`.
        thread: of one worker, in which models are loaded and run (``exkv.decode.streams`` says why
            in one); None for a new one.
        make: what makes models; a kind of ``Model``.

    Attributes:
        changing: whether a model is being loaded or unloaded.
        progress: units of it that are loaded, and how many it has.
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
        self._answering: set[asyncio.Future[None]] = set()  # done when a request's jobs have ended
        self._begun: dict[Handle, float] = {}
        self._change: asyncio.Task[None] | None = None
        self._make = make
        self._moving = asyncio.Lock()  # held while units move

    @property
    def model(self) -> ServedModel:
        """The model that answers.

        Raises:
            RequestError: there is none now.
        """
        if self.changing:
            raise RequestError("another model is being loaded: try again later", 503)
        if self.loaded is None:
            raise RequestError(
                "no model is loaded: POST /v1/model/load", 503, code="model_not_loaded"
            )
        return self.loaded

    def close(self) -> None:
        """Unload what is loaded."""
        self.grammars.close()
        if self.loaded is not None:
            self.loaded.unload()
            self.loaded = None
        self._thread.shutdown(wait=False)

    # Jobs ------------------------------------------------------------------------------------

    def check_room_for(self, jobs: int) -> None:
        """RequestError where so many more jobs would have to wait too long."""
        if self.metrics.jobs + jobs > self.limits.jobs:
            raise RequestError(
                f"{self.metrics.jobs} jobs are running or waiting, of {self.limits.jobs} that may: "
                "try again later",
                429,
                "rate_limit_error",
            )

    async def events(self, model: ServedModel, jobs: Sequence[Job]) -> AsyncGenerator[Found]:
        """What comes of all of these jobs, as it comes; jobs end when whoever reads it stops."""
        if model is not self.model:
            raise RequestError("another model was loaded meanwhile: try again", 503)
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
                self._begun.pop(handle, None)
            self._answering.discard(answering)
            answering.set_result(None)

    def _note(self, found: Found, handles: set[Handle]) -> int:
        """Which jobs have had their first event; how many have had their last."""
        ended = 0
        for _, event in found:
            if event.handle not in handles:
                handles.add(event.handle)
                self._begun[event.handle] = time.monotonic()
            if event.reason:
                self.metrics.ended(event.reason)
                del self._begun[event.handle]
                ended += 1
        return ended

    # What is there ---------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What is where, in bytes, and what is going on."""
        names: dict[str, Any] = {
            "model": None if self.loaded is None else self.loaded.name,
            "jobs": 0,
        }
        names["loading"] = list(self.progress) if self.changing else None
        if self.loaded is None:
            return {**names, "devices": [], "pages": dict.fromkeys(_PAGES, 0), "running": []}
        engine = self.loaded.engine
        pool, stats = engine.pool, engine.stats
        shared = sum(holders > 1 for holders in list(pool.holders))
        pages = zip(_PAGES, (pool.pages, pool.available, pool.idle, shared), strict=True)
        return {
            **names,
            "devices": _devices(self.loaded.models),
            "pages": dict(pages),
            "host": _host(engine),
            "jobs": self.metrics.jobs,
            "running": [_job(handle, begun) for handle, begun in list(self._begun.items())],
            "generated_tokens": stats.new_tokens,
            "put_away": stats.put_away,
        }

    async def take_hosts_in(self) -> None:
        """While no job runs, have hosts that came, or came back, hold a part of the model; it never
        ends. On one machine there is nothing to do."""
        while self._make is not Model:
            await asyncio.sleep(_LOOK)
            if self.changing or self.loaded is None or self.loaded.engine.busy:
                continue
            async with self._moving:
                if self.loaded is not None:
                    await self._take_in(self.loaded.models[0])

    async def _take_in(self, model: Model) -> None:
        try:
            came = await asyncio.get_running_loop().run_in_executor(self._thread, model.take_in)
        except RuntimeError as error:
            logger.warning("hosts that wait can't be taken in: %s", error)
            return
        if came:
            logger.warning("%s came, and holds a part of the model", ", ".join(came))

    # Another model ---------------------------------------------------------------------------

    def prepare(self, path: Path, options: LoadOptions, name: str) -> Prepared:
        """A model that may be loaded; errors as of :class:`Prepared`."""
        return Prepared(path, options, name, self._make)

    async def prepared(self, make: Callable[[], Prepared]) -> Prepared:
        """A model that may be loaded in place of the one that is there.

        Raises:
            RequestError: it can't be, and why; nothing has changed.
        """
        if self.changing:
            raise RequestError("a model is being loaded already", 409)
        return await in_new_thread(self._that_fits, make)

    def _that_fits(self, make: Callable[[], Prepared]) -> Prepared:
        try:
            prepared = make()
            answer = prepared.answer(self.leaving)
        except (ValueError, TypeError, OSError) as error:
            raise RequestError(str(error)[:500]) from None
        if not answer.fits:
            remedies = itertools.islice(answer.remedies, _REMEDIES)
            said = "".join(f"; would fit: {remedy}" for remedy in remedies)
            raise RequestError(f"{prepared.name}: {answer.sentence}{said}", code="does_not_fit")
        return prepared

    @property
    def leaving(self) -> list[Model]:
        """The models whose memory another one would get."""
        return [] if self.loaded is None else self.loaded.models

    def load(self, prepared: Prepared, *, now: bool) -> AsyncGenerator[dict[str, Any]]:
        """Begin to change models; what it gives says how far it is, in TabbyAPI's shape, and the
        change goes on if nobody listens.

        Args:
            now: end the jobs that run, instead of waiting for them.

        Raises:
            RequestError: a model is being loaded already.
        """
        if self.changing:
            raise RequestError("a model is being loaded already", 409)
        self.changing, self.progress = True, (0, prepared.units)
        said: Said = asyncio.Queue()
        said.put_nowait(_progress(*self.progress, "processing"))
        self._change = asyncio.create_task(self._exchange(prepared, now, said))
        return _until_none(said)

    async def _exchange(self, prepared: Prepared, now: bool, said: Said) -> None:
        old = self.loaded
        try:
            await self._take_out(now)
            await self._put_in(prepared, said)
        except Exception as error:  # noqa: BLE001 # the client is told, whatever it was
            reason = f"{prepared.name}: {type(error).__name__}: {str(error)[:500]}"
        else:
            reason = ""
        try:
            if reason:  # here the error's traceback, whose frames hold tensors, is gone
                prepared.unload()
                said.put_nowait(
                    error_body(f"{reason}. {await self._put_back(old)}", "server_error")
                )
        finally:
            self.changing = False
            said.put_nowait(None)

    async def unload(self, *, now: bool) -> None:
        """Give the model's memory back; errors as of :attr:`model`."""
        self.model  # noqa: B018 # raises where there is none
        self.changing = True
        try:
            await self._take_out(now)
        finally:
            self.changing = False

    async def _take_out(self, now: bool) -> None:
        """No job, and no model."""
        if now and self.loaded is not None:
            self.loaded.engine.fail_streams(RequestError("the model is being unloaded", 503))
        while self._answering:
            await asyncio.wait(list(self._answering))
        old, self.loaded = self.loaded, None
        if old is not None:
            async with self._moving:
                await in_new_thread(old.unload)

    async def _put_in(self, prepared: Prepared, said: Said | None = None) -> None:
        loop, steps = asyncio.get_running_loop(), prepared.load()
        while (step := await loop.run_in_executor(self._thread, next, steps, None)) is not None:
            self.progress = step
            if said is not None:
                said.put_nowait(_progress(*step, "processing"))
        self.loaded = await loop.run_in_executor(self._thread, prepared.serve, self._thread)
        if said is not None:
            said.put_nowait(_progress(*self.progress, "finished"))

    async def _put_back(self, old: ServedModel | None) -> str:
        """Load the model that was there, and say so, or that there is none."""
        none = "No model is loaded now: POST /v1/model/load"
        if old is None or old.path is None:
            return none
        path, options, name = old.path, old.options, old.name
        try:
            await self._put_in(await in_new_thread(self.prepare, path, options, name))
        except Exception as error:  # noqa: BLE001 # as above
            return f"{none} ({name} could not be loaded again: {str(error)[:200]})"
        return f"{name} is loaded again"


async def in_new_thread(call: Callable[..., T], *args: Any) -> T:
    """What a call returns that may take long and compute, in a thread that ends with it: so does
    the team that OpenMP has for it."""
    thread = ThreadPoolExecutor(1)
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, call, *args)
    finally:
        thread.shutdown(wait=False)


async def _until_none(said: Said) -> AsyncGenerator[dict[str, Any]]:
    while (each := await said.get()) is not None:
        yield each


_PAGES = ("total", "available", "known", "shared")


def _host(engine: Engine) -> dict[str, int]:
    """What lies in host memory: pages that nobody holds, with all that there is room for, and jobs
    that were put away; bytes."""
    layers, (jobs, away) = engine.cache.layers, engine.away
    room = sum(layer.tier_bytes() for layer in layers)
    used = sum(engine.pool.in_tiers)
    pages = engine.pool.in_tiers_at_most
    return {
        "pages": room * used // pages if pages else 0,
        "pages_room": room,
        "jobs": jobs,
        "jobs_bytes": away,
    }


def _progress(module: int, modules: int, status: str) -> dict[str, Any]:
    return {"model_type": "model", "module": module, "modules": modules, "status": status}


def _job(handle: Handle, begun: float) -> dict[str, Any]:
    """One that runs or waits; tokens a second since its first one."""
    seconds, new = time.monotonic() - begun, len(handle.tokens)
    return {
        "id": handle.number,
        "prompt_tokens": len(handle.prompt),
        "cached_tokens": handle.cached_tokens,
        "new_tokens": new,
        "tokens_per_second": round((new - 1) / seconds, 2) if new > 1 and seconds else 0.0,
        "in_host_memory": handle.away is not None,
    }


def _devices(models: Sequence[Model]) -> list[dict[str, Any]]:
    """What the plans say of each device that holds units, of all models together: calls are made
    one after the other."""
    found: dict[str, dict[str, Any]] = {}
    reports = [report for model in models if (report := model.full_report())]
    for row in [row for report in reports for row in report.devices]:
        capacity = row.ledger.budget.capacity
        of = 0 if capacity == UNBOUNDED else capacity
        name = str(row.ledger.place)
        device = found.setdefault(name, {"weights": 0, "cache": 0, "workspace": 0})
        device |= {
            "device": name,
            "weights": device["weights"] + row.ledger.weights,
            "cache": device["cache"] + row.ledger.cache,
            "workspace": max(device["workspace"], row.ledger.workspace),
            "of": of,
        }
    return list(found.values())
