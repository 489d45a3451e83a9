"""The loop: who runs, a step at a time, and what comes of it.

Jobs wait in order of priority, then of arrival. A step makes one token of every job that decodes,
then runs a part of the prompts. Where the calls run is for :class:`Rows` to say: in pages that
jobs share (``running``), or in the rows of any cache (``in_place``). Where pages run out, the last
job in that order is put away: what it has stored goes to host memory, and comes back as it was
once there is room. So every job that was taken ends with the tokens that it gives alone.

Over several hosts a call is not through when it has begun. There the jobs that decode are in
several groups, and a step waits for what the last step began: while one host runs a group, the
others run other groups and a part of a prompt.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from exkv import devices
from exkv.errors import ContentsLostError
from exkv.generation.completion import Piece
from exkv.sampling.logprobs import TokenLogprobs

from .choosing import choose, logprobs_of
from .job import Event, Handle
from .speculation import Speculation

T = TypeVar("T")


@dataclass(slots=True)
class EngineStats:
    """What an engine has done so far.

    Attributes:
        steps: that it made.
        prompt_tokens: of the jobs that ended their prompts (of negative prompts, too), of which
            ``found_tokens`` were found in pages.
        new_tokens: that were chosen.
        put_away: how many times a job had to leave its pages.
        out_of_memory: calls of the model that ran out of memory.
        most_running: jobs that ran at once.
        proposed_tokens, accepted_tokens: that were checked, and that were right.
    """

    steps: int = 0
    prompt_tokens: int = 0
    found_tokens: int = 0
    new_tokens: int = 0
    put_away: int = 0
    out_of_memory: int = 0
    most_running: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0


class Group(Protocol):
    """Jobs that decode in one call."""

    @property
    def decoding(self) -> list[Handle]:
        """The jobs, whose prompts are through."""

    def pages_missing(self) -> int:
        """Pages that its next call needs, beyond those that there are."""

    def decode(self, placed: Tensor | None) -> Callable[[], Tensor]:
        """Begin to run the newest token of each job; what gives logits (jobs, V).

        Args:
            placed: these tokens int64 (jobs,) where they were chosen, if that is a device.
        """

    def verify(self, proposed: Sequence[Sequence[int]]) -> Callable[[], Tensor]:
        """Begin to run the newest token of each job, and what is proposed behind it; what gives
        logits (tokens, V), job after job."""


G = TypeVar("G", bound=Group)


class Rows(Protocol[G]):
    """Where jobs run: their rows in caches, and the calls of the model.

    Attributes:
        found_tokens: tokens of prompts that were stored already, so far.
        puts_away: whether a job can leave, and come back later.
        lost: whether what jobs have stored is gone.
        overlaps: whether calls go on elsewhere once they have begun.
        away_tokens: of jobs that have left, at most; None for any number.
    """

    found_tokens: int
    puts_away: bool
    overlaps: bool
    away_tokens: int | None

    @property
    def lost(self) -> bool: ...

    @property
    def groups(self) -> Sequence[G]:
        """All of them, in the order in which they begin."""

    @property
    def jobs(self) -> list[Handle]:
        """All that run."""

    def can_begin(self, handle: Handle) -> bool:
        """Whether there is room for one more."""

    def begin(self, handle: Handle) -> None:
        """Give it a row."""

    def could_leave(self, handles: Sequence[Handle]) -> bool:
        """Whether there is room elsewhere for all of these but the first, to their ends."""

    def in_the_way_of(self, handle: Handle) -> list[Handle]:
        """Jobs of which one has to leave before it can begin."""

    def leave(self, handle: Handle) -> None:
        """Give up its row."""

    def put_away(self, handle: Handle) -> None:
        """Keep what it has stored elsewhere, and give up its row."""

    def start_over(self) -> list[Handle]:
        """After what was stored is lost: the jobs that have left and are to begin anew."""

    def is_full(self, handle: Handle) -> bool:
        """Whether its row has no room for another token."""

    def fill(self) -> tuple[list[Handle], Callable[[], Tensor]] | None:
        """Begin to run a part of the prompts: the jobs whose prompts are through by that, and what
        gives their logits (jobs, V)."""

    def join(self, jobs: Sequence[Handle]) -> None:
        """These jobs, whose prompts are through, decode from now on."""

    def even_out(self, idle: Sequence[G]) -> None:
        """Before these groups begin: have jobs of theirs go to groups that have fewer."""

    def room(self, group: G, wanted: Sequence[int]) -> list[int]:
        """How many of the tokens that are wanted for each job of a group its next call checks."""

    def forget_refused(self, jobs: Sequence[Handle]) -> None:
        """Of each of these all tokens are stored but the newest one. Of others the newest may not
        be chosen yet."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the model that has begun.

    Attributes:
        group: that decodes; None where prompts are through by it.
        jobs: whose logits it makes.
        proposed: tokens of each job that it checks; empty where it checks none.
        logits: gives them, once they have come.
    """

    group: Group | None
    jobs: list[Handle]
    proposed: Sequence[Sequence[int]]
    logits: Callable[[], Tensor]


class Scheduler:
    """The jobs that wait and those that run. Steps are one thread's at a time; jobs come, and are
    cancelled, from any.

    Attributes:
        rows: where they run.
        stats: what was done so far.
        waiting: those that wait, as a heap.
        away: of these, those that had begun.
    """

    def __init__(self, rows: Rows[Any], speculation: Speculation | None = None) -> None:
        self.rows = rows
        self._speculation = speculation
        self.stats = EngineStats()
        self.waiting: list[Handle] = []
        self.away: set[Handle] = set()
        # What other threads ask for, until the next step.
        self._submitted: deque[Handle] = deque()
        self._cancelled: deque[Handle] = deque()
        #: For whom tokens were chosen last, and these where the logits lay.
        self._placed: tuple[Sequence[Handle], Tensor | None] = ((), None)
        #: Calls that have begun, the oldest first; of each group one at most.
        self._under_way: deque[Call] = deque()
        self._events: list[Event] = []  # of this step, so far

    # Jobs ------------------------------------------------------------------------------------

    def submit(self, handle: Handle) -> None:
        """It begins as soon as there is room."""
        self._submitted.append(handle)

    def cancel(self, handle: Handle) -> None:
        """It ends before the next step."""
        self._cancelled.append(handle)

    def cancel_all(self) -> None:
        """None is left."""
        for handle in [*self._submitted, *self.waiting, *self.rows.jobs]:
            self.cancel(handle)
        self._sort_in()
        self.waiting.clear()
        self._under_way.clear()

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._submitted or self._cancelled or self.waiting or self.rows.jobs)

    def end(self, handle: Handle, reason: str) -> Event:
        """The job has ended, wherever it is: its pages are free, here or in host memory."""
        handle.reason = reason
        self._placed = (), None
        if self._speculation is not None:
            self._speculation.forget(handle)
        if handle in self.rows.jobs:
            self.rows.leave(handle)
        self.away.discard(handle)
        for part in handle.parts:
            part.away = part.last_page = part.logits = None
        return Event(handle=handle, reason=reason)

    # Steps -----------------------------------------------------------------------------------

    def iterate(self) -> list[Event]:
        """Make one step: what it brought. Over several hosts that is what the last step began, and
        each group begins again before the next one is waited for.

        Raises:
            torch.OutOfMemoryError: twice, in a call that no job could make room for; nothing is
                lost.
        """
        self._events += self._sort_in()
        if self.rows.lost:
            self._start_over()
        self._admit()
        self.stats.most_running = max(self.stats.most_running, len(self.rows.jobs))
        earlier = len(self._under_way)
        self._decode()
        self._fill()
        if not self.rows.overlaps:
            self._settle_all()
        for _ in range(earlier):
            self._settle()
            self._decode()
        self.stats.steps += 1
        events, self._events = self._events, []
        return events

    def _decode(self) -> None:
        """Begin a call of each group that none is under way of."""
        busy = [call.group for call in self._under_way]
        idle = [group for group in self.rows.groups if group not in busy]
        self.rows.even_out(idle)
        for group in idle:
            while group.pages_missing():
                self._make_room()
            if group.decoding:
                self._begin(group)

    def _begin(self, group: Group) -> None:
        """Begin to run the newest tokens of a group, and what is proposed behind them."""
        jobs = list(group.decoding)
        proposed: Sequence[Sequence[int]] = ()
        if self._speculation is not None:
            proposed = self._speculation.propose(jobs, partial(self.rows.room, group))
        if any(proposed):
            begun = self._in_memory(lambda: group.verify(proposed))
        else:
            chosen_for, placed = self._placed
            placed, proposed = placed if chosen_for == jobs else None, ()
            begun = self._in_memory(lambda: group.decode(placed))
        if begun is not None:
            self._under_way.append(Call(group, jobs, proposed, begun))

    def _fill(self) -> None:
        """Begin to run the next part of the prompts."""
        filled = self._in_memory(self.rows.fill)
        self.stats.found_tokens = self.rows.found_tokens
        if filled is not None:
            jobs, logits = filled
            self._under_way.append(Call(None, list(jobs), (), logits))

    def _settle(self) -> None:
        """Wait for the oldest call that is under way, and choose its jobs' tokens; some may have
        ended meanwhile."""
        if not self._under_way:
            return
        call = self._under_way.popleft()
        logits = self._in_memory(call.logits)
        if logits is None:
            return
        if call.proposed:
            self._events += self._verified(call, logits)
            return
        going = [index for index, job in enumerate(call.jobs) if not job.done]
        jobs = [call.jobs[index] for index in going]
        if call.group is None:
            self.stats.prompt_tokens += sum(len(part.prompt) for job in jobs for part in job.parts)
            self.rows.join(jobs)
        if jobs:
            self._events += self._choose(jobs, logits if jobs == call.jobs else logits[going])

    def _settle_all(self) -> None:
        """Of all jobs all tokens are known."""
        while self._under_way:
            self._settle()

    def _verified(self, call: Call, logits: Tensor) -> list[Event]:
        """A token for each of a call's jobs, and one more behind each that was proposed rightly."""
        jobs, proposed = call.jobs, call.proposed
        events, at = [], 0
        starts = [0, *itertools.accumulate(len(tokens) + 1 for tokens in proposed)]
        chosen = _known(jobs, proposed, logits)
        before = [len(handle.tokens) for handle in jobs]
        accepted = [0] * len(jobs)
        going = [index for index, handle in enumerate(jobs) if not handle.done]
        while going:
            own = logits[[starts[index] + at for index in going]]
            those = [jobs[index] for index in going]
            if chosen is None:
                tokens, _ = choose(those, own)
            else:
                tokens = [chosen[starts[index] + at] for index in going]
            logprobs = logprobs_of(those, own, tokens)
            right = []
            for index, token, likely in zip(going, tokens, logprobs, strict=True):
                job = jobs[index]
                events += self._take(job, token, likely)
                if at < len(proposed[index]) and token == proposed[index][at]:
                    accepted[index] += 1
                    if not job.done and len(job.tokens) == before[index] + at + 1:
                        right.append(index)  # it did not go back
            going, at = right, at + 1
        self._placed = (), None
        self.stats.proposed_tokens += sum(map(len, proposed))
        self.stats.accepted_tokens += sum(accepted)
        assert self._speculation is not None, "who proposed?"
        for handle, tokens, count in zip(jobs, proposed, accepted, strict=True):
            if not handle.done:
                self._speculation.learn(handle, len(tokens), count)
        self.rows.forget_refused(jobs)
        return events

    def _choose(self, jobs: Sequence[Handle], logits: Tensor) -> list[Event]:
        """A token for each of these jobs, from logits (jobs, V)."""
        tokens, placed = choose(jobs, logits)
        self._placed = jobs, placed
        logprobs = logprobs_of(jobs, logits, tokens)
        events, before = [], [len(handle.tokens) for handle in jobs]
        for each in zip(jobs, tokens, logprobs, strict=True):
            events += self._take(*each)
        if any(len(job.tokens) <= count for job, count in zip(jobs, before, strict=True)):
            self._placed = (), None
            self.rows.forget_refused(jobs)
        return events

    def _take(
        self, handle: Handle, token: int | ValueError, logprobs: TokenLogprobs | None
    ) -> list[Event]:
        """What becomes final with a token of a job."""
        if isinstance(token, ValueError):
            return [self._fail(handle, token)]
        full, before = self.rows.is_full(handle), len(handle.tokens)
        try:
            pieces = handle.completion.take(token, cache_full=full, logprobs=logprobs)
        except ValueError as error:  # no token of the tokenizer's, or a grammar too complex here
            return [self._fail(handle, error.with_traceback(None))]
        if len(handle.tokens) <= before and self._speculation is not None:
            self._speculation.went_back(handle)
        return self._told(handle, pieces)

    def _told(self, handle: Handle, pieces: Sequence[Piece]) -> list[Event]:
        """Events of what became final; the last one says why the job has ended, if it has."""
        events = []
        reason = handle.completion.reason
        for piece in pieces:
            last = reason if piece is pieces[-1] else ""
            handle.text += piece.text
            self.stats.new_tokens += 1
            if piece.logprobs is not None:
                handle.logprobs.append(piece.logprobs)
            events.append(
                Event(
                    handle=handle,
                    text=piece.text,
                    token=piece.token,
                    logprobs=piece.logprobs,
                    reason=last,
                )
            )
        if reason:
            self.end(handle, reason)
        return events

    def _fail(self, handle: Handle, error: BaseException) -> Event:
        handle.error = error
        return self.end(handle, "error")

    # Coming and going -------------------------------------------------------------------------

    def _sort_in(self) -> list[Event]:
        """End the jobs that are to be cancelled, and line up those that are new."""
        while self._submitted:
            heapq.heappush(self.waiting, self._submitted.popleft())
        events = []
        while self._cancelled:
            handle = self._cancelled.popleft()
            if not handle.done:
                events.append(self.end(handle, "cancelled"))
        return events

    def _admit(self) -> None:
        """Let those who wait begin, in their order, as long as there is room for them; jobs of a
        lower priority make room."""
        rows = self.rows
        while self.waiting and not rows.lost:
            first = self.waiting[0]
            if first.done:
                heapq.heappop(self.waiting)
            elif not self._may_begin(first):
                return
            elif rows.can_begin(first):
                rows.begin(heapq.heappop(self.waiting))
                self.away.discard(first)
            elif not self._make_way(first):
                return

    def _may_begin(self, handle: Handle) -> bool:
        """Whether whoever has begun then could leave: all but the first in their order, since one
        job always runs. Who was put away has begun."""
        if handle.begun or self.rows.away_tokens is None:
            return True
        return self.rows.could_leave([handle, *self.rows.jobs, *self.away])

    def _make_way(self, first: Handle) -> bool:
        """A job of a lower priority leaves for this one; False where none is in its way."""
        in_its_way = self.rows.in_the_way_of(first)
        if not in_its_way or max(in_its_way).job.priority >= first.job.priority:
            return False
        if self._under_way:  # whoever is in its way may end
            self._settle_all()
        else:
            self._put_away(max(in_its_way))
        return True

    def _make_room(self) -> None:
        """Have pages come free: jobs that end in calls that are under way leave some, or else the
        last job does."""
        if self._under_way:
            self._settle()
        else:
            self._put_last_away()

    def _put_last_away(self) -> None:
        """The youngest job of the lowest priority leaves its pages, and waits."""
        self._put_away(max(self.rows.jobs))

    def _put_away(self, last: Handle) -> None:
        self.rows.put_away(last)
        if self._speculation is not None:
            self._speculation.forget(last)
        heapq.heappush(self.waiting, last)
        self.away.add(last)
        self.stats.put_away += 1

    def _in_memory(self, call: Callable[[], T]) -> T | None:
        """The result of a call of the model; None where it ran out of memory, and one job less may
        try again in the next step. For a job that is alone nobody can make room: it tries once
        more, with what the allocators had kept for themselves."""
        try:
            return call()
        except ContentsLostError:
            self._start_over()
            return None
        except torch.OutOfMemoryError as error:
            self.stats.out_of_memory += 1
            if not self.rows.puts_away:
                raise
            reason = str(error)
        # Here the error's traceback, whose frames hold the call's tensors, is gone.
        devices.release_idle_memory()
        self._settle_all()  # of whoever leaves all tokens are known
        if len(self.rows.jobs) != 1:
            if self.rows.jobs:
                self._put_last_away()
            return None
        try:
            return call()
        except ContentsLostError:  # it was a host that ran out of memory
            self._start_over()
        except torch.OutOfMemoryError:
            self.stats.out_of_memory += 1
            raise
        raise torch.OutOfMemoryError(reason)

    def _start_over(self) -> None:
        """What jobs had stored is lost, also of those that were put away: they wait, and are run
        again before they go on."""
        self._placed = (), None
        self._under_way.clear()
        for handle in self.rows.start_over():
            if self._speculation is not None:
                self._speculation.forget(handle)
            heapq.heappush(self.waiting, handle)
            self.away.add(handle)
        for part in (part for handle in self.waiting for part in handle.parts):
            part.away = part.last_page = None

    def fail_all(self, error: BaseException) -> list[Event]:
        """The jobs that run end with this error; those that wait go on."""
        return [self._fail(handle, error) for handle in self.rows.jobs]


def _known(
    jobs: Sequence[Handle], proposed: Sequence[Sequence[int]], logits: Tensor
) -> Sequence[int | ValueError] | None:
    """What is chosen from each row of logits, by one call, where no job's choice depends on what it
    chose before; None elsewhere."""
    for handle in jobs:
        settings = handle.settings
        if not settings.is_greedy or settings.needs_history or handle.completion.is_constrained:
            return None
    pairs = zip(jobs, proposed, strict=True)
    tokens, _ = choose([handle for handle, ids in pairs for _ in range(len(ids) + 1)], logits)
    return tokens
