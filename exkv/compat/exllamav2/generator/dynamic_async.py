"""The dynamic generator for asyncio: steps run in another thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from exkv.compat.exllamav2.missing import Adapter, missing_from

from .dynamic import ExLlamaV2DynamicGenerator
from .jobs import ExLlamaV2DynamicJob


class ExLlamaV2DynamicGeneratorAsync(Adapter):
    """The dynamic generator for asyncio; takes the arguments of :class:`ExLlamaV2DynamicGenerator`,
    which is its ``generator``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.generator = ExLlamaV2DynamicGenerator(*args, **kwargs)
        self.jobs: dict[ExLlamaV2DynamicJob, ExLlamaV2DynamicJobAsync] = {}
        self.iteration_task: asyncio.Task[None] | None = None

    def enqueue(self, job: ExLlamaV2DynamicJobAsync) -> None:
        """Submit a job; jobs call this themselves."""
        self.generator.enqueue(job.job)
        self.jobs[job.job] = job
        if self.iteration_task is None or self.iteration_task.done():
            self.iteration_task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Run steps while there are jobs, or pages of cancelled ones to release."""
        while self.jobs or self.generator.exkv.busy:
            try:
                results = await asyncio.to_thread(self.generator.results)
            except Exception as error:  # noqa: BLE001 # nobody else would get it
                for job in list(self.jobs.values()):
                    await job.put_result(error)
                    await self.cancel(job)
                return
            for result in results:
                waiting = self.jobs.get(result["job"])
                if waiting is not None:
                    await waiting.put_result(result.get("error", result))
                    if result["eos"]:
                        del self.jobs[result["job"]]

    async def cancel(self, job: ExLlamaV2DynamicJobAsync) -> None:
        """Drop a job; an ``async for`` over it ends."""
        if self.jobs.pop(job.job, None) is not None:
            self.generator.cancel(job.job)
            await job.put_result(None)

    async def close(self) -> None:
        """Drop all jobs, wait for the last step, and release the caches."""
        for job in list(self.jobs.values()):
            await self.cancel(job)
        if self.iteration_task is not None:
            await self.iteration_task
        self.generator.exkv.close()


class ExLlamaV2DynamicJobAsync(Adapter):
    """A job of an :class:`ExLlamaV2DynamicGeneratorAsync`, submitted at once; ``async for`` yields
    its results. Further arguments are those of :class:`ExLlamaV2DynamicJob`."""

    def __init__(
        self, generator: ExLlamaV2DynamicGeneratorAsync, *args: Any, **kwargs: Any
    ) -> None:
        self.generator = generator
        self.job = ExLlamaV2DynamicJob(*args, **kwargs)
        self.queue: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()
        self.cancelled = False
        generator.enqueue(self)

    async def put_result(self, result: dict[str, Any] | Exception | None) -> None:
        """Queue a result; None ends the ``async for``."""
        await self.queue.put(result)

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        while not self.cancelled:
            result = await self.queue.get()
            if isinstance(result, Exception):
                raise result
            if result is None:
                return
            yield result
            if result["eos"]:
                return

    async def cancel(self) -> None:
        """Drop the job; a task that iterates over it stops."""
        self.cancelled = True
        await self.generator.cancel(self)


__getattr__ = missing_from(__name__)
