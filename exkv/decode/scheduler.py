"""The loop: rows that join and leave, step by step.

A step is: schedule, run, choose, hand out. Rows wait in order of priority, then of arrival. A step
makes one token of every row that decodes, then runs a chunk of the prompts. :class:`Rows` runs the
calls: in pages that jobs share (``in_pages``), or in place in any cache (``in_place``). A
:class:`Chooser` chooses tokens: for each job alone (``job_chooser``), or for a batch together
(``batch_chooser``, ``beams``).

When pages run out, the last job in that order is preempted: its pages are swapped out to host
memory, and swapped back in unchanged when it is readmitted. So every admitted job ends with the
tokens that it gives alone.

Over several hosts a call continues after it has begun. There the decoding jobs form several groups,
and a step waits for the calls of the step before: while one host runs a group, the others run other
groups and a chunk of a prompt.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from exkv import devices
from exkv.errors import Attempt, ContentsLostError

from .chooser import Choice, Chooser
from .job import Event
from .rows import Group, Row, Rows
from .speculation import Speculation

T = TypeVar("T")


@dataclass(slots=True)
class EngineStats:
    """Counters of an engine.

    Attributes:
        prompt_tokens: of jobs that have prefilled, including negative prompts; ``found_tokens`` of
            them came from the prefix cache.
        new_tokens: chosen tokens.
        put_away: preemptions.
        out_of_memory: calls of the model that ran out of memory.
        most_running: most jobs that ran at once.
        pressed: how many times the jobs that could run fell, because another program took memory.
        exchanges: experts moved to a card from host memory since the model was loaded, of
            ``exchanged_bytes`` in all.
    """

    steps: int = 0
    prompt_tokens: int = 0
    found_tokens: int = 0
    new_tokens: int = 0
    put_away: int = 0
    out_of_memory: int = 0
    most_running: int = 0
    pressed: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    exchanges: int = 0
    exchanged_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the model that has begun.

    Attributes:
        group: the decoding group; None for prompts.
        rows: the rows of the logits.
        proposed: proposed tokens of each job to verify; empty for none.
        logits: waits for the logits.
    """

    group: Group | None
    rows: list[Row]
    proposed: Sequence[Sequence[int]]
    logits: Callable[[], Tensor]


