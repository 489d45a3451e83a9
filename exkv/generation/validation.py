"""Checks of a GenerationConfig when it is built: the fields that are not a sampler step's, and
combinations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from exkv.cache import cache_kind
from exkv.sampling import huggingface
from exkv.sampling.bounds import (
    LARGEST,
    LARGEST_ID,
    MOST_TOKENS,
    Bounds,
    count,
    number,
    switch,
    token_ids,
)

if TYPE_CHECKING:
    from .config import GenerationConfig

#: Beams, and sequences of a prompt; each is a row of the cache.
_MOST_ROWS = 4096
#: Upper bound on drafted tokens, and on tokens compared to find them.
_MOST_PROPOSED = 1024


def _ends(name: str, ids: Any) -> tuple[int, ...]:
    words = "a token id, or several, or None for the model's"
    return tuple(dict.fromkeys(token_ids(name, ids, words)))


def _texts(name: str, texts: Any) -> tuple[str, ...]:
    texts = (texts,) if isinstance(texts, str) else texts
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name} is {texts!r}; it must be a text or a list of texts")
    if not all(texts):
        raise ValueError(f"{name} is {texts!r}: an empty text would end every sequence at once")
    return tuple(texts)


def _early_stopping(name: str, value: Any) -> bool | str:
    if not isinstance(value, bool) and value != "never":
        raise ValueError(f'{name} is {value!r}; it must be True, False or "never"')
    return value


_SEVERAL = count(1, _MOST_ROWS)
_PROPOSED = count(1, _MOST_PROPOSED)
#: Bounds of each field that has any.
BOUNDS = huggingface.BOUNDS | {
    "max_new_tokens": count(1, MOST_TOKENS, note="None for max_length"),
    "max_length": count(1, MOST_TOKENS, note="None for 20 new tokens"),
    "min_length": count(0, MOST_TOKENS, off=(0,)),
    "num_beams": count(1, _MOST_ROWS, note="1 is no beam search"),
    "num_beam_groups": count(1, _MOST_ROWS, note="1 is one group"),
    "num_return_sequences": _SEVERAL,
    "diversity_penalty": number(0.0, LARGEST),
    "length_penalty": number(-30.0, 30.0, note="above 0 favours long sequences"),
    "guidance_scale": huggingface.GUIDANCE,
    "max_time": number(0.0, math.inf, note="finite seconds, or None"),
    "assistant_confidence_threshold": number(0.0, 1.0, note="0 switches it off"),
    "num_assistant_tokens": _PROPOSED,
    "prompt_lookup_num_tokens": count(1, _MOST_PROPOSED, note="None for no lookup"),
    "max_matching_ngram_size": _PROPOSED,
    "pad_token_id": count(0, LARGEST_ID, note="or None"),
    "seed": count(0, LARGEST_ID, note="or None"),
    "eos_token_id": Bounds("ids", _ends),
    "stop_strings": Bounds("texts", _texts),
    "early_stopping": Bounds("True, False or never", _early_stopping),
    "do_sample": switch(),
    "return_dict_in_generate": switch(),
    "output_scores": switch(),
    "output_logits": switch(),
    "use_cache": switch(),
    "use_mtp": switch(),
}


def without_unused(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Drop a checkpoint's settings that transformers never reads: invalid settings of sampling if
    nothing is drawn, those of beam groups if there is one group, and ids of -1, which mean none."""
    left = {name: value for name, value in stated.items() if value is not None}
    for name in [name for name in left if name.endswith("token_id") and left[name] == -1]:
        del left[name]
    if isinstance(ends := left.get("eos_token_id"), list):
        left["eos_token_id"] = [end for end in ends if end != -1] or None
    if left.get("num_beams", 1) == 1 or left.get("num_beam_groups", 1) == 1:
        left.pop("num_beam_groups", None)
        left.pop("diversity_penalty", None)
    if not left.get("do_sample", False):
        for name in huggingface.DRAWN:
            if name in left and not _is_possible(name, left[name]):
                del left[name]
    return left


