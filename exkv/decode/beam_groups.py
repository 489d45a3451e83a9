"""Diverse beam search (Vijayakumar et al. 2018): groups of beams that avoid each other's tokens.

In each step the groups choose in turn, and a token costs a group ``diversity_penalty`` for each
beam of an earlier group that has just taken it. Each group is a beam search of its own. Details,
such as when a group is done, are those of transformers 4.48, the last version with beam groups in
its own code; the tests compare with its tokens.

B prompts, G groups of S beams each, n new tokens so far, V tokens in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from exkv.generation.config import ResolvedConfig
from exkv.sampling.scores import check_choosable

from .batch_chooser import BatchChooser, Completions, Task
from .beams import NEVER
from .chooser import Choice
from .in_place import InPlace
from .rows import Row


@dataclass(slots=True, kw_only=True)
class Group:
    """The beams of one group of one prompt, and its finished sequences.

    Attributes:
        tokens: (S, n).
        scores: summed log-probabilities (S,), descending.
        finished: at most S of (score, tokens), in the order in which they ended.
    """

    config: ResolvedConfig
    tokens: Tensor
    scores: Tensor
    finished: list[tuple[float, Tensor]] = field(default_factory=list)
    closed: bool = False

    @classmethod
    def start(cls, config: ResolvedConfig) -> Group:
        size = config.num_beams // config.num_beam_groups
        scores = torch.full((size,), NEVER)
        scores[0] = 0.0  # equal beams would stay equal, so only the first counts
        return cls(config=config, tokens=torch.empty((size, 0), dtype=torch.int64), scores=scores)

    def advance(self, scores: Tensor) -> Tensor:
        """Add a token to every beam, by scores (S, V) -> each one's source beam (S,)."""
        size, vocab_size = scores.shape
        ends = self.config.eos_token_id
        count = max(2, 1 + len(ends)) * size
        best, picked = (scores + self.scores[:, None]).flatten().topk(count)
        source, token = picked // vocab_size, picked % vocab_size
        tokens = torch.cat((self.tokens[source], token[:, None]), -1)
        ended = torch.isin(token, torch.tensor(ends, dtype=torch.int64))
        for rank in ended[:size].nonzero().flatten().tolist():
            self._finish(float(best[rank]), tokens[rank])
        going = (~ended).nonzero().flatten()[:size]
        self.tokens, self.scores = tokens[going], best[going]
        self.closed = self._is_done(float(best[0]))
        return source[going]

    def close(self) -> None:
        """End the search; running beams count as finished."""
        if not self.closed:
            for score, tokens in zip(self.scores.tolist(), self.tokens, strict=True):
                self._finish(score, tokens)
        self.closed = True

    def _finish(self, score: float, tokens: Tensor) -> None:
        """Add a sequence, replacing the worst if all places are taken."""
        score /= len(tokens) ** self.config.length_penalty
        if len(self.finished) < len(self.scores):
            self.finished.append((score, tokens))
            return
        worst = min(range(len(self.finished)), key=lambda i: self.finished[i][0])
        if score > self.finished[worst][0]:
            del self.finished[worst]
            self.finished.append((score, tokens))

    def _is_done(self, best: float) -> bool:
        """Whether no beam can beat the finished ones; ``best`` is the step's best sum."""
        if len(self.finished) < len(self.scores):
            return False
        if self.config.early_stopping is True:
            return True
        length = self.tokens.shape[1]
        if self.config.early_stopping == "never" and self.config.length_penalty > 0:
            length = self.config.max_new_tokens
        hoped_for = best / length**self.config.length_penalty
        return min(score for score, _ in self.finished) >= hoped_for


class GroupBeamSearch(BatchChooser):
    """The ``num_return_sequences`` best sequences of each prompt over all groups, best first.

    Stopping criteria end the search when they hold for every running beam.
    """

    def __init__(self, task: Task, place: InPlace) -> None:
        super().__init__(task, place)
        config, prompts = task.config, len(task.prompts.lengths)
        self._prompts = [
            [Group.start(config) for _ in range(config.num_beam_groups)] for _ in range(prompts)
        ]
        self._groups = [group for prompt in self._prompts for group in prompt]
        self._going = torch.ones(prompts * config.num_beams, dtype=torch.bool)
        self._length = 0

    def choose(self, rows: Sequence[Row], logits: Tensor) -> Choice:
        # On the host: each group's choice depends on those of the groups before it.
        logits = self.task.in_float32(logits.cpu(), self._going)
        self.task.check_logits(logits.amax(-1))
        source = advance_groups(self.task, self._prompts, logits.log_softmax(-1), self._length)
        self._length += 1
        tokens = running_tokens(self._groups, self._length)
        self._going = torch.tensor([not each.closed for each in self._groups for _ in each.scores])
        self._going &= ~self.task.met(tokens).all()
        self._going &= self._length < self.task.config.max_new_tokens
        sources = source.flatten().tolist()
        return Choice(tokens=tokens[:, -1].tolist(), details=(sources, self._going))

    def completions(self, rows: Sequence[Row]) -> Completions:
        return best_of(self._prompts, self.task.config)


def advance_groups(task: Task, prompts: list[list[Group]], scores: Tensor, length: int) -> Tensor:
    """Advance every open group by one step, by log-probabilities (B * G * S, V) after ``length``
    new tokens -> the source rows (B, G, S) of the beams in the cache."""
    rows, groups = len(prompts), len(prompts[0])
    scores = scores.view(rows, groups, -1, scores.shape[-1])
    source = torch.arange(scores[..., 0].numel()).view(scores.shape[:3])
    taken = torch.zeros((rows, scores.shape[-1]))  # beams that have taken each token in this step
    for index in range(groups):
        turn = [prompt[index] for prompt in prompts]
        part = scores[:, index] - task.config.diversity_penalty * taken[:, None]
        part = task.process(part.flatten(0, 1), running_tokens(turn, length)).view(part.shape)
        is_open = torch.tensor([not group.closed for group in turn])
        what = f"the processed scores of group {index}"
        check_choosable(part.flatten(1), what, going=is_open, infinite=True)
        for row, group in enumerate(turn):
            if group.closed:
                newest = torch.full_like(source[row, index], task.config.pad_token_id)
            else:
                source[row, index] = source[row, index, group.advance(part[row])]
                newest = group.tokens[:, -1]
            taken[row] += newest.bincount(minlength=taken.shape[1])[: taken.shape[1]]
    return source


def running_tokens(groups: list[Group], length: int) -> Tensor:
    """The new tokens of all beams (N, length), padded in closed groups; padding counts as taken, as
    in transformers."""
    return torch.cat([_filled(group.tokens, length, group.config) for group in groups])


def best_of(prompts: list[list[Group]], config: ResolvedConfig) -> Completions:
    """The best sequences of each prompt over all its groups; of equal ones, the last group's."""
    chosen: list[tuple[float, Tensor]] = []
    for groups in prompts:
        for group in groups:
            group.close()
        finished = [each for group in groups for each in group.finished]
        finished.sort(key=lambda each: each[0])
        chosen += finished[::-1][: config.num_return_sequences]
    lengths = tuple(len(tokens) for _, tokens in chosen)
    return Completions(
        tokens=torch.stack([_filled(tokens, max(lengths), config) for _, tokens in chosen]),
        lengths=lengths,
        scores=torch.tensor([score for score, _ in chosen]),
    )


def _filled(tokens: Tensor, length: int, config: ResolvedConfig) -> Tensor:
    """Pad on the right: (..., n) -> (..., length)."""
    return functional.pad(tokens, (0, length - tokens.shape[-1]), value=config.pad_token_id)
