"""Gemma 3n (Google, 2025), text only: several hidden states per token, of which each layer computes
one and predicts the others (AltUp: Baykal et al., 2023, arXiv 2301.13310), low-rank residual paths
(LAuReL: Menghani et al., 2024, arXiv 2411.07501), sparse MLPs, layers that use earlier layers' keys
and values, and an embedding for each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn

from exkv.batch import Batch
from exkv.checkpoint import ModelConfig, windows
from exkv.checkpoint.families import Family, beside_images
from exkv.checkpoint.gguf.names import GGUFFamily
from exkv.checkpoint.shared_keys import SharedKeysConfig
from exkv.checkpoint.value_checks import check_at_most, check_size, is_int, is_number, set_floats
from exkv.layers import MLP, GatedMLP, Linear, PlainModule
from exkv.layers.attention import Attend
from exkv.layers.linear import weight
from exkv.layers.shared_keys import SharedKeysAttention
from exkv.ops.activations import ACTIVATIONS

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

#: More hidden states per token than any model has.
_MOST_STREAMS = 64
#: The smallest mean square by which a projected hidden state is scaled.
_LEAST = 1e-5


@dataclass(frozen=True, kw_only=True)
class Gemma3nConfig(SharedKeysConfig):
    """A token has ``altup_num_inputs`` hidden states, of which layers compute the one at
    ``altup_active_idx``; with ``altup_correct_scale`` it has a factor where it meets the layer's
    embedding. ``laurel_rank`` is the rank of the residual path. ``intermediate_size`` is one for
    all layers or a list. ``activation_sparsity_pattern`` is the share of an MLP's gates set to
    zero, one number or a list; None for 0.95 in the first ten of more than ten layers.
    ``final_logit_softcapping`` c bounds logits x as c * tanh(x / c)."""

    num_hidden_layers: int = 35
    num_kv_shared_layers: int = 15
    altup_num_inputs: int = 4
    altup_active_idx: int = 0
    altup_correct_scale: bool = True
    laurel_rank: int = 64
    intermediate_size: int | tuple[int, ...] = 16384
    activation_sparsity_pattern: float | tuple[float, ...] | None = None
    final_logit_softcapping: float | None = 30.0

    def __post_init__(self) -> None:
        SharedKeysConfig.__post_init__(self)
        for key in ("altup_num_inputs", "laurel_rank", "hidden_size_per_layer_input"):
            check_size(key, getattr(self, key))
        check_at_most("altup_num_inputs", self.altup_num_inputs, _MOST_STREAMS)
        active = self.altup_active_idx
        if not is_int(active) or not 0 <= active < self.altup_num_inputs:
            raise ValueError(
                f"altup_active_idx {active!r} must be one of altup_num_inputs "
                f"{self.altup_num_inputs}, from 0 on"
            )
        set_floats(self, ("final_logit_softcapping",), null=True)
        sizes = self._of_layers("intermediate_size", is_int)
        for size in sizes:
            check_size("intermediate_size", size)
        object.__setattr__(self, "intermediate_size", sizes)
        if self.activation_sparsity_pattern is None:
            first = 10 if self.num_hidden_layers > 10 else 0
            shares = (0.95,) * first + (0.0,) * (self.num_hidden_layers - first)
            object.__setattr__(self, "activation_sparsity_pattern", shares)
        shares = self._of_layers("activation_sparsity_pattern", is_number)
        if not all(0 <= share < 1 for share in shares):
            raise ValueError(
                f"activation_sparsity_pattern must be shares from 0 to below 1, not {shares!r}"
            )
        object.__setattr__(self, "activation_sparsity_pattern", shares)

    def _of_layers(self, key: str, good: Callable[[Any], bool]) -> tuple[Any, ...]:
        """One number for all layers, or one per layer."""
        stated = getattr(self, key)
        stated = (stated,) * self.num_hidden_layers if good(stated) else stated
        fits = isinstance(stated, list | tuple) and len(stated) == self.num_hidden_layers
        if not fits or not all(map(good, stated)):
            raise ValueError(
                f"{key} must be a number, or one for each of num_hidden_layers "
                f"{self.num_hidden_layers}, not {stated!r}"
            )
        return tuple(stated)

    @property
    def streams(self) -> int:
        return self.altup_num_inputs

    def inner(self, layer: int) -> int:
        """Intermediate size of a layer's MLP."""
        return _at(self.intermediate_size, layer)

    def sparsity(self, layer: int) -> float:
        """The share of a layer's gates that are set to zero."""
        return _at(self.activation_sparsity_pattern, layer)

    def kind_of_layer(self, layer: int) -> Hashable:
        return layer == 0, self.inner(layer), self.sparsity(layer)


def _at(values: Any, layer: int) -> Any:
    return values[layer]


