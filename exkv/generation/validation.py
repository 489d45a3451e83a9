"""What a GenerationConfig checks as it is made: numbers, ids, and fields that don't go together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from exkv.cache import cache_kind
from exkv.checkpoint.checks import is_int, is_number

if TYPE_CHECKING:
    from .config import GenerationConfig

#: The largest number below 1.
_BELOW_1 = math.nextafter(1.0, 0.0)
# field: (lowest, lowest is allowed, highest, what the range is in words)
_RANGES = {
    "temperature": (0.0, False, math.inf, "a finite number > 0; do_sample=False is greedy"),
    "top_p": (0.0, False, 1.0, "in (0, 1]; 1 switches it off"),
    "min_p": (0.0, True, 1.0, "in [0, 1], or None to switch it off"),
    "typical_p": (0.0, False, 1.0, "in (0, 1]; 1 switches it off"),
    "epsilon_cutoff": (0.0, True, _BELOW_1, "in [0, 1); 0 switches it off"),
    "eta_cutoff": (0.0, True, _BELOW_1, "in [0, 1); 0 switches it off"),
    "repetition_penalty": (0.0, False, math.inf, "finite and > 0; 1 switches it off"),
    "diversity_penalty": (0.0, True, math.inf, "finite and >= 0"),
    "length_penalty": (-math.inf, False, math.inf, "finite; above 0 favours long sequences"),
}
_COUNTS = {
    "min_length": (0, "an int >= 0; 0 switches it off"),
    "top_k": (0, "an int >= 0; 0 switches it off"),
    "no_repeat_ngram_size": (0, "an int >= 0; 0 switches it off"),
    "num_beams": (1, "an int >= 1; 1 is no beam search"),
    "num_beam_groups": (1, "an int >= 1; 1 is one group"),
    "num_return_sequences": (1, "an int >= 1"),
}
_COUNTS_OR_NONE = {
    "max_new_tokens": (1, "an int >= 1, or None for max_length"),
    "max_length": (1, "an int >= 1, or None for 20 new tokens"),
    "min_new_tokens": (0, "an int >= 0, or None for min_length"),
    "pad_token_id": (0, "an int >= 0, or None"),
    "forced_bos_token_id": (0, "a token id, or None"),
    "seed": (0, "an int >= 0, or None"),
}
_SWITCHES = (
    "do_sample",
    "renormalize_logits",
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
)
_SOME_IDS = "a token id, or several, or None"


def check_numbers(config: GenerationConfig) -> None:
    """Each number, switch and word by itself."""
    for name, (low, low_allowed, high, words) in _RANGES.items():
        _check_range(name, getattr(config, name), low, low_allowed, high, words)
    for name, (low, words) in {**_COUNTS, **_COUNTS_OR_NONE}.items():
        value = getattr(config, name)
        if value is not None or name in _COUNTS:
            _check_count(name, value, low, words)
    for name in _SWITCHES:
        if not isinstance(getattr(config, name), bool):
            raise TypeError(f"{name} is {getattr(config, name)!r}; it must be True or False")
    if not isinstance(config.early_stopping, bool) and config.early_stopping != "never":
        raise ValueError(
            f'early_stopping is {config.early_stopping!r}; it must be True, False or "never"'
        )


def checked_ids(config: GenerationConfig) -> dict[str, Any]:
    """The fields that hold several ids, as tuples."""
    ends = _ids_of("eos_token_id", config.eos_token_id, f"{_SOME_IDS} for the model's")
    return {
        "bad_words_ids": _words_of("bad_words_ids", config.bad_words_ids),
        "eos_token_id": ends if ends is None else tuple(dict.fromkeys(ends)),
        "forced_eos_token_id": _ids_of("forced_eos_token_id", config.forced_eos_token_id),
        "suppress_tokens": _ids_of("suppress_tokens", config.suppress_tokens),
        "begin_suppress_tokens": _ids_of("begin_suppress_tokens", config.begin_suppress_tokens),
    }


def check_together(config: GenerationConfig) -> None:
    """What each field allows the others."""
    _check_beams(config)
    _check_outputs(config)
    _check_forced(config)
    _check_cache(config)


def check_vocabulary(config: GenerationConfig, vocab_size: int) -> None:
    """ValueError where an id that is forced or forbidden isn't in the vocabulary."""
    first = () if config.forced_bos_token_id is None else (config.forced_bos_token_id,)
    named = {
        "forced_bos_token_id": first,
        "forced_eos_token_id": config.forced_eos_token_id or (),
        "bad_words_ids": [token for word in config.bad_words_ids or () for token in word],
    }
    for name, ids in named.items():
        wrong = [token for token in ids if token >= vocab_size]
        if wrong:
            raise ValueError(
                f"{name} has the token id {wrong[0]}, outside the vocabulary of {vocab_size}"
            )


