"""Rules by which config.json says which layers have a sliding window, or a state in place of
attention.

A rule takes a config.json's values with defaults filled in. Rules of a single architecture are in
its file, ``exkv/models/<name>.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .value_checks import check_bool, check_count, check_layers, check_size, is_int

logger = logging.getLogger(__name__)

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
#: Layers with a state: of linear attention, and convolutions.
STATES = ("linear_attention", "conv")
#: Layers with a state beside keys and values.
HYBRID = "hybrid"
#: Layers that store nothing a token: an MLP or a mixture of experts.
STATELESS = ("mlp", "moe")
#: Older names of these types, in files of transformers 4.
_OLDER = {"attention": FULL_ATTENTION, "mamba": STATES[0]}

#: The window in tokens, and the type of every layer; None and () if all attend to everything.
WindowOfLayers = tuple[int | None, tuple[str, ...]]


def check_layer_types(
    types: Any, layers: int, window: int | None, states: Sequence[str] = ()
) -> tuple[str, ...]:
    """The layers' types as a tuple; ValueError unless each layer has one, and there is a window for
    sliding ones. ``states`` are the architecture's types beside attention."""
    known = (FULL_ATTENTION, SLIDING_ATTENTION, *states)
    if not isinstance(types, list | tuple):
        raise ValueError(f"layer_types must be a list, not {types!r}")
    for index, kind in enumerate(types):
        if kind not in known:
            raise ValueError(
                f"layer_types[{index}] is {kind!r}; exkv knows {', '.join(known)} here"
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
    """The window of all layers that have one; None if it isn't in use."""
    window = values.get("sliding_window")
    if window is None or not in_use:
        return None
    check_size("sliding_window", window)
    return int(window)


def window_in_use(values: Mapping[str, Any]) -> int | None:
    """The window, if ``use_sliding_window`` switches it on."""
    check_bool("use_sliding_window", values["use_sliding_window"])
    return sliding_window(values, values["use_sliding_window"])


def by_layer(
    values: Mapping[str, Any], window: int | None, slides: Callable[[int], bool]
) -> WindowOfLayers:
    """The stated ``layer_types``, else those that older files imply, by ``slides`` of a layer's
    index."""
    check_layers(values["num_hidden_layers"])
    layers = range(values["num_hidden_layers"])
    types = values.get("layer_types")
    if types is None:
        types = [SLIDING_ATTENTION if slides(layer) else FULL_ATTENTION for layer in layers]
    types = check_layer_types(types, len(layers), window)
    return (window, types) if SLIDING_ATTENTION in types else (None, ())


def with_states(values: Mapping[str, Any]) -> WindowOfLayers:
    """Qwen3-Next: linear attention except in every ``full_attention_interval``-th layer, unless
    ``layer_types`` says otherwise."""
    check_layers(values["num_hidden_layers"])
    layers, types = values["num_hidden_layers"], values.get("layer_types")
    period = values["full_attention_interval"]
    check_size("full_attention_interval", period)
    if types is None:
        linear, *_ = STATES
        types = [linear if (layer + 1) % period else FULL_ATTENTION for layer in range(layers)]
    return None, check_layer_types(types, layers, None, STATES[:1])


def renamed(types: Any) -> Any:
    """Replace older names in a list of layer types."""
    if not isinstance(types, list | tuple):
        return types
    return [_OLDER.get(kind, kind) if isinstance(kind, str) else kind for kind in types]


def linear_unless_stated(values: Mapping[str, Any]) -> WindowOfLayers:
    """The stated ``layer_types``; without them all layers have a state."""
    check_layers(values["num_hidden_layers"])
    layers, types = values["num_hidden_layers"], values.get("layer_types")
    types = STATES[:1] * layers if types is None else renamed(types)
    return None, check_layer_types(types, layers, None, STATES[:1])


def first_layers(values: Mapping[str, Any]) -> int:
    """``max_window_layers`` of Qwen's architectures."""
    check_count("max_window_layers", values["max_window_layers"])
    return int(values["max_window_layers"])


def late_layers(values: Mapping[str, Any], window: int | None) -> WindowOfLayers:
    """A window in the layers from ``max_window_layers`` on, if there is one."""
    first = first_layers(values)
    return by_layer(values, window, lambda layer: window is not None and layer >= first)


def nowhere(values: Mapping[str, Any]) -> WindowOfLayers:
    """Llama: no window; some files have the keys nevertheless, switched off."""
    if values.get("use_sliding_window") and values.get("sliding_window") is not None:
        raise ValueError(
            f"use_sliding_window with sliding_window {values['sliding_window']!r}: this "
            f"architecture attends to everything"
        )
    return None, ()


def every_layer(values: Mapping[str, Any], window: int | None) -> WindowOfLayers:
    """This window in every layer. A different ``layer_types`` is ignored, as in transformers, where
    attention doesn't read it."""
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
    """Mixtral, Phi-3: a window in every layer."""
    return every_layer(values, sliding_window(values))


def every_other(values: Mapping[str, Any]) -> WindowOfLayers:
    """Gemma 2, gpt-oss: every other layer, beginning with the first."""
    return by_layer(values, sliding_window(values), lambda layer: layer % 2 == 0)


def three_of_four(values: Mapping[str, Any]) -> WindowOfLayers:
    """Every fourth layer attends to everything, unless ``layer_types`` says otherwise; all do if
    there is no window."""
    window, stated = sliding_window(values), values.get("sliding_window_pattern")
    period: int = 4 if not is_int(stated) or not stated else stated  # "LLLG" in some files
    return by_layer(values, window, lambda layer: window is not None and (layer + 1) % period != 0)


def sliding_ones(values: Mapping[str, Any], types: tuple[str, ...]) -> tuple[bool, ...]:
    """Rotary positions for layers with a window, and none for those that see everything; for all
    layers in a model without windows."""
    return tuple(kind == SLIDING_ATTENTION for kind in types)
