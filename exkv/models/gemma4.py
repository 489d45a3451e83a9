"""Gemma 4 (Google, 2026), text only: different head sizes in the layers that attend to everything,
norms over heads of values, layers that use earlier layers' keys and values, an embedding for each
layer, and experts beside the MLP.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from exkv.batch import Batch
from exkv.checkpoint import ExpertsConfig, ModelConfig, windows
from exkv.checkpoint.families import Family, beside_images
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.checkpoint.shared_keys import SharedKeysConfig
from exkv.checkpoint.value_checks import check_size, is_int, set_floats
from exkv.layers import MLP, Experts, GatedMLP, PlainModule
from exkv.layers.attention import Attend
from exkv.layers.linear import weight
from exkv.layers.shared_keys import SharedKeysAttention, rms
from exkv.ops.experts import Routing

from . import gemma2
from .carried import (
    GGUF_ENDS,
    GGUF_METADATA,
    GGUF_NAMES,
    GGUF_SIZES,
    NAMES,
    OUTSIDE,
    Carried,
    CarryingHead,
    LayerEmbedding,
    LayerEmbeddings,
    carrying,
)
from .decoder import Decoder, Head, MakeNorm, rms_norm
from .gemma2 import gemma_scale
from .qwen3_vl_moe import stacked_experts

#: Keys that a layer's own config may have.
_OF_LAYERS = ("head_dim", "num_key_value_heads")


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(SharedKeysConfig, ExpertsConfig):
    """Heads of the layers that attend to everything have ``global_head_dim`` features; with
    ``attention_k_eq_v`` their values come from the same projection as their keys, and there are
    ``num_global_key_value_heads``, None for the config's. ``per_layer_config`` states both layer by
    layer, in place of these. ``use_double_wide_mlp`` doubles the MLPs of layers that use others'
    keys. With ``enable_moe_block`` there are experts beside every MLP. ``final_logit_softcapping``
    c bounds logits x as c * tanh(x / c)."""

    num_local_experts: int = None  # type: ignore[assignment]  # states so many without experts
    num_experts_per_tok: int = None  # type: ignore[assignment]
    global_head_dim: int | None = 512
    num_global_key_value_heads: int | None = None
    per_layer_config: tuple[tuple[int, tuple[tuple[str, int], ...]], ...] | None = None
    attention_k_eq_v: bool = False
    use_double_wide_mlp: bool = False
    enable_moe_block: bool = False
    final_logit_softcapping: float | None = None

    def __post_init__(self) -> None:
        if self.enable_moe_block:
            ExpertsConfig.__post_init__(self)
        SharedKeysConfig.__post_init__(self)
        set_floats(self, ("final_logit_softcapping",), null=True)
        for key in ("global_head_dim", "num_global_key_value_heads"):
            if getattr(self, key) is not None:
                check_size(key, getattr(self, key))
        object.__setattr__(self, "per_layer_config", _of_layers(self.per_layer_config))

    def heads_of_layer(self, layer: int, *, slides: bool) -> tuple[int | None, int | None]:
        if self.per_layer_config is not None:
            own = next((own for i, own in self.per_layer_config if i == layer), ())
            sizes = dict(own)
            return sizes.get("num_key_value_heads"), sizes.get("head_dim")
        if slides:
            return None, None
        heads = self.num_global_key_value_heads if self.attention_k_eq_v else None
        return heads, self.global_head_dim

    def kind_of_layer(self, layer: int) -> Hashable:
        return layer == 0 and self.hidden_size_per_layer_input > 0


def _of_layers(stated: Any) -> tuple[tuple[int, tuple[tuple[str, int], ...]], ...] | None:
    """``per_layer_config`` in an immutable form."""
    if stated is None or isinstance(stated, tuple):
        return stated
    if not isinstance(stated, Mapping):
        raise ValueError(f"per_layer_config must be an object, not {stated!r}")
    layers = []
    for layer, own in stated.items():
        if not str(layer).isdecimal() or not isinstance(own, Mapping):
            raise ValueError(f"per_layer_config: {layer!r} must be a layer with an object")
        for key, value in own.items():
            if key not in _OF_LAYERS:
                raise ValueError(
                    f"per_layer_config: layer {layer} states {key!r}; exkv knows "
                    f"{', '.join(_OF_LAYERS)} there"
                )
            check_size(f"{key} of layer {layer}", value)
        layers.append((int(layer), tuple(own.items())))
    return tuple(layers)


class _Experts(Experts):
    """Experts chosen by a router with its own norm and scale, from the state before the MLP."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        self.scale = weight(config.hidden_size, dtype=dtype)
        self.per_expert_scale = weight(config.settings(Gemma4Config).num_local_experts, dtype=dtype)
        self.root, self.eps = config.hidden_size**-0.5, config.rms_norm_eps

    def of(self, x: Tensor, normed: Tensor) -> Tensor:
        """x (B, T, hidden), from which experts are chosen, and the same normed as their input."""
        routing = self.counted(self.route(x.flatten(0, 1)))
        return self.run(normed.flatten(0, 1), routing).view_as(x)

    def route(self, x: Tensor) -> Routing:
        rated = rms(x, self.eps).mul_(self.get_parameter("scale")).mul_(self.root)
        routing = super().route(rated)
        factors = self.get_parameter("per_expert_scale")[routing.chosen]
        return Routing(chosen=routing.chosen, weights=routing.weights * factors)


