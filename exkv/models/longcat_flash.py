"""LongCat Flash (Meituan, 2025, arXiv 2509.01322): each layer has latent attention and an MLP
twice, and experts between the two whose outputs are added after the second; some experts return
their input.

Here each half is a layer. The output of the first half's experts is carried to the second, in one
tensor with the hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from exkv.batch import Batch
from exkv.checkpoint import ExpectedTensor, ModelConfig, RoutedExpertsConfig, has_tensors
from exkv.checkpoint.families import Family
from exkv.checkpoint.value_checks import check_layers, check_size, is_int
from exkv.layers import MLP, Experts, LatentAttention
from exkv.layers.attention import Attend
from exkv.layers.linear import ExactLinear, weight
from exkv.layers.routing import Router
from exkv.weights import FormatOf, Source, formats_of

from . import qwen2_moe
from .decoder import Decoder, DecoderLayer, Head, MakeNorm, TokenEmbedding
from .deepseek_v2 import ups_of
from .units import UnitSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LongcatConfig(RoutedExpertsConfig):
    """In addition to the experts, ``zero_expert_num`` that return their input."""

    zero_expert_num: int = 256

    def __post_init__(self) -> None:
        RoutedExpertsConfig.__post_init__(self)
        if not is_int(self.zero_expert_num) or self.zero_expert_num < 0:
            raise ValueError(
                f"zero_expert_num must be an integer of at least 0, not {self.zero_expert_num!r}"
            )

    def kind_of_layer(self, layer: int) -> Hashable:
        return layer % 2

    def carried(self, config: ModelConfig) -> int:
        return config.hidden_size


class ScaledLatentAttention(LatentAttention):
    """Latent attention whose queries and latent vectors are scaled up from their ranks to the
    hidden size."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, layer: int) -> None:
        super().__init__(config, dtype, layer=layer)
        self.second = layer % 2 == 1
        low, hidden = self.sizes.q_lora_rank, config.hidden_size
        assert low is not None, "checked when the config was read"
        self.params = replace(self.params, scale=self.params.scale * (hidden / low) ** 0.5)
        self.latent_scale = (hidden / self.sizes.kv_lora_rank) ** 0.5


class ZeroExperts(Experts):
    """Experts by a corrected softmax, some of which return their input."""

    has_op = False

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(config, dtype, exact=True)
        settings = config.settings(LongcatConfig)
        self.router = Router(
            top_k=settings.num_experts_per_tok,
            normalize=False,
            scale=settings.routed_scaling_factor,
        )
        count = settings.num_local_experts + settings.zero_expert_num
        self.gate = ExactLinear(config.hidden_size, count, bias=False, dtype=dtype)
        self.correction = weight(count, dtype=torch.float32)

    @property
    def count(self) -> int:
        return self.gate.size[0]

    def expert(self, index: int) -> nn.Module | None:
        return self.experts[index] if index < len(self.experts) else None

    def output(self, expert: nn.Module | None, inputs: Tensor) -> Tensor:
        return inputs if expert is None else super().output(expert, inputs)


class HalfLayer(DecoderLayer):
    """One half of a layer; x (B, T, 2 * hidden) has hidden states, and what is carried."""

    shortcut: ZeroExperts | None

    def forward(self, x: Tensor, batch: Batch, cache: Attend) -> Tensor:
        hidden, carried = x.chunk(2, dim=-1)
        attended = self.self_attn(self.input_layernorm(hidden.contiguous()), batch, cache)
        hidden, normed = self.post_attention_layernorm.of_sum(hidden.contiguous(), attended)
        del attended  # free it before the MLP
        out = torch.empty_like(x)
        first, second = out.chunk(2, dim=-1)
        if self.shortcut is not None:
            torch.add(hidden, self.mlp(normed), out=first)
            second.copy_(self.shortcut(normed))
        else:
            second.zero_()
            torch.add(hidden.add_(self.mlp(normed)), carried, out=first)
        return out


class _Embedding(TokenEmbedding):
    """Token embeddings, with zeros carried."""

    def forward(self, ids: Tensor, batch: Batch, cache: Attend | None) -> Tensor:
        tokens = super().forward(ids, batch, cache)
        return torch.cat((tokens, torch.zeros_like(tokens)), dim=-1)


class _Head(Head):
    """Logits of the hidden states only."""

    def forward(self, x: Tensor, batch: Batch, cache: Attend | None) -> Tensor:
        return super().forward(x.chunk(2, dim=-1)[0].contiguous(), batch, cache)


