"""What a config.json means by architecture: defaults for the keys that it leaves out, how it
says which layers have a sliding window, and the settings that only one architecture has.

The defaults are those of transformers' configuration classes, for which a file was written.
``FAMILIES`` is the one table of architectures: a new one is an entry here, and the file of
``exkv/models`` that it names.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .checks import check_bool, check_layers, check_size, is_int, set_floats
from .gguf_names import GGUFFamily

logger = logging.getLogger(__name__)

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"

#: From a config.json's values with defaults filled in: the window in tokens or None, and the type
#: of every layer, or () where every layer attends to everything.
Windows = Callable[[Mapping[str, Any]], tuple[int | None, tuple[str, ...]]]
#: From the same, and the types of the layers: which of them have rotary positions; () for all.
Rotated = Callable[[Mapping[str, Any], tuple[str, ...]], tuple[bool, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts: of ``num_local_experts``, each token takes ``num_experts_per_tok``.

    Experts have ``moe_intermediate_size`` inner values, None for the config's intermediate_size;
    beside them may be one that all tokens take, of ``shared_expert_intermediate_size``.
    ``norm_topk_prob`` makes the weights of those that are taken sum to one. Layers whose number,
    counted from one, is no multiple of ``decoder_sparse_step``, and ``mlp_only_layers``, have an
    MLP instead.
    """

    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for key in ("num_local_experts", "num_experts_per_tok", "decoder_sparse_step"):
            check_size(key, getattr(self, key))
        for key in ("moe_intermediate_size", "shared_expert_intermediate_size"):
            if getattr(self, key) is not None:
                check_size(key, getattr(self, key))
        check_bool("norm_topk_prob", self.norm_topk_prob)
        object.__setattr__(self, "mlp_only_layers", _layer_list(self.mlp_only_layers))
        if self.num_experts_per_tok > self.num_local_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} is more than num_local_experts "
                f"{self.num_local_experts}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig:
    """Gemma's scores are divided by the root of ``query_pre_attn_scalar``; a soft-cap c bounds a
    number x as c * tanh(x / c), the scores' or the logits', None for none."""

    query_pre_attn_scalar: float = 256.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    def __post_init__(self) -> None:
        set_floats(self, ("query_pre_attn_scalar",))
        set_floats(self, ("attn_logit_softcapping", "final_logit_softcapping"), null=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedExpertsConfig(ExpertsConfig):
    """Experts of (up + 1) * gate * sigmoid(alpha * gate), the gate clamped from above and up from
    both sides by the limit."""

    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    def __post_init__(self) -> None:
        ExpertsConfig.__post_init__(self)
        set_floats(self, ("swiglu_alpha", "swiglu_limit"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualConfig:
    """Whether the MLP sees the layer's input (``use_parallel_residual``), or what attention made of
    it; and whether heads of queries and keys are normed."""

    use_parallel_residual: bool = True
    qk_layernorm: bool = False

    def __post_init__(self) -> None:
        check_bool("use_parallel_residual", self.use_parallel_residual)
        check_bool("qk_layernorm", self.qk_layernorm)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputBiasConfig:
    """A bias of attention's output projection, whatever the other projections have."""

    attention_out_bias: bool = False

    def __post_init__(self) -> None:
        check_bool("attention_out_bias", self.attention_out_bias)


#: What only one architecture has; see ``ModelConfig.specific``.
Specific = ExpertsConfig | GemmaConfig | ResidualConfig | OutputBiasConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """What a model multiplies by, or divides by (``logits_divisor``): token embeddings, scores
    (None for 1 / sqrt(head_dim)), the outputs of attention and MLP, and logits."""

    embedding: float = 1.0
    attention: float | None = None
    residual: float = 1.0
    logits: float = 1.0
    logits_divisor: float = 1.0

    def __post_init__(self) -> None:
        set_floats(self, ("embedding", "residual", "logits", "logits_divisor"))
        set_floats(self, ("attention",), null=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """What a checkpoint calls the layers (before their number), the embedding table, the last norm
    and the head."""

    layers: str = "model.layers"
    table: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"


def _layer_list(layers: Any) -> tuple[int, ...]:
    if layers is None:
        return ()
    if not isinstance(layers, list | tuple) or not all(is_int(each) for each in layers):
        raise ValueError(f"mlp_only_layers must be a list of integers, not {layers!r}")
    return tuple(layers)


#: Keys beside the text model's config, which count for it before its own.
_SHARED = (
    *("model_type", "dtype", "torch_dtype", "quantization_config"),
    *("tie_word_embeddings", "eos_token_id"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to read the config.json of one architecture.

    Attributes:
        module: the file of exkv/models that has the layers.
        model_type: its name for the architecture, where it doesn't state ``architectures``.
        defaults: keys that a config.json may leave out, and what that means.
        windows: which layers have a sliding window.
        reads: keys beyond those that every architecture has; others are ignored.
        act_key: the key of the activation.
        specific: the class of the settings that only this architecture has.
        rope_theta: the base of rotary frequencies where none is stated.
        rope_local_base_freq: the same of sliding layers, where these have their own.
        rope_parameters: what a config.json says that says nothing of rotary positions.
        partial_rotary: whether positions may rotate a part of a head only.
        partial_rotary_factor: that part, where none is stated.
        rope_interleaved: whether pairs of neighbours are rotated, and not the halves of a head.
        rotated: which layers have rotary positions.
        aliases: keys of every architecture -> what this one calls them.
        multipliers: fields of :class:`Multipliers` -> keys of a config.json.
        names: what checkpoints call the parts of the model; the first that is there counts.
        stacked_experts: whether the experts' matrices lie together, in one tensor of a layer.
        text_config: the key under which the text model's config lies, in one of several models.
        rope_aliases: older names of a rope_type.
        original_max_position_embeddings: the trained length for longrope where none is stated.
        gguf: how GGUF files have it; None where they have it under another's name, or not at all.
    """

    module: str
    model_type: str
    defaults: Mapping[str, Any]
    windows: Windows
    reads: tuple[str, ...] = ()
    act_key: str = "hidden_act"
    specific: type[Specific] | None = None
    rope_theta: float = 10000.0
    rope_local_base_freq: float | None = None
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    partial_rotary: bool = False
    partial_rotary_factor: float = 1.0
    rope_interleaved: bool = False
    rotated: Rotated = lambda values, types: ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    multipliers: Mapping[str, str] = field(default_factory=dict)
    names: tuple[TensorNames, ...] = (TensorNames(),)
    stacked_experts: bool = False
    text_config: str | None = None
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    original_max_position_embeddings: int | None = None
    gguf: GGUFFamily | None = None

    def translated(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values with those under this architecture's own keys under everybody's, too; and of
        several models' those of the text model."""
        text = values.get(self.text_config) if self.text_config is not None else None
        if self.text_config is not None:
            text = {} if text is None else text
            if not isinstance(text, dict):
                raise ValueError(f"{self.text_config} must be an object, not {text!r}")
            shared = {key: values[key] for key in _SHARED if values.get(key) is not None}
            values = {**text, "model_type": self.model_type, **shared}
        ours = {ours: values[own] for ours, own in self.aliases.items() if own in values}
        return {**values, **ours}

    def read_multipliers(self, values: Mapping[str, Any]) -> Multipliers:
        """What the model multiplies by."""
        found = {ours: values.get(key) for ours, key in self.multipliers.items()}
        return Multipliers(**{key: value for key, value in found.items() if value is not None})

    def read_specific(self, values: Mapping[str, Any]) -> Specific | None:
        """The settings that only this architecture has."""
        if self.specific is None:
            return None
        names = [field.name for field in dataclasses.fields(self.specific)]
        return self.specific(**{name: values[name] for name in names if name in values})


# Windows ------------------------------------------------------------------------------------


def check_layer_types(types: Any, layers: int, window: int | None) -> tuple[str, ...]:
    """The types of the layers as a tuple; ValueError unless each has one, and sliding ones a
    window."""
    if not isinstance(types, list | tuple):
        raise ValueError(f"layer_types must be a list, not {types!r}")
    for index, kind in enumerate(types):
        if kind not in (FULL_ATTENTION, SLIDING_ATTENTION):
            raise ValueError(
                f"layer_types[{index}] is {kind!r}; exkv knows {FULL_ATTENTION}, "
                f"{SLIDING_ATTENTION}"
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


def _window(values: Mapping[str, Any]) -> int | None:
    window = values.get("sliding_window")
    if window is not None:
        check_size("sliding_window", window)
    return window


def _types(
    values: Mapping[str, Any], window: int | None, slides: Callable[[int], bool]
) -> tuple[str, ...]:
    """The stated ``layer_types``, else those that the older keys stand for; () if none slides."""
    check_layers(values["num_hidden_layers"])
    layers = range(values["num_hidden_layers"])
    types = values.get("layer_types")
    if types is None:
        types = [SLIDING_ATTENTION if slides(layer) else FULL_ATTENTION for layer in layers]
    types = check_layer_types(types, len(layers), window)
    return types if SLIDING_ATTENTION in types else ()


def _never(values: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...]]:
    """Llama: no window; some files carry the keys all the same, switched off."""
    if values.get("use_sliding_window") and values.get("sliding_window") is not None:
        raise ValueError(
            f"use_sliding_window with sliding_window {values['sliding_window']!r}: this "
            f"architecture attends to everything"
        )
    return None, ()


def _everywhere(values: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...]]:
    """Mixtral, Phi-3: a window is every layer's. A file may say something else by
    ``layer_types``; as in transformers, where attention doesn't ask for them, that is ignored."""
    check_layers(values["num_hidden_layers"])
    window, types = _window(values), values.get("layer_types")
    if types is not None:
        types = check_layer_types(types, values["num_hidden_layers"], window)
    if window is None:
        return None, ()
    all_slide = (SLIDING_ATTENTION,) * values["num_hidden_layers"]
    if types not in (None, all_slide):
        logger.warning(
            "layer_types are ignored: sliding_window %d is every layer's in this architecture",
            window,
        )
    return window, all_slide


def _as_stated(values: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...]]:
    """Mistral: every layer, or those that ``layer_types`` names (Ministral)."""
    window = _window(values)
    types = _types(values, window, lambda layer: window is not None)
    return (window if types else None), types


def _late_layers(values: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...]]:
    """Qwen: the layers from ``max_window_layers`` on, if windows are in use at all."""
    check_bool("use_sliding_window", values["use_sliding_window"])
    window = _window(values) if values["use_sliding_window"] else None
    first = values["max_window_layers"]
    if not is_int(first) or first < 0:
        raise ValueError(f"max_window_layers must be an integer of at least 0, not {first!r}")
    types = _types(values, window, lambda layer: window is not None and layer >= first)
    return (window if types else None), types


def _all_but_every_second(values: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...]]:
    """Gemma 2: every other layer, beginning with the first."""
    window = _window(values)
    return window, _types(values, window, lambda layer: layer % 2 == 0)


def _all_but_every_nth(values: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...]]:
    """Gemma 3: every n-th layer attends to everything."""
    window, period = _window(values), values["sliding_window_pattern"]
    check_size("sliding_window_pattern", period)
    return window, _types(values, window, lambda layer: (layer + 1) % period != 0)


def _all_but_every_fourth(values: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...]]:
    """Every fourth layer attends to everything, unless ``layer_types`` say otherwise; all do where
    there is no window."""
    window, stated = _window(values), values.get("sliding_window_pattern")
    period: int = 4 if not is_int(stated) or not stated else stated  # "LLLG" in some files
    types = _types(values, window, lambda layer: window is not None and (layer + 1) % period != 0)
    return (window if types else None), types


