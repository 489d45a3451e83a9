"""Which layers have a sliding window, or a state in place of attention, as architectures say it in
config.json.

A rule takes a config.json's values with defaults filled in. A rule of one architecture alone
stands in its file, ``exkv/models/<name>.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .value_checks import check_bool, check_layers, check_size, is_int

logger = logging.getLogger(__name__)

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
#: Layers with a state: of linear attention, and convolutions.
STATES = ("linear_attention", "conv")
#: Layers with a state beside keys and values.
HYBRID = "hybrid"
#: Layers that keep nothing of a token: one MLP, or one mixture of experts.
STATELESS = ("mlp", "moe")
#: Older names of these types, in files of transformers 4.
_OLDER = {"attention": FULL_ATTENTION, "mamba": STATES[0]}

#: The window in tokens, and the type of every layer; None and () where all attend to everything.
WindowOfLayers = tuple[int | None, tuple[str, ...]]


def check_layer_types(
    types: Any, layers: int, window: int | None, states: Sequence[str] = ()
) -> tuple[str, ...]:
    """The types of the layers as a tuple; ValueError unless each has one, and sliding ones a
    window. ``states`` are those that the architecture has beside attention."""
    known = (FULL_ATTENTION, SLIDING_ATTENTION, *states)
    if not isinstance(types, list | tuple):
        raise ValueError(f"layer_types must be a list, not {types!r}")
    for index, kind in enumerate(types):
        if kind not in known:
            raise ValueError(
                f"layer_types[{index}] is {kind!r}; exkv knows {', '.join(known)} there"
            )
    if len(types) != layers:
        raise ValueError(
            f"layer_types names {len(types)} layers, and num_hidden_layers is {layers}"
        )
    if SLIDING_ATTENTION in types and window is None:
        raise ValueError(
            f"layer_types[{types.index(SLIDING_ATTENTION)}] is {SLIDING_ATTENTION!r}, but there "
            f"is no sliding_window (or use_sliding_window is false)"
        )
    return tuple(types)


def sliding_window(values: Mapping[str, Any], in_use: bool = True) -> int | None:
    """The window, of all layers that have one; None where it isn't in use."""
    window = values.get("sliding_window")
    if window is None or not in_use:
        return None
    check_size("sliding_window", window)
    return int(window)


def window_in_use(values: Mapping[str, Any]) -> int | None:
    """The same where ``use_sliding_window`` switches it on."""
    check_bool("use_sliding_window", values["use_sliding_window"])
    return sliding_window(values, values["use_sliding_window"])


def by_layer(
    values: Mapping[str, Any], window: int | None, slides: Callable[[int], bool]
) -> WindowOfLayers:
    """The stated ``layer_types``, else those that older files mean: ``slides`` of a layer's
    index."""
    check_layers(values["num_hidden_layers"])
    layers = range(values["num_hidden_layers"])
    types = values.get("layer_types")
    if types is None:
        types = [SLIDING_ATTENTION if slides(layer) else FULL_ATTENTION for layer in layers]
    types = check_layer_types(types, len(layers), window)
    return (window, types) if SLIDING_ATTENTION in types else (None, ())


def with_states(values: Mapping[str, Any]) -> WindowOfLayers:
    """Qwen3-Next: linear attention, but in every ``full_attention_interval``-th layer, unless
    ``layer_types`` say otherwise."""
    check_layers(values["num_hidden_layers"])
    layers, types = values["num_hidden_layers"], values.get("layer_types")
    period = values["full_attention_interval"]
    check_size("full_attention_interval", period)
    if types is None:
        linear, *_ = STATES
        types = [linear if (layer + 1) % period else FULL_ATTENTION for layer in range(layers)]
    return None, check_layer_types(types, layers, None, STATES[:1])


def renamed(types: Any) -> Any:
    """Types of layers by today's names, where it is a list of them."""
    if not isinstance(types, list | tuple):
        return types
    return [_OLDER.get(kind, kind) if isinstance(kind, str) else kind for kind in types]


def linear_unless_stated(values: Mapping[str, Any]) -> WindowOfLayers:
    """The stated ``layer_types``; all layers have a state without."""
    check_layers(values["num_hidden_layers"])
    layers, types = values["num_hidden_layers"], values.get("layer_types")
    types = STATES[:1] * layers if types is None else renamed(types)
    return None, check_layer_types(types, layers, None, STATES[:1])


def first_layers(values: Mapping[str, Any]) -> int:
    """``max_window_layers``, which Qwen's architectures count by."""
    count = values["max_window_layers"]
    if not is_int(count) or count < 0:
        raise ValueError(f"max_window_layers must be an integer of at least 0, not {count!r}")
    return count


def late_layers(values: Mapping[str, Any], window: int | None) -> WindowOfLayers:
    """The layers from ``max_window_layers`` on, where there is a window."""
    first = first_layers(values)
    return by_layer(values, window, lambda layer: window is not None and layer >= first)


def nowhere(values: Mapping[str, Any]) -> WindowOfLayers:
    """Llama: no window; some files carry the keys all the same, switched off."""
    if values.get("use_sliding_window") and values.get("sliding_window") is not None:
        raise ValueError(
            f"use_sliding_window with sliding_window {values['sliding_window']!r}: this "
            f"architecture attends to everything"
        )
    return None, ()


def every_layer(values: Mapping[str, Any], window: int | None) -> WindowOfLayers:
    """This window in every layer. A file may say something else by ``layer_types``; as in
    transformers, where attention doesn't ask for them, that is ignored."""
    check_layers(values["num_hidden_layers"])
    layers, types = values["num_hidden_layers"], values.get("layer_types")
    if window is None:
        return None, ()
    all_slide = (SLIDING_ATTENTION,) * layers
    if types is not None and check_layer_types(types, layers, window) != all_slide:
        logger.warning(
            "layer_types are ignored: sliding_window %d is every layer's in this architecture",
            window,
        )
    return window, all_slide


def everywhere(values: Mapping[str, Any]) -> WindowOfLayers:
    """Mixtral, Phi-3: a window is every layer's."""
    return every_layer(values, sliding_window(values))


def every_other(values: Mapping[str, Any]) -> WindowOfLayers:
    """Gemma 2, gpt-oss: every other layer, beginning with the first."""
    return by_layer(values, sliding_window(values), lambda layer: layer % 2 == 0)


def three_of_four(values: Mapping[str, Any]) -> WindowOfLayers:
    """Every fourth layer attends to everything, unless ``layer_types`` say otherwise; all do where
    there is no window."""
    window, stated = sliding_window(values), values.get("sliding_window_pattern")
    period: int = 4 if not is_int(stated) or not stated else stated  # "LLLG" in some files
    return by_layer(values, window, lambda layer: window is not None and (layer + 1) % period != 0)


def sliding_ones(values: Mapping[str, Any], types: tuple[str, ...]) -> tuple[bool, ...]:
    """Rotary positions for layers with a window, and none for those that see everything; without
    windows in the model all have them."""
    return tuple(kind == SLIDING_ATTENTION for kind in types)
