"""Steps of the sampler: values with a source, settings, and functions on scores.

``steps`` lists them. An :class:`Entry` is a step in one of the two vocabularies, ``huggingface``
and ``exllamav2``, with the names of its settings there.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from .bounds import Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Tokens that may be drawn, with their scores.

    Attributes:
        scores: float32 (B, K), descending until a step reorders them, -inf for dropped tokens.
        ids: int64 (B, K).
        others: alternative scores, drawn from with the probability ``share``.
    """

    scores: Tensor
    ids: Tensor
    others: Tensor | None = None
    share: float = 0.0

    def each(self, function: Callable[..., Tensor], *values: Any) -> Candidates:
        """Apply a function to the scores: (B, K) -> (B, K)."""
        others = None if self.others is None else function(self.others, *values)
        return replace(self, scores=function(self.scores, *values), others=others)

    def mixed(self) -> Candidates:
        """The same distribution without ``others``."""
        if self.others is None:
            return self
        probabilities = (1 - self.share) * self.scores.softmax(-1)
        mixture = (probabilities + self.share * self.others.softmax(-1)).log()
        return Candidates(scores=mixture, ids=self.ids)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a step.

    Attributes:
        does: a phrase for documentation, the server's schema and ``exkv chat``'s flags.
        also_called: other names, in requests of TabbyAPI's clients.
        served: its name in requests to the server, if that is neither transformers' nor
            ExLlamaV2's; None if requests can't set it.
        short: its flag in ExLlamaV2's chat.
    """

    does: str
    bounds: Bounds
    also_called: tuple[str, ...] = ()
    served: str | None = ""
    short: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """A change of the scores of the next token.

    Attributes:
        source: the paper or project that it comes from.
        settings: arguments of its functions, in order. A vocabulary may name only the first few.
        columns: (scores (N, V), tokens so far, *values) -> scores (N, V): each score stays in its
            token's column. If transformers has the step, the result equals its own bit by bit. The
            tokens so far are a ``SoFar`` of ``exkv.decode.processors``, or just its ``histories``
            in ExLlamaV2's vocabulary.
        candidates: (Candidates, *values) -> Candidates, which ExLlamaV2's vocabulary prefers to
            ``columns``.
        is_drawn: whether it has no effect on greedy choices.
        needs_history: whether it reads the tokens so far.
        is_on: (*values) -> whether it has an effect, if no single setting decides that.
    """

    source: str
    settings: tuple[Setting, ...]
    columns: Callable[..., Tensor] | None = None
    candidates: Callable[..., Candidates] | None = None
    is_drawn: bool = False
    needs_history: bool = False
    is_on: Callable[..., bool] | None = None


def step(source: str, *settings: Setting, is_drawn: bool = False, **functions: Any) -> Step:
    """Make a step; steps on candidates have no effect on greedy choices."""
    is_drawn |= "candidates" in functions
    return Step(source=source, settings=settings, is_drawn=is_drawn, **functions)


def alone(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``columns`` of a function without the tokens so far."""
    return lambda scores, _, *values: function(scores, *values)


def each(function: Callable[..., Tensor]) -> Callable[..., Candidates]:
    """``candidates`` of a function (scores (B, K), *values) -> scores (B, K)."""
    return lambda those, *values: those.each(function, *values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A step in a vocabulary.

    Attributes:
        bounds: bounds of the vocabulary's fields, which are the step's first settings.
        reads: other attributes of a configuration that the step's functions take after them.
    """

    step: Step
    bounds: Mapping[str, Bounds]
    reads: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Setting]:
        """Field -> setting."""
        return dict(zip(self.bounds, self.step.settings, strict=False))

    def values(self, config: Any) -> tuple[Any, ...]:
        """Arguments of the step's functions."""
        return tuple(getattr(config, name) for name in (*self.bounds, *self.reads))

    def switched_on(self, config: Any) -> list[str]:
        """The fields that switch the step on; empty if it does nothing."""
        if self.step.is_on is not None and not self.step.is_on(*self.values(config)):
            return []
        return [name for name, each in self.bounds.items() if each.is_on(getattr(config, name))]


def entry(step: Step, names: str, reads: tuple[str, ...] = (), **bounds: Bounds) -> Entry:
    """A step with the names of its first settings, and bounds of fields that have their own."""
    pairs = zip(names.split(), step.settings, strict=False)
    own = {name: bounds.get(name, setting.bounds) for name, setting in pairs}
    return Entry(step=step, bounds=own, reads=reads)


def bounds_of(vocabulary: Iterable[Entry]) -> dict[str, Bounds]:
    """The bounds of all fields of a vocabulary."""
    return {name: each for row in vocabulary for name, each in row.bounds.items()}


def filled(docstring: str | None, vocabulary: Iterable[Entry]) -> str:
    """A docstring with the vocabulary's fields in place of ``{fields}``."""
    texts = (
        f"{name}: {setting.does}; {row.bounds[name].words}"
        + (", without effect unless tokens are drawn." if row.step.is_drawn else ".")
        for row in vocabulary
        for name, setting in row.settings.items()
    )
    lines = (
        textwrap.fill(text, 100, initial_indent=" " * 8, subsequent_indent=" " * 12)
        for text in texts
    )
    return (docstring or "").replace("{fields}", "\n".join(lines).lstrip())