def _every_second_of_the_first(values: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...]]:
    """Qwen2-MoE: every other layer of the first ``max_window_layers``, if windows are in use."""
    check_bool("use_sliding_window", values["use_sliding_window"])
    window = _window(values) if values["use_sliding_window"] else None
    end = values["max_window_layers"]
    if not is_int(end) or end < 0:
        raise ValueError(f"max_window_layers must be an integer of at least 0, not {end!r}")
    slides = lambda layer: window is not None and layer % 2 == 0 and layer < end  # noqa: E731
    types = _types(values, window, slides)
    return (window if types else None), types


def _everywhere_if_used(values: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...]]:
    """Qwen3-MoE: every layer, if windows are in use."""
    check_bool("use_sliding_window", values["use_sliding_window"])
    return _everywhere(values if values["use_sliding_window"] else {**values, **_NO_WINDOW})


def _those_without_positions(values: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...]]:
    """SmolLM3: if windows are in use, the layers that have no rotary positions."""
    check_bool("use_sliding_window", values["use_sliding_window"])
    window = _window(values) if values["use_sliding_window"] else None
    rotated = _by_list_or_interval(values, ())
    types = _types(values, window, lambda layer: window is not None and not rotated[layer])
    return (window if types else None), types


_NO_WINDOW = {"sliding_window": None, "layer_types": None}