class SparseGatedMLP(GatedMLP):
    """A gated MLP whose gates are lowered by a threshold and clamped at zero: the value that the
    share ``sparsity`` of them would be below if they were normally distributed."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, inner: int, sparsity: float
    ) -> None:
        super().__init__(config, dtype, inner)
        self.deviations = NormalDist().inv_cdf(sparsity)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        factor = torch.tensor(self.deviations, dtype=gate.dtype, device=gate.device)
        cutoff = gate.std(-1, correction=0, keepdim=True).mul_(factor)
        cutoff.add_(gate.mean(-1, keepdim=True))
        gate = gate.sub_(cutoff).relu_()
        ACTIVATIONS[self.act].gate(gate, self.up_proj(x))
        return self.down_proj(gate)


class AltUp(PlainModule):
    """What a layer does with the hidden states (B, T, N, hidden) before and after it computes one
    of them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, norm: MakeNorm) -> None:
        super().__init__()
        settings, hidden = config.settings(Gemma3nConfig), config.hidden_size
        count = settings.streams
        self.active = settings.altup_active_idx
        self.modality_router = Linear(hidden, count, bias=False, dtype=dtype)
        self.prediction_coefs = Linear(count, count * count, bias=False, dtype=dtype)
        self.correction_coefs = Linear(count, count, bias=False, dtype=dtype)
        self.correct_output_scale = weight(hidden, dtype=dtype)
        self.scaled = settings.altup_correct_scale
        self.router_norm, self.scale = norm(hidden), 1 / hidden

    def _modalities(self, x: Tensor) -> Tensor:
        """x (B, T, hidden) -> (B, T, N)."""
        routed = self.router_norm(x).mul_(self.scale)
        return self.modality_router(routed).tanh_()

    def predict(self, states: Tensor) -> Tensor:
        """Each hidden state as a sum of all, weighted according to the active one."""
        modalities = self._modalities(states[..., self.active, :])
        factors = self.prediction_coefs(modalities)
        size = states.shape[-2]
        return (factors.unflatten(-1, (size, size)) @ states).add_(states)

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """Correct all of them by the newly computed active one (B, T, hidden)."""
        modalities = self._modalities(computed)
        factors = self.correction_coefs(modalities).add_(1)
        error = computed - predicted[..., self.active, :]
        return (error.unsqueeze(-2) * factors.unsqueeze(-1)).add_(predicted)

    def output(self, states: Tensor) -> Tensor:
        """The active one, with its factor."""
        active = states[..., self.active, :]
        return active * self.get_parameter("correct_output_scale") if self.scaled else active


class Laurel(PlainModule):
    """A low-rank residual path."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, norm: MakeNorm) -> None:
        super().__init__()
        hidden, rank = config.hidden_size, config.settings(Gemma3nConfig).laurel_rank
        self.linear_left = Linear(hidden, rank, bias=False, dtype=dtype)
        self.linear_right = Linear(rank, hidden, bias=False, dtype=dtype)
        self.post_laurel_norm = norm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.post_laurel_norm(self.linear_right(self.linear_left(x))).add_(x)


class Gemma3nLayer(PlainModule):
    """Attention beside a low-rank path, and an MLP, on one hidden state, by which the others are
    corrected; then the layer's embedding for all but the first. x (B, T, carried) -> the same."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        attention: SharedKeysAttention,
        mlp: MLP,
        norm: MakeNorm,
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.carried, self.layer = Carried.of(config), attention.layer
        self.streams = config.settings(Gemma3nConfig).streams
        self.self_attn, self.mlp = attention, mlp
        self.altup, self.laurel = AltUp(config, dtype, norm), Laurel(config, dtype, norm)
        self.input_layernorm = norm(hidden)
        self.post_attention_layernorm = norm(hidden)
        self.pre_feedforward_layernorm = norm(hidden)
        self.post_feedforward_layernorm = norm(hidden)
        self.layer_embedding = LayerEmbedding(config, dtype, norm)
        self.layer_embeddings = self.altup_projections = None
        if self.layer == 0:
            self.layer_embeddings = LayerEmbeddings(config, dtype, norm)
            self.altup_projections = _projections(config, dtype)

    def forward(self, x: Tensor, batch: Batch, cache: Attend) -> Tensor:
        carried, attention = self.carried, self.self_attn
        states = carried.hidden_of(x).unflatten(-1, (self.streams, -1))
        if self.layer_embeddings is not None and self.altup_projections is not None:
            tokens = states[..., 0, :].contiguous()
            embeddings = self.layer_embeddings(tokens, x[..., carried.embeddings])
            states = _expanded(tokens, self.altup_projections)
            x = carried.joined(states.flatten(-2), x, embeddings=embeddings)
            del embeddings, tokens
        given = None if attention.source is None else carried.keys_of(x, attention.source)
        states = self.altup.predict(states)
        active = states[..., self.altup.active, :].contiguous()
        normed = self.input_layernorm(active)
        beside = self.laurel(normed)
        attended, made = attention(normed, batch, cache, given)
        del normed, given  # free them before the MLP
        active = self.post_attention_layernorm(attended).add_(active).add_(beside).mul_(2**-0.5)
        del attended, beside
        normed = self.pre_feedforward_layernorm(active)
        active.add_(self.post_feedforward_layernorm(self.mlp(normed)))
        states = self.altup.correct(states, active)
        embedding = carried.embedding_of(x, self.layer)
        states[..., 1:, :] += self.layer_embedding(self.altup.output(states), embedding).unsqueeze(
            -2
        )
        shown = self.layer, made
        return carried.joined(
            states.flatten(-2), x, made=shown if self.layer in carried.keys else None
        )


