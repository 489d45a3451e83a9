"""What a GenerationConfig checks as it is made: numbers, ids, and fields that don't go together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from exkv.cache import cache_kind
from exkv.checkpoint.value_checks import is_int, is_number

if TYPE_CHECKING:
    from .config import GenerationConfig

#: The largest number below 1.
_BELOW_1 = math.nextafter(1.0, 0.0)
#: Float32 scores can be divided by it: the largest logits of a model are around 10**4.
SMALLEST = 1e-30
#: Beams, and sequences of a prompt; each is a row of the cache.
_MOST_ROWS = 4096
_MOST_TOKENS = 2**31 - 1
#: Tokens that are proposed at a time, or compared to find them.
_MOST_PROPOSED = 1024
# field: (lowest, lowest is allowed, highest, what the range is in words)
GUIDANCE = (-1000.0, True, 1000.0, "from -1000 to 1000; 1 switches it off")
_RANGES = {
    "temperature": (SMALLEST, True, 1 / SMALLEST, "from 1e-30 to 1e30; do_sample=False is greedy"),
    "top_p": (0.0, False, 1.0, "in (0, 1]; 1 switches it off"),
    "min_p": (0.0, True, 1.0, "in [0, 1], or None to switch it off"),
    "typical_p": (0.0, False, 1.0, "in (0, 1]; 1 switches it off"),
    "epsilon_cutoff": (0.0, True, _BELOW_1, "in [0, 1); 0 switches it off"),
    "eta_cutoff": (0.0, True, _BELOW_1, "in [0, 1); 0 switches it off"),
    "repetition_penalty": (SMALLEST, True, 1 / SMALLEST, "from 1e-30 to 1e30; 1 switches it off"),
    "encoder_repetition_penalty": (
        SMALLEST,
        True,
        1 / SMALLEST,
        "from 1e-30 to 1e30; 1 switches it off",
    ),
    "diversity_penalty": (0.0, True, 1 / SMALLEST, "from 0 to 1e30"),
    "guidance_scale": GUIDANCE,
    "length_penalty": (-30.0, True, 30.0, "from -30 to 30; above 0 favours long sequences"),
    "max_time": (0.0, True, math.inf, "seconds, finite and >= 0, or None"),
    "assistant_confidence_threshold": (0.0, True, 1.0, "from 0 to 1; 0 switches it off"),
}
# field: (lowest, highest, what the range is in words)
_COUNTS = {
    "min_length": (0, _MOST_TOKENS, "an int from 0 to 2**31 - 1; 0 switches it off"),
    "top_k": (0, _MOST_TOKENS, "an int from 0 to 2**31 - 1; 0 switches it off"),
    "no_repeat_ngram_size": (0, _MOST_TOKENS, "an int from 0 to 2**31 - 1; 0 switches it off"),
    "encoder_no_repeat_ngram_size": (
        0,
        _MOST_TOKENS,
        "an int from 0 to 2**31 - 1; 0 switches it off",
    ),
    "num_beams": (1, _MOST_ROWS, f"an int from 1 to {_MOST_ROWS}; 1 is no beam search"),
    "num_beam_groups": (1, _MOST_ROWS, f"an int from 1 to {_MOST_ROWS}; 1 is one group"),
    "num_return_sequences": (1, _MOST_ROWS, f"an int from 1 to {_MOST_ROWS}"),
    "num_assistant_tokens": (1, _MOST_PROPOSED, f"an int from 1 to {_MOST_PROPOSED}"),
}
_COUNTS_OR_NONE = {
    "max_new_tokens": (1, _MOST_TOKENS, "an int from 1 to 2**31 - 1, or None for max_length"),
    "max_length": (1, _MOST_TOKENS, "an int from 1 to 2**31 - 1, or None for 20 new tokens"),
    "min_new_tokens": (0, _MOST_TOKENS, "an int from 0 to 2**31 - 1, or None for min_length"),
    "pad_token_id": (0, 2**63 - 1, "an int from 0 to 2**63 - 1, or None"),
    "forced_bos_token_id": (0, 2**63 - 1, "a token id, or None"),
    "seed": (0, 2**63 - 1, "an int from 0 to 2**63 - 1, or None"),
    "prompt_lookup_num_tokens": (
        1,
        _MOST_PROPOSED,
        f"an int from 1 to {_MOST_PROPOSED}, or None for no lookup",
    ),
    "max_matching_ngram_size": (1, _MOST_PROPOSED, f"an int from 1 to {_MOST_PROPOSED}, or None"),
}
_SWITCHES = (
    "do_sample",
    "renormalize_logits",
    "remove_invalid_values",
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "use_cache",
)
_SOME_IDS = "a token id, or several, or None"
# field: the value that None stands for, where that isn't a value of its own
_OFF = {
    **dict.fromkeys(_SWITCHES, False),
    "min_length": 0,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "num_assistant_tokens": 20,
    "assistant_confidence_threshold": 0.4,
    "diversity_penalty": 0.0,
    "early_stopping": False,
    "length_penalty": 1.0,
    "use_cache": True,
}
_OF_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)


def plain_values(config: GenerationConfig) -> dict[str, Any]:
    """The fields whose value is written in another way here: None for off, and numbers that are
    tensors or numpy's."""
    found = {}
    for name in {**_OFF, **_RANGES, **_COUNTS, **_COUNTS_OR_NONE}:
        value = getattr(config, name)
        plain = _OFF.get(name) if value is None else plain_number(value)
        if plain is not value:
            found[name] = plain
    return found