class Gemma4Layer(PlainModule):
    """Attention, and an MLP with experts beside it, between norms; then the layer's embedding, and
    a common factor; x (B, T, carried) -> the same."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        attention: SharedKeysAttention,
        mlp: MLP,
        norm: MakeNorm,
    ) -> None:
        super().__init__()
        settings, hidden = config.settings(Gemma4Config), config.hidden_size
        self.carried, self.layer = Carried.of(config), attention.layer
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm = norm(hidden)
        self.post_attention_layernorm = norm(hidden)
        self.pre_feedforward_layernorm = norm(hidden)
        self.post_feedforward_layernorm = norm(hidden)
        self.layer_scalar = weight(1, dtype=dtype)
        self.layer_embeddings = self.layer_embedding = self.experts = None
        if settings.hidden_size_per_layer_input:
            self.layer_embedding = LayerEmbedding(config, dtype, norm)
            if self.layer == 0:
                self.layer_embeddings = LayerEmbeddings(config, dtype, norm)
        if settings.enable_moe_block:
            self.experts = _Experts(config, dtype)
            self.post_feedforward_layernorm_1 = norm(hidden)
            self.post_feedforward_layernorm_2 = norm(hidden)
            self.pre_feedforward_layernorm_2 = norm(hidden)

    def forward(self, x: Tensor, batch: Batch, cache: Attend) -> Tensor:
        carried, attention = self.carried, self.self_attn
        hidden = carried.hidden_of(x)
        embeddings = None
        if self.layer_embeddings is not None:
            embeddings = self.layer_embeddings(hidden, x[..., carried.embeddings])
            x = carried.joined(hidden, x, embeddings=embeddings)
            del embeddings
        given = None if attention.source is None else carried.keys_of(x, attention.source)
        attended, made = attention(self.input_layernorm(hidden), batch, cache, given)
        attended = self.post_attention_layernorm(attended)
        hidden, normed = self.pre_feedforward_layernorm.of_sum(hidden, attended)
        del attended, given  # free them before the MLP
        hidden = hidden.add_(self.post_feedforward_layernorm(self._fed_forward(hidden, normed)))
        if self.layer_embedding is not None:
            hidden.add_(self.layer_embedding(hidden, carried.embedding_of(x, self.layer)))
        hidden.mul_(self.get_parameter("layer_scalar"))
        shown = self.layer, made
        return carried.joined(hidden, x, made=shown if self.layer in carried.keys else None)

    def _fed_forward(self, hidden: Tensor, normed: Tensor) -> Tensor:
        """The MLP's output, plus the experts' if there are any."""
        out = self.mlp(normed)
        if self.experts is None:
            return out
        out = self.post_feedforward_layernorm_1(out)
        chosen = self.experts.of(hidden, self.pre_feedforward_layernorm_2(hidden))
        return out.add_(self.post_feedforward_layernorm_2(chosen))


def _attention(config: ModelConfig, dtype: torch.dtype, *, layer: int, **options: Any) -> nn.Module:
    alike = config.settings(Gemma4Config).attention_k_eq_v and not config.slides(layer)
    return SharedKeysAttention(config, dtype, layer=layer, keys_are_values=alike, **options)


def _mlp(config: ModelConfig, dtype: torch.dtype, layer: int) -> MLP:
    wide = config.settings(Gemma4Config).use_double_wide_mlp
    wide = wide and config.kv_source(layer) is not None
    return GatedMLP(config, dtype, config.intermediate_size * (2 if wide else 1))


def _head(config: ModelConfig, dtype: torch.dtype, norm: MakeNorm) -> Head:
    settings = config.settings(Gemma4Config)
    kind = Head if config.handed_on == config.hidden_size else CarryingHead
    return kind(config, dtype, norm=norm, softcap=settings.final_logit_softcapping)


def _windows(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    """Every sixth layer attends to everything, unless ``layer_types`` says otherwise; the last one
    always does, as in transformers."""
    window = windows.sliding_window(values)
    window, types = windows.by_layer(values, window, lambda layer: (layer + 1) % 6 != 0)
    types = (*types[:-1], windows.FULL_ATTENTION) if types else types
    return (window, types) if windows.SLIDING_ATTENTION in types else (None, ())


def _of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """What files state for layers that attend to everything, and for each layer, is stated for
    types of layers here; pairs that aren't rotated have a factor of their frequency."""
    found: dict[str, Any] = {
        "global_head_dim": values.get("head_dim"),
        "head_dim": values.get("swa_head_dim", values.get("head_dim")),
        "swa_head_dim": None,
        "enable_moe_block": bool(values.get("num_local_experts")),
    }
    heads, types = values.get("num_key_value_heads"), values.get("layer_types")
    if isinstance(heads, list) and isinstance(types, list):
        of_kind = dict(zip(types, heads, strict=False))
        found["num_key_value_heads"] = of_kind.get(windows.SLIDING_ATTENTION)
        found["num_global_key_value_heads"] = of_kind.get(windows.FULL_ATTENTION)
    inner = values.get("intermediate_size")
    if isinstance(inner, list) and inner and all(map(is_int, inner)):
        found |= {"intermediate_size": min(inner), "use_double_wide_mlp": True}
    factors = values.get("rope_scaling", {}).get("factors")
    if factors:
        part = sum(factor == 1 for factor in factors) / len(factors)
        found["rope_scaling"] = {"rope_type": "proportional", "partial_rotary_factor": part}
    return found


