"""Jobs of an engine or a generator, their events, and their handles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from exkv.sampling import SamplingParams
from exkv.sampling.grammar import Constraint
from exkv.sampling.logprobs import TokenLogprobs

from .completion import Completion
from .rows import Row

#: A text, token ids, or the messages of a chat: ``[{"role": "user", "content": "Hello"}]``.
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt to be completed.

    Attributes:
        prompt: a text, token ids, or the messages of a chat.
        settings: of the sampler.
        seed: of the random numbers, for repeatable tokens; None for any.
        min_new_tokens: before this many, a token that ends the completion is chosen only if the
            grammar allows no other.
        stop: texts and token ids that end the completion and are left out of it, beside the model's
            own end-of-sequence tokens.
        ignore_eos: continue after end-of-sequence tokens, unless ``stop`` or a grammar ends with
            them.
        grammar: that the completion must match.
        logprobs: number of likeliest tokens whose log-probabilities each event has, beside that of
            the chosen one, see :mod:`exkv.sampling.logprobs`; None for neither.
        prompt_logprobs: the same for the prompt's tokens, in the handle's ``prompt_logprobs``; the
            whole prompt then runs, in short calls, without the prefix cache.
        return_logits: return the logits with the log-probabilities.
        banned_strings: texts that must not occur, in upper or lower case, see
            :mod:`exkv.sampling.banned_strings`. A token's event comes when the token is final.
        token_healing: drop the prompt's last token, and choose a first token whose text begins with
            that of the dropped one, so that it doesn't matter where the prompt was cut. Doesn't
            apply to a single token, or a control token at the end.
        approximate_reuse: also reuse pages that hold nearly what prefilling would store: text that
            another such job generated, such as the last turn of a chat, or pages that came back
            from host memory in fewer bits. The text is as good, but may differ from the one that
            the job gives alone.
        priority: jobs of a higher one are admitted first and preempted last.
        on_event: called with each :class:`Event` of this job, in the thread that runs the engine.
            If it raises, the job ends with that error.
        encode_special_tokens: parse special tokens in a text.
        shown_tokens: control tokens that the completion's text shows; all others are left out.
        continues: whether the completion continues the prompt's text, so that its first word may
            begin with a space; None for only if the prompt is a text.
        speculate: allow proposed tokens, if the engine has a draft or n-grams; they change no
            output.
        adapter: the name of one of ``model.adapters``, which stays loaded until the job ends; None
            for the model alone.
        guidance_scale: how far scores are shifted away from those of the negative prompt, see
            :mod:`exkv.decode.guidance`; 1 for not at all. A guided job takes two rows with pages
            each, gets no proposals, and has guided log-probabilities.
        negative_prompt: in any form of a prompt; None for the prompt's last token.
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
    shown_tokens: Sequence[int] = ()
    continues: bool | None = None
    speculate: bool = True
    adapter: str | None = None
    guidance_scale: float = 1.0
    negative_prompt: Prompt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A job's result in one step.

    Attributes:
        text: newly final text: whole characters, and no partial stop text.
        token: the new token; None if the job ended without one.
        logprobs: of the token, if the job asks for them.
        reason: why the job ended: ``"eos"``, ``"stop"``, ``"length"``, ``"grammar"`` (complete),
            ``"cache_full"`` (in a ``Generator``), ``"cancelled"`` or ``"error"``; ``""`` while it
            runs.
    """

    handle: Handle
    text: str = ""
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    reason: str = ""


class Driver(Protocol):
    """Runs jobs: an ``Engine`` or a ``Scheduler``."""

    def iterate(self) -> list[Event]:
        """Run one step."""

    def cancel(self, handle: Any) -> None:
        """End a job before the next step."""


class Handle(Row):
    """A submitted job.

    Attributes:
        job: as submitted.
        prompt: token ids (without a last one that is healed).
        tokens, logprobs, text: so far, without the prompt.
        reason: why it ended, as in :class:`Event`; ``""`` while it runs.
        error: the error that ended it, if any.
        cached_tokens: prompt tokens found in the prefix cache, which did not run.
        settings: the job's, with the sets of tokens that depend on the tokenizer.
        completion: decodes its tokens to text.
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
        """End the job before the next step, and free its pages. Thread-safe."""
        self._driver.cancel(self)

    def result(self) -> str:
        """Run the engine until the job has ended, and return its text; raises the error that ended
        it, if any."""
        for _ in self:
            pass
        if self.error is not None:
            raise self.error
        return self.text

    def __iter__(self) -> Iterator[Event]:
        """Run the engine, and yield this job's events from now on."""
        while not self.done:
            yield from [event for event in self._driver.iterate() if event.handle is self]