def plain_number(value: Any) -> Any:
    """Python's number for a tensor's or numpy's single one; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value
    return value.item() if isinstance(value, np.generic) else value


def without_unused(stated: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's recommendations without those that transformers never looks at: what belongs
    to sampling where nothing is drawn and it makes no sense, to groups of beams where there is one
    group, and ids of -1, which stand for none."""
    left = {name: value for name, value in stated.items() if value is not None}
    for name in [name for name in left if name.endswith("token_id") and left[name] == -1]:
        del left[name]
    if isinstance(ends := left.get("eos_token_id"), list):
        left["eos_token_id"] = [end for end in ends if end != -1] or None
    if left.get("num_beams", 1) == 1 or left.get("num_beam_groups", 1) == 1:
        left.pop("num_beam_groups", None)
        left.pop("diversity_penalty", None)
    if not left.get("do_sample", False):
        for name in _OF_SAMPLING:
            if name in left and not _is_possible(name, left[name]):
                del left[name]
    return left


def _is_possible(name: str, value: Any) -> bool:
    try:
        _check_number(name, value)
    except (TypeError, ValueError):
        return False
    return True


def check_numbers(config: GenerationConfig) -> None:
    """Each number, switch and word by itself."""
    for name in {**_RANGES, **_COUNTS, **_COUNTS_OR_NONE}:
        _check_number(name, getattr(config, name))
    for name in _SWITCHES:
        if not isinstance(getattr(config, name), bool):
            raise TypeError(f"{name} is {getattr(config, name)!r}; it must be True or False")
    if not isinstance(config.early_stopping, bool) and config.early_stopping != "never":
        raise ValueError(
            f'early_stopping is {config.early_stopping!r}; it must be True, False or "never"'
        )


def _check_number(name: str, value: Any) -> None:
    if value is None and name in (*_COUNTS_OR_NONE, "min_p", "max_time"):
        return
    if name in _RANGES:
        check_range(name, value, *_RANGES[name])
    else:
        check_count(name, value, *(_COUNTS | _COUNTS_OR_NONE)[name])


def checked_ids(config: GenerationConfig) -> dict[str, Any]:
    """The fields that hold several ids or texts, as tuples."""
    ends = _ids_of("eos_token_id", config.eos_token_id, f"{_SOME_IDS} for the model's")
    return {
        "bad_words_ids": _words_of("bad_words_ids", config.bad_words_ids),
        "eos_token_id": ends if ends is None else tuple(dict.fromkeys(ends)),
        "forced_eos_token_id": _ids_of("forced_eos_token_id", config.forced_eos_token_id),
        "suppress_tokens": _ids_of("suppress_tokens", config.suppress_tokens),
        "begin_suppress_tokens": _ids_of("begin_suppress_tokens", config.begin_suppress_tokens),
        "sequence_bias": _biases_of(config.sequence_bias),
        "stop_strings": _texts_of("stop_strings", config.stop_strings),
        "exponential_decay_length_penalty": _decay_of(config.exponential_decay_length_penalty),
    }


def check_together(config: GenerationConfig) -> None:
    """What each field allows the others."""
    _check_beams(config)
    _check_outputs(config)
    _check_forced(config)
    _check_cache(config)
    if config.num_beams > 1 and config.guidance_scale != 1:
        raise ValueError(
            f"guidance_scale is {config.guidance_scale} with num_beams = {config.num_beams}: beams "
            "that change places would leave their negative rows behind; leave out one of them"
        )
    if config.num_beams > 1 and config.prompt_lookup_num_tokens:
        raise ValueError(
            f"prompt_lookup_num_tokens is {config.prompt_lookup_num_tokens} with num_beams = "
            f"{config.num_beams}: tokens are proposed for greedy decoding and sampling only"
        )


