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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts: of ``num_local_experts``, each token takes ``num_experts_per_tok``."""

    num_local_experts: int = 8
    num_experts_per_tok: int = 2

    def __post_init__(self) -> None:
        check_size("num_local_experts", self.num_local_experts)
        check_size("num_experts_per_tok", self.num_experts_per_tok)
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


#: What only one architecture has; see ``ModelConfig.specific``.
Specific = ExpertsConfig | GemmaConfig


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
        partial_rotary: whether positions may rotate a part of a head only.
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
    partial_rotary: bool = False
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    original_max_position_embeddings: int | None = None
    gguf: GGUFFamily | None = None

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
    "Gemma3ForCausalLM": dataclasses.replace(
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
    ),
}
