"""Fields of requests as TabbyAPI's clients send them, in the words of ``requests``.

Such clients (SillyTavern, for one) send every setting of their samplers with each request, those
that are switched off too, and some of them under several names. So other names are translated,
settings that are switched off are dropped, and one that exkv can't follow is refused by its name.
The names are those of TabbyAPI's ``BaseSamplerRequest`` and of SillyTavern's text completions.
"""

from __future__ import annotations

import json
from typing import Any

from exkv.sampling.exllamav2 import EXLLAMAV2, PLAIN, SERVED
from exkv.sampling.step import Entry

#: A field here -> its other names; of several that are given the first counts.
_OTHER_NAMES = {
    "max_tokens": ("max_new_tokens", "max_length", "n_predict", "num_predict"),
    "stop": ("stopping_strings", "stop_sequence"),
    "seed": ("sampler_seed",),
    "banned_tokens": ("custom_token_bans",),
    "cfg_scale": ("guidance_scale",),
    "chat_template_kwargs": ("template_vars",),
    **{name: PLAIN[field].also_called for name, field in SERVED.items()},
}
#: A setting that exkv hasn't got -> the values at which it is switched off.
_SWITCHED_OFF: dict[str, tuple[Any, ...]] = {
    "min_tokens": (0,),
    "min_length": (0,),
    "ban_eos_token": (False,),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
    "add_bos_token": (True,),
    "mirostat": (0, False),
    "mirostat_mode": (0,),
    "smoothing_curve": (0, 1),
    "adaptive_target": (0, -0.01, -1),
    "max_tokens_second": (0,),
    "grammar_string": ("",),
}
#: What belongs to a setting above, says a setting once more, or is about the client itself.
_NOT_NEEDED = (
    *("mirostat_tau", "mirostat_eta", "adaptive_decay", "min_keep"),
    *("dynamic_temperature", "dynatemp_range", "rep_pen_size", "rep_pen_slope"),
    *("truncation_length", "generate_window", "include_reasoning", "speculative_ngram"),
    *("api_type", "api_server", "bypass_status_check", "cache_prompt"),
)
_NAMES = {field: name for name, field in SERVED.items()}


def _belonging(row: Entry) -> tuple[str, list[str]] | None:
    """The setting that alone switches a step, and those that say nothing where it is 0."""
    names = [name for name, setting in row.settings.items() if setting.served is not None]
    switches = [name for name in names if row.bounds[name].switches]
    if len(switches) != 1 or len(names) == 1:
        return None
    return _NAMES[switches[0]], [_NAMES.get(name, name) for name in names]


_BELONGING = dict(filter(None, map(_belonging, EXLLAMAV2)))


def translated(values: Any) -> Any:
    """A request's fields under the names that ``requests`` knows; of what is no object, itself.

    Raises:
        ValueError: a setting that is on, and that exkv hasn't got.
    """
    if not isinstance(values, dict):
        return values
    found = dict(values)
    for name, others in _OTHER_NAMES.items():
        given = [value for other in others if (value := found.pop(other, None)) is not None]
        if given and found.get(name) is None:
            found[name] = given[0]
    for name, off in _SWITCHED_OFF.items():
        value = found.pop(name, None)
        if value is not None and value not in off:
            raise ValueError(f"{name} is {value!r:.40}, and exkv has no such setting: leave it out")
    for name in _NOT_NEEDED:
        found.pop(name, None)
    for name, belonging in _BELONGING.items():
        if name in found and not found[name]:
            for other in belonging:
                found.pop(other, None)
    return _with_lists(found)


def _with_lists(found: dict[str, Any]) -> dict[str, Any]:
    """What comes as a text that stands for a list, and what is empty for nothing."""
    for name in ("banned_tokens", "dry_sequence_breakers", "banned_strings"):
        if isinstance(text := found.get(name), str):
            found[name] = _listed(text) if name != "banned_strings" else [text]
    for name in ("stop", "logit_bias", "banned_tokens", "banned_strings", "json_schema"):
        if name in found and found[name] in ([], {}, "", [""]):
            del found[name]
    return found


def _listed(text: str) -> list[Any]:
    """``[1, 2]``, ``"\\n", ":"`` or ``1,2`` as a list."""
    bare = text.strip()
    try:
        return json.loads(bare if bare.startswith("[") else f"[{bare}]")
    except (json.JSONDecodeError, RecursionError):
        return [piece.strip() for piece in bare.split(",")]
