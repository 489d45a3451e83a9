"""Jobs: what is asked of an engine, what comes of it step by step, and how far each one is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from exkv.sampling import SamplingParams
from exkv.sampling.grammar import Constraint
from exkv.sampling.logprobs import TokenLogprobs

from .completion import Completion
from .rows import Row

if TYPE_CHECKING:
    from .engine import Engine
    from .scheduler import Scheduler

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
        min_new_tokens: before there are this many, no token that ends the completion is chosen,
            unless the grammar allows no other.
        stop: texts and token ids that end the completion and are left out of it. The model's own
            end-of-sequence tokens do too.
        ignore_eos: end-of-sequence tokens don't end the completion unless ``stop`` or a grammar
            says so.
        grammar: what the completion must be; None for anything.
        logprobs: how many of the likeliest tokens each event names with their log-probabilities,
            beside the chosen one's, see :mod:`exkv.sampling.logprobs`; None for neither.
        prompt_logprobs: the same for the prompt's tokens, in the handle's ``prompt_logprobs``; the
            prompt is run whole then, in short calls, whatever pages are known.
        return_logits: log-probabilities come with the logits that they are of.
        banned_strings: texts that must not come up, in upper or lower case, see
            :mod:`exkv.sampling.banned_strings`. An event comes when its token is final.
        token_healing: the prompt's last token is taken off, and the first token that is chosen is
            one whose text begins with it, so that where the prompt was cut decides nothing. A
            prompt of one token, or one that ends in a control token, is left as it is.
        approximate_reuse: begin with pages that hold nearly what running the prompt would store,
            too: of what another such job has generated, as the last turn of a chat was, or such as
            came back from host memory in fewer bits. The text is then one that the model might give
            as well, but not to the token the one that the job gives alone.
        priority: jobs of a higher one are admitted first and preempted last.
        on_event: called with each :class:`Event` of this job, in the thread that runs the engine.
            If it raises, the job ends with that error, and the others go on.
        encode_special_tokens: take special tokens written in a text as such.
        continues: whether the completion goes on within the prompt's text, so that its first word
            may begin with a space; None if the prompt is a text.
        speculate: whether tokens may be proposed for it, where the engine has a draft or looks
            n-grams up; that changes none of its tokens.
        adapter: the name of one of ``model.adapters``, which stays loaded until the job ends; None
            for the model alone.
        guidance_scale: how far to go away from what follows the negative prompt, see
            :mod:`exkv.decode.guidance`; 1 is not at all. A guided job takes two rows, and pages
            for both; nothing is proposed for it, and its log-probabilities are the guided ones.
        negative_prompt: as a prompt; None for the prompt's last token.
    """

    prompt: Prompt
    settings: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    seed: int | None = None
    stop: str | Sequence[str | int] = ()
    ignore_eos: bool = False
    grammar: Constraint | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_logits: bool = False
    banned_strings: Sequence[str] = ()
    token_healing: bool = False
    approximate_reuse: bool = False
    priority: int = 0
    on_event: Callable[[Event], Any] | None = None
    encode_special_tokens: bool = True
    continues: bool | None = None
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


class Handle(Row):
    """A job that was submitted: what has come of it so far.

    Attributes:
        job: what was asked.
        prompt: its token ids (without the last one, if that is healed).
        tokens: that were chosen so far.
        text: that is final so far, without the prompt.
        logprobs: of the tokens so far, if the job asks for them.
        reason: why it ended, as of :class:`Event`; ``""`` while it goes on.
        error: what ended it, if that was an error.
        cached_tokens: of the prompt, that were found in pages and not run again.
        settings: the job's, with the sets of tokens that they take from the tokenizer.
        completion: what becomes of its tokens.
    """

    def __init__(
        self,
        job: Job,
        number: int,
        completion: Completion,
        settings: SamplingParams,
        driver: Engine | Scheduler,
        negative: list[int] | None = None,
    ) -> None:
        self.settings = settings
        self.completion = completion
        self.text = ""
        self.logprobs: list[TokenLogprobs] = []
        self._driver = driver
        super().__init__(job, number, completion.prompt, completion.new_ids, negative)

    def __repr__(self) -> str:
        state = self.reason or f"{len(self.tokens)} tokens so far"
        return f"Handle({self.number}, prompt of {len(self.prompt)} tokens, {state})"

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
