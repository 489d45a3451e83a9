"""MiniMax-Text-01 and M1 (MiniMax, 2025, arXiv 2501.08313): lightning attention, each of whose
heads decays at its own rate, in most layers, and attention in the others; experts; and residual
paths that begin after the norms and have factors. MiniMax's own config.json uses other key names
than transformers' class."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from exkv.batch import Batch
from exkv.checkpoint import ExpertsConfig, ModelConfig, StateTensor, windows
from exkv.checkpoint.families import Family
from exkv.checkpoint.value_checks import check_layers, check_size, is_int, set_floats
from exkv.layers import MLP, Attention, Experts, Linear, PlainModule, RMSNorm
from exkv.layers.recurrent import KeepsState
from exkv.ops.activations import ACTIVATIONS

from .decoder import Decoder, DecoderLayer, MakeNorm, ResidualLayer

_FACTORS = tuple(
    f"{part}_{factor}_factor"
    for part in ("full_attn", "linear_attn", "mlp")
    for factor in ("alpha", "beta")
)
#: Epsilon of the norm after lightning attention, whatever the config says about the others.
_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniMaxSettings(ExpertsConfig):
    """Factors of the residual path (alpha) and of what is added to it (beta). transformers sums
    ``block_size`` tokens at once, which affects only rounding."""

    block_size: int = 256
    full_attn_alpha_factor: float = 1.0
    full_attn_beta_factor: float = 1.0
    linear_attn_alpha_factor: float = 1.0
    linear_attn_beta_factor: float = 1.0
    mlp_alpha_factor: float = 1.0
    mlp_beta_factor: float = 1.0

    def __post_init__(self) -> None:
        ExpertsConfig.__post_init__(self)
        check_size("block_size", self.block_size)
        set_floats(self, _FACTORS)

    def kind_of_layer(self, layer: int) -> Hashable:
        return layer  # lightning attention decays at the layer's own rates

    def factors(self, part: str) -> tuple[float, float]:
        """Alpha and beta of "full_attn", "linear_attn" or "mlp"."""
        return getattr(self, f"{part}_alpha_factor"), getattr(self, f"{part}_beta_factor")


class LightningAttention(PlainModule):
    """Linear attention with one state per head, which decays by a constant factor per token,
    followed by a norm over all heads and a gate. It is state space duality with steps of one
    (:func:`exkv.ops.ssd.ssd`), in which each head has its own keys and queries."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, layer: int) -> None:
        super().__init__()
        self.heads, self.head_dim, self.act = (
            *(config.num_attention_heads, config.head_dim, config.hidden_act),
        )
        self.kept = states(config)
        #: Slower from layer to layer; transformers adds the small number.
        self.rate = 1 - layer / (config.num_hidden_layers - 1 + 1e-5) + 1e-5
        size = self.heads * self.head_dim
        self.qkv_proj = Linear(config.hidden_size, 3 * size, bias=False, dtype=dtype)
        self.output_gate = Linear(config.hidden_size, size, bias=False, dtype=dtype)
        self.norm = RMSNorm(size, _EPS, dtype=dtype)
        self.out_proj = Linear(size, config.hidden_size, bias=False, dtype=dtype)

    def forward(self, x: Tensor, batch: Batch, cache: KeepsState) -> Tensor:
        """x (B, T, hidden), normed -> (B, T, hidden)."""
        kept = cache.states(batch, self.kept, x.dtype)
        mixed = ACTIVATIONS[self.act].apply(self.qkv_proj(x))
        q, k, v = mixed.unflatten(-1, (self.heads, -1)).chunk(3, dim=-1)
        out = self.norm(kept.advance("recurrent", self._recurred, q, k, v).flatten(2))
        return self.out_proj(out.mul_(self.output_gate(x).sigmoid_()))

    def _recurred(
        self, q: Tensor, k: Tensor, v: Tensor, state: Tensor, new_lens: Tensor | None
    ) -> Tensor:
        head = torch.arange(1, self.heads + 1, dtype=torch.float32, device=q.device)
        slopes = torch.exp2(head.mul_(-8 / self.heads)).mul_(-self.rate)
        steps = slopes.new_ones(q.shape[:3])
        skip = torch.zeros_like(slopes)
        return torch.ops.exkv.ssd(v, steps, slopes, k, q, skip, state, new_lens)