# Rotary positions ---------------------------------------------------------------------------


def _by_list_or_interval(values: Mapping[str, Any], types: tuple[str, ...]) -> tuple[bool, ...]:
    """SmolLM3: ``no_rope_layers`` has a one for each layer that *has* rotary positions; without it,
    all but every ``no_rope_layer_interval``-th have them."""
    check_layers(values["num_hidden_layers"])
    count, stated = values["num_hidden_layers"], values.get("no_rope_layers")
    if stated is None:
        period = values["no_rope_layer_interval"]
        check_size("no_rope_layer_interval", period)
        return tuple((layer + 1) % period != 0 for layer in range(count))
    if not isinstance(stated, list | tuple) or any(each not in (0, 1) for each in stated):
        raise ValueError(f"no_rope_layers must be a list of 0 and 1, not {stated!r}")
    if len(stated) != count:
        raise ValueError(
            f"no_rope_layers names {len(stated)} layers, and num_hidden_layers is {count}"
        )
    return tuple(map(bool, stated))


def _sliding_ones(values: Mapping[str, Any], types: tuple[str, ...]) -> tuple[bool, ...]:
    """Layers with a window have rotary positions, and those that see everything none; without
    windows in the model all have them."""
    return tuple(kind == SLIDING_ATTENTION for kind in types)


