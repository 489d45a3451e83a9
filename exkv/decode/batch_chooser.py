"""Choosers of ``generate``: as in transformers, processors see the scores of all sequences (N, V),
and one call draws for all. Greedy decoding and sampling; see ``beams`` and ``beam_groups`` for
beams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from exkv.devices import CPU
from exkv.generation.config import ResolvedConfig
from exkv.sampling.chain import greedy
from exkv.sampling.scores import check_choosable, check_largest, to_host, where_there_is_room

from .chooser import Choice, Chooser, Guess, Token, copied
from .hooks import Hooks, StoppingCriterion, ended_by
from .in_place import InPlace
from .job import Event
from .processors import Processor, SoFar, processors
from .prompts import Prompts
from .rows import Row

#: What ``greedy`` returns for a row without a token to choose.
NO_TOKEN = -1
_GOES = torch.ones(1, dtype=torch.bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """New tokens of N sequences, int64 (N, n), padded on the right, and their numbers without
    padding; the beams' scores (N,) and the rows that their tokens were chosen from (N, n); the
    numbers of proposed and accepted tokens."""

    tokens: Tensor
    lengths: tuple[int, ...]
    scores: Tensor | None = None
    beam_indices: Tensor | None = None
    proposed: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One call of ``generate``: N sequences, N / B for each of B prompts.

    Scores stay on the logits' device unless the caller looks at them; random numbers are drawn
    there, too, as in transformers.

    Attributes:
        processors: applied to scores, in order.
        criteria: end sequences, beside token ids and the length.
        ends: int64, ids that end a sequence.
        generators: one for each device on which numbers are drawn, if the call has a seed.
        scores, logits: of the steps so far, if the call asks for them.
        is_watched: whether the caller, or one of their functions, sees scores or logits.
        takes_likeliest: whether tokens are the argmax of logits that are not watched.
    """

    prompts: Prompts
    config: ResolvedConfig
    hooks: Hooks
    processors: tuple[Processor, ...] = ()
    criteria: tuple[StoppingCriterion, ...] = ()
    ends: Tensor = field(init=False)
    generators: dict[torch.device, torch.Generator] = field(default_factory=dict)
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    is_watched: bool = field(init=False)
    takes_likeliest: bool = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        watched = self.hooks.see_scores or config.output_scores or config.output_logits
        ends = torch.tensor(config.eos_token_id, dtype=torch.int64)
        object.__setattr__(self, "ends", ends)
        object.__setattr__(self, "is_watched", watched)
        likeliest = not (config.do_sample or self.processors or watched)
        object.__setattr__(self, "takes_likeliest", likeliest)

    def alone(self, row: int) -> Task:
        """This task for one of N sequences, with the same random generators."""
        prompts = self.prompts
        if len(prompts.lengths) > 1:
            prompts = prompts.only(row // self.config.num_return_sequences)
        return replace(self, prompts=prompts)

    def in_float32(self, logits: Tensor, going: Tensor) -> Tensor:
        """Logits (N, V) as float32; 0 in rows that have ended, whose NaN would spoil a sum."""
        scores = logits.float()
        if not going.all():
            scores = torch.where(going[:, None].to(scores.device), scores, 0.0)
        return scores

    # Scores -------------------------------------------------------------------------------

    def process(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """Apply all processors to scores (N, V) behind prompts and new tokens (N, n)."""
        so_far = SoFar(
            prompts=self.prompts, tokens=tokens, vocab_size=scores.shape[1], device=scores.device
        )
        for processor in self.processors:
            scores = processor(scores, so_far)
        return scores

    def process_step(self, logits: Tensor, tokens: Tensor, going: Tensor) -> tuple[Tensor, Tensor]:
        """The scores of a step with logits (N, V), log-probabilities with beams, and the largest
        logit of each row (N,). Records both if the call asks for them."""
        logits = self.in_float32(logits, going)
        largest = logits.amax(-1)
        if self.config.output_logits:
            self.logits.append(logits.clone())  # a processor may write over them
        scores = logits.log_softmax(-1) if self.config.num_beams > 1 else logits
        scores = self.process(scores, tokens)
        if self.config.output_scores:
            self.scores.append(scores)
        return scores, largest

    def check_logits(self, largest: Tensor) -> None:
        """ValueError for NaN or +inf in a running row, unless the call replaces them."""
        if not self.config.remove_invalid_values:
            check_largest(largest, "the logits")

    # Tokens -------------------------------------------------------------------------------

    def draw(self, scores: Tensor, count: int) -> Tensor:
        """Draw ``count`` columns of each row without replacement: (N, K) -> int64 (N, count). A row
        without valid probabilities gives any; its scores are refused when they are checked."""
        # NaN would trip an assertion on the GPU, after which every call fails.
        probabilities = scores.softmax(-1).nan_to_num_(nan=1.0)
        generator = self._generator(scores.device)
        return torch.multinomial(probabilities, count, generator=generator)

    def _generator(self, device: torch.device) -> torch.Generator | None:
        """The generator of this call's seed; None for the device's own."""
        if device not in self.generators:
            if self.config.seed is None:
                return None
            self.generators[device] = torch.Generator(device).manual_seed(self.config.seed)
        return self.generators[device]

    def copied_generator(self, device: torch.device) -> torch.Generator:
        """A copy of the generator that :meth:`draw` will use on this device; an unrelated one on an
        accelerator without a seed."""
        source = self._generator(device)
        if source is None and device.type == "cpu":
            source = torch.default_generator
        return copied(source, device)

    def met(self, tokens: Tensor, scores: Tensor | None = None) -> Tensor:
        """Which sequences a stopping criterion ends: new tokens (N, n) -> bool (N,)."""
        if not self.criteria:
            return torch.zeros(len(tokens), dtype=torch.bool)
        return ended_by(self.criteria, self.prompts.followed_by(tokens), scores)

    def stream(self, ids: Tensor) -> None:
        """Pass ids to the caller's streamer, if there is one."""
        if self.hooks.streamer is not None:
            self.hooks.streamer.put(ids)

    def end_stream(self) -> None:
        if self.hooks.streamer is not None:
            self.hooks.streamer.end()

    def ended(self, tokens: Tensor, scores: Tensor | None = None) -> Tensor:
        """Which sequences have ended, by token, criterion or length: bool (N,)."""
        if tokens.shape[1] >= self.config.max_new_tokens:
            self.met(tokens, scores)  # a criterion may count its calls
            return torch.ones(len(tokens), dtype=torch.bool)
        ended = torch.isin(tokens[:, -1], self.ends)
        return ended | self.met(tokens, scores) if self.criteria else ended


class BatchChooser(Chooser[Row]):
    """Base of ``generate``'s choosers. A choice's details are each row's source row, or None, and
    which rows continue, bool (N,).

    Args:
        place: where the rows run; beams fork there.
    """

    def __init__(self, task: Task, place: InPlace) -> None:
        self.task = task
        self._place = place

    def take(self, rows: Sequence[Row], choice: Choice) -> list[Event]:
        """Append tokens to running rows; a row that ends is idle until all have ended."""
        sources, going = choice.details
        each = going.tolist()
        over = not any(each)
        if sources is not None and not over:
            self._place.fork(sources)
        for row, token, goes in zip(rows, choice.tokens, each, strict=True):
            if not row.idle:
                row.tokens.append(cast(int, token))
            row.idle = not goes
            row.reason = "ended" if over else ""
        if over:
            self.task.end_stream()
        return []

    def completions(self, rows: Sequence[Row]) -> Completions:
        """The result, once all rows have ended."""
        lengths = tuple(len(row.tokens) for row in rows)
        tokens = torch.full((len(rows), max(lengths)), self.task.config.pad_token_id)
        for row, length in zip(rows, lengths, strict=True):
            tokens[row.number, :length] = torch.tensor(row.tokens)
        return Completions(tokens=tokens, lengths=lengths)


class Together(BatchChooser):
    """Greedy decoding and sampling: one token of every sequence in each step.

    A sequence that has ended does not run any more. Random numbers are still drawn for it, as in
    transformers, so that those of the others stay the same.
    """

    def __init__(self, task: Task, place: InPlace, rows: int) -> None:
        super().__init__(task, place)
        self._tokens = torch.empty((rows, 0), dtype=torch.int64)
        self._going = torch.ones(rows, dtype=torch.bool)

    def choose(self, rows: Sequence[Row], logits: Tensor) -> Choice:
        found, scores, placed = next_tokens(self.task, logits, self._tokens, self._going)
        found = torch.where(self._going, found, self.task.config.pad_token_id)
        self._tokens = torch.cat((self._tokens, found[:, None]), -1)
        self._going = self._going & ~self.task.ended(self._tokens, scores)
        self.task.stream(found)
        return Choice(tokens=found.tolist(), placed=placed, details=(None, self._going))


class OneByOne(BatchChooser):
    """Greedy decoding and sampling with proposed tokens: sequences progress at different rates, so
    tokens are chosen for each alone. They share one generator; for several sequences greedy tokens
    equal those of :class:`Together`, and sampled ones have the same distribution."""

    def __init__(self, task: Task, place: InPlace, rows: int) -> None:
        super().__init__(task, place)
        self._alone = [task.alone(number) for number in range(rows)]
        self._device = CPU

    def choose(self, rows: Sequence[Row], logits: Tensor) -> Choice:
        self._device = logits.device
        each = [self._next(row, own) for row, own in zip(rows, logits.split(1), strict=True)]
        return Choice(tokens=[token for token, _ in each], details=[by for _, by in each])

    def _next(self, row: Row, logits: Tensor) -> tuple[int, Tensor | None]:
        """A token and its scores; logits (1, V)."""
        tokens = torch.tensor([row.tokens], dtype=torch.int64)
        chosen, scores, _ = next_tokens(self._alone[row.number], logits, tokens, _GOES)
        return int(chosen), scores

    def chosen(self, rows: Sequence[Row], logits: Tensor, tokens: Sequence[Token]) -> Choice:
        for token, own in zip(tokens, logits.split(1), strict=True):
            if token == NO_TOKEN:
                check_choosable(own, "the logits")
        return Choice(tokens=tokens, details=[None] * len(rows))

    def take(self, rows: Sequence[Row], choice: Choice) -> list[Event]:
        for row, token, scores in zip(rows, choice.tokens, choice.details, strict=True):
            row.tokens.append(cast(int, token))
            over = bool(self._alone[row.number].ended(torch.tensor([row.tokens]), scores))
            row.reason = "ended" if over else ""
            self.task.stream(torch.tensor(row.tokens[-1:]))
            if over:  # with a streamer there is only one sequence
                self.task.end_stream()
        return []

    def choose_ahead(self, rows: Sequence[Row], logits: Tensor) -> Sequence[Token] | None:
        if not self.task.takes_likeliest:
            return None
        return where_there_is_room(greedy, logits).tolist()

    def guessing(self, row: Row) -> Guess:
        alone, device = self._alone[row.number], self._device
        steps = processors(alone.config, Hooks())  # without the caller's
        drawn_by = {device: alone.copied_generator(device)}
        task = replace(alone, processors=steps, generators=drawn_by)

        def guess(logits: Tensor, proposed: Sequence[int]) -> int:
            tokens = torch.tensor([[*row.tokens, *proposed]], dtype=torch.int64)
            scores = task.process(logits.to(device).float(), tokens)
            return int(task.draw(scores, 1) if task.config.do_sample else scores.argmax(-1))

        return guess


def next_tokens(
    task: Task, logits: Tensor, tokens: Tensor, going: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A token for each sequence (N,), the scores if they are watched, and the tokens on the device
    if they were chosen there; logits (N, V), tokens so far (N, n), which rows run (N,).

    Raises:
        ValueError: a running sequence has no token to choose.
    """
    if task.takes_likeliest:
        placed = where_there_is_room(greedy, logits)
        found = placed.cpu()
        if bool((found[going] < 0).any()):
            check_choosable(logits, "the logits", going=going)
        # An ended row may have no token; it doesn't run, but its id must not be negative.
        return found, None, None if placed.is_cpu else placed.clamp(min=0)
    drawn, largest, scores = where_there_is_room(lambda x: _draw(task, x, tokens, going), logits)
    found, on_host, best = to_host(drawn, largest, scores.amax(-1))
    task.check_logits(on_host)
    infinite = not task.config.do_sample
    check_largest(best, "the processed scores", going=going, infinite=infinite)
    # Unwatched scores are dropped: the next step may need their memory.
    return found, scores if task.is_watched else None, None if drawn.is_cpu else drawn


def _draw(
    task: Task, logits: Tensor, tokens: Tensor, going: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """On the logits' device: a token for each sequence (N,), unchecked, the largest logit of each
    (N,), and the scores (N, V)."""
    scores, largest = task.process_step(logits, tokens, going)
    drawn = task.draw(scores, 1)[:, 0] if task.config.do_sample else scores.argmax(-1)
    return drawn, largest, scores