def _projections(config: ModelConfig, dtype: torch.dtype) -> nn.ModuleList:
    count, hidden = config.settings(Gemma3nConfig).streams - 1, config.hidden_size
    return nn.ModuleList(Linear(hidden, hidden, bias=False, dtype=dtype) for _ in range(count))


def _magnitude(x: Tensor) -> Tensor:
    """Mean squares (B, T, 1)."""
    return x.square().mean(-1, keepdim=True)


def _of_size(x: Tensor, size: Tensor) -> Tensor:
    """x (B, T, hidden), scaled to a root mean square."""
    return x * size / _magnitude(x).clamp_(min=_LEAST).sqrt_()


def _expanded(tokens: Tensor, projections: nn.ModuleList) -> Tensor:
    """Embeddings (B, T, hidden) -> the hidden states (B, T, N, hidden): projections of equal
    magnitude."""
    size = _magnitude(tokens).sqrt_()
    others = (_of_size(project(tokens), size) for project in projections)
    return torch.stack([tokens, *others], dim=-2)


class Gemma3nHead(CarryingHead):
    """A head for the mean of the hidden states, all but the first projected to its magnitude."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, **options: Any) -> None:
        super().__init__(config, dtype, **options)
        self.altup_unembed_projections = _projections(config, dtype)

    def forward(self, x: Tensor, batch: Batch, cache: Attend | None) -> Tensor:
        count = len(self.altup_unembed_projections) + 1
        states = self.carried.hidden_of(x).unflatten(-1, (count, -1))
        first = states[..., 0, :]
        size = _magnitude(first).sqrt_()
        others = [
            _of_size(project(states[..., i + 1, :].contiguous()), size)
            for i, project in enumerate(self.altup_unembed_projections)
        ]
        mean = torch.stack([first, *others]).mean(0)
        del states, first, others  # free them before the logits
        return Head.forward(self, mean, batch, cache)


def _mlp(config: ModelConfig, dtype: torch.dtype, layer: int) -> MLP:
    settings = config.settings(Gemma3nConfig)
    inner, sparsity = settings.inner(layer), settings.sparsity(layer)
    return (
        SparseGatedMLP(config, dtype, inner, sparsity)
        if sparsity
        else GatedMLP(config, dtype, inner)
    )


def _head(config: ModelConfig, dtype: torch.dtype, norm: MakeNorm) -> Head:
    softcap = config.settings(Gemma3nConfig).final_logit_softcapping
    return Gemma3nHead(config, dtype, norm=norm, softcap=softcap)


def _windows(values: Mapping[str, Any]) -> windows.WindowOfLayers:
    """Every fifth layer attends to everything, unless ``layer_types`` says otherwise."""
    window = windows.sliding_window(values)
    return windows.by_layer(values, window, lambda layer: (layer + 1) % 5 != 0)


def _of_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Shares of gates from how many deviations from the mean their threshold is."""
    stated = values.get("activation_sparsity_pattern")
    if not isinstance(stated, list) or not all(isinstance(each, float) for each in stated):
        return {}
    return {"activation_sparsity_pattern": [NormalDist().cdf(each) for each in stated]}


FAMILY = Family(
    architecture="Gemma3nForCausalLM",
    model_type="gemma3n_text",
    units=carrying(
        Decoder(
            attention=SharedKeysAttention,
            mlp_of_layer=_mlp,
            layer=Gemma3nLayer,
            norm=rms_norm,
            head_norm=rms_norm,
            scale=gemma_scale,
            head=_head,
            rename=NAMES,
            outside=(*OUTSIDE, "altup_projections."),
        )
    ),
    defaults={
        "vocab_size": 262400,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
    windows=_windows,
    reads=("attention_bias",),
    act_key="hidden_activation",
    specific=Gemma3nConfig,
    rope_theta=1e6,
    rope_local_base_freq=1e4,
    gguf=GGUFFamily(
        architecture="gemma3n",
        names={
            **gemma2.GGUF.names,
            **GGUF_NAMES,
            "altup_correct_coef": "altup.correction_coefs",
            "altup_correct_scale.weight": "altup.correct_output_scale",
            "altup_predict_coef": "altup.prediction_coefs",
            "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm",
            "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        ends={
            **GGUF_ENDS,
            "altup_proj": "model.altup_projections.{}",
            "altup_unembd_proj": "model.altup_unembed_projections.{}",
        },
        metadata={
            **GGUF_METADATA,
            "altup.active_idx": "altup_active_idx",
            "altup.num_inputs": "altup_num_inputs",
            "activation_sparsity_scale": "activation_sparsity_pattern",
        },
        sizes={**GGUF_SIZES, "blk.0.laurel_l.weight": "laurel_rank"},
        additions=_of_gguf,
    ),
)
#: The text model of one with images and audio, as published checkpoints have it.
WITH_IMAGES = beside_images(FAMILY, "Gemma3nForConditionalGeneration", "gemma3n")
