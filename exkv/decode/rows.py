"""Rows, which are sequences under way, and the interface of the places where they run."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

from torch import Tensor

from exkv.cache.paging.pool import KnownPage
from exkv.cache.paging.swap import SwappedPages
from exkv.sampling.logprobs import TokenLogprobs

if TYPE_CHECKING:
    from .job import Job
    from .speculation.draft import Guess

R = TypeVar("R", bound="Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedRow:
    """A preempted row's stored tokens, and their pages in host memory."""

    tokens: list[int]
    pages: SwappedPages


class Row:
    """One sequence: a job of an engine or a generator, or a row of ``generate``'s batch.

    Attributes:
        number: order of submission.
        prompt: token ids.
        tokens: chosen so far.
        reason: why it ended; ``""`` while it runs.
        error: the error that ended it, if any.
        cached_tokens: prompt tokens found in the prefix cache, which did not run.
        proposed_tokens, accepted_tokens: by draft or n-grams.
        idle: whether it has ended, and waits for the others of its batch.
        exact: whether the prompt's stored keys and values are those that prefilling it stores.
        last_page: the page before the prompt's next full page.
        shared_len: tokens of the prompt's pages that an earlier prompt also has.
        away: its stored tokens and pages when it was preempted.
        logits: gives those of its prompt (1, V), until its other part has its own.
        prompt_logprobs: of the prompt's tokens from the second on, if the job asks for them.
        negative: the part with the negative prompt and the same new tokens, if it is guided.
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
        self.shared_len = 0
        self.away: SwappedRow | None = None
        self.logits: Callable[[], Tensor] | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.is_negative = False
        self.negative: Row | None = None
        if negative is not None:
            self.negative = copy.copy(self)  # shares the list of tokens
            self.negative.prompt, self.negative.is_negative = negative, True

    def __lt__(self, other: Row) -> bool:
        """Whether it comes before the other: by priority, then by arrival."""
        return (-self.job.priority, self.number) < (-other.job.priority, other.number)

    @property
    def parts(self: R) -> tuple[R, ...]:
        """Itself, and its negative part if it is guided; each has a row in a cache."""
        return (self,) if self.negative is None else (self, cast(R, self.negative))

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of its prompt are requested."""
        return self.job.prompt_logprobs is not None and not self.is_negative

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return bool(self.reason)

    @property
    def newest(self) -> int:
        """The last token, which runs next."""
        return (self.tokens or self.prompt)[-1]

    @property
    def stored(self) -> int:
        """Stored tokens between two steps: all but the newest."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def before_newest(self) -> list[int]:
        """Tokens to prefill: the prompt, and if the row runs again from the start, its new tokens
        but the newest."""
        return [*self.prompt, *self.tokens[:-1]]

    @property
    def begun(self) -> bool:
        """Whether the row has run before."""
        return self.away is not None or bool(self.tokens)

    @property
    def total(self) -> int:
        """Stored tokens at full length; the last chosen token never runs."""
        return len(self.prompt) + self.job.max_new_tokens - 1


class Group(Protocol):
    """Rows that decode in one call."""

    @property
    def decoding(self) -> list[Row]:
        """Rows that have prefilled."""

    def pages_missing(self) -> int:
        """Pages that the next call needs beyond the available ones."""

    def decode(self, placed: Tensor | None) -> Callable[[], Tensor]:
        """Begin to run each row's newest token; the result gives logits (rows, V). ``placed`` are
        these tokens on the device where they were chosen, int64 (rows,)."""

    def verify(self, proposed: Sequence[Sequence[int]]) -> Callable[[], Tensor]:
        """Begin to run each row's newest token and the proposed ones; the result gives logits
        (tokens, V), row after row."""


G = TypeVar("G", bound=Group)


class Rows(ABC, Generic[G]):
    """Where rows run: their places in caches, and calls of the model. The defaults are for rows
    that begin together and keep their places until they end.

    Attributes:
        found_tokens: prompt tokens found stored so far.
        pressed: how many times the rows that could run fell, because a device had less memory.
        preempts: whether rows can be preempted.
        overlaps: whether calls continue elsewhere after they have begun.
        away_tokens: upper bound on tokens of preempted rows; None for no bound.
    """

    found_tokens = 0
    pressed = 0
    preempts = False
    overlaps = False
    away_tokens: int | None = None

    @property
    def lost(self) -> bool:
        """Whether the stored keys and values are lost."""
        return False

    @property
    @abstractmethod
    def groups(self) -> Sequence[G]:
        """All groups, in the order of their calls."""

    @property
    @abstractmethod
    def jobs(self) -> list[Row]:
        """All running rows."""

    @property
    def crowded(self) -> bool:
        """Whether more rows run than now have room for their calls, and one can leave."""
        return False

    def can_begin(self, row: Row) -> bool:
        """Whether there is room for this row."""
        return True

    @abstractmethod
    def begin(self, row: Row) -> None:
        """Give a row a place."""

    def could_swap_out(self, rows: Sequence[Row]) -> bool:
        """Whether all of these but the first could be preempted at full length."""
        return True

    def blockers(self, row: Row) -> list[Row]:
        """Rows one of which must leave before this one can begin."""
        return []

    @abstractmethod
    def leave(self, row: Row) -> None:
        """Release a row's place."""

    def preempt(self, row: Row) -> None:
        """Swap out a row's stored tokens, and release its place."""
        raise AssertionError("a row keeps its place")

    def start_over(self) -> list[Row]:
        """After contents were lost: remove and return the rows that must begin again; others run
        their tokens again in the next call."""
        return []

    def is_full(self, row: Row) -> bool:
        """Whether a row has no room for another token."""
        return False

    @abstractmethod
    def fill(self) -> tuple[list[Row], Callable[[], Tensor]] | None:
        """Begin the next chunk of prompts -> the rows that have prefilled with it, and a function
        that gives their logits (rows, V)."""

    def join(self, rows: Sequence[Row]) -> None:
        """Let these rows decode from now on."""

    def balance(self, idle: Sequence[G]) -> None:
        """Move rows of these groups to smaller ones, before their calls."""

    @abstractmethod
    def room(self, group: G, wanted: Sequence[int]) -> list[int]:
        """How many of the wanted tokens a group's next call verifies for each row."""

    @abstractmethod
    def guess(
        self,
        group: G,
        most: Mapping[Row, int],
        guesses: Mapping[Row, Guess],
        confidence: float,
    ) -> dict[Row, list[int]]:
        """Have the model's MTP head propose tokens for some rows of a group: see
        ``exkv.decode.speculation.heads``."""

    @abstractmethod
    def drop_rejected(self, rows: Sequence[Row]) -> None:
        """Truncate the stored tokens of these rows to all but the newest; another row's newest may
        not be chosen yet."""
