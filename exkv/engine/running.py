"""Jobs in pages: one whose prompt is being run, others that decode, and the pages of all.

Both live in caches that share one pool: a cache of one row for prompts, and one with a row for each
job that decodes. A job goes from one to the other by reference. A guided job has a row more, for
its negative prompt (``guiding``): the two have their pages at once, are run one after the other,
and go together.

What a job stores does not depend on who runs beside it. A prompt is run alone, in chunks that end
where pages do, so that a page holds the same bits whoever ran it, and jobs with the same beginning
can share it. Decoding runs all rows in one call; on the CPU the native run answers each row with
the bits that it has alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from exkv.batch import pad_rows
from exkv.cache import KVCache
from exkv.cache.pages import KnownPage, PageTable
from exkv.devices import CPU
from exkv.generation.speculation import Limits
from exkv.models import Transformer
from exkv.models.bound_run import MOST_TOKENS

from .guiding import logits_of_jobs
from .job import Handle, PutAway


class Running:
    """Jobs with pages: the :class:`exkv.engine.scheduler.Rows` of an engine.

    Args:
        cache: in pages; its pool is what jobs share.
        most: jobs that run at once.
        chunk: tokens of a prompt that one call runs at most.
        proposed: tokens of a job that are checked in one call, beside the one that it has.
        away_tokens: of jobs that are put away, at most; None for any number.

    Attributes:
        filling: the job whose prompt is being run.
        found_tokens: tokens of prompts that were found in pages so far.
    """

    puts_away = True

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        most: int,
        chunk: int,
        proposed: int = 0,
        away_tokens: int | None = None,
    ) -> None:
        self.filling: Handle | None = None
        self.found_tokens = 0
        self._parts: list[Handle] = []  # of those that decode; each one's place is its row
        self._model = model
        self._most = most
        self._chunk = chunk
        self.away_tokens = away_tokens
        self._rows = cache.sharing_pool(most, call_len=1 + proposed)
        self._limits = Limits(model, self._rows)
        call_len = min(chunk, cache.max_seq_len)
        #: For the prompt that is run, and for the negative one.
        self._prompts = [cache.sharing_pool(1, call_len=call_len) for _ in range(2)]
        #: With longrope keys depend on how long their text becomes.
        self._finds = not model.rotary.varies

    @property
    def decoding(self) -> list[Handle]:
        """Those whose prompts are through."""
        return [part for part in self._parts if not part.is_negative]

    @property
    def jobs(self) -> list[Handle]:
        """All of them."""
        return self.decoding if self.filling is None else [*self.decoding, self.filling]

    @property
    def _table(self) -> PageTable:
        table = self._rows.pages
        assert table is not None
        return table

    def free(self) -> None:
        """Give up all pages, and the caches."""
        for cache in (self._rows, *self._prompts):
            cache.free()
            self._model.forget_cache(cache)

    # Joining and leaving --------------------------------------------------------------------

    def can_begin(self, handle: Handle) -> bool:
        """Whether there is a row for it, pages for its prompt or for what was put away of it, and
        one more for each row that runs, so that it needn't leave at once."""
        rows = sum(len(job.parts) for job in self.jobs)
        if rows + len(handle.parts) > self._most:
            return False
        if self.filling is not None and not self.can_decode(handle):
            return False
        needed = sum(map(self._pages_to_begin, handle.parts))
        return needed + rows <= self._table.pool.available

    def _pages_to_begin(self, part: Handle) -> int:
        found = self._found(part)
        others = self._table.pages_for(self._begins_with(part)) - len(found)
        return others + self._table.pool.needed_for(found)

    def could_leave(self, handles: Sequence[Handle]) -> bool:
        """Whether there is room in host memory for all of these but the first, to their ends."""
        first, table = min(handles), self._table
        parts = [part for handle in handles if handle is not first for part in handle.parts]
        pages = sum(table.pages_for(part.total) for part in parts)
        return self.away_tokens is None or pages * table.pool.size <= self.away_tokens

    def in_the_way_of(self, handle: Handle) -> list[Handle]:
        """Jobs of which one has to leave before this one can begin."""
        if self.filling is not None and not self.can_decode(handle):
            return [self.filling]
        return self.jobs

    def can_decode(self, handle: Handle) -> bool:
        """Whether its prompt is through, and the negative one."""
        return all(
            part.away is not None and len(part.away.tokens) >= len(part.prompt)
            for part in handle.parts
        )

    def _begins_with(self, handle: Handle) -> int:
        """Tokens for which it gets pages when it begins."""
        return len(handle.before_newest)

    def begin(self, handle: Handle) -> None:
        """Give it a row and pages, with what is known of its prompt or was put away."""
        if not self.can_decode(handle):
            self.filling = handle
            for part, cache in zip(handle.parts, self._prompts, strict=False):
                self._begin(part, cache, 0)
            return
        for part in handle.parts:
            self._parts.append(part)
            self._begin(part, self._rows, len(self._parts) - 1)

    def _begin(self, handle: Handle, cache: KVCache, row: int) -> None:
        found, size = self._found(handle), self._table.pool.size
        stored = handle.away.tokens if handle.away else handle.prompt[: len(found) * size]
        table = cache.pages
        assert table is not None
        (key,) = self._model.keys_of(handle.job.adapter, 1)
        cache.set_row(row, stored, made_with=key, known=found)
        starts, ends = [0] * row, [0] * row
        first, last = len(found) * size, self._begins_with(handle)
        table.reserve([*starts, first], [*ends, last], cache)
        handle.last_page = found[-1] if found else None
        handle.exact &= all(known.exact for known in found)
        if handle.away is None:
            if not handle.tokens:
                handle.cached_tokens = len(stored)
                self.found_tokens += len(stored)
            return
        filled = table.rows[row][len(found) : table.pages_for(len(stored))]
        cache.copy_in(handle.away.pages, filled, len(found))
        full = min(len(stored), len(handle.prompt)) // size
        for at in range(len(found), full if self._finds else 0):
            self._remember(handle, cache, row, at)
        handle.away = None

    def _found(self, handle: Handle) -> list[KnownPage]:
        """Known pages of its prompt, from the first one on: never its last token's, whose logits
        are wanted, nor more than it has stored."""
        pool, found = self._table.pool, list[KnownPage]()
        last = len(handle.prompt) - 1 if self._finds else 0
        if handle.away is not None:
            last = min(last, len(handle.away.tokens))
        before = None
        for start in range(0, last - pool.size + 1, pool.size):
            before = pool.find(before, self._page_of(handle, handle.prompt, start // pool.size))
            if before is None or not (before.exact or handle.job.approximate_reuse):
                break
            found.append(before)
        return found

    def _page_of(self, handle: Handle, text: Sequence[int], at: int) -> tuple[Hashable, ...]:
        """What page ``at`` of a job's text is found by: its tokens, and at the beginning the
        adapter that makes their keys and values."""
        size = self._table.pool.size
        tokens = text[at * size : (at + 1) * size]
        (key,) = self._model.keys_of(handle.job.adapter, 1)
        return tuple(tokens) if key is None or at else (key, *tokens)

    @property
    def _adapters(self) -> list[str | None]:
        """Of the rows that decode."""
        return [part.job.adapter for part in self._parts]

    def leave(self, handle: Handle) -> None:
        """Give up its row and its pages; the last job that decodes takes the row over."""
        if handle is self.filling:
            self.filling = None
            for cache in self._prompts:
                cache.crop([0])
            return
        for part in handle.parts:
            self._leave(part)

    def _leave(self, part: Handle) -> None:
        row = self._parts.index(part)
        if part.job.approximate_reuse and self._finds:
            self._remember_text(part, row)
        last = self._parts.pop()
        if last is not part:
            self._parts[row] = last
            self._rows.move_row(row, self._rows, len(self._parts))
        else:
            self._rows.crop([*self._rows.seq_lens[:row], 0, *self._rows.seq_lens[row + 1 :]])

    def _remember_text(self, handle: Handle, row: int) -> None:
        """What is stored of its answer can be found again, too: the next prompt of a chat begins
        with it."""
        size = self._table.pool.size
        for at in range(len(handle.prompt) // size, self._rows.seq_lens[row] // size):
            self._remember(handle, self._rows, row, at)

    def put_away(self, handle: Handle) -> None:
        """Copy what it has stored to host memory, and give up its row and its pages."""
        for part, prompt in zip(handle.parts, self._prompts, strict=False):
            if self.lost:
                part.away = None
            elif handle is self.filling:
                part.away = self._copied(prompt, 0)
            else:
                part.away = self._copied(self._rows, self._parts.index(part))
        self.leave(handle)

    def _copied(self, cache: KVCache, row: int) -> PutAway:
        """What a row has stored, in host memory."""
        assert cache.pages is not None
        tokens = list(cache.sequences[row])
        pages = cache.pages.rows[row][: self._table.pages_for(len(tokens))]
        return PutAway(tokens=tokens, pages=cache.copy_out(pages))

    # When what is stored is lost --------------------------------------------------------------

    @property
    def lost(self) -> bool:
        """Whether what jobs have stored is gone."""
        return self._table.pool.lost

    def start_over(self) -> list[Handle]:
        """Have all jobs leave, with nothing stored: they are run again from their first token on,
        in the same chunks."""
        jobs = self.jobs
        self._table.pool.lost = False
        self.filling, self._parts = None, []
        for cache in (self._rows, *self._prompts):
            cache.crop(0)
        for part in (part for job in jobs for part in job.parts):
            part.logits, part.exact = None, True
        return jobs

    def is_full(self, handle: Handle) -> bool:
        """Never: a job that is taken has room to its end."""
        return False

    # Steps ----------------------------------------------------------------------------------

    def pages_missing(self) -> int:
        """Pages that the next token of those who decode needs, beyond those that there are."""
        return max(self._pages_needed() - self._table.pool.available, 0)

    def _pages_needed(self) -> int:
        """Pages that the next token of those who decode needs."""
        size, table = self._table.pool.size, self._table
        lens = self._rows.seq_lens[: len(self._parts)]
        more = 0
        for held, length in zip(table.rows, lens, strict=False):
            new = len(held) * size == length  # or else a job that went back may write to a page
            more += new or table.pool.holders[held[length // size]] > 1  # that others see
        return more

    def fill(self) -> tuple[list[Handle], Tensor] | None:
        """Run the next chunk of the prompt; the job and its logits (1, V) once it is through: it
        decodes then."""
        handle = self.filling
        if handle is None:
            return None
        parts = handle.parts
        for part, cache in zip(parts, self._prompts, strict=False):
            if not self._is_through(part, cache):
                self._run_chunk(part, cache)
                break
        if not all(map(self._is_through, parts, self._prompts)):
            return None
        known = [part.logits for part in parts if part.logits is not None]
        for part, cache in zip(parts, self._prompts, strict=False):
            self._rows.move_row(len(self._parts), cache, 0)
            self._parts.append(part)
            part.logits = None
        self.filling = None
        if handle.tokens:  # it was run again, and goes on
            return None
        return [handle], logits_of_jobs(parts, torch.cat(known) if len(known) > 1 else known[0])

    def _is_through(self, part: Handle, cache: KVCache) -> bool:
        """Whether all that is to be run before it decodes is stored."""
        return cache.seq_lens[0] == len(part.before_newest)

    def _run_chunk(self, handle: Handle, cache: KVCache) -> None:
        """Run the next chunk of a prompt; its logits are there once it is through. What follows it,
        of a job that is run again, comes in chunks that give the bits of single tokens."""
        size, done, text = self._table.pool.size, cache.seq_lens[0], handle.before_newest
        if done < len(handle.prompt):
            end = min(len(handle.prompt), done + self._chunk, (done // size + 1) * size)
        else:
            end = min(len(text), done + min(MOST_TOKENS, self._most))  # logits for which is room
        ids = torch.tensor([text[done:end]])
        through = end == len(handle.prompt) and not handle.tokens
        wanted: dict[str, Any] = {"last_id_only": True, "preprocess_only": not through}
        if done >= len(handle.prompt):
            wanted = {"each_token": True}  # none, but with the bits of one by one
        logits = self._model.forward(ids, cache, adapter=handle.job.adapter, **wanted)
        if end % size == 0 and end <= len(handle.prompt) and self._finds:
            self._remember(handle, cache, 0, end // size - 1)
        if through:
            assert logits is not None
            # Where they wait for another part's, no plan has room for them.
            waits = handle.job.guidance_scale != 1
            handle.logits = logits[:, 0].to(CPU) if waits else logits[:, 0]

    def _remember(self, handle: Handle, cache: KVCache, row: int, at: int) -> None:
        """Page ``at`` of its text can be found again; who ran it at the same time shares it."""
        table = cache.pages
        assert table is not None
        page = table.rows[row][at]
        exact = handle.exact and (at + 1) * table.pool.size <= len(handle.prompt)
        text = self._page_of(handle, cache.sequences[row], at)
        known = table.pool.remember(page, handle.last_page, text, exact)
        if known.tier == 0 and known.page != page:
            table.replace(row, at, known.page)
        handle.last_page = known

    def room(self, wanted: Sequence[int]) -> list[int]:
        """How many of the tokens that are wanted for each job that decodes the next call may check:
        no job leaves for them."""
        given = iter(wanted)
        asked = [0 if part.is_negative else next(given) for part in self._parts]
        most = [self._limits.of_row(row, count) for row, count in enumerate(asked)]
        most = self._limits.shared(most)
        table, lens = self._table, self._rows.seq_lens
        spare = table.pool.available - self._pages_needed()
        for row, count in enumerate(most):
            end = lens[row] + 1
            held = max(len(table.rows[row]), table.pages_for(end))
            more = min(max(table.pages_for(end + count) - held, 0), max(spare, 0))
            most[row] = min(count, (held + more) * table.pool.size - end)
            spare -= more
        pairs = zip(self._parts, most, strict=True)
        return [count for part, count in pairs if not part.is_negative]

    def verify(self, proposed: Sequence[Sequence[int]]) -> Tensor:
        """Run the newest token of each job that decodes, and what is proposed behind it: logits
        (tokens, V), job after job."""
        behind = iter(proposed)
        rows = [[p.newest, *([] if p.is_negative else next(behind))] for p in self._parts]
        ids, lengths = pad_rows(rows)
        logits = self._model.forward(
            ids, self._rows, new_lens=lengths, each_token=True, adapter=self._adapters
        )
        assert logits is not None
        return logits_of_jobs(self._parts, logits[:, 0], list(map(len, rows)))

    def forget_refused(self, jobs: Sequence[Handle]) -> None:
        """Of each of these that decode all tokens are stored but the newest one."""
        kept, parts = self._rows.seq_lens, {part for handle in jobs for part in handle.parts}
        for row, part in enumerate(self._parts):
            if part in parts:
                kept[row] = min(kept[row], part.stored)
        self._rows.crop(kept)

    def decode(self, placed: Tensor | None) -> Callable[[], Tensor]:
        """Begin to run the newest token of each job that decodes; what gives logits (jobs, V).

        Args:
            placed: these tokens int64 (jobs,) where they were chosen, if that is a device.
        """
        ids, _ = pad_rows([[part.newest] for part in self._parts])
        if placed is not None and len(placed) < len(self._parts):
            placed = None  # negative prompts have rows, too
        placed_ids = None if placed is None else placed[:, None]
        parts = list(self._parts)
        begun = self._model.begin_forward(
            ids, self._rows, last_id_only=True, placed_ids=placed_ids, adapter=self._adapters
        )
        return lambda: logits_of_jobs(parts, begun()[:, 0])
