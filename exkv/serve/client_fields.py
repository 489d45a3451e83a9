"""Translate request fields from clients' names to those of ``requests``.

Clients send all their sampler settings with each request, even those that are off, some under
several names, beside fields on which no token depends. So aliases are translated, fields without
effect are dropped, and a setting that exkv lacks is refused by name unless it is off. The names are
those of OpenAI's API, TabbyAPI, vLLM, llama.cpp and SillyTavern.
"""

from __future__ import annotations

import json
from typing import Any

from exkv.sampling.exllamav2 import EXLLAMAV2, PLAIN, SERVED
from exkv.sampling.step import Entry

#: Field -> its aliases; the first one given counts.
_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "max_tokens": ("max_new_tokens", "max_length", "n_predict", "num_predict"),
    "min_tokens": ("min_length", "min_new_tokens"),
    "stop": ("stopping_strings", "stop_sequence"),
    "seed": ("sampler_seed",),
    "banned_tokens": ("custom_token_bans",),
    "cfg_scale": ("guidance_scale",),
    "chat_template_kwargs": ("template_vars",),
    **{name: PLAIN[field].also_called for name, field in SERVED.items()},
}
#: Setting that exkv lacks -> the values that switch it off.
_OFF: dict[str, tuple[Any, ...]] = {
    "skip_special_tokens": (True,),
    "add_bos_token": (True,),
    "mirostat": (0, False),
    "mirostat_mode": (0,),
    "smoothing_curve": (0, 1),
    "adaptive_target": (0, -0.01, -1),
    "max_tokens_second": (0,),
    "grammar_string": ("",),
    "best_of": (1,),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "include_stop_str_in_output": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "t_max_predict_ms": (0,),
}
#: Fields that change no token: parameters of the settings above, duplicates, and everything about
#: clients, billing and retention.
_NO_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "prediction", "verbosity", "request_id"),
    *("mirostat_tau", "mirostat_eta", "adaptive_decay", "min_keep"),
    *("dynamic_temperature", "dynatemp_range", "rep_pen_size", "rep_pen_slope"),
    *("truncation_length", "generate_window", "speculative_ngram"),
    *("api_type", "api_server", "bypass_status_check", "cache_prompt", "legacy_api"),
    *("n_probs", "num_ctx", "keep_alive", "id_slot", "timings_per_token"),
)
_NAMES: dict[str, str] = {field: name for name, field in SERVED.items()}


def _belonging(row: Entry) -> tuple[str, list[str]] | None:
    """The one setting that switches a step on, and all that have no effect while it is 0."""
    names = [name for name, setting in row.settings.items() if setting.served is not None]
    switches = [name for name in names if row.bounds[name].switches]
    if len(switches) != 1 or len(names) == 1:
        return None
    return _NAMES[switches[0]], [_NAMES.get(name, name) for name in names]


_BELONGING = dict(filter(None, map(_belonging, EXLLAMAV2)))


def translated(values: Any) -> Any:
    """A request's fields under ``requests``' names; non-dicts pass through.

    Raises:
        ValueError: a setting that exkv lacks is on.
    """
    if not isinstance(values, dict):
        return values
    found = dict(values)
    for name, others in _OTHER_NAMES.items():
        given = [value for other in others if (value := found.pop(other, None)) is not None]
        if given and found.get(name) is None:
            found[name] = given[0]
    for name, off in _OFF.items():
        value = found.pop(name, None)
        if value is not None and value not in off:
            raise ValueError(f"{name} is {value!r:.40}, and exkv has no such setting: leave it out")
    for name in _NO_EFFECT:
        found.pop(name, None)
    for name, belonging in _BELONGING.items():
        if name in found and not found[name]:
            for other in belonging:
                found.pop(other, None)
    if found.get("max_tokens") == -1:
        found["max_tokens"] = None
    if found.get("top_k") == -1:  # vLLM's value for off
        found["top_k"] = 0
    return _with_lists(found)


def _with_lists(found: dict[str, Any]) -> dict[str, Any]:
    """Parse lists that are sent as strings, and drop empty ones."""
    if isinstance(text := found.get("banned_strings"), str):
        found["banned_strings"] = [text]
    for name in ("banned_tokens", "dry_sequence_breakers"):
        if isinstance(text := found.get(name), str):
            found[name] = _parse_list(text)
    for name in ("stop", "logit_bias", "banned_tokens", "banned_strings", "json_schema"):
        if name in found and found[name] in ([], {}, "", [""]):
            del found[name]
    return found


def _parse_list(text: str) -> list[Any]:
    """Parse ``[1, 2]``, ``"\\n", ":"`` or ``1,2``."""
    bare = text.strip()
    try:
        return json.loads(bare if bare.startswith("[") else f"[{bare}]")
    except (json.JSONDecodeError, RecursionError):
        return [piece.strip() for piece in bare.split(",")]
