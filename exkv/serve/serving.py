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
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeAlias

from exkv.engine import Engine, Event, Handle, Job
from exkv.model import Model
from exkv.planning.plan import UNBOUNDED

from .answers import RequestError, error_body
from .bounds import GrammarTrial
from .guard import Limits
from .hosting import ModelFolder, Prepared, ServedModel
from .metrics import Metrics

#: What a step brought one of a request's jobs, and which.
Found: TypeAlias = tuple[int, Event]
Queue: TypeAlias = "asyncio.Queue[Found | BaseException | None]"

#: What a client hears of a change of models; None at its end.
Said: TypeAlias = "asyncio.Queue[dict[str, Any] | None]"

_REMEDIES = 3  # that a refusal names


class Serving:
    """What a server serves.

    Args:
        loaded: the model that answers, None for none yet.
        folder: the models that may be loaded in its place; None for no others.
        key, hosts: as of :class:`exkv.serve.guard.Guard`.

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
    ) -> None:
        self.loaded = loaded
        self.folder = folder
        self.limits = limits or Limits()
        self.key = key
        self.hosts = hosts
        self.metrics = Metrics()
        self.grammars = GrammarTrial()
        self.changing = False
        self.progress = (0, 0)
        self._followed: dict[asyncio.Task[None], Queue] = {}
        self._begun: dict[Handle, float] = {}
        self._change: asyncio.Task[None] | None = None

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
        """What comes of all of these jobs, with their indices, as it comes; jobs end when whoever
        reads it stops."""
        if model is not self.model:
            raise RequestError("another model was loaded meanwhile: try again", 503)
        self.check_room_for(len(jobs))
        queue: Queue = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._follow(model, i, job, queue)) for i, job in enumerate(jobs)
        ]
        self._followed.update(dict.fromkeys(tasks, queue))
        for task in tasks:  # not below: where a client goes away, nothing can be waited for there
            task.add_done_callback(lambda task: self._followed.pop(task, None))
        try:
            left = len(tasks)
            while left:
                found = await queue.get()
                if found is None:
                    left -= 1
                elif isinstance(found, BaseException):
                    raise found
                else:
                    yield found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, model: ServedModel, index: int, job: Job, queue: Queue) -> None:
        handle = None
        with self.metrics.job():
            try:
                async with contextlib.aclosing(model.engine.stream(job)) as events:
                    async for each in events:
                        handle = each.handle
                        self._begun.setdefault(handle, time.monotonic())
                        self.metrics.count(each)
                        queue.put_nowait((index, each))
            except Exception as error:  # noqa: BLE001 # whatever ended the job is told its client
                asked_for = isinstance(error, ValueError | TypeError) and handle is None
                queue.put_nowait(RequestError(str(error)) if asked_for else error)
            finally:
                self._begun.pop(handle, None)  # type: ignore[arg-type] # None is in no dict
            queue.put_nowait(None)

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
            "devices": _devices(engine.model),
            "pages": dict(pages),
            "host": _host(engine),
            "jobs": self.metrics.jobs,
            "running": [_job(handle, begun) for handle, begun in list(self._begun.items())],
            "generated_tokens": stats.new_tokens,
            "put_away": stats.put_away,
        }

    # Another model ---------------------------------------------------------------------------

    async def prepared(self, make: Callable[[], Prepared]) -> Prepared:
        """A model that may be loaded in place of the one that is there.

        Raises:
            RequestError: it can't be, and why; nothing has changed.
        """
        if self.changing:
            raise RequestError("a model is being loaded already", 409)
        return await asyncio.to_thread(self._that_fits, make)

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
    def leaving(self) -> Model | None:
        """The model whose memory another one would get."""
        model = None if self.loaded is None else self.loaded.engine.model
        return model if isinstance(model, Model) else None

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
        self.changing, self.progress = True, (0, len(prepared.model.units))
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
                prepared.model.unload()
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
        if now:
            for queue in {id(queue): queue for queue in self._followed.values()}.values():
                queue.put_nowait(RequestError("the model is being unloaded", 503))
        while self._followed:
            await asyncio.wait(list(self._followed))
            await asyncio.sleep(0)  # for whoever waits for them, too
        old, self.loaded = self.loaded, None
        if old is not None:
            await asyncio.to_thread(old.unload)

    async def _put_in(self, prepared: Prepared, said: Said | None = None) -> None:
        steps = prepared.load()
        while (step := await asyncio.to_thread(next, steps, None)) is not None:
            self.progress = step
            if said is not None:
                said.put_nowait(_progress(*step, "processing"))
        self.loaded = await asyncio.to_thread(prepared.serve)
        if said is not None:
            said.put_nowait(_progress(*self.progress, "finished"))

    async def _put_back(self, old: ServedModel | None) -> str:
        """Load the model that was there, and say so, or that there is none."""
        none = "No model is loaded now: POST /v1/model/load"
        if old is None or old.path is None:
            return none
        path, options, name = old.path, old.options, old.name
        try:
            await self._put_in(await asyncio.to_thread(Prepared, path, options, name))
        except Exception as error:  # noqa: BLE001 # as above
            return f"{none} ({name} could not be loaded again: {str(error)[:200]})"
        return f"{name} is loaded again"


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


def _devices(model: Any) -> list[dict[str, Any]]:
    """What the plan says of each device that holds units."""
    report = model.report if isinstance(model, Model) else None
    found = []
    for row in report.devices if report else ():
        lines = {line: getattr(row.ledger, line) for line in ("weights", "cache", "workspace")}
        capacity = row.ledger.budget.capacity
        of = 0 if capacity == UNBOUNDED else capacity
        found.append({"device": str(row.device), **lines, "of": of})
    return found
