"""Time and size limits for untrusted input: a request's grammar, and its rendered chat template.

A grammar is compiled in a subprocess first, under limits of CPU time and memory. A template is
rendered in a thread, in which an exception is raised when its time is up.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import json
import queue
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from exkv.sampling import Grammar

T = TypeVar("T")

GRAMMAR_BYTES = 1 << 18
_GRAMMAR_SECONDS = 1  # of CPU time
_GRAMMAR_MEMORY = 2 << 30
_GRAMMAR_WAIT = 30.0  # wall-clock seconds, on a busy machine
_KNOWN = 256  # remembered verdicts
_TERSE = {"NoExtensionBias": "a rule or a $ref refers only to itself, which no text can match"}

# Reads one grammar per line and writes its error, "" if it is valid.
_TRIAL = f"""
import json, resource, sys
import llguidance
resource.setrlimit(resource.RLIMIT_AS, ({_GRAMMAR_MEMORY}, {_GRAMMAR_MEMORY}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
tokens = llguidance.LLTokenizer("byte")
hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
for line in sys.stdin:
    kind, text = json.loads(line)
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime) + 1 + {_GRAMMAR_SECONDS}
    resource.setrlimit(resource.RLIMIT_CPU, (most, hard))
    made = getattr(llguidance.LLMatcher, "grammar_from_" + kind)(text)
    matcher = llguidance.LLMatcher(tokens, made, log_level=0)
    if not matcher.is_error():
        matcher.compute_logit_bias()
    print(json.dumps(matcher.get_error()[:500] if matcher.is_error() else ""), flush=True)
"""


class TimeUp(Exception):
    """Raised in a thread whose time is up."""


class GrammarTrials:
    """Tries grammars in subprocesses, shortest first, so that one client's large grammars don't
    delay another's."""

    def __init__(self, workers: int = 2) -> None:
        self._waiting: queue.PriorityQueue[_Waiting] = queue.PriorityQueue()
        self._number = itertools.count()
        self._known: OrderedDict[Grammar, str] = OrderedDict()
        self._trials = [_Trial(self._waiting) for _ in range(workers)]

    async def check(self, grammar: Grammar) -> None:
        """Check that a grammar compiles within the limits.

        Raises:
            ValueError: it is invalid, too large, or takes too long to compile.
        """
        nbytes = len(grammar.text.encode())
        if nbytes > GRAMMAR_BYTES:
            raise ValueError(
                f"the grammar can't be followed: it has more than {GRAMMAR_BYTES} bytes"
            )
        reason = self._known.get(grammar)
        if reason is None:
            result: Future[str] = Future()
            self._waiting.put((nbytes, next(self._number), grammar, result))
            reason = self._known[grammar] = await asyncio.wrap_future(result)
            while len(self._known) > _KNOWN:
                self._known.popitem(last=False)
        if reason:
            raise ValueError(f"the grammar can't be followed: {reason}")

    def close(self) -> None:
        """End the processes."""
        for _ in self._trials:
            self._waiting.put((-1, next(self._number), None, Future()))
        for trial in self._trials:
            trial.close()


#: Size in bytes, tie breaker, the grammar (None ends a worker), and its error ("" if valid).
_Waiting: TypeAlias = "tuple[int, int, Grammar | None, Future[str]]"


class _Trial:
    """A thread with a subprocess that tries grammars from a queue."""

    def __init__(self, waiting: queue.PriorityQueue[_Waiting]) -> None:
        self._waiting = waiting
        self.process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run, name="exkv-grammars", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            _, _, grammar, result = self._waiting.get()
            if grammar is None:
                return
            if result.set_running_or_notify_cancel():  # the client may have disconnected
                result.set_result(self._try(grammar))

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def _try(self, grammar: Grammar) -> str:
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _TRIAL],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        process = self.process
        assert process.stdin is not None and process.stdout is not None
        watchdog = threading.Timer(_GRAMMAR_WAIT, process.kill)
        watchdog.start()
        try:
            process.stdin.write(json.dumps([grammar.kind, grammar.text]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (BrokenPipeError, ValueError):  # the process ended, or was closed
            line = ""
        finally:
            watchdog.cancel()
        if line:
            reason = str(json.loads(line)).split("<state>")[0].strip()[:300]
            return _TERSE.get(reason, reason)
        process.kill()
        process.wait()
        return f"it takes more than {_GRAMMAR_SECONDS} s or too much memory to compile"


async def in_time(work: Callable[[], T], seconds: float, what: str) -> T:
    """Run a Python function in a thread, within a time limit -> its result.

    Raises:
        ValueError: it took longer, and was stopped.
    """
    thread = _Stoppable(work)
    try:
        return await asyncio.wait_for(asyncio.shield(thread.result), seconds)
    except TimeoutError:
        thread.stop()
        raise ValueError(f"{what} takes more than {seconds:g} s: shorten the request") from None


class _Stoppable:
    """A thread that can be stopped between two Python instructions."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._lock = threading.Lock()
        self._over = False
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[Any] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Raise :class:`TimeUp` in the thread, unless it has finished."""
        self.result.cancel()
        with self._lock:
            if not self._over:
                ident = ctypes.c_ulong(self._thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(TimeUp))

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            found, error = self._call(work)
            self._loop.call_soon_threadsafe(self._deliver, found, error)
        except (TimeUp, RuntimeError):  # RuntimeError: the loop is closed
            return

    def _call(self, work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        try:
            found, error = work(), None
        except TimeUp:
            raise
        except Exception as raised:  # noqa: BLE001 # raised again in the caller
            found, error = None, raised
        with self._lock:
            self._over = True
        return found, error

    def _deliver(self, found: Any, error: BaseException | None) -> None:
        if self.result.done():
            return
        if error is None:
            self.result.set_result(found)
        else:
            self.result.set_exception(error)
