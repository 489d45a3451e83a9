"""Events of jobs for coroutines: steps run in one thread while there are jobs, and each step's
events reach the event loop in one call.

The thread never waits for the loop. It should be the one that loaded the model: OpenMP keeps a team
of threads for each calling thread, and if there are more threads than processors they sleep between
two operations instead of spinning, and have to be woken.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

from .job import Event, Handle, Job

if TYPE_CHECKING:
    from .engine import Engine

#: The events of a step, each with the index of its job in the stream.
Step: TypeAlias = list[tuple[int, Event]]


class Streams:
    """Streams of an engine's events. It refers to the engine only while there are any, so that a
    dropped engine is freed at once.

    Args:
        thread: runs the steps; None for a thread of its own.
    """

    def __init__(self, thread: Executor | None = None) -> None:
        self._listeners: dict[Handle, tuple[int, asyncio.Queue[Step | BaseException]]] = {}
        self._own = None if thread else ThreadPoolExecutor(1, thread_name_prefix="exkv-steps")
        self._thread = thread or self._own
        self._driver: asyncio.Task[None] | None = None

    def close(self) -> None:
        """End its own thread, if any, after its step."""
        if self._own is not None:
            self._own.shutdown(wait=False)

    def fail(self, error: BaseException) -> None:
        """Raise this error in every stream, and cancel its jobs."""
        for queue in {id(queue): queue for _, queue in self._listeners.values()}.values():
            queue.put_nowait(error)

    async def steps(self, engine: Engine, jobs: Sequence[Job]) -> AsyncGenerator[Step]:
        """Submit jobs, and yield their events until all have ended, those of several steps at once
        if the reader is slower. Raises the error that ended a job, a step or the submission; then,
        or when it is dropped, cancels the remaining jobs."""
        queue: asyncio.Queue[Step | BaseException] = asyncio.Queue()
        handles: list[Handle] = []
        try:
            for index, job in enumerate(jobs):
                handles.append(engine.submit(job))
                self._listeners[handles[-1]] = index, queue
            self._ensure_driving(engine)
            left = len(handles)
            while left:
                found = await _next_events(queue)
                left -= sum(bool(event.reason) for _, event in found)
                yield found
                for _, event in found:
                    if event.reason and event.handle.error is not None:
                        raise event.handle.error
        finally:
            for handle in handles:
                del self._listeners[handle]
                if not handle.done:
                    handle.cancel()
            if engine.busy and not (self._driver is not None and self._driver.cancelled()):
                self._ensure_driving(engine)  # the next step frees their pages

    def _ensure_driving(self, engine: Engine) -> None:
        """Start a task that runs steps, if there is none."""
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive(engine))

    async def _drive(self, engine: Engine) -> None:
        loop, over = asyncio.get_running_loop(), threading.Event()

        def steps() -> None:
            while engine.busy and not over.is_set():
                loop.call_soon_threadsafe(self._wake, engine.iterate_for_streams())

        try:
            while engine.busy:
                await loop.run_in_executor(self._thread, steps)
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            over.set()

    def _wake(self, events: Sequence[Event]) -> None:
        """Wake each stream with any of these events once."""
        found: dict[int, tuple[asyncio.Queue[Step | BaseException], Step]] = {}
        for event in events:
            if event.handle in self._listeners:
                index, queue = self._listeners[event.handle]
                found.setdefault(id(queue), (queue, []))[1].append((index, event))
        for queue, step in found.values():
            queue.put_nowait(step)


async def _next_events(queue: asyncio.Queue[Step | BaseException]) -> Step:
    """Wait for events, and take all that are queued; an error raises after the events before it."""
    found = await queue.get()
    if isinstance(found, BaseException):
        raise found
    while not queue.empty():
        more = queue.get_nowait()
        if isinstance(more, BaseException):
            queue.put_nowait(more)
            break
        found = found + more
    return found