class Scheduler:
    """Waiting and running rows. One thread at a time runs steps; any thread may submit and cancel.

    Attributes:
        rows: where they run.
        waiting: a heap.
        away: waiting rows that were preempted.
    """

    def __init__(
        self, rows: Rows[Any], chooser: Chooser[Any], speculation: Speculation | None = None
    ) -> None:
        self.rows = rows
        self._chooser = chooser
        self._speculation = speculation if speculation is not None and speculation.tokens else None
        self.stats = EngineStats()
        self.waiting: list[Row] = []
        self.away: set[Row] = set()
        # From other threads, until the next step.
        self._submitted: deque[Row] = deque()
        self._cancelled: deque[Row] = deque()
        #: The last rows that got tokens, and these tokens on the device.
        self._placed: tuple[Sequence[Row], Tensor | None] = ((), None)
        #: Calls that have begun, oldest first; at most one of each group.
        self._under_way: deque[Call] = deque()
        self._events: list[Event] = []  # of this step, so far

    # Rows ------------------------------------------------------------------------------------

    def submit(self, row: Row) -> None:
        """Queue a row."""
        self._submitted.append(row)

    def cancel(self, row: Row) -> None:
        """End a row before the next step."""
        self._cancelled.append(row)

    def cancel_all(self) -> None:
        """End all rows."""
        for row in [*self._submitted, *self.waiting, *self.rows.jobs]:
            self.cancel(row)
        self._take_submitted()
        self._events.clear()
        self.waiting.clear()
        self._under_way.clear()

    @property
    def busy(self) -> bool:
        """Whether any row is left."""
        return bool(self.rows.jobs or self.waiting or self._submitted or self._cancelled)

    def end(self, row: Row, reason: str) -> list[Event]:
        """End a row, wherever it is."""
        row.reason = reason
        self._release(row)
        return self._chooser.ended(row)

    def fail_all(self, error: BaseException) -> list[Event]:
        """End the running rows with this error; waiting ones stay."""
        events = []
        for row in self.rows.jobs:
            row.error = error
            events += self.end(row, "error")
        return events

    def _release(self, row: Row) -> None:
        """Free an ended row's pages, on the device and in host memory."""
        self._placed = (), None
        if self._speculation is not None:
            self._speculation.forget(row)
        if row in self.rows.jobs:
            self.rows.leave(row)
        self.away.discard(row)
        for part in row.parts:
            part.away = part.last_page = part.logits = None

    # Steps -----------------------------------------------------------------------------------

    def iterate(self) -> list[Event]:
        """Run one step, and return its events. Over several hosts they are those of calls from the
        step before, and each group begins its next call before the step waits for the next group.

        Raises:
            torch.OutOfMemoryError: the call of a single row ran out of memory twice; nothing is
                lost.
        """
        self._schedule()
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

    def _schedule(self) -> None:
        """Decide which rows run."""
        self._take_submitted()
        if self.rows.lost:
            self._start_over()
        self._relieve_pressure()
        self._admit()
        self.stats.most_running = max(self.stats.most_running, len(self.rows.jobs))

    def _decode(self) -> None:
        """Begin a call of each group without one under way."""
        busy = [call.group for call in self._under_way]
        idle = [group for group in self.rows.groups if group not in busy]
        self.rows.balance(idle)
        for group in idle:
            while group.pages_missing():
                self._free_pages()
            if group.decoding:
                self._begin(group)

    def _begin(self, group: Group) -> None:
        """Begin to run a group's newest tokens, and those proposed after them."""
        rows = list(group.decoding)
        proposed: Sequence[Sequence[int]] = ()
        if self._speculation is not None:
            room = partial(self.rows.room, group)
            by_head = partial(self.rows.guess, group)
            proposed = self._speculation.propose(rows, room, self._chooser, by_head)
        if any(proposed):
            begun = self._in_memory(lambda: group.verify(proposed))
        else:
            chosen_for, placed = self._placed
            placed, proposed = placed if chosen_for == rows else None, ()
            begun = self._in_memory(lambda: group.decode(placed))
        if begun is not None:
            self._under_way.append(Call(group, rows, proposed, begun))

    def _fill(self) -> None:
        """Begin the next chunk of the prompts."""
        filled = self._in_memory(self.rows.fill)
        self.stats.found_tokens = self.rows.found_tokens
        if filled is not None:
            rows, logits = filled
            self._under_way.append(Call(None, list(rows), (), logits))

    def _settle_all(self) -> None:
        """Wait for all calls: every row's tokens are known then."""
        while self._under_way:
            self._settle()

    def _settle(self) -> None:
        """Wait for the oldest call, and choose tokens for its rows that haven't ended meanwhile."""
        if not self._under_way:
            return
        call = self._under_way.popleft()
        logits = self._in_memory(call.logits)
        if logits is None:
            return
        if call.proposed:
            self._verify(call, logits)
            return
        going = [index for index, row in enumerate(call.rows) if not row.done]
        rows = [call.rows[index] for index in going]
        if call.group is None:
            self.stats.prompt_tokens += sum(len(part.prompt) for row in rows for part in row.parts)
            self.rows.join(rows)
        if rows:
            self._choose(rows, logits if rows == call.rows else logits[going])

    def _choose(self, rows: Sequence[Row], logits: Tensor) -> None:
        """Choose a token for each row; logits (rows, V)."""
        choice = self._chooser.choose(rows, logits)
        self._placed = rows, choice.placed
        if self._hand_out(rows, choice):
            self._placed = (), None
            self.rows.drop_rejected(rows)

    def _verify(self, call: Call, logits: Tensor) -> None:
        """Choose a token for each row of a call, and one more after each accepted one; logits
        (tokens, V), row after row."""
        rows, proposed = call.rows, call.proposed
        starts = [0, *itertools.accumulate(len(tokens) + 1 for tokens in proposed)]
        each = [row for row, tokens in zip(rows, proposed, strict=True) for _ in [0, *tokens]]
        known = self._chooser.choose_ahead(each, logits)
        accepted, at = [0] * len(rows), 0
        going = [index for index, row in enumerate(rows) if not row.done]
        while going:
            places = [starts[index] + at for index in going]
            those, own = [rows[index] for index in going], logits[places]
            if known is None:
                choice = self._chooser.choose(those, own)
            else:
                choice = self._chooser.chosen(those, own, [known[place] for place in places])
            back = self._hand_out(those, choice)
            matched = []
            for index, token in zip(going, choice.tokens, strict=True):
                if at < len(proposed[index]) and token == proposed[index][at]:
                    accepted[index] += 1
                    if not rows[index].done and rows[index] not in back:
                        matched.append(index)
            going, at = matched, at + 1
        self._placed = (), None
        self.stats.proposed_tokens += sum(map(len, proposed))
        self.stats.accepted_tokens += sum(accepted)
        for row, tokens, right in zip(rows, proposed, accepted, strict=True):
            row.proposed_tokens += len(tokens)
            row.accepted_tokens += right
        assert self._speculation is not None, "who proposed?"
        self._speculation.learn(rows, proposed, accepted)
        self.rows.drop_rejected(rows)

    def _hand_out(self, rows: Sequence[Row], choice: Choice) -> list[Row]:
        """Give rows their tokens -> the rows that rolled back instead, or could take none."""
        before = [len(row.tokens) for row in rows]
        events = self._chooser.take(rows, choice)
        self._events += events
        self.stats.new_tokens += sum(event.token is not None for event in events)
        pairs = zip(rows, before, strict=True)
        back = [row for row, had in pairs if len(row.tokens) <= had and not row.idle]
        for row in rows:
            if row.done:
                self._release(row)
            elif row in back and self._speculation is not None:
                self._speculation.rolled_back(row)
        return back

    # Coming and going -------------------------------------------------------------------------

    def _take_submitted(self) -> None:
        """Queue the submitted rows, and end the cancelled ones."""
        while self._submitted:
            heapq.heappush(self.waiting, self._submitted.popleft())
        while self._cancelled:
            row = self._cancelled.popleft()
            if not row.done:
                self._events += self.end(row, "cancelled")

    def _relieve_pressure(self) -> None:
        """Preempt rows whose calls no longer fit, before one fails."""
        while self.rows.crowded:
            if self._under_way:  # rows are preempted with all their tokens known; some may end
                self._settle_all()
            else:
                self._preempt(max(self.rows.jobs))
        self.stats.pressed = self.rows.pressed

    def _admit(self) -> None:
        """Admit waiting rows in their order as long as there is room, preempting rows of lower
        priority."""
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
            elif not self._preempt_for(first):
                return

    def _may_begin(self, row: Row) -> bool:
        """Whether all admitted rows but the first, which always runs, could be preempted with this
        one admitted. A preempted row was admitted before."""
        if row.begun or self.rows.away_tokens is None:
            return True
        return self.rows.could_swap_out([row, *self.rows.jobs, *self.away])

    def _preempt_for(self, first: Row) -> bool:
        """Preempt a row of lower priority for this one; False if there is none."""
        blockers = self.rows.blockers(first)
        if not blockers or max(blockers).job.priority >= first.job.priority:
            return False
        if self._under_way:  # a blocking row may end
            self._settle_all()
        else:
            self._preempt(max(blockers))
        return True

    def _free_pages(self) -> None:
        """Free pages: settle a call, with which rows may end, or preempt the last row."""
        if self._under_way:
            self._settle()
        else:
            self._preempt(max(self.rows.jobs))

    def _preempt(self, last: Row) -> None:
        """Swap a job's pages out to host memory, and have it wait."""
        self.rows.preempt(last)
        if self._speculation is not None:
            self._speculation.forget(last)
        heapq.heappush(self.waiting, last)
        self.away.add(last)
        self.stats.put_away += 1

    def _in_memory(self, call: Callable[[], T]) -> T | None:
        """Make a call of the model; None if it ran out of memory, after preempting a row. A single
        row tries once more, after the allocators have released their idle memory."""
        try:
            if not self.rows.preempts:  # the caller frees memory by other means
                return call()
            with Attempt() as attempt:
                return call()
        except ContentsLostError:
            self._start_over()
            return None
        self.stats.out_of_memory += 1
        devices.release_idle_memory()
        self._settle_all()  # rows are preempted with all their tokens known
        if len(self.rows.jobs) != 1:
            if self.rows.jobs:
                self._preempt(max(self.rows.jobs))
            return None
        try:
            with Attempt() as second:
                return call()
        except ContentsLostError:  # another host ran out of memory
            self._start_over()
        self.stats.out_of_memory += bool(second.why)
        raise torch.OutOfMemoryError(second.why or attempt.why)

    def _start_over(self) -> None:
        """After all stored keys and values are lost, also those of preempted rows: every row waits,
        and runs its tokens again."""
        self._placed = (), None
        self._under_way.clear()
        for row in self.rows.start_over():
            if self._speculation is not None:
                self._speculation.forget(row)
            heapq.heappush(self.waiting, row)
            self.away.add(row)
        for part in (part for row in self.waiting for part in row.parts):
            part.away = part.last_page = None
