"""Hugging Face's vocabulary: the fields of ``GenerationConfig`` that change scores, in the order in
which transformers runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from .bans import (
    BAD_WORDS,
    ENCODER_NGRAMS,
    FORCED_FIRST,
    FORCED_LAST,
    INVALID,
    LOG_PROBABILITIES,
    MIN_LENGTH,
    NGRAMS,
    SUPPRESSED,
    SUPPRESSED_FIRST,
)
from .bounds import number
from .penalties import ENCODER_REPETITION, LENGTH_DECAY, PENALTIES, SEQUENCE_BIAS
from .step import Entry, bounds_of, entry
from .temperature import TEMPERATURE
from .truncation import EPSILON, ETA, MIN_P, TOP_K, TOP_P, TYPICAL

#: Scores (N, V) of what follows and the tokens so far -> scores (N, V).
Processor: TypeAlias = Callable[..., Tensor]

#: Of ``guidance_scale``, whose processor is the caller's.
GUIDANCE = number(-1000.0, 1000.0, off=(1.0,))

#: Steps, and between them names of processors that a call may bring.
ORDER: tuple[Entry | str, ...] = (
    "guidance",
    entry(SEQUENCE_BIAS, "sequence_bias"),
    entry(ENCODER_REPETITION, "encoder_repetition_penalty"),
    entry(PENALTIES, "repetition_penalty"),
    entry(NGRAMS, "no_repeat_ngram_size"),
    entry(ENCODER_NGRAMS, "encoder_no_repeat_ngram_size"),
    entry(BAD_WORDS, "bad_words_ids", reads=("ends",)),
    entry(MIN_LENGTH, "min_new_tokens", reads=("ends",)),
    "prefix_allowed_tokens_fn",
    entry(FORCED_FIRST, "forced_bos_token_id"),
    entry(FORCED_LAST, "forced_eos_token_id", reads=("max_new_tokens",)),
    entry(INVALID, "remove_invalid_values"),
    entry(LENGTH_DECAY, "exponential_decay_length_penalty", reads=("ends",)),
    entry(SUPPRESSED, "suppress_tokens"),
    entry(SUPPRESSED_FIRST, "begin_suppress_tokens", reads=("forced_bos_token_id",)),
    "logits_processor",
    entry(TEMPERATURE, "temperature"),
    entry(TOP_K, "top_k", reads=("least",)),
    entry(TOP_P, "top_p", reads=("least",)),
    entry(MIN_P, "min_p", reads=("least",)),
    entry(TYPICAL, "typical_p", reads=("least",)),
    entry(EPSILON, "epsilon_cutoff", reads=("least",)),
    entry(ETA, "eta_cutoff", reads=("least",)),
    entry(LOG_PROBABILITIES, "renormalize_logits"),
)
HUGGING_FACE = tuple(row for row in ORDER if isinstance(row, Entry))
BOUNDS = bounds_of(HUGGING_FACE)
#: The fields that have no effect where the likeliest token is taken.
DRAWN = tuple(name for row in HUGGING_FACE if row.step.is_drawn for name in row.bounds)


def processors(config: Any, given: Mapping[str, Processor]) -> Iterator[Processor]:
    """Those that a ``GenerationConfig`` asks for, in order.

    Args:
        given: by the names in :data:`ORDER`.
    """
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
