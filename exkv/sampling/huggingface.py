"""Hugging Face's vocabulary: the fields of ``GenerationConfig`` that change scores, in the order in
which transformers runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from . import steps
from .bounds import number
from .step import Entry, bounds_of, entry

#: Scores (N, V) and the tokens so far -> scores (N, V).
Processor: TypeAlias = Callable[..., Tensor]

#: Bounds of ``guidance_scale``, whose processor the caller passes.
GUIDANCE = number(-1000.0, 1000.0, off=(1.0,))

#: Steps, and names of processors that the caller may pass.
ORDER: tuple[Entry | str, ...] = (
    "guidance",
    entry(steps.SEQUENCE_BIAS, "sequence_bias"),
    entry(steps.ENCODER_REPETITION, "encoder_repetition_penalty"),
    entry(steps.PENALTIES, "repetition_penalty"),
    entry(steps.NGRAMS, "no_repeat_ngram_size"),
    entry(steps.ENCODER_NGRAMS, "encoder_no_repeat_ngram_size"),
    entry(steps.BAD_WORDS, "bad_words_ids", ("ends",)),
    entry(steps.MIN_LENGTH, "min_new_tokens", ("ends",)),
    "prefix_allowed_tokens_fn",
    entry(steps.FORCED_FIRST, "forced_bos_token_id"),
    entry(steps.FORCED_LAST, "forced_eos_token_id", ("max_new_tokens",)),
    entry(steps.INVALID, "remove_invalid_values"),
    entry(steps.LENGTH_DECAY, "exponential_decay_length_penalty", ("ends",)),
    entry(steps.SUPPRESSED, "suppress_tokens"),
    entry(steps.SUPPRESSED_FIRST, "begin_suppress_tokens", ("forced_bos_token_id",)),
    "logits_processor",
    entry(steps.TEMPERATURE, "temperature"),
    entry(steps.TOP_K, "top_k", ("least",)),
    entry(steps.TOP_P, "top_p", ("least",)),
    entry(steps.MIN_P, "min_p", ("least",)),
    entry(steps.TYPICAL, "typical_p", ("least",)),
    entry(steps.EPSILON, "epsilon_cutoff", ("least",)),
    entry(steps.ETA, "eta_cutoff", ("least",)),
    entry(steps.LOG_PROBABILITIES, "renormalize_logits"),
)
HUGGING_FACE = tuple(row for row in ORDER if isinstance(row, Entry))
BOUNDS = bounds_of(HUGGING_FACE)
#: Fields without effect on greedy decoding.
DRAWN = tuple(name for row in HUGGING_FACE if row.step.is_drawn for name in row.bounds)


def processors(config: Any, given: Mapping[str, Processor]) -> Iterator[Processor]:
    """Yield the processors that a ``GenerationConfig`` asks for, in order; ``given`` has those that
    :data:`ORDER` only names."""
    for row in ORDER:
        if isinstance(row, str):
            if row in given:
                yield given[row]
        elif row.switched_on(config) and (config.do_sample or not row.step.is_drawn):
            assert row.step.columns is not None, "transformers' steps leave scores in columns"
            yield partial(_run, row.step.columns, row.values(config))


def _run(
    columns: Callable[..., Tensor], values: tuple[Any, ...], scores: Tensor, at: Any
) -> Tensor:
    return columns(scores, at, *values)