FAMILY = Family(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    units=carrying(
        Decoder(
            attention=_attention,
            mlp_of_layer=_mlp,
            layer=Gemma4Layer,
            norm=rms_norm,
            head_norm=rms_norm,
            scale=gemma_scale,
            head=_head,
            rename={
                **NAMES,
                "experts.gate": "router.proj",
                "experts.scale": "router.scale",
                "experts.per_expert_scale": "router.per_expert_scale",
            },
            outside=OUTSIDE,
            made=partial(stacked_experts, inputs_first=False, path="experts", module="experts"),
        )
    ),
    defaults={
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
    windows=_windows,
    reads=("attention_bias",),
    # Images attend in both directions; text doesn't.
    refuses={"use_bidirectional_attention": "vision"},
    act_key="hidden_activation",
    specific=Gemma4Config,
    ignores=frozenset(
        ("shared_expert_intermediate_size", "norm_topk_prob", "decoder_sparse_step")
        + ("mlp_only_layers",)
    ),
    aliases={"num_local_experts": "num_experts", "num_experts_per_tok": "top_k_experts"},
    rope_theta=1e6,
    rope_local_base_freq=1e4,
    rope_parameters={
        windows.FULL_ATTENTION: {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    },
    stacked_experts=True,
    gguf=GGUFFamily(
        architecture="gemma4",
        names={
            **gemma2.GGUF.names,
            **GGUF_NAMES,
            "layer_output_scale.weight": "layer_scalar",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "ffn_gate_exps": "experts.experts.{}.w1",
            "ffn_up_exps": "experts.experts.{}.w3",
            "ffn_down_exps": "experts.experts.{}.w2",
        },
        ends=GGUF_ENDS,
        metadata={**GGUF_METADATA, "attention.key_length_swa": "swa_head_dim"},
        sizes=GGUF_SIZES,
        additions=_of_gguf,
    ),
)
#: The text model of one with images or audio, as published checkpoints have it.
WITH_IMAGES = beside_images(FAMILY, "Gemma4ForConditionalGeneration", "gemma4")


@dataclass(frozen=True, kw_only=True)
class Gemma4UnifiedConfig(Gemma4Config):
    """Without experts and without layers' embeddings."""

    hidden_size_per_layer_input: int = 0


#: The same layers in a model that reads images and sounds without separate models for them.
UNIFIED = replace(
    FAMILY,
    architecture="Gemma4UnifiedForCausalLM",
    model_type="gemma4_unified_text",
    defaults={
        **FAMILY.defaults,
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
    },
    specific=Gemma4UnifiedConfig,
    ignores=FAMILY.ignores
    | {"hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block"}
    | {"num_local_experts", "num_experts_per_tok", "moe_intermediate_size"},
    aliases={},
    stacked_experts=False,
    gguf=None,  # in a file it is a Gemma 4
)
UNIFIED_WITH_IMAGES = beside_images(
    UNIFIED, "Gemma4UnifiedForConditionalGeneration", "gemma4_unified"
)
