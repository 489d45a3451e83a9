"""MiMo V2 Flash (Xiaomi, 2025): windows in most layers, which have learned sinks and twice as many
heads of keys and values; values narrower than keys; experts by corrected sigmoids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from exkv.batch import Batch
from exkv.checkpoint import ModelConfig, windows
from exkv.checkpoint.families import Family
from exkv.checkpoint.gguf.names import EXPERTS, GGUFFamily
from exkv.checkpoint.value_checks import check_size, is_int, set_floats
from exkv.layers import Attention, Linear
from exkv.layers.attention import Attend
from exkv.layers.linear import weight

from . import glm4_moe
from .decoder import Decoder
from .exaone_moe import LayerTypeExpertsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MiMoConfig(LayerTypeExpertsConfig):
    """Values of a head have ``v_head_dim`` features and are multiplied by
    ``attention_value_scale``; layers with a window have ``swa_num_key_value_heads``."""

    v_head_dim: int = 128
    attention_value_scale: float = 0.707
    swa_num_key_value_heads: int = 8

    def __post_init__(self) -> None:
        LayerTypeExpertsConfig.__post_init__(self)
        set_floats(self, ("attention_value_scale",))
        check_size("v_head_dim", self.v_head_dim)

    def heads_of_layer(self, layer: int, *, slides: bool) -> tuple[int | None, int | None]:
        return self.swa_num_key_value_heads if slides else None, None


class NarrowValuesAttention(Attention):
    """Attention whose values have fewer features than its keys; a cache stores them padded with
    zeros to the keys' size. Layers with a window have sinks, see
    :class:`exkv.layers.SinkAttention`.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, layer: int) -> None:
        super().__init__(config, dtype, layer=layer, out_bias=False)
        settings, hidden = config.settings(MiMoConfig), config.hidden_size
        self.width, self.scale = settings.v_head_dim, settings.attention_value_scale
        heads, (kv_heads, _) = config.query_heads(layer), config.heads(layer)
        bias = config.attention_bias
        self.v_proj = Linear(hidden, kv_heads * self.width, bias=bias, dtype=dtype)
        self.o_proj = Linear(heads * self.width, hidden, bias=False, dtype=dtype)
        self.sinks = weight(heads, dtype=dtype) if config.slides(layer) else None

    def forward(self, x: Tensor, batch: Batch, cache: Attend) -> Tensor:
        q, k, v = self.project(x)
        v = v.unflatten(-1, (-1, self.width)).mul_(self.scale)
        v = F.pad(v, (0, self.head_dim - self.width)).flatten(2)
        q, k, v = self.rotated([q, k, v], batch)
        attended = self.attend(q, k, v, batch, cache)
        return self.o_proj(attended[..., : self.width].flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, cache: Attend) -> Tensor:
        params = replace(self.params, sinks=self._parameters.get("sinks"))
        return cache.attend(q, k, v, batch, params)


def _derived(values: Mapping[str, Any]) -> dict[str, Any]:
    """Twice as many heads in layers with a window; a window of so many tokens before a token plus
    its own; and the meaning of null."""
    for key in ("num_key_value_heads", "head_dim", "v_head_dim"):
        check_size(key, values[key])
    width, narrow = values["head_dim"], values["v_head_dim"]
    if narrow > width:
        raise ValueError(
            f"v_head_dim {narrow} is more than head_dim {width}: exkv stores values that are "
            "as wide as keys, or narrower"
        )
    heads = values.get("swa_num_key_value_heads") or 2 * values["num_key_value_heads"]
    found: dict[str, Any] = {"swa_num_key_value_heads": heads}
    if (before := values.get("sliding_window_size")) is not None:
        check_size("sliding_window_size", before)
        found["sliding_window"] = before + 1
    for key in ("routed_scaling_factor", "attention_value_scale"):
        found[key] = 1.0 if values[key] is None else values[key]
    return found


def _layers(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    """Windows except in the first layer and every sixth, unless ``layer_types`` says otherwise."""
    window = windows.sliding_window(values)
    return windows.by_layer(values, window, lambda layer: layer > 0 and (layer + 1) % 6 != 0)


def _of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """A file's window, which llama.cpp counts with a token's own and Xiaomi without it, so that it
    is one larger; and per-layer settings by type of layer. Lists may include the layers for
    multi-token prediction at the end."""
    types, heads = values.get("layer_types"), values.get("num_key_value_heads")
    window: Any = values.get("sliding_window")
    part = values.get("partial_rotary_factor")
    of_kind = {windows.FULL_ATTENTION: values.get("rope_theta")}
    of_kind[windows.SLIDING_ATTENTION] = values.get("rope_local_base_freq")
    found: dict[str, Any] = {
        "sliding_window": window + 1 if is_int(window) else window,
        "rope_parameters": {
            kind: {"rope_theta": theta, "partial_rotary_factor": part}
            for kind, theta in of_kind.items()
        },
        **dict.fromkeys(("rope_theta", "partial_rotary_factor", "rope_local_base_freq")),
    }
    if isinstance(types, list) and is_int(values.get("num_hidden_layers")):
        found["layer_types"] = types[: values["num_hidden_layers"]]
    if isinstance(types, list) and isinstance(heads, list) and heads:
        by_type = dict(zip(types, heads, strict=False))
        found["num_key_value_heads"] = by_type.get(windows.FULL_ATTENTION, heads[0])
        found["swa_num_key_value_heads"] = by_type.get(windows.SLIDING_ATTENTION)
    return found


_PART = 0.334

FAMILY = Family(
    architecture="MiMoV2FlashForCausalLM",
    model_type="mimo_v2_flash",
    units=Decoder(
        attention=NarrowValuesAttention,
        mlp_of_layer=glm4_moe.MLP_OF_LAYER,
        rename={**glm4_moe.NAMES, "self_attn.sinks": "self_attn.attention_sink_bias"},
    ),
    defaults={
        "vocab_size": 152576,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "attention_value_scale": 0.707,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": 129,
        "moe_intermediate_size": 2048,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 0,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "bos_token_id": 1,
        "eos_token_id": None,
    },
    derived=_derived,
    windows=_layers,
    reads=("attention_bias",),
    refuses={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    specific=MiMoConfig,
    rope_theta=5e6,
    rope_local_base_freq=1e4,
    rope_parameters={
        windows.FULL_ATTENTION: {"rope_theta": 5e6, "partial_rotary_factor": _PART},
        windows.SLIDING_ATTENTION: {"rope_theta": 1e4, "partial_rotary_factor": _PART},
    },
    partial_rotary_factor=_PART,
    aliases={"num_local_experts": "n_routed_experts"},
    gguf=GGUFFamily(
        architecture="mimo2",
        names={
            **EXPERTS,
            "exp_probs_b.bias": glm4_moe.NAMES["mlp.correction"],
            "attn_sinks.weight": "self_attn.attention_sink_bias",
        },
        metadata={
            "attention.value_length": "v_head_dim",
            "attention.value_scale": "attention_value_scale",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        additions=_of_gguf,
    ),
)
