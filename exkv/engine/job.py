"""Jobs: what is asked of an engine, what comes of it step by step, and how far each one is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch

from exkv.cache.pages import KnownPage
from exkv.cache.pages_away import PagesAway
from exkv.generation.completion import Completion
from exkv.sampling import SamplingParams
from exkv.sampling.grammar import Grammar
from exkv.sampling.logprobs import TokenLogprobs

#: A text, token ids, or the messages of a chat: ``[{"role": "user", "content": "Hello"}]``.
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt to be completed.

    Attributes:
        prompt: a text, token ids, or the messages of a chat.
        settings: how tokens are chosen.
        max_new_tokens: at most.
        seed: of the random numbers: with it a job gives the same tokens again; None for any.
        stop: texts and token ids that end the completion and are left out of it. The model's own
            end-of-sequence tokens always do.
        grammar: what the completion must be; None for anything.
        logprobs: how many of the likeliest tokens each event names with their log-probabilities,
            beside the chosen one's, see :mod:`exkv.sampling.logprobs`; None for neither.
        banned_strings: texts that must not come up, in upper or lower case, see
            :mod:`exkv.sampling.banned_strings`. An event comes when its token is final.
        token_healing: the prompt's last token is taken off, and the first token that is chosen is
            one whose text begins with it, so that where the prompt was cut decides nothing. A
            prompt of one token, or one that ends in a control token, is left as it is.
        approximate_reuse: begin with pages that hold nearly what running the prompt would store,
            too: of what another such job has generated, as the last turn of a chat was, or such as
            came back from host memory in fewer bits. The text is then one that the model might give
            as well, but not to the token the one that the job gives alone.
        priority: jobs of a higher one go first, and are put away last.
        on_event: called with each :class:`Event` of this job, in the thread that runs the engine.
            If it raises, the job ends with that error, and the others go on.
        encode_special_tokens: take special tokens written in a text as such.
        speculate: whether tokens may be proposed for it, where the engine has a draft or looks
            n-grams up; that changes none of its tokens.
        adapter: the name of one of ``model.adapters``, which stays loaded until the job ends; None
            for the model alone.
        guidance_scale: how far to go away from what follows the negative prompt, see
            :mod:`exkv.generation.guidance`; 1 is not at all. A guided job takes two rows, and pages
            for both; nothing is proposed for it, and its log-probabilities are the guided ones.
        negative_prompt: as a prompt; None for the prompt's last token.
    """

    prompt: Prompt
    settings: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 128
    seed: int | None = None
    stop: str | Sequence[str | int] = ()
    grammar: Grammar | None = None
    logprobs: int | None = None
    banned_strings: Sequence[str] = ()
    token_healing: bool = False
    approximate_reuse: bool = False
    priority: int = 0
    on_event: Callable[[Event], Any] | None = None
    encode_special_tokens: bool = True
    speculate: bool = True
    adapter: str | None = None
    guidance_scale: float = 1.0
    negative_prompt: Prompt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What a step brought a job.

    Attributes:
        handle: the job's.
        text: that became final: never half a character, never the beginning of a stop text.
        token: that was chosen; None where the job ended without one.
        logprobs: how likely the token was, and what else; None if the job doesn't ask.
        reason: why it ended: ``"eos"``, ``"stop"``, ``"length"``, ``"grammar"`` (it allows nothing
            more), ``"cache_full"`` (in a ``Generator``), ``"cancelled"`` or ``"error"``; ``""``
            while it goes on.
    """

    handle: Handle
    text: str = ""
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutAway:
    """What a job had stored when it had to leave its pages: its tokens, and the pages that held
    them."""

    tokens: list[int]
    pages: PagesAway


class Driver(Protocol):
    """What runs a job."""

    def iterate(self) -> list[Event]:
        """Make one step, for all jobs: what it brought."""

    def cancel(self, handle: Handle) -> None:
        """End a job before the next step."""


class Handle:
    """A job that was submitted: what has come of it so far.

    Attributes:
        job: what was asked.
        number: in which order jobs were submitted.
        settings: the job's, with the sets of tokens that they take from the tokenizer.
        prompt: its token ids (without the last one, if that is healed).
        tokens: that were chosen so far.
        text: that is final so far, without the prompt.
        logprobs: of the tokens so far, if the job asks for them.
        reason: why it ended, as of :class:`Event`; ``""`` while it goes on.
        error: what ended it, if that was an error.
        cached_tokens: of the prompt, that were found in pages and not run again.
    """

    def __init__(
        self,
        job: Job,
        number: int,
        completion: Completion,
        settings: SamplingParams,
        driver: Driver,
        negative: list[int] | None = None,
    ) -> None:
        self.job = job
        self.number = number
        self.settings = settings
        self.prompt = completion.prompt
        self.tokens = completion.new_ids
        self.text = ""
        self.logprobs: list[TokenLogprobs] = []
        self.reason = ""
        self.error: BaseException | None = None
        self.cached_tokens = 0
        #: Whether what is stored of the prompt is what running it stores.
        self.exact = True
        self._driver = driver
        self.completion = completion
        #: The page that the prompt's next full one goes on from, and what was put away.
        self.last_page: KnownPage | None = None
        self.away: PutAway | None = None
        #: What gives those of its prompt (1, V), until its other part has its own.
        self.logits: Callable[[], torch.Tensor] | None = None
        #: The same tokens after the negative prompt, where it is guided.
        self.negative: Handle | None = None
        self.is_negative = False
        if negative is not None:
            self.negative = copy.copy(self)  # with the same list of tokens
            self.negative.prompt, self.negative.is_negative = negative, True

    def __repr__(self) -> str:
        state = self.reason or f"{len(self.tokens)} tokens so far"
        return f"Handle({self.number}, prompt of {len(self.prompt)} tokens, {state})"

    def __lt__(self, other: Handle) -> bool:
        """Whether it goes before the other: by priority, then as they came."""
        return (-self.job.priority, self.number) < (-other.job.priority, other.number)

    @property
    def parts(self) -> tuple[Handle, ...]:
        """What has a row of its own: the job, and its negative prompt if it is guided."""
        return (self,) if self.negative is None else (self, self.negative)

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
        """Tokens that are run before the next one is chosen or decoded: its prompt; of a job that
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

    def cancel(self) -> None:
        """End it before the next step; its pages are free then. Any thread may call it."""
        self._driver.cancel(self)

    def result(self) -> str:
        """Its whole text, once it has ended; the engine runs until then.

        Raises:
            BaseException: what ended it, if that was an error.
        """
        for _ in self:
            pass
        if self.error is not None:
            raise self.error
        return self.text

    def __iter__(self) -> Iterator[Event]:
        """Its events from here on; the engine runs for them, the other jobs' too."""
        while not self.done:
            yield from [event for event in self._driver.iterate() if event.handle is self]