def check_vocabulary(config: GenerationConfig, vocab_size: int) -> None:
    """ValueError where an id that is forced or forbidden isn't in the vocabulary."""
    first = () if config.forced_bos_token_id is None else (config.forced_bos_token_id,)
    biases = _biases_of(config.sequence_bias) or ()
    named: dict[str, Iterable[int]] = {
        "forced_bos_token_id": first,
        "forced_eos_token_id": _ids_of("forced_eos_token_id", config.forced_eos_token_id) or (),
        "bad_words_ids": [token for word in config.bad_words_ids or () for token in word],
        "sequence_bias": [token for ids, _ in biases for token in ids],
    }
    for name, ids in named.items():
        wrong = [token for token in ids if token >= vocab_size]
        if wrong:
            raise ValueError(
                f"{name} has the token id {wrong[0]}, outside the vocabulary of {vocab_size}"
            )


def check_range(
    name: str, value: Any, low: float, low_allowed: bool, high: float, words: str
) -> None:
    """A number from low to high.

    Raises:
        TypeError, ValueError: naming it, with its value and the range in words.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; it must be {words}")
    inside = low <= value if low_allowed else low < value
    if not (is_number(value) and inside and value <= high):
        raise ValueError(f"{name} is {value!r}; it must be {words}")


def check_count(name: str, value: Any, low: int, high: int, words: str) -> None:
    """An int from low to high; errors as of :func:`check_range`."""
    if not is_int(value):
        raise TypeError(f"{name} is {value!r}; it must be {words}")
    if not low <= value <= high:
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
    last = _ids_of("forced_eos_token_id", config.forced_eos_token_id)
    for name, forced in (("forced_bos_token_id", first), ("forced_eos_token_id", last)):
        if forced is not None and suppressed.issuperset(forced):
            raise ValueError(
                f"{name} is {getattr(config, name)}, and suppress_tokens leaves none of it: no "
                "token could be chosen; take it out of one of them"
            )


def _ids_of(name: str, ids: Any, words: str = _SOME_IDS) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if isinstance(ids, torch.Tensor | np.ndarray | np.generic):
        ids = ids.tolist()
    several: Any = [ids] if is_int(ids) else ids
    if isinstance(several, str | bytes) or not isinstance(several, Iterable):
        raise TypeError(f"{name} is {ids!r}; it must be {words}")
    found = tuple(map(plain_number, several))
    for token in found:
        check_count(name, token, 0, 2**63 - 1, words)
    return found


def _words_of(name: str, words: Any) -> tuple[tuple[int, ...], ...] | None:
    if words is None:
        return None
    if not isinstance(words, list | tuple) or not all(isinstance(w, list | tuple) for w in words):
        raise TypeError(f"{name} is {words!r}; it must be a list of lists of token ids")
    if not all(words):
        raise ValueError(f"{name} is {words!r}, with an empty word: leave it out")
    return tuple(_ids_of(name, word, "a list of lists of token ids") or () for word in words)


def _biases_of(biases: Any) -> tuple[tuple[tuple[int, ...], float], ...] | None:
    if biases is None:
        return None
    words = "{(ids,): number} or a list of [[ids], number], numbers finite or -inf"
    pairs = list(biases.items() if isinstance(biases, Mapping) else biases)
    if not pairs or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError(f"sequence_bias is {biases!r}; it must be {words}")
    sequences = _words_of("sequence_bias", [ids for ids, _ in pairs]) or ()
    for _, bias in pairs:
        if bias != -math.inf:
            check_range("sequence_bias", bias, -1 / SMALLEST, True, 1 / SMALLEST, words)
    given = {ids: float(bias) for ids, (_, bias) in zip(sequences, pairs, strict=True)}
    return tuple(given.items())


def _texts_of(name: str, texts: Any) -> tuple[str, ...] | None:
    if texts is None:
        return None
    texts = (texts,) if isinstance(texts, str) else texts
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name} is {texts!r}; it must be a text or a list of texts")
    if not all(texts):
        raise ValueError(f"{name} is {texts!r}: an empty text would end every sequence at once")
    return tuple(texts)


def _decay_of(decay: Any) -> tuple[int, float] | None:
    if decay is None:
        return None
    name, words = "exponential_decay_length_penalty", "(tokens from 0 on, factor from 1e-30 on)"
    if not isinstance(decay, list | tuple) or len(decay) != 2:
        raise TypeError(f"{name} is {decay!r}; it must be {words}")
    start, factor = map(plain_number, decay)
    check_count(name, start, 0, _MOST_TOKENS, words)
    check_range(name, factor, SMALLEST, True, 1 / SMALLEST, words)
    return start, float(factor)
