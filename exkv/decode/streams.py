"""Events of jobs for coroutines: steps run in a thread of their own, as long as there is anything
to do, and what a step brought comes to the event loop in one call.

The thread never waits for the loop, and is the same for all steps. Best it is the one that loaded
the model: OpenMP keeps a team for each thread that asks for one, and once these are more threads
than processors, a team's don't spin between two operations but sleep, and each has to be woken.
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

#: What a step brought some jobs, with the places of these among the jobs of one stream.
Step: TypeAlias = list[tuple[int, Event]]


class Streams:
    """Whoever waits for events of an engine's jobs. It knows the engine only while somebody does,
    so that one that is dropped is freed at once.

    Args:
        thread: where steps run; None for a thread of its own.
    """

    def __init__(self, thread: Executor | None = None) -> None:
        self._listeners: dict[Handle, tuple[int, asyncio.Queue[Step | BaseException]]] = {}
        self._own = None if thread else ThreadPoolExecutor(1, thread_name_prefix="exkv-steps")
        self._thread = thread or self._own
        self._driver: asyncio.Task[None] | None = None

    def close(self) -> None:
        """A thread of its own ends with the step that it is in."""
        if self._own is not None:
            self._own.shutdown(wait=False)

    def fail(self, error: BaseException) -> None:
        """Every stream raises this error next, and cancels its jobs."""
        for queue in {id(queue): queue for _, queue in self._listeners.values()}.values():
            queue.put_nowait(error)

    async def steps(self, engine: Engine, jobs: Sequence[Job]) -> AsyncGenerator[Step]:
        """Submit jobs, and yield what steps bring them until all have ended; several steps at once
        where the reader is slower. Dropped, or where it raises, it cancels those that are left.

        Raises:
            BaseException: what ended one of the jobs, a step, or the submission.
        """
        queue: asyncio.Queue[Step | BaseException] = asyncio.Queue()
        handles: list[Handle] = []
        try:
            for index, job in enumerate(jobs):
                handles.append(engine.submit(job))
                self._listeners[handles[-1]] = index, queue
            self._keep_driving(engine)
            left = len(handles)
            while left:
                found = await _waiting_in(queue)
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
                self._keep_driving(engine)  # after a step that raised: pages come back in the next

    def _keep_driving(self, engine: Engine) -> None:
        """Run steps in a task, if none does."""
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive(engine))

    async def _drive(self, engine: Engine) -> None:
        loop, over = asyncio.get_running_loop(), threading.Event()

        def steps() -> None:
            while engine.busy and not over.is_set():
                loop.call_soon_threadsafe(self._tell, engine.iterate_for_streams())

        try:
            while engine.busy:
                await loop.run_in_executor(self._thread, steps)
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            over.set()

    def _tell(self, events: Sequence[Event]) -> None:
        """Wake each of those who wait for any of these, once."""
        found: dict[int, tuple[asyncio.Queue[Step | BaseException], Step]] = {}
        for event in events:
            if event.handle in self._listeners:
                index, queue = self._listeners[event.handle]
                found.setdefault(id(queue), (queue, []))[1].append((index, event))
        for queue, step in found.values():
            queue.put_nowait(step)


async def _waiting_in(queue: asyncio.Queue[Step | BaseException]) -> Step:
    """All that is there, once there is something; an error raises once what came before is read."""
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
