"""Step 3.7 Flash (StepFun, 2026), text only: a gate for each head, windows in three of four layers,
with their own positions and heads, and experts whose gates are bounded in some layers.

StepFun's files state settings by layer, transformers' by type of layer; both are supported.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from exkv.checkpoint import ModelConfig, windows
from exkv.checkpoint.families import BESIDE_IMAGES, Family
from exkv.checkpoint.gguf.names import EXPERTS, GGUFFamily, most, shared
from exkv.checkpoint.value_checks import check_layers, check_size, is_int, is_number, set_floats
from exkv.layers import MLP, Attention, Experts, GatedMLP, SharedExperts
from exkv.layers.descriptions import ExpertsBlock, NotDescribed, describes
from exkv.layers.low_rank import side_by_side
from exkv.layers.mlp import describe_shared
from exkv.ops.activations import ACTIVATIONS
from exkv.weights import Source, sliced_source

from . import laguna
from .decoder import Decoder, matrix_slice, rms_norm
from .laguna import HeadGatedAttention, HeadsByLayerConfig

_LIMITS = ("swiglu_limits", "swiglu_limits_shared")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig(HeadsByLayerConfig):
    """Bounds, by layer, of the gates and ups of experts, and of those of the shared expert or the
    MLP, 0 for none. Scores are divided by the square root of ``query_pre_attn_scalar``."""

    swiglu_limits: tuple[float, ...] | None = None
    swiglu_limits_shared: tuple[float, ...] | None = None
    query_pre_attn_scalar: float = 128.0

    def __post_init__(self) -> None:
        HeadsByLayerConfig.__post_init__(self)
        set_floats(self, ("query_pre_attn_scalar",))
        for key in _LIMITS:
            limits = getattr(self, key)
            if limits is None:
                continue
            if not isinstance(limits, list | tuple) or not all(map(_is_limit, limits)):
                raise ValueError(f"{key} must be a list of numbers, 0 or more, not {limits!r}")
            object.__setattr__(self, key, tuple(float(limit or 0) for limit in limits))

    def limits(self, layer: int) -> tuple[float, float]:
        """The bounds of experts in this layer, and of the shared one; infinity for none."""
        first, second = (getattr(self, key) or () for key in _LIMITS)
        experts, shared = (each[layer] if each else 0.0 for each in (first, second))
        return experts or torch.inf, shared or torch.inf

    def kind_of_layer(self, layer: int) -> Hashable:
        return HeadsByLayerConfig.kind_of_layer(self, layer), self.limits(layer)


def _is_limit(limit: Any) -> bool:
    return limit is None or is_number(limit) and limit >= 0


class LimitedMLP(GatedMLP):
    """down(min(act(gate(x)), limit) * up(x) within both limits)."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, inner: int | None, limit: float
    ) -> None:
        super().__init__(config, dtype, inner)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        gate, up = side_by_side(x, (self.gate_proj, self.up_proj))
        gate = limited(gate, up, self.act, self.limit)
        del up  # free it before the next projection
        return self.down_proj(gate)


def limited(gate: Tensor, up: Tensor, act: str, limit: float) -> Tensor:
    """The product of an activated gate and an up, both bounded; stored in the up."""
    active = ACTIVATIONS[act].apply(gate).clamp_(max=limit)
    return active.mul_(up.clamp_(-limit, limit))