def _check_range(
    name: str, value: Any, low: float, low_allowed: bool, high: float, words: str
) -> None:
    if value is None and name == "min_p":
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; it must be {words}")
    inside = low <= value if low_allowed else low < value
    if not (is_number(value) and inside and value <= high):
        raise ValueError(f"{name} is {value!r}; it must be {words}")


def _check_count(name: str, value: Any, low: int, words: str) -> None:
    if not is_int(value):
        raise TypeError(f"{name} is {value!r}; it must be {words}")
    if value < low:
        raise ValueError(f"{name} is {value}; it must be {words}")


def _check_beams(config: GenerationConfig) -> None:
    beams, groups = config.num_beams, config.num_beam_groups
    wanted = config.num_return_sequences
    if beams > 1 and wanted > beams:
        raise ValueError(f"num_return_sequences is {wanted}, more than the {beams} of num_beams")
    if beams == 1 and wanted > 1 and not config.do_sample:
        raise ValueError(
            f"num_return_sequences is {wanted}, but greedy decoding has one sequence only: set "
            "do_sample=True or num_beams"
        )
    if beams % groups:
        raise ValueError(f"num_beams is {beams}, not a multiple of num_beam_groups = {groups}")
    if groups == 1 and config.diversity_penalty:
        raise ValueError(
            f"diversity_penalty is {config.diversity_penalty}, but there is one group of beams "
            "only: set num_beam_groups"
        )
    if groups > 1 and not config.diversity_penalty:
        raise ValueError(
            f"num_beam_groups is {groups} with a diversity_penalty of 0: all groups would be alike"
        )
    if groups > 1 and config.do_sample:
        raise ValueError(f"num_beam_groups is {groups} with do_sample=True: groups don't sample")


def _check_outputs(config: GenerationConfig) -> None:
    for name in ("output_scores", "output_logits"):
        if getattr(config, name) and not config.return_dict_in_generate:
            raise ValueError(f"{name} is True: set return_dict_in_generate=True, to get them")
        if getattr(config, name) and config.num_beam_groups > 1:
            raise ValueError(
                f"{name} is True with num_beam_groups = {config.num_beam_groups}: groups of beams "
                "keep none; set num_beam_groups=1"
            )


def _check_cache(config: GenerationConfig) -> None:
    name, options = config.cache_implementation, config.cache_config
    if name is not None:
        cache_kind(name)
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise TypeError(f"cache_config is {options!r}; it must be a dict, e.g. {{'nbits': 4}}")
    if name is None:
        raise ValueError(f"cache_config is {options!r}: set cache_implementation, whose it is")
    sizes = [size for size in ("max_seq_len", "batch_size") if size in options]
    if sizes:
        raise ValueError(
            f"cache_config has {sizes[0]} = {options[sizes[0]]!r}, but the cache is sized for the "
            "call: leave it out, or pass a cache of your own"
        )


def _check_forced(config: GenerationConfig) -> None:
    first = None if config.forced_bos_token_id is None else (config.forced_bos_token_id,)
    suppressed = set(config.suppress_tokens or ())
    for name, forced in (
        ("forced_bos_token_id", first),
        ("forced_eos_token_id", config.forced_eos_token_id),
    ):
        if forced is not None and suppressed.issuperset(forced):
            raise ValueError(
                f"{name} is {getattr(config, name)}, and suppress_tokens leaves none of it: no "
                "token could be chosen; take it out of one of them"
            )


def _ids_of(name: str, ids: Any, words: str = _SOME_IDS) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if not is_int(ids) and (isinstance(ids, str | bytes) or not isinstance(ids, Iterable)):
        raise TypeError(f"{name} is {ids!r}; it must be {words}")
    ids = (ids,) if is_int(ids) else tuple(ids)
    for token in ids:
        _check_count(name, token, 0, words)
    return tuple(ids)


def _words_of(name: str, words: Any) -> tuple[tuple[int, ...], ...] | None:
    if words is None:
        return None
    if not isinstance(words, list | tuple) or not all(isinstance(w, list | tuple) for w in words):
        raise TypeError(f"{name} is {words!r}; it must be a list of lists of token ids")
    if not all(words):
        raise ValueError(f"{name} is {words!r}, with an empty word: leave it out")
    return tuple(_ids_of(name, word, "a list of lists of token ids") for word in words)
