"""ExLlamaV2's vocabulary: the names and the order of its sampler's steps, and
:class:`SamplingParams` with the names and defaults of its settings.

``chain`` runs the steps; those from top-k on work on sorted candidates. ExLlamaV2's mirostat is not
here: it changes its own settings with each token.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from exkv.checkpoint.files import read_json_object
from exkv.text import Tokenizer

from . import steps
from .bounds import LARGEST, SMALLEST, check_fields, number
from .huggingface import HUGGING_FACE
from .step import Entry, bounds_of, entry, filled

EXLLAMAV2 = (
    entry(steps.TOKEN_BIAS, "token_bias"),
    entry(
        steps.PENALTIES,
        "token_repetition_penalty token_frequency_penalty token_presence_penalty "
        "token_repetition_range token_repetition_decay",
    ),
    entry(
        steps.DRY,
        "dry_multiplier dry_base dry_allowed_length dry_max_ngram dry_range dry_sequence_breakers",
    ),
    entry(steps.SMOOTHING, "smoothing_factor"),
    entry(steps.TOP_N_SIGMA, "top_n_sigma"),
    TEMPERATURE := entry(
        steps.TEMPERATURE,
        "temperature temperature_last",
        temperature=number(SMALLEST, LARGEST, zero="is greedy"),
    ),
    TOP_K := entry(steps.TOP_K, "top_k"),
    entry(steps.TOP_P, "top_p"),
    entry(steps.TOP_A, "top_a"),
    entry(steps.MIN_P, "min_p"),
    entry(steps.TAIL_FREE, "tfs"),
    entry(steps.TYPICAL, "typical", typical=number(0.0, 1.0, off=(0.0, 1.0))),
    entry(steps.XTC, "xtc_probability xtc_threshold xtc_ignore_tokens"),
    DYNAMIC := entry(steps.DYNAMIC_TEMPERATURE, "min_temp max_temp temp_exponent"),
    SKEW := entry(steps.SKEW, "skew"),
)
BOUNDS = bounds_of(EXLLAMAV2)
_BY_STEP = {row.step: row for row in EXLLAMAV2}
#: Fields of GenerationConfig, and keys of generation_config.json, for the same setting.
FROM_HUGGING_FACE = {
    theirs: ours
    for row in HUGGING_FACE
    if row.step in _BY_STEP
    for theirs, ours in zip(row.bounds, _BY_STEP[row.step].bounds, strict=False)
}
#: The fields that are a number or a switch.
PLAIN = {
    name: setting
    for row in EXLLAMAV2
    for name, setting in row.settings.items()
    if row.bounds[name].kind is not None
}
_TRANSFORMERS = {ours: theirs for theirs, ours in FROM_HUGGING_FACE.items()}
#: Fields of a request to the server -> those of SamplingParams.
SERVED = {
    setting.served or _TRANSFORMERS.get(name) or name.removeprefix("token_"): name
    for name, setting in PLAIN.items()
    if setting.served is not None
}
#: Parameters of ``torch.ops.exkv.sample``, in order.
_FUSED = ("temperature", "top_k", "top_p", "min_p", "typical", "temperature_last")
_BREAKERS = '.,!?<>[](){}\n\t"'  # those of ExLlamaV2


@dataclass(frozen=True, slots=True)
class Chain:
    """The steps that some parameters ask for, in order.

    Attributes:
        columns: steps on all scores.
        candidates: steps on sorted candidates.
        fused: arguments of the op that does all of ``candidates``; None if it can't.
        needs_history: whether a step reads the tokens so far.
    """

    columns: tuple[Entry, ...]
    candidates: tuple[Entry, ...]
    fused: tuple[Any, ...] | None
    needs_history: bool


class _Memo:
    """Memo for the chain, which is needed for every token."""

    __slots__ = ("_chain",)
    _chain: Chain


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(_Memo):
    """How the next token is chosen. Names and defaults are those of ExLlamaV2's sampler settings.

    Attributes:
        {fields}

    Raises:
        ValueError, TypeError: naming the field, its value and what is allowed.
    """

    temperature: float = 0.8
    min_temp: float = 0.0
    max_temp: float = 0.0
    temp_exponent: float = 1.0
    smoothing_factor: float = 0.0
    top_k: int = 50
    top_p: float = 0.8
    top_a: float = 0.0
    top_n_sigma: float = 0.0
    min_p: float = 0.0
    tfs: float = 0.0
    typical: float = 0.0
    skew: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_ignore_tokens: Set[int] | None = None
    token_repetition_penalty: float = 1.025
    token_repetition_range: int = -1
    token_repetition_decay: int = 0
    token_frequency_penalty: float = 0.0
    token_presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = 0
    dry_max_ngram: int = 20
    dry_sequence_breakers: Set[int] | None = None
    token_bias: Mapping[int, float] | None = field(default=None, hash=False)
    temperature_last: bool = False

    def __post_init__(self) -> None:
        check_fields(self, BOUNDS, "SamplingParams.")

    @classmethod
    def greedy(cls) -> SamplingParams:
        """The plain argmax of the model's own logits: no penalty, no truncation, no randomness."""
        return cls(temperature=0.0, top_k=1, top_p=1.0, token_repetition_penalty=1.0)

    @classmethod
    def recommended(cls, folder: str | os.PathLike[str]) -> SamplingParams:
        """The settings of a checkpoint's generation_config.json: greedy for ``"do_sample": false``.
        Settings that it leaves out have transformers' defaults; without a file, or without any
        setting, the result is ``SamplingParams()``.

        Raises:
            ValueError: the file is broken, or has a value out of range.
        """
        file = Path(folder) / "generation_config.json"
        if not file.is_file():
            return cls()
        config = read_json_object(file)
        if config.get("do_sample") is False:
            return cls.greedy()
        pairs = {ours: config.get(theirs) for theirs, ours in FROM_HUGGING_FACE.items()}
        stated: dict[str, Any] = {key: value for key, value in pairs.items() if value is not None}
        usual = cls(temperature=1.0, top_p=1.0, token_repetition_penalty=1.0)
        try:
            return replace(usual, **stated) if stated else cls()
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}: {error}") from None

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken without drawing."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def needs_history(self) -> bool:
        """Whether the tokens so far matter; otherwise a caller may leave them out."""
        return self.chain.needs_history

    @property
    def chain(self) -> Chain:
        """The steps to run."""
        try:
            return self._chain
        except AttributeError:
            steps = self._steps()
        drawn = tuple(row for row in steps if row.step.candidates)
        fused = all(name in _FUSED for row in drawn for name in row.bounds)
        chain = Chain(
            columns=tuple(row for row in steps if not row.step.candidates),
            candidates=drawn,
            fused=tuple(getattr(self, name) for name in _FUSED) if fused else None,
            needs_history=any(row.step.needs_history for row in steps),
        )
        object.__setattr__(self, "_chain", chain)
        return chain

    def _steps(self) -> list[Entry]:
        """The steps in order. ``temperature_last`` moves the temperature to the place of the
        dynamic temperature, and drops it if that is on. Temperature, which makes the largest score
        0, and top-k, which sorts, always run: the draw relies on both."""
        on = [row for row in EXLLAMAV2 if row in (TEMPERATURE, TOP_K) or row.switched_on(self)]
        if self.is_greedy:
            return [row for row in on if not row.step.is_drawn]
        if self.temperature_last:
            on.remove(TEMPERATURE)
            if DYNAMIC not in on:
                on.insert(len(on) - (SKEW in on), TEMPERATURE)
        return on

    def with_bias(self, bias: Mapping[int, float]) -> SamplingParams:
        """A copy with these entries of `token_bias` added or replaced."""
        return replace(self, token_bias={**(self.token_bias or {}), **bias})

    def disallow_tokens(self, ids: Iterable[int]) -> SamplingParams:
        """A copy that never chooses these token ids."""
        return self.with_bias(dict.fromkeys(ids, -math.inf))

    disallowing = disallow_tokens

    def for_tokenizer(self, tokenizer: Tokenizer) -> SamplingParams:
        """A copy with the sets of tokens that these parameters need and that were not given."""
        sets: dict[str, Any] = {}
        if self.dry_multiplier and self.dry_sequence_breakers is None:
            sets["dry_sequence_breakers"] = tokenizer.ids_with(_BREAKERS)
        if self.xtc_probability and self.xtc_ignore_tokens is None:
            sets["xtc_ignore_tokens"] = tokenizer.ids_with("\n")
        return replace(self, **sets) if sets else self


SamplingParams.__doc__ = filled(SamplingParams.__doc__, EXLLAMAV2)