class StepExperts(SharedExperts):
    """Experts by corrected sigmoids, bounded in this layer, and a shared one."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, layer: int) -> None:
        super().__init__(config, dtype, sigmoid=True, corrected=True, exact=True)
        settings = config.settings(StepConfig)
        self.limit, shared = settings.limits(layer)
        self.has_op = self.limit == torch.inf
        if shared < torch.inf:
            self.shared_expert = LimitedMLP(config, dtype, settings.shared_inner, shared)

    def combined(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.has_op:
            return super().combined(gate, up)
        return limited(gate, up, self.act, self.limit)


@describes(StepExperts)
def _described(mlp: StepExperts) -> ExpertsBlock:
    if not mlp.has_op:
        raise NotDescribed("experts with bounds")
    return describe_shared(mlp)  # which knows a shared one without bounds


def _mlp(config: ModelConfig, dtype: torch.dtype, layer: int) -> MLP:
    settings = config.settings(StepConfig)
    if not settings.is_dense(layer):
        return StepExperts(config, dtype, layer=layer)
    _, limit = settings.limits(layer)
    if limit == torch.inf:
        return GatedMLP(config, dtype)
    return LimitedMLP(config, dtype, config.intermediate_size, limit)


def _attention(config: ModelConfig, dtype: torch.dtype, **options: Any) -> Attention:
    scale = config.settings(StepConfig).query_pre_attn_scalar ** -0.5
    return HeadGatedAttention(config, dtype, scale=scale, **options)


def _experts(config: ModelConfig, dtype: torch.dtype, name: str, layer: nn.Module) -> list[Source]:
    """Experts of the layer that the checkpoint calls ``name``: all gates, all ups, all downs."""
    if not isinstance(layer.get_submodule("mlp"), Experts):
        return []
    settings, hidden = config.settings(StepConfig), config.hidden_size
    count, inner = settings.num_local_experts, settings.moe_intermediate_size or 0
    sizes = {"w1": (inner, hidden), "w3": (inner, hidden), "w2": (hidden, inner)}
    stored = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    return [
        sliced_source(
            f"{name}.moe.{stored[matrix]}.weight",
            (count, *size),
            dtype,
            [matrix_slice(layer, f"mlp.experts.{i}.{matrix}", itemgetter(i)) for i in range(count)],
        )
        for matrix, size in sizes.items()
    ]


# What config.json says ------------------------------------------------------------------------

#: StepFun's names of keys that transformers' files name differently.
_OTHERS = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "num_local_experts",
    "moe_top_k": "num_experts_per_tok",
}


def _by_layer(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of each layer: types of attention and MLP, heads, positions, bounds. Lists may
    include the layers for multi-token prediction at the end."""
    check_layers(values["num_hidden_layers"])
    count, more = values["num_hidden_layers"], values.get("num_nextn_predict_layers") or 0
    found = {ours: values[own] for own, ours in _OTHERS.items() if own in values}
    for key in ("layer_types", "mlp_layer_types", *_LIMITS):
        found[key] = stated = values.get(key)
        if isinstance(stated, list | tuple) and is_int(more) and len(stated) == count + more:
            found[key] = stated = stated[:count]
        if key in _LIMITS and isinstance(stated, list | tuple) and len(stated) != count:
            raise ValueError(f"{key} names {len(stated)} layers, and num_hidden_layers is {count}")
    if found["mlp_layer_types"] is None:
        sparse = _sparse(values.get("moe_layers_enum"), count)
        found["mlp_layer_types"] = ["sparse" if i in sparse else "dense" for i in range(count)]
    types = found["layer_types"]
    types = [windows.FULL_ATTENTION] * count if types is None else types
    if not isinstance(types, list | tuple) or len(types) != count:
        return found  # the reader of windows reports what is wrong
    found["num_attention_heads_per_layer"] = _heads(values, types)
    if values.get("query_pre_attn_scalar") is None:
        found["query_pre_attn_scalar"] = values["head_dim"]
    return found | _positions(values, types)


def _sparse(stated: Any, count: int) -> set[int]:
    """Layers with experts: a list, or a string of numbers with commas."""
    if stated is None:
        return set(range(3, count))
    try:
        items = stated.split(",") if isinstance(stated, str) else list(stated)
        return {int(each) for each in items if str(each).strip()}
    except (TypeError, ValueError):
        raise ValueError(
            f"moe_layers_enum must be layers with commas between them, not {stated!r}"
        ) from None


def _heads(values: Mapping[str, Any], types: Sequence[str]) -> list[int]:
    """Number of query heads in each layer."""
    heads, sliding = values["num_attention_heads"], values.get("num_sliding_attention_heads")
    own = values.get("per_layer_config")
    if own is not None:
        if not isinstance(own, dict) or any(
            not isinstance(each, dict) or each.keys() != {"num_attention_heads"}
            for each in own.values()
        ):
            raise ValueError(
                f"per_layer_config must have num_attention_heads for each layer, and nothing "
                f"else, not {own!r}"
            )
        layers = {int(layer): each["num_attention_heads"] for layer, each in own.items()}
        return [layers.get(layer, heads) for layer in range(len(types))]
    other = values.get("attention_other_setting") or {}
    if not isinstance(other, dict):
        raise ValueError(f"attention_other_setting must be an object, not {other!r}")
    if sliding is None:
        sliding = other.get("num_attention_heads", heads)
    check_size("num_sliding_attention_heads", sliding)
    return [sliding if kind == windows.SLIDING_ATTENTION else heads for kind in types]