def _layer(
    config: ModelConfig,
    dtype: torch.dtype,
    attention: ScaledLatentAttention,
    mlp: MLP,
    norm: MakeNorm,
) -> HalfLayer:
    layer = HalfLayer(config, dtype, attention, mlp, norm)
    layer.shortcut = None if attention.second else ZeroExperts(config, dtype)
    return layer


def _names(config: ModelConfig, layer: int) -> dict[str, str]:
    """Checkpoint names of the parts of a half of a layer."""
    half = layer % 2
    modules = ("self_attn", "input_layernorm", "post_attention_layernorm")
    return {
        "mlp.": f"mlps.{half}.",
        **{f"{each}.": f"{each}.{half}." for each in modules},
        "shortcut.gate": "mlp.router.classifier",
        "shortcut.correction": "mlp.router.e_score_correction_bias",
        "shortcut.experts.": "mlp.experts.",
        **qwen2_moe.NAMES,
    }


def _made(
    config: ModelConfig,
    dtype: torch.dtype,
    name: str,
    layer: nn.Module,
    *,
    ups: Callable[[str, LatentAttention], list[Source]],
    unused: FormatOf | None,
) -> list[Source]:
    assert isinstance(layer, HalfLayer)
    attention = layer.self_attn
    assert isinstance(attention, LatentAttention)
    sources = ups(f"{name}.self_attn.{0 if layer.shortcut is not None else 1}", attention)
    if unused is not None and layer.shortcut is not None:
        sources.append(_with_unused(config, name, unused))
    return sources


def _with_unused(config: ModelConfig, name: str, formats: FormatOf) -> Source:
    """The correction; reading it also accounts for matrices that transformers saves for experts
    without any, and doesn't use."""
    settings = config.settings(LongcatConfig)
    count, inner = settings.num_local_experts, settings.moe_intermediate_size or 0
    total = count + settings.zero_expert_num
    bias, parameter = f"{name}.mlp.router.e_score_correction_bias", "shortcut.correction"
    stored = {bias: ExpectedTensor.of_floats((total,), torch.float32)}
    size = inner, config.hidden_size
    for expert in range(count, total):
        for each in ("gate_proj", "up_proj"):
            matrix = f"{name}.mlp.experts.{expert}.{each}"
            found = formats(matrix, size).stored(size)
            stored |= {f"{matrix}.{tensor}": expected for tensor, expected in found.items()}
    return Source(
        stored=stored, parameters=(parameter,), convert=lambda found: {parameter: found[bias]}
    )


def _units(config: ModelConfig, dtype: torch.dtype) -> list[UnitSpec]:
    first = f"model.layers.0.mlp.experts.{config.settings(LongcatConfig).num_local_experts}."
    unused = formats_of(config, dtype) if has_tensors(config, first) else None
    return Decoder(
        attention=ScaledLatentAttention,
        layer=_layer,
        embedding=_Embedding,
        head=_Head,
        rename_of_layer=_names,
        parts=2,
        made=partial(_made, ups=ups_of(config, dtype), unused=unused),
    )(config, dtype)


def _halves(values: Mapping[str, Any]) -> dict[str, Any]:
    """Two layers for each of ``num_layers``."""
    both = values["num_hidden_layers"]
    check_layers(both)
    count = values.get("num_layers", both // 2)
    check_size("num_layers", count)
    check_size("q_lora_rank", values["q_lora_rank"])
    return {"num_hidden_layers": 2 * count, "zero_expert_num": values["zero_expert_num"] or 0}


FAMILY = Family(
    architecture="LongcatFlashForCausalLM",
    model_type="longcat_flash",
    units=_units,
    defaults={
        "vocab_size": 131072,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "num_hidden_layers": 56,
        "num_attention_heads": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "moe_intermediate_size": 2048,
        "num_local_experts": 512,
        "num_experts_per_tok": 12,
        "zero_expert_num": 256,
        "routed_scaling_factor": 6.0,
    },
    derived=_halves,
    reads=("attention_bias",),
    refuses={
        **{"router_bias": False, "zero_expert_type": "identity"},
        **{"mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    },
    specific=LongcatConfig,
    ignores=frozenset(
        (
            *("n_group", "topk_group", "moe_norm_min", "norm_topk_prob", "n_shared_experts"),
            *("first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers"),
            "shared_expert_intermediate_size",
        )
    ),
    rope_theta=1e7,
    rope_interleaved=True,
    latent=True,
    aliases={
        "intermediate_size": "ffn_hidden_size",
        "moe_intermediate_size": "expert_ffn_hidden_size",
        "num_local_experts": "n_routed_experts",
        "num_experts_per_tok": "moe_topk",
    },
)
