"""Nemotron-H and Nemotron 3 Nano and Super (NVIDIA, 2025): each layer is Mamba 2, attention without
positions, an MLP, or experts, after one norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from exkv.batch import Batch
from exkv.checkpoint import ModelConfig, RoutedExpertsConfig, windows
from exkv.checkpoint.families import Family, TensorNames
from exkv.checkpoint.gguf.names import most
from exkv.checkpoint.mamba import Mamba2Config
from exkv.checkpoint.value_checks import check_size, set_floats
from exkv.layers import MLP, Attention, Linear, Mamba2, PlainMLP, PlainModule
from exkv.layers.attention import Attend
from exkv.layers.descriptions import (
    ExpertsBlock,
    Layer,
    PlainBlock,
    describe,
    describes,
    try_describe,
)
from exkv.layers.mlp import Experts, experts_block
from exkv.layers.split_experts import Meanwhile
from exkv.ops.activations import activated
from exkv.ops.experts import Routing

from .decoder import Decoder, MakeNorm, rms_norm
from .granitemoehybrid import GGUF_MAMBA, mamba_states, of_inner

#: The letters of ``hybrid_override_pattern``.
_LETTERS = {"M": "linear_attention", "E": "moe", "*": windows.FULL_ATTENTION, "-": "mlp"}


@dataclass(frozen=True, kw_only=True)
class OneOfManyConfig(RoutedExpertsConfig, Mamba2Config):
    """Mamba 2 layers, whose steps are at least ``time_step_min``, and layers of experts that work
    on ``moe_latent_size`` features; None for the hidden size."""

    time_step_min: float = 1e-3
    moe_latent_size: int | None = None

    def __post_init__(self) -> None:
        Mamba2Config.__post_init__(self)
        RoutedExpertsConfig.__post_init__(self)
        set_floats(self, ("time_step_min",))
        if self.moe_latent_size is not None:
            check_size("moe_latent_size", self.moe_latent_size)

    @property
    def step_limits(self) -> tuple[float, float]:
        low, high = self.time_step_limit
        return max(low, self.time_step_min), high


class PlainExpert(nn.Module):
    """An expert without a gate; ``PlainExperts`` runs it."""

    def __init__(self, features: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up_proj = Linear(features, inner, bias=False, dtype=dtype)
        self.down_proj = Linear(inner, features, bias=False, dtype=dtype)


class PlainExperts(Experts):
    """Experts without gates, optionally between two projections, beside an MLP that all tokens
    take."""

    has_op = False

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(config, dtype, sigmoid=True, corrected=True, exact=True)
        settings = config.settings(OneOfManyConfig)
        hidden, inner = config.hidden_size, settings.moe_intermediate_size
        assert inner is not None, "the family's default is a number"
        latent, count = settings.moe_latent_size, settings.num_local_experts
        self.experts = nn.ModuleList(
            PlainExpert(latent or hidden, inner, dtype) for _ in range(count)
        )
        self.shared_expert = PlainMLP(config, dtype, settings.shared_expert_intermediate_size)
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if latent is not None:
            self.fc1_latent_proj = Linear(hidden, latent, bias=config.mlp_bias, dtype=dtype)
            self.fc2_latent_proj = Linear(latent, hidden, bias=config.mlp_bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.beside(x, self.shared_expert)

    def run(self, x: Tensor, routing: Routing, meanwhile: Meanwhile | None = None) -> Tensor:
        before, after = self.fc1_latent_proj, self.fc2_latent_proj
        if before is None or after is None:
            return self.sum(x, routing, meanwhile)
        return after(self.sum(before(x), routing, meanwhile))

    def output(self, expert: nn.Module | None, inputs: Tensor) -> Tensor:
        assert isinstance(expert, PlainExpert)
        return expert.down_proj(activated(expert.up_proj(inputs), self.act))


@describes(PlainExperts)
def _experts(mlp: PlainExperts) -> ExpertsBlock:
    experts = [
        PlainBlock(up=describe(each.up_proj), down=describe(each.down_proj), act=mlp.act)
        for each in cast(list[PlainExpert], list(mlp.experts))
    ]
    before, after = (
        None if each is None else describe(each)
        for each in (mlp.fc1_latent_proj, mlp.fc2_latent_proj)
    )
    shared = describe(mlp.shared_expert)
    return replace(experts_block(mlp, experts), shared=shared, before=before, after=after)


class OneLayer(PlainModule):
    """A token mixer or an MLP, beside a residual path and after a norm; ``forward`` maps x (B, T,
    hidden) to the same shape."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        attention: nn.Module | None,
        mlp: MLP | None,
        norm: MakeNorm | None = None,
    ) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm = (norm or rms_norm(config, dtype))(config.hidden_size)

    def forward(self, x: Tensor, batch: Batch, cache: Attend) -> Tensor:
        normed = self.input_layernorm(x)
        if self.mlp is not None:
            return self.mlp(normed).add_(x)
        assert self.self_attn is not None
        return self.self_attn(normed, batch, cache).add_(x)


@describes(OneLayer)
def _one_layer(layer: OneLayer) -> Layer:
    attention, mlp = (
        None if part is None else try_describe(part) or part
        for part in (layer.self_attn, layer.mlp)
    )
    norm = describe(layer.input_layernorm)
    return Layer(
        attention=attention,
        mlp=mlp,
        before_attention=None if attention is None else norm,
        after_attention=None,
        before_mlp=None if mlp is None else norm,
        after_mlp=None,
    )