def states(config: ModelConfig) -> tuple[StateTensor, ...]:
    """The state of a layer of lightning attention."""
    shape = (config.num_attention_heads, config.head_dim, config.head_dim)
    return (StateTensor("recurrent", shape, torch.float32),)


class _Layer(ResidualLayer):
    """Attention and experts, each beside a residual path that begins after its norm."""

    norms = DecoderLayer.norms

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        attention: nn.Module,
        mlp: MLP,
        norm: MakeNorm | None = None,
    ) -> None:
        super().__init__(config, dtype, attention, mlp, norm)
        linear = isinstance(attention, LightningAttention)
        settings = config.settings(MiniMaxSettings)
        self.of_attention = settings.factors("linear_attn" if linear else "full_attn")
        self.of_mlp = settings.factors("mlp")

    def forward(self, x: Tensor, batch: Batch, cache: Any) -> Tensor:
        x = self.input_layernorm(x)
        x = _added(x, self.self_attn(x, batch, cache), self.of_attention)
        x = self.post_attention_layernorm(x)
        return _added(x, self.mlp(x), self.of_mlp)


def _added(x: Tensor, y: Tensor, factors: tuple[float, float]) -> Tensor:
    """alpha x + beta y, stored in x."""
    alpha, beta = factors
    return x.mul_(alpha).add_(y.mul_(beta))


def _attention(config: ModelConfig, dtype: torch.dtype, *, layer: int) -> nn.Module:
    kind = LightningAttention if config.state(layer) else Attention
    return kind(config, dtype, layer=layer)


def _windows(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    """The stated ``layer_types``, or lightning attention in every other layer."""
    check_layers(values["num_hidden_layers"])
    layers, types = values["num_hidden_layers"], values.get("layer_types")
    linear, full = windows.STATES[0], windows.FULL_ATTENTION
    if types is None:
        types = [linear if layer % 2 else full for layer in range(layers)]
    return None, windows.check_layer_types(types, layers, None, (linear,))


def _derived(values: Mapping[str, Any]) -> dict[str, Any]:
    """Types of layers as MiniMax states them: 0 for lightning attention, 1 for attention."""
    types = values.get("attn_type_list")
    if types is None:
        return {}
    if not isinstance(types, list) or not all(is_int(each) and each in (0, 1) for each in types):
        raise ValueError(f"attn_type_list must be a list of 0 and 1, not {types!r}")
    kinds = windows.STATES[0], windows.FULL_ATTENTION
    return {"layer_types": [kinds[each] for each in types]}


FAMILY = Family(
    architecture="MiniMaxForCausalLM",
    model_type="minimax",
    published=("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
    units=Decoder(
        attention=_attention,
        mlp=Experts,
        layer=_Layer,
        rename={"mlp.": "block_sparse_moe."},
    ),
    defaults={
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    },
    windows=_windows,
    specific=MiniMaxSettings,
    derived=_derived,
    refuses={"sliding_window": None, "postnorm": True, "shared_intermediate_size": 0},
    aliases={
        **{f"full_attn_{x}_factor": f"layernorm_full_attention_{x}" for x in ("alpha", "beta")},
        **{f"linear_attn_{x}_factor": f"layernorm_linear_attention_{x}" for x in ("alpha", "beta")},
        **{f"mlp_{x}_factor": f"layernorm_mlp_{x}" for x in ("alpha", "beta")},
    },
    rotary_dim="rotary_dim",
    partial_rotary_factor=1.0,
    ignores=frozenset(
        ("norm_topk_prob", "moe_intermediate_size", "shared_expert_intermediate_size")
        + ("mlp_only_layers", "decoder_sparse_step")
    ),
    rope_theta=1e6,
    states=states,
)
