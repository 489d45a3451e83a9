"""Beam search: for each prompt the ``num_beams`` likeliest sequences so far, and the finished ones.

The algorithm and its results are transformers 5's. Each step extends every running beam by every
token; the best candidates continue, and finished ones compete for ``num_beams`` places by
log-probability / length ** ``length_penalty`` (Wu et al. 2016). With ``do_sample`` candidates are
drawn instead.

B prompts, K beams, C candidates, n new tokens so far, V tokens in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from exkv.generation.config import ResolvedConfig
from exkv.sampling.scores import check_largest, to_host, where_there_is_room

from .batch_chooser import BatchChooser, Completions, Task
from .chooser import Choice
from .in_place import InPlace
from .rows import Row

#: The score of what must never be chosen; finite, so that sums and softmax are, too.
NEVER = -1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveBeams:
    """Running beams: tokens (B, K, n), the row of each step's scores that each was chosen from
    (B, K, n), summed log-probabilities (B, K), descending."""

    tokens: Tensor
    paths: Tensor
    scores: Tensor

    @classmethod
    def start(cls, rows: int, beams: int) -> ActiveBeams:
        """Beams without tokens; only the first counts, since equal beams would stay equal."""
        scores = torch.full((rows, beams), NEVER)
        scores[:, 0] = 0.0
        none = torch.empty((rows, beams, 0), dtype=torch.int64)
        return cls(tokens=none, paths=none, scores=scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Beams with one more token: tokens and paths (B, C, n + 1), scores (B, C), the source beam
    (B, C), and whether it has ended (B, C)."""

    tokens: Tensor
    paths: Tensor
    scores: Tensor
    source: Tensor
    ended: Tensor

    def best_running(self, beams: int) -> tuple[ActiveBeams, Tensor]:
        """The ``beams`` best that have not ended, and their source beams (B, K)."""
        scores, order = (self.scores + self.ended * NEVER).topk(beams)
        tokens = self.tokens.take_along_dim(order[..., None], 1)
        paths = self.paths.take_along_dim(order[..., None], 1)
        return ActiveBeams(tokens=tokens, paths=paths, scores=scores), self.source.gather(1, order)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Finished sequences: tokens and paths (B, K, n), padded by padding and -1, lengths (B, K),
    scores (B, K), descending, and which places are taken (B, K)."""

    tokens: Tensor
    paths: Tensor
    lengths: Tensor
    scores: Tensor
    taken: Tensor

    @classmethod
    def start(cls, rows: int, beams: int) -> Finished:
        shape = (rows, beams)
        return cls(
            tokens=torch.empty((*shape, 0), dtype=torch.int64),
            paths=torch.empty((*shape, 0), dtype=torch.int64),
            lengths=torch.zeros(shape, dtype=torch.int64),
            scores=torch.full(shape, NEVER),
            taken=torch.zeros(shape, dtype=torch.bool),
        )

    @property
    def full(self) -> Tensor:
        """Prompts without a free place: bool (B,)."""
        return self.taken.all(-1)

    def with_ended(
        self, candidates: Candidates, is_open: Tensor, config: ResolvedConfig
    ) -> Finished:
        """The best of these and of the ended candidates, for open prompts. Only the K best
        candidates may end; the others are there so that enough can continue."""
        rows, beams = self.scores.shape
        count, length = candidates.tokens.shape[1:]
        ended = candidates.ended & (torch.arange(count) < beams)
        # Added, so that impossible candidates rank behind empty places.
        never = NEVER * ((~ended).int() + (~is_open[:, None]).int())
        scores = candidates.scores / length**config.length_penalty + never
        best, order = torch.cat((self.scores, scores), 1).topk(beams)
        tokens = _merged(self.tokens, candidates.tokens, order, config.pad_token_id)
        paths = _merged(self.paths, candidates.paths, order, -1)
        lengths = torch.cat((self.lengths, torch.full((rows, count), length)), 1).gather(1, order)
        taken = torch.cat((self.taken, ended), 1).gather(1, order)
        return Finished(tokens=tokens, paths=paths, lengths=lengths, scores=best, taken=taken)


def _merged(held: Tensor, new: Tensor, order: Tensor, fill: int) -> Tensor:
    """``order`` (B, K) of held (B, K, m) and new (B, C, n >= m) together, padded on the right."""
    held = functional.pad(held, (0, new.shape[-1] - held.shape[-1]), value=fill)
    return torch.cat((held, new), 1).take_along_dim(order[..., None], 1)


class BeamSearch(BatchChooser):
    """The ``num_return_sequences`` best sequences of each prompt, best first. A prompt whose search
    has ended does not run any more."""

    def __init__(self, task: Task, place: InPlace) -> None:
        super().__init__(task, place)
        rows, beams = len(task.prompts.lengths), task.config.num_beams
        self._running = ActiveBeams.start(rows, beams)
        self._finished = Finished.start(rows, beams)
        self._open = torch.ones(rows, dtype=torch.bool)

    def choose(self, rows: Sequence[Row], logits: Tensor) -> Choice:
        config = self.task.config
        candidates = extend(self.task, self._running, logits, self._open)
        self._finished = self._finished.with_ended(candidates, self._open, config)
        self._running, source = candidates.best_running(config.num_beams)
        hopeful = can_improve(self._running, self._finished, config)
        self._open = self._open & ~candidates.ended.all(-1) & hopeful
        newest = self._running.tokens[..., -1].flatten()
        going = self._open.repeat_interleave(config.num_beams)
        return Choice(tokens=newest.tolist(), details=(cache_rows(source, self._open), going))

    def completions(self, rows: Sequence[Row]) -> Completions:
        return best_of(self._finished, self.task.config.num_return_sequences)


def extend(task: Task, running: ActiveBeams, logits: Tensor, is_open: Tensor) -> Candidates:
    """Extend every beam by every token, and return enough candidates for K to continue even if all
    beams end: with E end-of-sequence tokens, (1 + E) * K and at least 2 * K."""
    rows, beams = running.scores.shape
    count = max(2, 1 + len(task.config.eos_token_id)) * beams
    tried = where_there_is_room(lambda x: _try_tokens(task, running, x, is_open, count), logits)
    picked, best, largest, likeliest = to_host(*tried)
    task.check_logits(largest)
    what = f"the processed scores of {beams} beams"  # one candidate is enough
    check_largest(likeliest, what, going=is_open, infinite=not task.config.do_sample)
    vocab_size = logits.shape[-1]
    source, token = picked // vocab_size, picked % vocab_size
    before, row = source[..., None], source + torch.arange(rows)[:, None] * beams
    tokens = torch.cat((running.tokens.take_along_dim(before, 1), token[..., None]), -1)
    paths = torch.cat((running.paths.take_along_dim(before, 1), row[..., None]), -1)
    ended = task.ended(tokens.flatten(0, 1)).view(rows, count)
    return Candidates(tokens=tokens, paths=paths, scores=best, source=source, ended=ended)


def _try_tokens(
    task: Task, running: ActiveBeams, logits: Tensor, is_open: Tensor, count: int
) -> tuple[Tensor, ...]:
    """On the device of the logits (B * K, V): ``count`` of the K * V candidates of each prompt
    (B, C), their summed scores (B, C), the largest logit of each beam (B * K,), and the largest
    score of each prompt (B,)."""
    rows, beams = running.scores.shape
    tokens = running.tokens.flatten(0, 1)  # (B * K, n)
    going = is_open.repeat_interleave(beams)
    scores, largest = task.process_step(logits, tokens, going)
    likeliest = scores.view(rows, -1).amax(-1)
    sums = (scores.view(rows, beams, -1) + running.scores[..., None].to(scores.device)).flatten(1)
    if task.config.do_sample:
        drawn = task.draw(sums, count)
        best, order = sums.gather(1, drawn).sort(descending=True)
        picked = drawn.gather(1, order)
    else:
        best, picked = sums.topk(count)
    return picked, best, largest, likeliest


def can_improve(running: ActiveBeams, finished: Finished, config: ResolvedConfig) -> Tensor:
    """Whether a prompt's search continues, by ``early_stopping``: bool (B,)."""
    length = running.tokens.shape[-1]
    if config.early_stopping == "never" and config.length_penalty > 0:
        length = config.max_new_tokens  # longer sequences might score better
    hoped_for = running.scores[:, 0] / length**config.length_penalty
    better = hoped_for > finished.scores.amin(-1)  # an empty place is worse than any beam
    return better & ~finished.full if config.early_stopping is True else better


def cache_rows(source: Tensor, is_open: Tensor) -> list[int]:
    """The source rows of the beams in the cache; rows of finished prompts stay."""
    rows, beams = source.shape
    kept = torch.where(is_open[:, None], source, torch.arange(beams))
    return (kept + torch.arange(rows)[:, None] * beams).flatten().tolist()


def best_of(finished: Finished, count: int) -> Completions:
    """The first ``count`` sequences of each prompt."""
    lengths = finished.lengths[:, :count].flatten()
    longest = int(lengths.max())
    return Completions(
        tokens=finished.tokens[:, :count].flatten(0, 1)[:, :longest],
        lengths=tuple(lengths.tolist()),
        scores=finished.scores[:, :count].flatten(),
        beam_indices=finished.paths[:, :count].flatten(0, 1)[:, :longest],
    )
