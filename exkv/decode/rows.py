"""A sequence under way, as the loop and the caches know it; and what the loop asks of the place
where sequences run."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

from torch import Tensor

from exkv.cache.paging.pool import KnownPage
from exkv.cache.paging.swap import SwappedPages
from exkv.sampling.logprobs import TokenLogprobs

if TYPE_CHECKING:
    from .job import Job

R = TypeVar("R", bound="Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class PutAway:
    """What a row had stored when it had to leave its pages: its tokens, and the pages that held
    them."""

    tokens: list[int]
    pages: SwappedPages


class Row:
    """One sequence: a job of an engine or a generator, or one of the batch of ``generate``.

    Attributes:
        job: what was asked.
        number: in which order rows were submitted.
        prompt: its token ids.
        tokens: that were chosen so far.
        reason: why it ended; ``""`` while it goes on.
        error: what ended it, if that was an error.
        cached_tokens: of the prompt, that were found in pages and not run again.
        proposed_tokens, accepted_tokens: that were proposed for it and verified; of these, that
            were right.
        idle: whether it has ended, and stays with the others of its batch until all have.
        exact: whether what is stored of the prompt is what running it stores.
        last_page: that the prompt's next full page goes on from.
        away: what was stored of it when it left its pages.
        logits: gives those of its prompt (1, V), until its other part has its own.
        prompt_logprobs: of its prompt's tokens from the second on, if the job asks for them.
        negative: the same tokens after the negative prompt, where it is guided.
        is_negative: whether it is such a part.
    """

    def __init__(
        self,
        job: Job,
        number: int,
        prompt: list[int],
        tokens: list[int],
        negative: list[int] | None = None,
    ) -> None:
        self.job = job
        self.number = number
        self.prompt = prompt
        self.tokens = tokens
        self.reason = ""
        self.error: BaseException | None = None
        self.cached_tokens = self.proposed_tokens = self.accepted_tokens = 0
        self.idle = False
        self.exact = True
        self.last_page: KnownPage | None = None
        self.away: PutAway | None = None
        self.logits: Callable[[], Tensor] | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.is_negative = False
        self.negative: Row | None = None
        if negative is not None:
            self.negative = copy.copy(self)  # with the same list of tokens
            self.negative.prompt, self.negative.is_negative = negative, True

    def __lt__(self, other: Row) -> bool:
        """Whether it goes before the other: by priority, then as they came."""
        return (-self.job.priority, self.number) < (-other.job.priority, other.number)

    @property
    def parts(self: R) -> tuple[R, ...]:
        """What has a row of its own: itself, and its negative prompt if it is guided."""
        return (self,) if self.negative is None else (self, cast(R, self.negative))

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of its prompt are wanted."""
        return self.job.prompt_logprobs is not None and not self.is_negative

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return bool(self.reason)

    @property
    def newest(self) -> int:
        """The last token, which the next one follows from."""
        return (self.tokens or self.prompt)[-1]

    @property
    def stored(self) -> int:
        """Tokens that its row holds when it waits for the next one: all but the newest."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def before_newest(self) -> list[int]:
        """Tokens that are run before the next one is chosen or decoded: its prompt; of a row that
        has tokens, and of which nothing is stored any more, all but the newest."""
        return [*self.prompt, *self.tokens[:-1]]

    @property
    def begun(self) -> bool:
        """Whether it has run before."""
        return self.away is not None or bool(self.tokens)

    @property
    def total(self) -> int:
        """Tokens that are stored of it at last: the last one that is chosen is never run."""
        return len(self.prompt) + self.job.max_new_tokens - 1


class Group(Protocol):
    """Rows that decode in one call."""

    @property
    def decoding(self) -> list[Row]:
        """Those whose prompts are through."""

    def pages_missing(self) -> int:
        """Pages that its next call needs, beyond those that there are."""

    def decode(self, placed: Tensor | None) -> Callable[[], Tensor]:
        """Begin to run the newest token of each row; what gives logits (rows, V).

        Args:
            placed: these tokens int64 (rows,) where they were chosen, if that is a device.
        """

    def verify(self, proposed: Sequence[Sequence[int]]) -> Callable[[], Tensor]:
        """Begin to run the newest token of each row, and what is proposed behind it; what gives
        logits (tokens, V), row after row."""


G = TypeVar("G", bound=Group)


class Rows(ABC, Generic[G]):
    """Where rows run: their places in caches, and the calls of the model. What is written out here
    is for rows that all begin at once, and keep their places until they end.

    Attributes:
        found_tokens: tokens of prompts that were stored already, so far.
        puts_away: whether a row can leave, and come back later.
        overlaps: whether calls go on elsewhere once they have begun.
        away_tokens: of rows that have left, at most; None for any number.
    """

    found_tokens = 0
    puts_away = False
    overlaps = False
    away_tokens: int | None = None

    @property
    def lost(self) -> bool:
        """Whether what rows have stored is gone."""
        return False

    @property
    @abstractmethod
    def groups(self) -> Sequence[G]:
        """All of them, in the order in which they begin."""

    @property
    @abstractmethod
    def jobs(self) -> list[Row]:
        """All that run."""

    def can_begin(self, row: Row) -> bool:
        """Whether there is room for one more."""
        return True

    @abstractmethod
    def begin(self, row: Row) -> None:
        """Give it its place."""

    def could_leave(self, rows: Sequence[Row]) -> bool:
        """Whether there is room elsewhere for all of these but the first, to their ends."""
        return True

    def in_the_way_of(self, row: Row) -> list[Row]:
        """Those of which one has to leave before it can begin."""
        return []

    @abstractmethod
    def leave(self, row: Row) -> None:
        """Give up its place."""

    def put_away(self, row: Row) -> None:
        """Keep what it has stored elsewhere, and give up its place."""
        raise AssertionError("a row keeps its place")

    def start_over(self) -> list[Row]:
        """After what was stored is lost: those that have left and are to begin anew. Of the others
        the next call runs again what they had."""
        return []

    def is_full(self, row: Row) -> bool:
        """Whether its place has no room for another token."""
        return False

    @abstractmethod
    def fill(self) -> tuple[list[Row], Callable[[], Tensor]] | None:
        """Begin to run a part of the prompts: the rows whose prompts are through by that, and what
        gives their logits (rows, V)."""

    def join(self, rows: Sequence[Row]) -> None:
        """These, whose prompts are through, decode from now on."""

    def even_out(self, idle: Sequence[G]) -> None:
        """Before these groups begin: have rows of theirs go to groups that have fewer."""

    @abstractmethod
    def room(self, group: G, wanted: Sequence[int]) -> list[int]:
        """How many of the tokens that are wanted for each row of a group its next call checks."""

    @abstractmethod
    def forget_refused(self, rows: Sequence[Row]) -> None:
        """Of each of these all tokens are stored but the newest one. Of others the newest may not
        be chosen yet."""
