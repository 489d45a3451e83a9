"""The caller's functions that run in each step of ``generate``, under transformers' names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from exkv.models import Transformer

from .prompts import PromptIds
from .speculation import Draft

#: (ids (N, tokens), the step's scores (N, V)) -> scores (N, V).
LogitsProcessor: TypeAlias = Callable[[Tensor, Tensor], Tensor]
#: (index of a prompt, ids (tokens,) of one of its sequences) -> the tokens that may follow.
AllowedTokens: TypeAlias = Callable[[int, Tensor], Sequence[int]]
#: (ids (N, tokens), the step's scores (N, V) or None) -> whether to stop: one bool, or one a row.
StoppingCriterion: TypeAlias = Callable[[Tensor, Tensor | None], bool | Tensor]


class Streamer(Protocol):
    """A streamer of transformers, such as ``TextIteratorStreamer``."""

    def put(self, value: Tensor) -> None:
        """Receive the prompts' ids (B, T), then each step's tokens (B,)."""

    def end(self) -> None:
        """End the stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """The callables of a call; ids are prompts and new tokens, padded on the left.

    Attributes:
        logits_processor: ids so far (N, T + new) and the step's scores (N, V) -> scores (N, V);
            they run in order, after the config's own processors and before the sampler
            (temperature and the rest).
        prefix_allowed_tokens_fn: the index of a prompt and the ids of one of its sequences
            (T + new,) -> the ids that may follow.
        stopping_criteria: ids so far and the step's scores, None with beams -> whether a sequence
            ends.
        streamer: gets the prompts, then each step's tokens; not with beams.
        assistant_model: a smaller loaded model of the same vocabulary, which drafts tokens; it gets
            a cache for the call. A ``Draft`` has one already.
        negative_prompt_ids: with ``guidance_scale``: one prompt, or one for each, in any form that
            ``input_ids`` takes; None for each prompt's last token.
        negative_prompt_attention_mask: their ``attention_mask``.

    Raises:
        TypeError: one that can't be called, or is given in place of a list.
    """

    logits_processor: Sequence[LogitsProcessor] = ()
    prefix_allowed_tokens_fn: AllowedTokens | None = None
    stopping_criteria: Sequence[StoppingCriterion] = ()
    streamer: Streamer | None = None
    assistant_model: Transformer | Draft | None = None
    negative_prompt_ids: PromptIds | None = None
    negative_prompt_attention_mask: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("logits_processor", "stopping_criteria"):
            given = getattr(self, name)
            several = given is None or isinstance(given, list | tuple)
            if not several or not all(map(callable, given or ())):
                raise TypeError(f"{name} is {given!r}; it must be a list of callables")
            object.__setattr__(self, name, tuple(given or ()))
        allowed = self.prefix_allowed_tokens_fn
        if allowed is not None and not callable(allowed):
            raise TypeError(f"prefix_allowed_tokens_fn is {allowed!r}; it must be callable")
        streamer = self.streamer
        if streamer is not None and not all(
            callable(getattr(streamer, name, None)) for name in ("put", "end")
        ):
            raise TypeError(f"streamer is {streamer!r}; it must have the methods put and end")
        draft = self.assistant_model
        if not isinstance(draft, Transformer | Draft | None):
            raise TypeError(
                f"assistant_model is a {type(draft).__name__}; it must be a model of exkv's, or a "
                "Draft"
            )

    @classmethod
    def taken_from(cls, arguments: dict[str, Any]) -> Hooks:
        """Pop the hooks from a call's keyword arguments.

        Raises:
            TypeError: an argument that looks like a misspelling of one of them.
        """
        known = [field.name for field in fields(cls)]
        hooks = cls(**{name: arguments.pop(name) for name in known if name in arguments})
        for name in arguments:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            if near:
                raise TypeError(f"generate() has no argument {name!r}: did you mean {near[0]}?")
        return hooks

    @property
    def see_scores(self) -> bool:
        """Whether a function of the caller sees scores in each step."""
        functions = self.logits_processor or self.stopping_criteria
        return bool(functions or self.prefix_allowed_tokens_fn)

    def keep_allowed(self, scores: Tensor, ids: Tensor, rows: int) -> Tensor:
        """Mask scores (N, V) by ``prefix_allowed_tokens_fn`` for ids (N, tokens), ``rows`` of them
        for each prompt. If every row of a prompt is fully masked, force the allowed set.

        Raises:
            ValueError: it allows no token, or one outside the vocabulary.
        """
        allow = self.prefix_allowed_tokens_fn
        assert allow is not None, "only called if there is one"
        mask = torch.full_like(scores, -torch.inf)
        for row, sequence in enumerate(ids):
            allowed = [int(token) for token in allow(row // rows, sequence)]
            wrong = [token for token in allowed if not 0 <= token < scores.shape[1]]
            if wrong or not allowed:
                raise ValueError(
                    f"prefix_allowed_tokens_fn gave {wrong or 'no token'} for row {row}: it must "
                    f"return one or more ids from 0 to {scores.shape[1] - 1}"
                )
            mask[row, allowed] = 0.0
        kept = scores + mask
        stuck = (kept == -torch.inf).all(-1).view(-1, rows).all(-1)
        return torch.where(stuck.repeat_interleave(rows)[:, None], mask, kept)

    def process(self, scores: Tensor, ids: Tensor) -> Tensor:
        """Run each ``logits_processor``: (N, V), (N, tokens) -> (N, V).

        Raises:
            TypeError, ValueError: one doesn't return scores (N, V).
        """
        for processor in self.logits_processor:
            changed = processor(ids, scores)
            if not isinstance(changed, Tensor):
                raise TypeError(
                    f"logits_processor {processor!r} returned {changed!r}: it must return the "
                    "scores, even if it changes them in place"
                )
            if changed.shape != scores.shape:
                raise ValueError(
                    f"logits_processor {processor!r} returned scores of {tuple(changed.shape)} for "
                    f"scores of {tuple(scores.shape)}: it must keep the shape"
                )
            scores = changed.to("cpu", torch.float32)
        return scores


def ended_by(criteria: Sequence[StoppingCriterion], ids: Tensor, scores: Tensor | None) -> Tensor:
    """Which sequences one of the criteria ends: ids (N, tokens) -> bool (N,).

    Raises:
        ValueError: one returned neither a bool nor one for each sequence.
    """
    stop = torch.zeros(len(ids), dtype=torch.bool)
    for criterion in criteria:
        said = torch.as_tensor(criterion(ids, scores), device="cpu").bool()
        if said.numel() not in (1, len(ids)):
            raise ValueError(
                f"stopping criterion {criterion!r} returned {tuple(said.shape)} for {len(ids)} "
                "sequences: it must return one bool, or one for each sequence"
            )
        stop = stop | said.flatten()
    return stop