def _mixer(
    config: ModelConfig, dtype: torch.dtype, *, layer: int, **options: Any
) -> nn.Module | None:
    state = config.state(layer)
    if state is None:
        return Attention(config, dtype, layer=layer, **options)
    return Mamba2(config, dtype, act="silu") if state else None


def _mlp(config: ModelConfig, dtype: torch.dtype, layer: int) -> MLP | None:
    made = {"mlp": PlainMLP, "moe": PlainExperts}.get(config.layer_types[layer])
    return made(config, dtype) if made else None


def _types(values: Mapping[str, Any]) -> Any:
    """The layers' types: as stated, from the letters of a pattern, or one of each."""
    types = values.get("layer_types")
    if types is not None:
        return windows.renamed(types)
    pattern = values.get("hybrid_override_pattern", "ME*-")
    if not isinstance(pattern, str) or not set(pattern) <= _LETTERS.keys():
        raise ValueError(
            f"hybrid_override_pattern must be of {', '.join(_LETTERS)}, a letter a layer, not "
            f"{pattern!r:.80}"
        )
    return [_LETTERS[letter] for letter in pattern]


def _windows(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    types, states = _types(values), (windows.STATES[0], *windows.STATELESS)
    return None, windows.check_layer_types(types, values["num_hidden_layers"], None, states)


def _derived(values: Mapping[str, Any]) -> dict[str, Any]:
    """As many layers as have a type, whatever the config states."""
    types = _types(values)
    return {"num_hidden_layers": len(types)} if isinstance(types, list | tuple) else {}


#: Checkpoint names of the parts of a layer.
NAMES = {
    "mlp.correction": "mixer.gate.e_score_correction_bias",
    "mlp.shared_expert.": "mixer.shared_experts.",
    "self_attn.": "mixer.",
    "mlp.": "mixer.",
    "input_layernorm": "norm",
}


def _of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """A layer's type, from its key heads and the size of its MLP, of which it has one or
    neither."""
    heads, inner = values.get("num_key_value_heads"), values.get("intermediate_size")
    found = {**of_inner(values), "num_key_value_heads": most(heads)}
    found["intermediate_size"] = most(inner)
    if not isinstance(heads, list) or not isinstance(inner, list):
        return found
    if not values.get("num_local_experts"):  # and no layer has any
        found |= {"num_local_experts": 1, "num_experts_per_tok": 1}
    mlp = "moe" if values.get("num_local_experts") else "mlp"
    linear, *_ = windows.STATES
    types = [
        windows.FULL_ATTENTION if own else mlp if size else linear
        for own, size in zip(heads, inner, strict=False)
    ]
    if len(types) != values["num_hidden_layers"]:
        raise ValueError(
            f"attention.head_count_kv and feed_forward_length name {len(heads)} and {len(inner)} "
            f"layers, and there are {values['num_hidden_layers']!r}"
        )
    return {**found, "layer_types": types}


FAMILY = Family(
    architecture="NemotronHForCausalLM",
    model_type="nemotron_h",
    units=Decoder(attention=_mixer, mlp_of_layer=_mlp, layer=OneLayer, rename=NAMES),
    defaults={
        "vocab_size": 131072,
        "intermediate_size": 21504,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "relu2",
        "mlp_hidden_act": "relu2",
        "mamba_n_groups": 8,
        "mamba_d_state": 128,
        "moe_intermediate_size": 7688,
        "shared_expert_intermediate_size": 7688,
        "pad_token_id": 0,
    },
    windows=_windows,
    reads=("mlp_bias",),
    # Whatever is stated, transformers' attention has no bias and no window, and one MLP is shared.
    refuses={
        **{"attention_bias": False, "sliding_window": None, "mamba_hidden_act": "silu"},
        "n_shared_experts": 1,
    },
    act_key="mlp_hidden_act",
    rotated=lambda values, types: (False,) * len(types),
    specific=OneOfManyConfig,
    ignores=frozenset(
        ("n_shared_experts", "first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step")
    ),
    aliases={
        "layer_types": "layers_block_type",
        "rms_norm_eps": "layer_norm_epsilon",
        "num_local_experts": "n_routed_experts",
        "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
        "mamba_n_heads": "mamba_num_heads",
        "mamba_d_head": "mamba_head_dim",
        "mamba_n_groups": "n_groups",
        "mamba_d_state": "ssm_state_size",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_proj_bias": "use_bias",
    },
    names=(
        TensorNames(layers="backbone.layers", table="backbone.embeddings", norm="backbone.norm_f"),
        TensorNames(),  # of GGUF files
    ),
    states=mamba_states,
    derived=_derived,
    gguf=replace(
        GGUF_MAMBA,
        architecture="nemotron_h",
        mixture="nemotron_h_moe",
        names={
            "attn_norm": "norm",
            **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
            "attn_output": "mixer.o_proj",
            **{own: name.replace("mamba.", "mixer.") for own, name in GGUF_MAMBA.names.items()},
            **{f"ffn_{part}": f"mixer.{part}_proj" for part in ("up", "down")},
            **{f"ffn_{part}_exps": f"mixer.experts.{{}}.{part}_proj" for part in ("up", "down")},
            **{f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
            "ffn_gate_inp": "mixer.gate",
            "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
            "ffn_latent_down": "mixer.fc1_latent_proj",
            "ffn_latent_up": "mixer.fc2_latent_proj",
        },
        interleaved=True,
        metadata={**GGUF_MAMBA.metadata, "moe_latent_size": "moe_latent_size"},
        additions=_of_gguf,
    ),
)
