"""Jobs in KV pages: one prefills while others decode.

Their caches share one pool: a cache of one row prefills, and each group of jobs that decode in one
call has a cache with a row for each (``paged_group``). A job moves from one to the other by
reference. A guided job has a second row, for its negative prompt (``guidance``): the two get their
pages at once, prefill one after the other, and move together.

On one machine there is one group. Over hosts there are as many as keep all hosts busy, and one more
that never runs, for jobs whose prompts have run and whose first tokens are on their way.

What a job stores does not depend on other jobs. A prompt prefills alone, in chunks that end where
pages do, so that a page holds the same bits whoever ran it, and jobs with the same beginning can
share it. Decoding runs all rows in one call; on the CPU the native run gives each row the bits that
it has alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from exkv.cache import KVCache
from exkv.cache.paging.pool import KnownPage, PageTable
from exkv.devices import CPU
from exkv.models import Transformer
from exkv.models.bound_run import MOST_TOKENS
from exkv.sampling.logprobs import token_logprobs

from .guidance import logits_of_jobs
from .paged_group import PagedGroup
from .pressure import Pressure
from .rows import Row, Rows, SwappedRow
from .snapshots import Snapshots
from .speculation.draft import Guess
from .speculation.heads import propose


class InPages(Rows[PagedGroup]):
    """The jobs of an engine.

    Args:
        cache: in pages; jobs share its pool.
        most: most jobs that run at once.
        chunk: most prompt tokens of a call.
        proposed: most proposed tokens of a job that a call verifies.
        away_tokens: upper bound on tokens of preempted jobs; None for no bound.

    Attributes:
        filling: the job that prefills.
        groups: of decoding jobs.
        overlaps: whether hosts continue calls after they have begun.
        found_tokens: prompt tokens found in the prefix cache so far.
    """

    preempts = True

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        most: int,
        chunk: int,
        proposed: int = 0,
        away_tokens: int | None = None,
    ) -> None:
        self.filling: Row | None = None
        self._model = model
        self._most = most
        self._chunk = chunk
        self.away_tokens = away_tokens
        self.overlaps = model.in_flight > 1
        group = partial(PagedGroup, model, cache, most, proposed)
        self._groups = [group() for _ in range(groups_for(model))]
        self._arrived = group() if self.overlaps else self.groups[0]
        self._pressure = Pressure(model, most, lambda: self._caches)
        call_len = min(chunk, cache.max_seq_len)
        #: The caches in which a job's prompt, and its negative one, prefill.
        self._prompts = [cache.sharing_pool(1, call_len=call_len) for _ in range(2)]
        #: False with longrope, where keys depend on the final length of their text.
        self._finds = not model.rotary.varies
        self._states = Snapshots(most) if model.config.has_states else None

    @property
    def groups(self) -> list[PagedGroup]:
        return self._groups

    @property
    def decoding(self) -> list[Row]:
        """Jobs that have prefilled."""
        return [handle for group in self._all_groups for handle in group.decoding]

    @property
    def jobs(self) -> list[Row]:
        return self.decoding if self.filling is None else [*self.decoding, self.filling]

    @property
    def _all_groups(self) -> list[PagedGroup]:
        return self.groups if self._arrived in self.groups else [*self.groups, self._arrived]

    @property
    def _caches(self) -> list[KVCache]:
        return [*(group.cache for group in self._all_groups), *self._prompts]

    @property
    def _table(self) -> PageTable:
        return self.groups[0].table

    def free(self) -> None:
        """Release all pages, and the caches."""
        for cache in self._caches:
            cache.free()
            self._model.forget_cache(cache)

    # Joining and leaving --------------------------------------------------------------------

    @property
    def pressed(self) -> int:  # type: ignore[override] # it is only read
        return self._pressure.raised

    @property
    def crowded(self) -> bool:
        running = sum(len(job.parts) for job in self.jobs)
        return len(self.jobs) > 1 and running > self._pressure.look()

    def can_begin(self, row: Row) -> bool:
        """Whether there is a row, pages for its prompt or its swapped-out past, and a page for each
        running row, so that it is not preempted at once."""
        rows = sum(len(job.parts) for job in self.jobs)
        if rows + len(row.parts) > (self._pressure.rows if rows else self._most):
            return False
        if self.filling is not None and not self.can_decode(row):
            return False
        needed = sum(map(self._pages_to_begin, row.parts))
        return needed + rows <= self._table.pool.available

    def _pages_to_begin(self, part: Row) -> int:
        found = self._reusable(self._cached_pages(part))
        others = self._table.pages_for(len(part.before_newest)) - len(found)
        return others + self._table.pool.needed_for(found)

    def could_swap_out(self, rows: Sequence[Row]) -> bool:
        first, table = min(rows), self._table
        parts = [part for row in rows if row is not first for part in row.parts]
        pages = sum(table.pages_for(part.total) for part in parts)
        return self.away_tokens is None or pages * table.pool.size <= self.away_tokens

    def blockers(self, row: Row) -> list[Row]:
        if self.filling is not None and not self.can_decode(row):
            return [self.filling]
        return self.jobs

    def can_decode(self, handle: Row) -> bool:
        """Whether all of its prompts have run."""
        return all(
            part.away is not None and len(part.away.tokens) == len(part.before_newest)
            for part in handle.parts
        )

    def begin(self, row: Row) -> None:
        """Give a job rows and pages, filled from the prefix cache or from its swapped-out past."""
        if not self.can_decode(row):
            self.filling = row
            for part, cache in zip(row.parts, self._prompts, strict=False):
                self._begin(part, cache, 0)
            return
        group = self._smallest()
        for part in row.parts:
            group.parts.append(part)
            self._begin(part, group.cache, len(group.parts) - 1)

    def _smallest(self) -> PagedGroup:
        """The smallest of the groups that the current hosts need, which a new job joins."""
        return min(self.groups[: groups_for(self._model)], key=lambda group: len(group.parts))

    def _begin(self, handle: Row, cache: KVCache, row: int) -> None:
        known, size = self._cached_pages(handle), self._table.pool.size
        found, handle.shared_len = self._reusable(known), len(known) * size
        stored = handle.away.tokens if handle.away else handle.prompt[: len(found) * size]
        table = cache.pages
        assert table is not None
        (key,) = self._model.keys_of(handle.job.adapter, 1)
        cache.set_row(row, stored, made_with=key, known=found)
        starts, ends = [0] * row, [0] * row
        first, last = len(found) * size, len(handle.before_newest)
        table.reserve([*starts, first], [*ends, last], cache)
        handle.last_page = found[-1] if found else None
        handle.exact &= all(known.exact for known in found)
        if self._states is not None and found:
            cache.swap_in(self._states.find(found[-1]), (), 0, row)
        if handle.away is None:
            if not handle.tokens:
                handle.cached_tokens = len(stored)
                self.found_tokens += len(stored)
            return
        filled = table.rows[row][len(found) : table.pages_for(len(stored))]
        cache.swap_in(handle.away.pages, filled, len(found), row)
        full = min(len(stored), len(handle.prompt)) // size
        for at in range(len(found), full if self._finds else 0):
            self._remember(handle, cache, row, at)
        handle.away = None

    def _cached_pages(self, handle: Row) -> list[KnownPage]:
        """The prompt's pages in the prefix cache, without that of its last token, whose logits are
        needed, and within the tokens that a preempted job had stored."""
        pool, known = self._table.pool, list[KnownPage]()
        last = len(handle.prompt) - 1 if self._finds and not handle.is_scored else 0
        if handle.away is not None:
            last = min(last, len(handle.away.tokens))
        before = None
        for start in range(0, last - pool.size + 1, pool.size):
            before = pool.find(before, self._page_of(handle, handle.prompt, start // pool.size))
            if before is None or not (before.exact or handle.job.approximate_reuse):
                break
            known.append(before)
        return known

    def _reusable(self, known: Sequence[KnownPage]) -> list[KnownPage]:
        """The first pages after which a prompt can continue: if a model has states, up to the last
        one with a snapshot."""
        found = list(known)
        while self._states is not None and found and found[-1] not in self._states:
            found.pop()
        return found

    def _page_of(self, handle: Row, text: Sequence[int], at: int) -> tuple[Hashable, ...]:
        """The key of page ``at`` of a text: its tokens, and on the first page the adapter's key."""
        size = self._table.pool.size
        tokens = text[at * size : (at + 1) * size]
        (key,) = self._model.keys_of(handle.job.adapter, 1)
        return tuple(tokens) if key is None or at else (key, *tokens)

    def leave(self, row: Row) -> None:
        """Release a job's rows and pages; the group's last job takes over the row."""
        if row is self.filling:
            self.filling = None
            for cache in self._prompts:
                cache.crop([0])
            return
        for part in row.parts:
            group = self._group_of(part)
            if part.job.approximate_reuse and self._finds and self._states is None:
                self._remember_text(part, group)
            group.drop(part)

    def _group_of(self, part: Row) -> PagedGroup:
        return next(group for group in self._all_groups if part in group.parts)

    def _remember_text(self, handle: Row, group: PagedGroup) -> None:
        """Add a job's answer to the prefix cache, too: the next prompt of a chat begins with it."""
        size, row = self._table.pool.size, group.parts.index(handle)
        for at in range(len(handle.prompt) // size, group.cache.seq_lens[row] // size):
            self._remember(handle, group.cache, row, at)

    def preempt(self, row: Row) -> None:
        """Swap out a job's pages to host memory, and release its rows."""
        for part, prompt in zip(row.parts, self._prompts, strict=False):
            if self.lost:
                part.away = None
            elif row is self.filling:
                part.away = self._swapped_out(prompt, 0)
            else:
                group = self._group_of(part)
                part.away = self._swapped_out(group.cache, group.parts.index(part))
        self.leave(row)

    def _swapped_out(self, cache: KVCache, row: int) -> SwappedRow | None:
        """Swap out a row, as far as its contents are valid; None if it has to run again."""
        assert cache.pages is not None
        stale = row in cache.stale
        if stale and not cache.snapshot_lens[row]:
            return None
        tokens = cache.sequences[row][: cache.snapshot_lens[row] if stale else None]
        pages = cache.pages.rows[row][: self._table.pages_for(len(tokens))]
        return SwappedRow(tokens=tokens, pages=cache.swap_out(pages, row))

    # Lost contents ----------------------------------------------------------------------------

    @property
    def lost(self) -> bool:
        return self._table.pool.lost

    def start_over(self) -> list[Row]:
        """Remove all jobs with nothing stored -> the jobs, which run again from the first token, in
        the same chunks."""
        jobs = self.jobs
        self._table.pool.lost = False
        self.filling = None
        for group in self._all_groups:
            group.parts.clear()
        for cache in self._caches:
            cache.crop(0)
        for part in (part for job in jobs for part in job.parts):
            part.logits, part.exact = None, True
        return jobs

    # Steps ----------------------------------------------------------------------------------

    def fill(self) -> tuple[list[Row], Callable[[], Tensor]] | None:
        """Begin the next chunk of the prompt -> at its end, the job and a function that gives its
        logits (1, V). It decodes once it has joined a group."""
        handle = self.filling
        if handle is None:
            return None
        parts = handle.parts
        for part, cache in zip(parts, self._prompts, strict=False):
            if not self._is_prefilled(part, cache):
                self._run_chunk(part, cache)
                break
        if not all(map(self._is_prefilled, parts, self._prompts)):
            return None
        known = [part.logits for part in parts if part.logits is not None]
        # A rerun job already has its next token.
        group = self._smallest() if handle.tokens else self._arrived
        for part, cache in zip(parts, self._prompts, strict=False):
            group.take(part, cache, 0)
            part.logits = None
        self.filling = None
        if handle.tokens:
            return None
        return [handle], lambda: logits_of_jobs(parts, _joined([each() for each in known]))

    def join(self, rows: Sequence[Row]) -> None:
        for handle in rows:
            if (group := self._smallest()) is not self._arrived:
                group.take_from(self._arrived, handle)

    def balance(self, idle: Sequence[PagedGroup]) -> None:
        for group in idle if len(self.groups) > 1 else ():
            for handle in reversed(group.decoding):
                other = self._smallest()
                if len(group.parts) - len(other.parts) > len(handle.parts):
                    other.take_from(group, handle)

    def _is_prefilled(self, part: Row, cache: KVCache) -> bool:
        """Whether all tokens before the newest are stored."""
        return cache.seq_lens[0] == len(part.before_newest)

    def _run_chunk(self, handle: Row, cache: KVCache) -> None:
        """Run the next chunk of a prompt, and keep its logits at the end. New tokens of a rerun job
        and scored prompts run in short chunks: there is room for the logits of that many tokens,
        and they have the bits of single tokens."""
        size, done = self._table.pool.size, cache.seq_lens[0]
        text, prompt = handle.before_newest, len(handle.prompt)
        scored = handle.is_scored and done < prompt
        singly = scored or done >= prompt
        most = min(MOST_TOKENS, self._most, self._model.logits_len) if singly else self._chunk
        page_end = (done // size + 1) * size if done < prompt else len(text)
        end = min(prompt if done < prompt else len(text), done + most, page_end)
        ids = torch.tensor([text[done:end]])
        through = end == prompt and not handle.tokens
        wanted: dict[str, Any] = {"last_id_only": True, "preprocess_only": not through}
        if singly:
            wanted = {"each_token": True}
        if through and not scored:
            begun = self._model.begin_forward(ids, cache, adapter=handle.job.adapter, **wanted)
            handle.logits = self._deferred(handle, begun)
        else:
            logits = self._model.forward(ids, cache, adapter=handle.job.adapter, **wanted)
            if scored and logits is not None:
                self._score(handle, done, logits[:, 0])
                if through:
                    last = partial(logits.__getitem__, slice(-1, None))
                    handle.logits = self._deferred(handle, last)
        if end % size == 0 and end <= prompt and self._finds:
            known = self._remember(handle, cache, 0, end // size - 1)
            if self._states is not None and end in (handle.shared_len, (prompt - 1) // size * size):
                self._states.add(known, cache.swap_out((), 0))

    def _score(self, handle: Row, done: int, logits: Tensor) -> None:
        """Log-probabilities of a prompt's tokens by the logits (tokens, V) of those from ``done``
        on; clears ``exact``, which is for pages that ran in whole chunks."""
        handle.exact = False
        most, following = handle.job.prompt_logprobs, handle.prompt[done + 1 :][: len(logits)]
        if most is not None and following:
            found = token_logprobs(logits[: len(following)], following, most)
            handle.prompt_logprobs[done:] = found

    def _deferred(self, handle: Row, begun: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A function that gives a prompt's logits (1, V); they are on the host if they wait for
        those of another part, for which no plan has room."""
        if handle.job.guidance_scale == 1:
            return lambda: begun()[:, 0]
        logits = begun()[:, 0].to(CPU)
        return lambda: logits

    def _remember(self, handle: Row, cache: KVCache, row: int, at: int) -> KnownPage:
        """Add page ``at`` of a job's text to the prefix cache, or use the equal one there."""
        table = cache.pages
        assert table is not None
        page = table.rows[row][at]
        exact = handle.exact and (at + 1) * table.pool.size <= len(handle.prompt)
        text = self._page_of(handle, cache.sequences[row], at)
        known = table.pool.remember(page, handle.last_page, text, exact)
        if known.tier == 0 and known.page != page:
            table.replace(row, at, known.page)
        handle.last_page = known
        return known

    def room(self, group: PagedGroup, wanted: Sequence[int]) -> list[int]:
        needed = sum(each.pages_needed() for each in self.groups)
        return group.room(wanted, self._table.pool.available - needed)

    def guess(
        self,
        group: PagedGroup,
        most: Mapping[Row, int],
        guesses: Mapping[Row, Guess],
        confidence: float,
    ) -> dict[Row, list[int]]:
        return propose(self._model, group.cache, group.parts, most, guesses, confidence)

    def drop_rejected(self, rows: Sequence[Row]) -> None:
        parts = {part for row in rows for part in row.parts}
        for group in self.groups:
            group.drop_rejected(parts)


def _joined(logits: Sequence[Tensor]) -> Tensor:
    return logits[0] if len(logits) == 1 else torch.cat(list(logits))


def groups_for(model: Transformer) -> int:
    """The number of groups that keep a model's hosts busy. With one more they would read their
    weights once more for the same tokens."""
    return max(round(model.in_flight), 1)
