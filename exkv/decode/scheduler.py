"""The loop: rows that join and leave, a step at a time, and what comes of them.

A step is: schedule, run, choose, hand out. Rows wait in order of priority, then of arrival. A step
makes one token of every row that decodes, then runs a part of the prompts. Where the calls run is
for :class:`Rows` to say: in pages that jobs share (``in_pages``), or in the rows of any cache
(``in_place``). What a row goes on with is for a :class:`Chooser`: for each job alone
(``job_chooser``), or for a batch together (``batch_chooser``, ``beams``).

Where pages run out, the last job in that order is preempted: its pages are swapped out to host
memory, and swapped back in unchanged when it is readmitted. So every admitted job ends with the
tokens that it gives alone.

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
from typing import Any, TypeVar

import torch
from torch import Tensor

from exkv import devices
from exkv.errors import ContentsLostError

from .chooser import Choice, Chooser
from .job import Event
from .rows import Group, Row, Rows
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


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the model that has begun.

    Attributes:
        group: that decodes; None where prompts are through by it.
        rows: whose logits it makes.
        proposed: tokens of each job that it checks; empty where it checks none.
        logits: gives them, once they have come.
    """

    group: Group | None
    rows: list[Row]
    proposed: Sequence[Sequence[int]]
    logits: Callable[[], Tensor]


class Scheduler:
    """The rows that wait and those that run. Steps are one thread's at a time; rows come, and are
    cancelled, from any.

    Attributes:
        rows: where they run.
        stats: what was done so far.
        waiting: those that wait, as a heap.
        away: of these, those that had begun.
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
        # What other threads ask for, until the next step.
        self._submitted: deque[Row] = deque()
        self._cancelled: deque[Row] = deque()
        #: For whom tokens were chosen last, and these where the logits lay.
        self._placed: tuple[Sequence[Row], Tensor | None] = ((), None)
        #: Calls that have begun, the oldest first; of each group one at most.
        self._under_way: deque[Call] = deque()
        self._events: list[Event] = []  # of this step, so far

    # Rows ------------------------------------------------------------------------------------

    def submit(self, row: Row) -> None:
        """It begins as soon as there is room."""
        self._submitted.append(row)

    def cancel(self, row: Row) -> None:
        """It ends before the next step."""
        self._cancelled.append(row)

    def cancel_all(self) -> None:
        """None is left."""
        for row in [*self._submitted, *self.waiting, *self.rows.jobs]:
            self.cancel(row)
        self._sort_in()
        self._events.clear()
        self.waiting.clear()
        self._under_way.clear()

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.rows.jobs or self.waiting or self._submitted or self._cancelled)

    def end(self, row: Row, reason: str) -> list[Event]:
        """End a row, wherever it is."""
        row.reason = reason
        self._release(row)
        return self._chooser.ended(row)

    def fail_all(self, error: BaseException) -> list[Event]:
        """The rows that run end with this error; those that wait go on."""
        events = []
        for row in self.rows.jobs:
            row.error = error
            events += self.end(row, "error")
        return events

    def _release(self, row: Row) -> None:
        """A row has ended: its pages are free, here or in host memory."""
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
        """Make one step: what it brought. Over several hosts that is what the last step began, and
        each group begins again before the next one is waited for.

        Raises:
            torch.OutOfMemoryError: twice, in a call that no row could make room for; nothing is
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
        """Say who runs."""
        self._sort_in()
        if self.rows.lost:
            self._start_over()
        self._admit()
        self.stats.most_running = max(self.stats.most_running, len(self.rows.jobs))

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
        rows = list(group.decoding)
        proposed: Sequence[Sequence[int]] = ()
        if self._speculation is not None:
            room = partial(self.rows.room, group)
            proposed = self._speculation.propose(rows, room, self._chooser)
        if any(proposed):
            begun = self._in_memory(lambda: group.verify(proposed))
        else:
            chosen_for, placed = self._placed
            placed, proposed = placed if chosen_for == rows else None, ()
            begun = self._in_memory(lambda: group.decode(placed))
        if begun is not None:
            self._under_way.append(Call(group, rows, proposed, begun))

    def _fill(self) -> None:
        """Begin to run the next part of the prompts."""
        filled = self._in_memory(self.rows.fill)
        self.stats.found_tokens = self.rows.found_tokens
        if filled is not None:
            rows, logits = filled
            self._under_way.append(Call(None, list(rows), (), logits))

    def _settle_all(self) -> None:
        """Of all rows all tokens are known."""
        while self._under_way:
            self._settle()

    def _settle(self) -> None:
        """Wait for the oldest call that is under way, and choose its rows' tokens; some may have
        ended meanwhile."""
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
        """Choose a token for each of these rows, from logits (rows, V)."""
        choice = self._chooser.choose(rows, logits)
        self._placed = rows, choice.placed
        if self._hand_out(rows, choice):
            self._placed = (), None
            self.rows.forget_refused(rows)

    def _verify(self, call: Call, logits: Tensor) -> None:
        """Choose a token for each of a call's rows, and one more behind each that was proposed
        rightly; logits (tokens, V), row after row."""
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
        self.rows.forget_refused(rows)

    def _hand_out(self, rows: Sequence[Row], choice: Choice) -> list[Row]:
        """Give rows their tokens; those that have gone back by some instead, or could have none."""
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
                self._speculation.went_back(row)
        return back

    # Coming and going -------------------------------------------------------------------------

    def _sort_in(self) -> None:
        """End the rows that are to be cancelled, and line up those that are new."""
        while self._submitted:
            heapq.heappush(self.waiting, self._submitted.popleft())
        while self._cancelled:
            row = self._cancelled.popleft()
            if not row.done:
                self._events += self.end(row, "cancelled")

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

    def _may_begin(self, row: Row) -> bool:
        """Whether whoever has begun then could leave: all but the first in their order, since one
        job always runs. A preempted job has begun."""
        if row.begun or self.rows.away_tokens is None:
            return True
        return self.rows.could_leave([row, *self.rows.jobs, *self.away])

    def _make_way(self, first: Row) -> bool:
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

    def _put_away(self, last: Row) -> None:
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
        """All stored keys and values are lost, also those of preempted jobs: every job waits, and
        its tokens are run again before it goes on."""
        self._placed = (), None
        self._under_way.clear()
        for row in self.rows.start_over():
            if self._speculation is not None:
                self._speculation.forget(row)
            heapq.heappush(self.waiting, row)
            self.away.add(row)
        for part in (part for row in self.waiting for part in row.parts):
            part.away = part.last_page = None