def _sliding_ones_only(values: Mapping[str, Any], types: tuple[str, ...]) -> tuple[bool, ...]:
    """The same, and no layer has them in a model without windows."""
    return _sliding_ones(values, types) or (False,) * values["num_hidden_layers"]


# The table ----------------------------------------------------------------------------------

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MISTRAL = _LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_MIXTRAL = _MISTRAL | {"rms_norm_eps": 1e-5, "sliding_window": None}
_QWEN2 = _LLAMA | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "bos_token_id": None,
    "eos_token_id": None,
}
_PHI3 = _LLAMA | {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 32000,
    "pad_token_id": 32000,
}
_GEMMA2 = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_GEMMA3 = _GEMMA2 | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_GEMMA = _LLAMA | {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_EXPERTS = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
}
_QWEN2_MOE = (
    _EXPERTS
    | _QWEN2
    | {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_local_experts": 60,
        "attention_bias": True,
    }
)
_QWEN3_MOE = (
    _EXPERTS
    | _QWEN2
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_local_experts": 128,
    }
)
_GPT_OSS = _LLAMA | {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "attention_bias": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
_SMOLLM3 = _LLAMA | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": None,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
    "pad_token_id": 128004,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_OLMO2 = _LLAMA | {
    "vocab_size": 50304,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": 50279,
}
_COHERE = _LLAMA | {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 5,
    "eos_token_id": 255001,
}
_GLM4 = _LLAMA | {
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "pad_token_id": 151329,
    "bos_token_id": None,
    "eos_token_id": [151329, 151336, 151338],
}
_STARCODER2 = _LLAMA | {
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "gelu_pytorch_tanh",
    "attention_bias": True,
    "mlp_bias": True,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "bos_token_id": None,  # transformers' defaults are outside of its vocabulary's
    "eos_token_id": None,
}
_EXAONE4 = _LLAMA | {
    "vocab_size": 102400,
    "intermediate_size": 16384,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "bos_token_id": 0,
}
_SEED_OSS = _LLAMA | {
    "vocab_size": 155136,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
    "pad_token_id": 1,
    "bos_token_id": 0,
}
_ERNIE4_5 = _LLAMA | {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
_STABLELM = _LLAMA | {
    "vocab_size": 50304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "use_parallel_residual": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_PHI = _LLAMA | {
    "vocab_size": 51200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "rms_norm_eps": 1e-5,
    "hidden_act": "gelu_new",
    "attention_bias": True,
    "mlp_bias": True,
}
_GPT_NEOX = _LLAMA | {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "attention_bias": True,
    "mlp_bias": True,
    "bos_token_id": 0,
}
_NEMOTRON = _LLAMA | {
    "vocab_size": 256000,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_attention_heads": 48,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "relu2",
    "bos_token_id": 2,
    "eos_token_id": 3,
}
_ARCEE = _LLAMA | {
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "relu2",
    "bos_token_id": None,  # as for StarCoder 2
    "eos_token_id": None,
}
_GRANITE = {
    "embedding": "embedding_multiplier",
    "attention": "attention_multiplier",
    "residual": "residual_multiplier",
    "logits_divisor": "logits_scaling",
}


def _gemma_scalar(values: Mapping[str, Any], largest: int) -> dict[str, Any]:
    """What Gemma's scores are divided by the root of, which GGUF leaves out: a head's features but
    for the 27B, whose layers are so many, and whose files go by ``hidden_size / heads``."""
    if values["num_hidden_layers"] != largest:
        return {"query_pre_attn_scalar": values["head_dim"]}
    return {"query_pre_attn_scalar": values["hidden_size"] // values["num_attention_heads"]}


_GEMMA_GGUF = GGUFFamily(
    architecture="gemma2",
    names={
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    norm_offset=1.0,
    metadata={
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "rope.freq_base_swa": "rope_local_base_freq",
    },
    additions=lambda values: _gemma_scalar(values, 46),
)
_LLAMA_GGUF = GGUFFamily(architecture="llama", interleaved=True)

_GEMMA2_FAMILY = Family(
    module="gemma2",
    model_type="gemma2",
    defaults=_GEMMA2,
    windows=_all_but_every_second,
    reads=("attention_bias",),
    act_key="hidden_activation",
    specific=GemmaConfig,
    gguf=_GEMMA_GGUF,
)

_GEMMA3_FAMILY = dataclasses.replace(
    _GEMMA2_FAMILY,
    module="gemma3",
    model_type="gemma3_text",
    defaults=_GEMMA3,
    windows=_all_but_every_nth,
    rope_theta=1e6,
    rope_local_base_freq=1e4,
    gguf=dataclasses.replace(
        _GEMMA_GGUF,
        architecture="gemma3",
        additions=lambda values: _gemma_scalar(values, 62),
    ),
)

#: ``architectures[0]`` of config.json -> how to read the rest of it, and where the layers are.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        module="llama",
        model_type="llama",
        defaults=_LLAMA,
        windows=_never,
        reads=("attention_bias", "mlp_bias"),
        gguf=_LLAMA_GGUF,
    ),
    "MistralForCausalLM": Family(
        module="mistral", model_type="mistral", defaults=_MISTRAL, windows=_as_stated
    ),
    "MixtralForCausalLM": Family(
        module="mixtral",
        model_type="mixtral",
        defaults=_MIXTRAL,
        windows=_everywhere,
        specific=ExpertsConfig,
        rope_theta=1e6,
        gguf=dataclasses.replace(
            _LLAMA_GGUF,
            names={
                "ffn_gate_inp": "block_sparse_moe.gate",
                "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
                "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
                "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            },
            metadata={
                "expert_count": "num_local_experts",
                "expert_used_count": "num_experts_per_tok",
            },
        ),
    ),
    "Qwen2ForCausalLM": Family(
        module="qwen2",
        model_type="qwen2",
        defaults=_QWEN2,
        windows=_late_layers,
        gguf=GGUFFamily(architecture="qwen2"),
    ),
    "Qwen3ForCausalLM": Family(
        module="qwen3",
        model_type="qwen3",
        defaults=_QWEN2 | {"head_dim": 128},
        windows=_late_layers,
        reads=("attention_bias",),
        gguf=GGUFFamily(architecture="qwen3"),
    ),
    "Phi3ForCausalLM": Family(
        module="phi3",
        model_type="phi3",
        defaults=_PHI3,
        windows=_everywhere,
        partial_rotary=True,
        rope_aliases={"su": "longrope", "yarn": "longrope"},
        original_max_position_embeddings=4096,
        gguf=GGUFFamily(
            architecture="phi3",
            names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        ),
    ),
    "Gemma2ForCausalLM": _GEMMA2_FAMILY,
    "Gemma3ForCausalLM": _GEMMA3_FAMILY,
    "Qwen2MoeForCausalLM": Family(
        module="qwen2_moe",
        model_type="qwen2_moe",
        defaults=_QWEN2_MOE,
        windows=_every_second_of_the_first,
        reads=("attention_bias",),
        specific=ExpertsConfig,
        aliases={"num_local_experts": "num_experts", "attention_bias": "qkv_bias"},
    ),
    "Qwen3MoeForCausalLM": Family(
        module="qwen3_moe",
        model_type="qwen3_moe",
        defaults=_QWEN3_MOE,
        windows=_everywhere_if_used,
        reads=("attention_bias",),
        specific=ExpertsConfig,
        aliases={"num_local_experts": "num_experts"},
    ),
    "GptOssForCausalLM": Family(
        module="gpt_oss",
        model_type="gpt_oss",
        defaults=_GPT_OSS,
        windows=_all_but_every_second,
        reads=("attention_bias",),
        specific=ClampedExpertsConfig,
        rope_theta=150000.0,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        stacked_experts=True,
    ),
    "SmolLM3ForCausalLM": Family(
        module="smollm3",
        model_type="smollm3",
        defaults=_SMOLLM3,
        windows=_those_without_positions,
        reads=("attention_bias", "mlp_bias"),
        rope_theta=2e6,
        rotated=_by_list_or_interval,
    ),
    "Olmo2ForCausalLM": Family(
        module="olmo2",
        model_type="olmo2",
        defaults=_OLMO2,
        windows=_never,
        reads=("attention_bias",),
    ),
    "Olmo3ForCausalLM": Family(
        module="olmo3",
        model_type="olmo3",
        defaults=_OLMO2 | {"sliding_window": 4096},
        windows=_all_but_every_fourth,
        reads=("attention_bias",),
        rope_theta=5e5,
        rope_local_base_freq=5e5,
    ),
    "GraniteForCausalLM": Family(
        module="granite",
        model_type="granite",
        defaults=_LLAMA | {"attention_multiplier": 1.0},
        windows=_never,
        reads=("attention_bias", "mlp_bias"),
        multipliers=_GRANITE,
    ),
    "GraniteMoeForCausalLM": Family(
        module="granitemoe",
        model_type="granitemoe",
        defaults=_LLAMA | {"attention_multiplier": 1.0},
        windows=_never,
        reads=("attention_bias",),
        specific=ExpertsConfig,
        multipliers=_GRANITE,
        stacked_experts=True,
    ),
    "CohereForCausalLM": Family(
        module="cohere",
        model_type="cohere",
        defaults=_COHERE,
        windows=_never,
        reads=("attention_bias",),
        rope_theta=5e5,
        rope_interleaved=True,
        aliases={"rms_norm_eps": "layer_norm_eps"},
        multipliers={"logits": "logit_scale"},
    ),
    "Cohere2ForCausalLM": Family(
        module="cohere2",
        model_type="cohere2",
        defaults=_COHERE | {"sliding_window": 4096},
        windows=_all_but_every_fourth,
        reads=("attention_bias",),
        rope_interleaved=True,
        rotated=_sliding_ones_only,
        aliases={"rms_norm_eps": "layer_norm_eps"},
        multipliers={"logits": "logit_scale"},
    ),
    "Glm4ForCausalLM": Family(
        module="glm4",
        model_type="glm4",
        defaults=_GLM4,
        windows=_never,
        reads=("attention_bias",),
        partial_rotary=True,
        partial_rotary_factor=0.5,
        rope_interleaved=True,
    ),
    "Starcoder2ForCausalLM": Family(
        module="starcoder2",
        model_type="starcoder2",
        defaults=_STARCODER2,
        windows=_everywhere,
        reads=("attention_bias", "mlp_bias"),
        aliases={
            "rms_norm_eps": "norm_epsilon",
            "attention_bias": "use_bias",
            "mlp_bias": "use_bias",
        },
    ),
    "GemmaForCausalLM": Family(
        module="gemma",
        model_type="gemma",
        defaults=_GEMMA,
        windows=_never,
        reads=("attention_bias",),
    ),
    "Exaone4ForCausalLM": Family(
        module="exaone4",
        model_type="exaone4",
        defaults=_EXAONE4,
        windows=_all_but_every_fourth,
        rotated=_sliding_ones,
    ),
    "SeedOssForCausalLM": Family(
        module="seed_oss",
        model_type="seed_oss",
        defaults=_SEED_OSS,
        windows=_never,
        reads=("attention_bias", "mlp_bias"),
        specific=OutputBiasConfig,
    ),
    "Ernie4_5ForCausalLM": Family(
        module="ernie4_5",
        model_type="ernie4_5",
        defaults=_ERNIE4_5,
        windows=_never,
        reads=("attention_bias", "mlp_bias"),
        rope_theta=5e5,
        rope_interleaved=True,
        aliases={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
    ),
    "StableLmForCausalLM": Family(
        module="stablelm",
        model_type="stablelm",
        defaults=_STABLELM,
        windows=_never,
        reads=("attention_bias",),
        specific=ResidualConfig,
        partial_rotary=True,
        partial_rotary_factor=0.25,
        aliases={"rms_norm_eps": "layer_norm_eps", "attention_bias": "use_qkv_bias"},
    ),
    "PhiForCausalLM": Family(
        module="phi",
        model_type="phi",
        defaults=_PHI,
        windows=_never,
        reads=("attention_bias", "mlp_bias"),
        specific=ResidualConfig,
        partial_rotary=True,
        partial_rotary_factor=0.5,
        aliases={"rms_norm_eps": "layer_norm_eps"},
        names=(TensorNames(norm="model.final_layernorm"),),
    ),
    "GPTNeoXForCausalLM": Family(
        module="gpt_neox",
        model_type="gpt_neox",
        defaults=_GPT_NEOX,
        windows=_never,
        reads=("attention_bias", "mlp_bias"),
        specific=ResidualConfig,
        partial_rotary=True,
        partial_rotary_factor=0.25,
        aliases={
            "rms_norm_eps": "layer_norm_eps",
            "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_pct",
        },
        names=(
            TensorNames(
                layers="gpt_neox.layers",
                table="gpt_neox.embed_in",
                norm="gpt_neox.final_layer_norm",
                head="embed_out",
            ),
        ),
    ),
    "NemotronForCausalLM": Family(
        module="nemotron",
        model_type="nemotron",
        defaults=_NEMOTRON,
        windows=_never,
        reads=("attention_bias", "mlp_bias"),
        partial_rotary=True,
        partial_rotary_factor=0.5,
        aliases={"rms_norm_eps": "norm_eps"},
    ),
    "ArceeForCausalLM": Family(
        module="arcee",
        model_type="arcee",
        defaults=_ARCEE,
        windows=_never,
        reads=("attention_bias", "mlp_bias"),
    ),
    "Gemma3ForConditionalGeneration": dataclasses.replace(
        _GEMMA3_FAMILY,
        model_type="gemma3",
        text_config="text_config",
        names=(
            TensorNames(
                layers="language_model.model.layers",
                table="language_model.model.embed_tokens",
                norm="language_model.model.norm",
                head="language_model.lm_head",
            ),
            TensorNames(
                layers="model.language_model.layers",
                table="model.language_model.embed_tokens",
                norm="model.language_model.norm",
            ),
        ),
        gguf=None,
    ),
}
