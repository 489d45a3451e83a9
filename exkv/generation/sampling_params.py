"""How the next token is chosen, in ExLlamaV2's words: :class:`SamplingParams`.

``sampler.py``, where the reader goes next, has the steps that the fields switch on.
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

from .validation import SMALLEST, check_count, check_range, plain_number

_MOST = 1 / SMALLEST
_SIZE = 2**31 - 1
# field: (lowest, lowest is allowed, highest, what the range is in words)
_RANGES = {
    "temperature": (0.0, True, _MOST, "0, which is greedy, or from 1e-30 to 1e30"),
    "min_temp": (0.0, True, _MOST, "from 0 to 1e30"),
    "max_temp": (0.0, True, _MOST, "from 0 to 1e30; 0 switches the dynamic temperature off"),
    "temp_exponent": (0.0, False, _MOST, "above 0, to 1e30"),
    "smoothing_factor": (0.0, True, _MOST, "from 0 to 1e30; 0 switches it off"),
    "top_p": (0.0, False, 1.0, "in (0, 1]; 1 switches it off"),
    "top_a": (0.0, True, 1.0, "in [0, 1]; 0 switches it off"),
    "min_p": (0.0, True, 1.0, "in [0, 1]; 0 switches it off"),
    "tfs": (0.0, True, 1.0, "in [0, 1]; 0 or 1 switches it off"),
    "typical": (0.0, True, 1.0, "in [0, 1]; 0 or 1 switches it off"),
    "skew": (-50.0, True, 50.0, "from -50 to 50; 0 switches it off"),
    "xtc_probability": (0.0, True, 1.0, "in [0, 1]; 0 switches it off"),
    "xtc_threshold": (0.0, True, 1.0, "in [0, 1]; above 0.5 it does nothing"),
    "token_repetition_penalty": (SMALLEST, True, _MOST, "from 1e-30 to 1e30; 1 switches it off"),
    "token_frequency_penalty": (-_MOST, True, _MOST, "from -1e30 to 1e30; 0 switches it off"),
    "token_presence_penalty": (-_MOST, True, _MOST, "from -1e30 to 1e30; 0 switches it off"),
    "dry_multiplier": (0.0, True, _MOST, "from 0 to 1e30; 0 switches it off"),
    "dry_base": (1.0, True, 100.0, "from 1 to 100"),
}
# field: (lowest, highest, what the range is in words)
_COUNTS = {
    "top_k": (0, _SIZE, "an int from 0 to 2**31 - 1; 0 switches it off"),
    "token_repetition_range": (
        -1,
        _SIZE,
        "an int from 0 to 2**31 - 1, or -1 for the whole history",
    ),
    "token_repetition_decay": (
        0,
        _SIZE,
        "an int from 0 to 2**31 - 1; 0 ends the penalty at the range",
    ),
    "dry_allowed_length": (1, _SIZE, "an int from 1 to 2**31 - 1"),
    "dry_range": (0, _SIZE, "an int from 0 to 2**31 - 1; 0 looks at the whole history"),
    "dry_max_ngram": (1, 1000, "an int from 1 to 1000"),
}
#: Keys of generation_config.json -> fields.
_RECOMMENDED = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical",
    "repetition_penalty": "token_repetition_penalty",
}
_BREAKERS = '.,!?<>[](){}\n\t"'  # those of ExLlamaV2
_TOKENS = ("dry_sequence_breakers", "xtc_ignore_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. Names and defaults are those of ExLlamaV2's sampler settings.

    Attributes:
        temperature: divides the logits; 0 is greedy.
        min_temp, max_temp, temp_exponent: with ``max_temp`` above ``min_temp``, what is left after
            truncation is divided by a temperature between the two: its entropy, as a share of the
            largest that so many tokens can have, to the power of ``temp_exponent``, says where.
        smoothing_factor: a logit's distance from the largest, d, becomes ``smoothing_factor * d²``:
            near ones come nearer, far ones go.
        top_k: keep the k likeliest tokens; 0 keeps all, 1 is greedy.
        top_p: keep the smallest set of tokens with at least this mass (Holtzman et al. 2020).
        top_a: drop what is less likely than top_a times the square of the likeliest.
        min_p: drop what is less than min_p times as likely as the likeliest (Nguyen et al. 2024).
        tfs: drop the tail of the sorted probabilities, from where their curvature has used up this
            share of its sum.
        typical: mass of the locally typical set (Meister et al. 2022).
        skew: above 0 shifts choices to the less likely tokens, below 0 to the likelier ones.
        xtc_probability: how often the top choices are excluded: all tokens of at least
            ``xtc_threshold`` but the least likely of them.
        xtc_ignore_tokens: ids that are never excluded; None for those of a line break and control
            tokens in a :class:`Generator`, and for none elsewhere.
        token_repetition_penalty: positive logits of tokens in the history are divided by it,
            negative ones multiplied (Keskar et al. 2019, CTRL).
        token_repetition_range: how many of the last tokens are penalized in full; -1 is all.
        token_repetition_decay: over how many tokens before those the penalties fade to nothing.
        token_frequency_penalty: subtracted from a logit once for each time its token occurs.
        token_presence_penalty: subtracted once if its token occurs (both as in OpenAI's API).
        dry_multiplier, dry_base, dry_allowed_length: a token that would go on repeating n tokens of
            the history loses ``dry_multiplier * dry_base ** (n - dry_allowed_length)``, from
            n = dry_allowed_length on ("don't repeat yourself").
        dry_range: how many of the last tokens are looked at; 0 is all.
        dry_max_ngram: the largest n.
        dry_sequence_breakers: ids that no repetition goes across; None for those of punctuation,
            brackets, line breaks and control tokens in a :class:`Generator`, none elsewhere.
        token_bias: {token id: number added to its logit}; -inf forbids the token.
        temperature_last: apply the temperature after the truncating steps, not before.

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
        for name in (*_RANGES, *_COUNTS):
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        for name, limits in _RANGES.items():
            check_range(f"SamplingParams.{name}", getattr(self, name), *limits)
        for name, bounds in _COUNTS.items():
            check_count(f"SamplingParams.{name}", getattr(self, name), *bounds)
        if 0 < self.temperature < SMALLEST:
            words = _RANGES["temperature"][3]
            raise ValueError(
                f"SamplingParams.temperature is {self.temperature!r}; it must be {words}"
            )
        if not isinstance(self.temperature_last, bool):
            raise TypeError(
                f"SamplingParams.temperature_last is {self.temperature_last!r}; it must be a bool"
            )
        # Copies, so that a later change of the caller's does not reach a frozen value.
        object.__setattr__(self, "token_bias", _checked_bias(self.token_bias))
        for name in _TOKENS:
            object.__setattr__(self, name, _checked_tokens(name, getattr(self, name)))

    @classmethod
    def greedy(cls) -> SamplingParams:
        """The plain argmax of the model's own logits: no penalty, no truncation, no randomness."""
        return cls(temperature=0.0, top_k=1, top_p=1.0, token_repetition_penalty=1.0)

    @classmethod
    def recommended(cls, folder: str | os.PathLike[str]) -> SamplingParams:
        """What a checkpoint's generation_config.json recommends: greedy if it says
        ``"do_sample": false``.

        Where it recommends something, what it leaves out is as in transformers; where it recommends
        nothing, or there is no such file, it is ``SamplingParams()``.

        Raises:
            ValueError: the file is broken, or recommends what makes no sense.
        """
        file = Path(folder) / "generation_config.json"
        if not file.is_file():
            return cls()
        config = read_json_object(file)
        if config.get("do_sample") is False:
            return cls.greedy()
        stated = {_RECOMMENDED[key]: config[key] for key in _RECOMMENDED.keys() & config.keys()}
        stated = {name: value for name, value in stated.items() if value is not None}
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
        """Whether the tokens so far change the outcome (a caller may leave them out if not)."""
        return self.penalizes_repetition or self.penalizes_counts or self.dry_multiplier > 0

    @property
    def penalizes_repetition(self) -> bool:
        """Whether ``token_repetition_penalty`` does anything."""
        return self.token_repetition_penalty != 1

    @property
    def penalizes_counts(self) -> bool:
        """Whether the frequency or the presence penalty does anything."""
        return self.token_frequency_penalty != 0 or self.token_presence_penalty != 0

    @property
    def has_dynamic_temperature(self) -> bool:
        return self.max_temp > self.min_temp

    @property
    def is_shaped(self) -> bool:
        """Whether a step between the temperature and the draw is switched on that the op ``sample``
        doesn't have."""
        shaping = (self.top_a, self.skew, self.xtc_probability, self.has_dynamic_temperature)
        return any(shaping) or 0 < self.tfs < 1

    def with_bias(self, bias: Mapping[int, float]) -> SamplingParams:
        """A copy whose `token_bias` has these entries added, replacing those of the same ids."""
        return replace(self, token_bias={**(self.token_bias or {}), **bias})

    def disallow_tokens(self, ids: Iterable[int]) -> SamplingParams:
        """A copy that never chooses one of these token ids."""
        return self.with_bias(dict.fromkeys(ids, -math.inf))

    disallowing = disallow_tokens

    def for_tokenizer(self, tokenizer: Tokenizer) -> SamplingParams:
        """A copy that has the sets of tokens that it needs and that were not given."""
        breakers, ignored = self.dry_sequence_breakers, self.xtc_ignore_tokens
        if self.dry_multiplier and breakers is None:
            breakers = tokenizer.ids_with(_BREAKERS)
        if self.xtc_probability and ignored is None:
            ignored = tokenizer.ids_with("\n")
        return replace(self, dry_sequence_breakers=breakers, xtc_ignore_tokens=ignored)


def _checked_bias(bias: Mapping[int, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise TypeError(f"SamplingParams.token_bias is {bias!r}; it must be a dict: {{id: number}}")
    for token, value in bias.items():
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ValueError(f"SamplingParams.token_bias has the key {token!r}; keys are token ids")
        if value != -math.inf:
            name = f"SamplingParams.token_bias[{token}]"
            check_range(name, value, -_MOST, True, _MOST, "from -1e30 to 1e30, or -inf")
    return dict(bias)


def _checked_tokens(name: str, tokens: Any) -> frozenset[int] | None:
    if tokens is None:
        return None
    if isinstance(tokens, str | Mapping) or not isinstance(tokens, Iterable):
        raise TypeError(f"SamplingParams.{name} is {tokens!r:.60}; it must be a set of token ids")
    found = frozenset(tokens)
    for token in found:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ValueError(f"SamplingParams.{name} holds {token!r:.60}; it must hold token ids")
    return found