def _is_possible(name: str, value: Any) -> bool:
    try:
        BOUNDS[name].check(name, value)
    except (TypeError, ValueError):
        return False
    return True


def check_together(config: GenerationConfig) -> None:
    """Check combinations of fields."""
    _check_beams(config)
    _check_outputs(config)
    _check_forced(config)
    _check_cache(config)
    if config.num_beams > 1 and config.guidance_scale != 1:
        raise ValueError(
            f"guidance_scale is {config.guidance_scale} with num_beams = {config.num_beams}: "
            "negative rows can't follow beams that are reordered; leave out one of them"
        )
    if config.num_beams > 1 and config.prompt_lookup_num_tokens:
        raise ValueError(
            f"prompt_lookup_num_tokens is {config.prompt_lookup_num_tokens} with num_beams = "
            f"{config.num_beams}: tokens are proposed for greedy decoding and sampling only"
        )


def check_vocabulary(config: GenerationConfig, vocab_size: int) -> None:
    """ValueError if a forced or forbidden id isn't in the vocabulary."""
    first = () if config.forced_bos_token_id is None else (config.forced_bos_token_id,)
    checked: Any = config  # whose ids are tuples by now
    named: dict[str, Iterable[int]] = {
        "forced_bos_token_id": first,
        "forced_eos_token_id": checked.forced_eos_token_id or (),
        "bad_words_ids": [token for word in config.bad_words_ids or () for token in word],
        "sequence_bias": [i for ids, _ in checked.sequence_bias or () for i in ids],
    }
    for name, ids in named.items():
        wrong = [token for token in ids if token >= vocab_size]
        if wrong:
            raise ValueError(
                f"{name} has the token id {wrong[0]}, outside the vocabulary of {vocab_size}"
            )


def _check_beams(config: GenerationConfig) -> None:
    beams, groups = config.num_beams, config.num_beam_groups
    wanted = config.num_return_sequences
    if beams > 1 and wanted > beams:
        raise ValueError(f"num_return_sequences is {wanted}, more than the {beams} of num_beams")
    if beams == 1 and wanted > 1 and not config.do_sample:
        raise ValueError(
            f"num_return_sequences is {wanted}, but greedy decoding has only one sequence: set "
            "do_sample=True or num_beams"
        )
    if beams % groups:
        raise ValueError(f"num_beams is {beams}, not a multiple of num_beam_groups = {groups}")
    if groups == 1 and config.diversity_penalty:
        raise ValueError(
            f"diversity_penalty is {config.diversity_penalty}, but there is only one group of "
            "beams: set num_beam_groups"
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
            raise ValueError(f"{name} is True: set return_dict_in_generate=True to get them")
        if getattr(config, name) and config.num_beam_groups > 1:
            raise ValueError(
                f"{name} is True with num_beam_groups = {config.num_beam_groups}: groups of beams "
                "don't store them; set num_beam_groups=1"
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
        raise ValueError(f"cache_config is {options!r} without a cache_implementation: set both")
    sizes = [size for size in ("max_seq_len", "batch_size") if size in options]
    if sizes:
        raise ValueError(
            f"cache_config has {sizes[0]} = {options[sizes[0]]!r}, but the cache is sized for the "
            "call: leave it out, or pass a cache of your own"
        )


def _check_forced(config: GenerationConfig) -> None:
    first = None if config.forced_bos_token_id is None else (config.forced_bos_token_id,)
    suppressed = set(config.suppress_tokens or ())
    named: dict[str, Any] = {
        "forced_bos_token_id": first,
        "forced_eos_token_id": config.forced_eos_token_id,
    }
    for name, forced in named.items():
        if forced is not None and suppressed.issuperset(forced):
            raise ValueError(
                f"{name} is {getattr(config, name)}, and suppress_tokens forbids all of it: no "
                "token could be chosen; remove it from one of them"
            )