def _positions(values: Mapping[str, Any], types: Sequence[str]) -> dict[str, Any]:
    """Rotary positions by type of layer, if stated by layer, or once for all."""
    kinds, stated = dict.fromkeys(types), values.get("rope_parameters")
    if isinstance(stated, dict) and all(isinstance(stated.get(kind), dict) for kind in kinds):
        return {"rope_scaling": None, "rope_theta": None}
    if stated is not None:
        raise ValueError(
            f"rope_parameters must have an object for each of {', '.join(kinds)}, not {stated!r}"
        )
    found: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    for key in ("rope_theta", "partial_rotary_factors"):
        each = values.get(key)
        each = each[: len(types)] if isinstance(each, list) else [each] * len(types)
        for kind in kinds:
            own = {x for x, other in zip(each, types, strict=True) if other == kind}
            if len(own) > 1:
                raise ValueError(
                    f"{key}: layers of the type {kind} have {sorted(own)}; exkv supports one for "
                    "each type of layers"
                )
            found[kind][key.removesuffix("s")] = own.pop()
    if windows.FULL_ATTENTION in found and values.get("rope_scaling"):
        found[windows.FULL_ATTENTION] |= values["rope_scaling"]
    return {"rope_parameters": found, "rope_scaling": None, "rope_theta": None}


def _of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Half of a head is rotated in layers that attend to everything, as in llama.cpp, and all of it
    in the others. Lists may include the layers for multi-token prediction at the end."""
    layers, types, heads = (
        values.get(key) for key in ("num_hidden_layers", "layer_types", "num_attention_heads")
    )
    scaling = values.get("rope_scaling", {})
    if factors := scaling.get("factors"):
        scaling = {**scaling, "factors": factors[: len(factors) // 2]}
    full = {"rope_theta": values.get("rope_theta"), "partial_rotary_factor": 0.5, **scaling}
    sliding = {"rope_theta": values.get("rope_local_base_freq")}
    found: dict[str, Any] = {
        "num_key_value_heads": most(values.get("num_key_value_heads")),
        "rope_parameters": {windows.FULL_ATTENTION: full, windows.SLIDING_ATTENTION: sliding},
        **dict.fromkeys(("rope_theta", "rope_scaling", "partial_rotary_factor")),
        "rope_local_base_freq": None,
    }
    for key in ("layer_types", *_LIMITS):
        if isinstance(values.get(key), list) and is_int(layers):
            found[key] = values[key][:layers]
    if isinstance(types, list) and isinstance(heads, list) and heads:
        of_kind = dict(zip(types, heads, strict=False))
        found["num_attention_heads"] = of_kind.get(windows.FULL_ATTENTION, heads[0])
        found["num_sliding_attention_heads"] = of_kind.get(windows.SLIDING_ATTENTION)
    return found


_norm = partial(rms_norm, offset=True)

FAMILY = Family(
    architecture="Step3p7ForConditionalGeneration",
    model_type="step3p7",
    units=Decoder(
        attention=_attention,
        mlp_of_layer=_mlp,
        norm=_norm,
        head_norm=_norm,
        rename={
            "mlp.shared_expert.": "share_expert.",
            "mlp.correction": "moe.router_bias",
            # The router; and dense layers, which have a different gate.
            "mlp.gate": "moe.gate",
            "moe.gate_proj": "mlp.gate_proj",
        },
        made=_experts,
    ),
    defaults={
        "vocab_size": 128815,
        "hidden_size": 4096,
        "intermediate_size": 11264,
        "num_hidden_layers": 45,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 288,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280,
        "shared_expert_intermediate_size": 1280,
        "n_shared_experts": 0,
        "pad_token_id": 1,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    derived=_by_layer,
    windows=laguna.as_stated,
    reads=("attention_bias", "mlp_bias"),
    refuses={"hidden_act": "silu", "gating": True},
    specific=StepConfig,
    ignores=laguna.FAMILY.ignores | {"first_k_dense_replace", "norm_topk_prob"},
    rope_local_base_freq=1e4,
    partial_rotary_factor=1.0,
    aliases={
        "num_local_experts": "n_routed_experts",
        "shared_expert_intermediate_size": "share_expert_dim",
        "routed_scaling_factor": "moe_router_scaling_factor",
    },
    stacked_experts=True,
    text_config="text_config",
    names=BESIDE_IMAGES,
    gguf=GGUFFamily(
        architecture="step35",
        names={
            **EXPERTS,
            **shared("share_expert"),
            "ffn_gate_inp": "moe.gate",
            "exp_probs_b.bias": "moe.router_bias",
            "ffn_gate_exps": "mlp.experts.{}.w1",
            "ffn_up_exps": "mlp.experts.{}.w3",
            "ffn_down_exps": "mlp.experts.{}.w2",
            "attn_gate": "self_attn.g_proj",
        },
        norm_offset=1.0,
        metadata={
            "rope.freq_base_swa": "rope_local_base_freq",
            "swiglu_clamp_exp": "swiglu_limits",
            "swiglu_clamp_shexp": "swiglu_limits_shared",
        },
        additions=_of_gguf,
    ),
)
