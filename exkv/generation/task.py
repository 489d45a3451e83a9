"""What a decoding loop is given and what it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from exkv.sampling.scores import check_largest, where_there_is_room

from .config import ResolvedConfig
from .fallback import Fallback
from .hooks import Hooks, StoppingCriterion, ended_by
from .processors import Processor, SoFar
from .prompts import Prompts
from .runner import Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOutput:
    """What ``generate(..., return_dict_in_generate=True)`` returns; N rows, those of a prompt
    beside each other.

    Attributes:
        sequences: int64 (N, tokens), prompts and new tokens.
        sequences_scores: float32 (N,), the beams' log-probability over the length's power; None
            without beams.
        texts: the sequences as texts, where there is a tokenizer.
        scores, logits: float32 (N, V) of each step, or (B * num_beams, V) with beams: what the
            tokens were chosen by (with beams log-probabilities), and what the model said. None
            unless ``output_scores``, ``output_logits``. A row that has ended, or whose prompt's
            search is over, runs no more: its logits are 0.
        beam_indices: int64 (N, new tokens), which row of ``scores`` each new token was chosen
            from, -1 after a sequence's end; None without beams, and with groups of them.
        fallbacks: what was done where memory ran out, in order; () where it didn't.
        proposed_tokens, accepted_tokens: that were checked, with ``assistant_model`` or
            ``prompt_lookup_num_tokens``, and that were right.
    """

    sequences: Tensor
    sequences_scores: Tensor | None = None
    texts: tuple[str, ...] | None = None
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    beam_indices: Tensor | None = None
    fallbacks: tuple[Fallback, ...] = ()
    proposed_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """The new tokens of N sequences: int64 (N, n) filled up with padding, how many of each are
    its own, the beams' scores (N,), and the rows that their tokens were chosen from (N, n); how
    many tokens were proposed, and accepted."""

    tokens: Tensor
    lengths: tuple[int, ...]
    scores: Tensor | None = None
    beam_indices: Tensor | None = None
    proposed: int = 0
    accepted: int = 0


@dataclass(slots=True, kw_only=True)
class Steps:
    """The scores and logits of the steps so far, where a call asks for them."""

    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One call of ``generate``: N sequences, N / B of each of B prompts.

    Scores stay where the model has its logits, unless the caller looks at them; random numbers are
    drawn there, too, as transformers does.

    Attributes:
        processors: what is done to scores, in order.
        criteria: that end sequences beside ids, numbers and the caller's own.
        generators: of each device that numbers were drawn on, where the call has a seed.
    """

    runner: Runner
    prompts: Prompts
    config: ResolvedConfig
    hooks: Hooks
    processors: tuple[Processor, ...] = ()
    criteria: tuple[StoppingCriterion, ...] = ()
    generators: dict[torch.device, torch.Generator] = field(default_factory=dict)
    steps: Steps = field(default_factory=Steps)

    # Logits -------------------------------------------------------------------------------

    def prefill(self, repeats: int) -> Tensor:
        """Run the prompts and make ``repeats`` rows of each: logits (N, V), as of :meth:`step`."""
        logits = self._kept(self.runner.prefill(self.prompts.rows))
        self.runner.repeat(len(self.prompts.lengths), repeats)
        if repeats == 1:
            return logits
        return where_there_is_room(lambda x: x.repeat_interleave(repeats, 0), logits)

    def step(self, tokens: Tensor, going: Tensor, placed: Tensor | None = None) -> Tensor:
        """Run one token of each sequence that goes on; int64, bool (N,) -> logits (N, V), where
        the model has them, or on the host where others look at them. ``placed`` as of
        :meth:`Runner.step`."""
        return self._kept(self.runner.step(tokens.tolist(), going.tolist(), placed))

    def verify(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """Run some tokens of each of N sequences; logits (tokens, V) of each."""
        logits = self._kept(self.runner.verify(rows))
        return list(logits.split([len(ids) for ids in rows]))

    def alone(self, row: int) -> Task:
        """The same of one of N sequences; random numbers are drawn from the same generators."""
        prompts = self.prompts
        if len(prompts.lengths) > 1:
            prompts = prompts.only(row // self.config.num_return_sequences)
        return replace(self, prompts=prompts)

    def _kept(self, logits: Tensor) -> Tensor:
        return logits.cpu() if self.is_watched else logits

    def in_float32(self, logits: Tensor, going: Tensor) -> Tensor:
        """Logits (N, V) as float32; rows that have ended are 0, so that nothing which they run
        into can upset a sum."""
        scores = logits.float()
        if not going.all():
            scores = torch.where(going[:, None].to(scores.device), scores, 0.0)
        return scores

    # Scores -------------------------------------------------------------------------------

    @property
    def takes_likeliest(self) -> bool:
        """Whether a token follows from the logits as they are, and nobody wants to see these."""
        return not (self.config.do_sample or self.processors or self.is_watched)

    @property
    def is_watched(self) -> bool:
        """Whether the caller, or a function of theirs, gets to see scores or logits."""
        config, hooks = self.config, self.hooks
        functions = hooks.logits_processor or hooks.prefix_allowed_tokens_fn is not None
        kept = config.output_scores or config.output_logits
        return bool(functions or hooks.stopping_criteria or kept)

    def process(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """Scores (N, V) of what follows prompts and new tokens (N, n), after all processors."""
        so_far = SoFar(
            prompts=self.prompts, tokens=tokens, vocab_size=scores.shape[1], device=scores.device
        )
        for processor in self.processors:
            scores = processor(scores, so_far)
        return scores

    def process_step(self, logits: Tensor, tokens: Tensor, going: Tensor) -> tuple[Tensor, Tensor]:
        """The scores of a step whose logits are (N, V), with beams as log-probabilities, kept
        where the call asks for them; and the largest logit of each row (N,)."""
        logits = self.in_float32(logits, going)
        largest = logits.amax(-1)
        if self.config.output_logits:
            self.steps.logits.append(logits.clone())  # a processor may write over them
        scores = logits.log_softmax(-1) if self.config.num_beams > 1 else logits
        scores = self.process(scores, tokens)
        if self.config.output_scores:
            self.steps.scores.append(scores)
        return scores, largest

    def check_logits(self, largest: Tensor) -> None:
        """ValueError where a row that goes on held NaN or +inf, which are not to be replaced."""
        if not self.config.remove_invalid_values:
            check_largest(largest, "the logits")

    # Tokens -------------------------------------------------------------------------------

    def draw(self, scores: Tensor, count: int) -> Tensor:
        """``count`` columns of each row, without one twice: (N, K) -> int64 (N, count). Of a row
        that has no probabilities any; its scores are refused once they are looked at."""
        # NaN would be an assertion on a GPU, after which it takes no more calls.
        probabilities = scores.softmax(-1).nan_to_num_(nan=1.0)
        generator = self._generator(scores.device)
        return torch.multinomial(probabilities, count, generator=generator)

    def _generator(self, device: torch.device) -> torch.Generator | None:
        """Of this call's seed; None for the device's own."""
        if device not in self.generators:
            if self.config.seed is None:
                return None
            self.generators[device] = torch.Generator(device).manual_seed(self.config.seed)
        return self.generators[device]

    def copied(self, device: torch.device) -> torch.Generator:
        """A generator that will draw what :meth:`draw` will on this device; any other one where
        there is no seed, and numbers are drawn on an accelerator."""
        source = self._generator(device)
        if source is None and device.type == "cpu":
            source = torch.default_generator
        copy = torch.Generator(device)
        return copy if source is None else copy.set_state(source.get_state())

    def met(self, tokens: Tensor, scores: Tensor | None = None) -> Tensor:
        """Which sequences a stopping criterion ends: new tokens (N, n) -> bool (N,)."""
        criteria = (*self.criteria, *self.hooks.stopping_criteria)
        if not criteria:
            return torch.zeros(len(tokens), dtype=torch.bool)
        return ended_by(criteria, self.prompts.followed_by(tokens), scores)

    def ended(self, tokens: Tensor, scores: Tensor | None = None) -> Tensor:
        """Which sequences are at their end, by token, criterion or number: bool (N,)."""
        if tokens.shape[1] >= self.config.max_new_tokens:
            self.met(tokens, scores)  # a criterion may count its calls
            return torch.ones(len(tokens), dtype=torch.bool)
        ends = torch.tensor(self.config.eos_token_id, dtype=torch.int64)
        return torch.isin(tokens[:, -1], ends) | self.met(tokens, scores)
