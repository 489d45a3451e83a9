"""How config.json differs by architecture: defaults for missing keys, keys under other names, and
settings that only one architecture has.

A :class:`Family` is defined beside its layers in ``exkv/models/<name>.py``; that package collects
those of all its files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .fields import Fields
from .gguf.names import GGUFFamily
from .value_checks import (
    check_at_most,
    check_bool,
    check_convolution,
    check_count,
    check_size,
    is_int,
    set_floats,
)
from .windows import WindowOfLayers, nowhere

if TYPE_CHECKING:
    from exkv.models.units import UnitSpec

    from .model_config import ModelConfig

#: A config.json's values with defaults filled in -> which layers have a sliding window.
Windows = Callable[[Mapping[str, Any]], WindowOfLayers]
#: The same values and the layers' types -> which layers have rotary positions; () for all.
Rotated = Callable[[Mapping[str, Any], tuple[str, ...]], tuple[bool, ...]]

#: Upper bound on heads of a layer's state, and on their features.
WIDEST_STATE = 1 << 16

#: transformers' defaults for a Llama.
LLAMA = {
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Specific:
    """Settings that only one architecture has, under their names in config.json; defaults are for
    files that leave them out. Booleans are checked."""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            if isinstance(each.default, bool):
                check_bool(each.name, getattr(self, each.name))

    def kind_of_layer(self, layer: int) -> Hashable:
        """What these settings decide by this layer's index; layers of equal kinds are alike."""
        return None

    def query_heads(self, layer: int, *, slides: bool) -> int | None:
        """Heads of queries in this layer; None for the config's."""
        return None

    def heads_of_layer(self, layer: int, *, slides: bool) -> tuple[int | None, int | None]:
        """Heads of keys and values in this layer, and features of a head; None for the
        config's."""
        return None, None

    def carried(self, config: ModelConfig) -> int:
        """Values a token that layers hand on beside the hidden state."""
        return 0


def check_state_sizes(config: Specific, keys: Iterable[str]) -> None:
    """ValueError unless these settings are sizes that a layer's state may have."""
    for key in keys:
        check_size(key, getattr(config, key))
        check_at_most(key, getattr(config, key), WIDEST_STATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig(Specific):
    """A mixture of ``num_local_experts`` experts, of which each token uses ``num_experts_per_tok``.

    Experts have ``moe_intermediate_size`` inner values, None for the config's intermediate_size;
    a shared expert that all tokens use has ``shared_expert_intermediate_size``, 0 for none.
    ``norm_topk_prob`` normalizes the weights of a token's experts. Layers whose number, counted
    from one, is not a multiple of ``decoder_sparse_step``, and ``mlp_only_layers``, have an MLP
    instead.
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
        if self.moe_intermediate_size is not None:
            check_size("moe_intermediate_size", self.moe_intermediate_size)
        if self.shared_expert_intermediate_size not in (None, 0):
            check_size("shared_expert_intermediate_size", self.shared_expert_intermediate_size)
        Specific.__post_init__(self)
        object.__setattr__(self, "mlp_only_layers", _layer_list(self.mlp_only_layers))
        if self.num_experts_per_tok > self.num_local_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} is more than num_local_experts "
                f"{self.num_local_experts}"
            )

    @property
    def shared_inner(self) -> int | None:
        """Inner values of the shared expert."""
        return self.shared_expert_intermediate_size

    def kind_of_layer(self, layer: int) -> Hashable:
        return self.is_dense(layer)

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has an MLP instead of experts."""
        return layer in self.mlp_only_layers or (layer + 1) % self.decoder_sparse_step != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExpertsConfig(ExpertsConfig):
    """Experts in ``n_group`` groups of equal size; a token's experts come from ``topk_group`` of
    them. Weights are divided by at least ``moe_norm_min`` and multiplied by
    ``routed_scaling_factor``. All tokens use ``n_shared_experts`` of the same size. The first
    ``first_k_dense_replace`` layers have an MLP instead."""

    n_group: int = 1
    topk_group: int = 1
    moe_norm_min: float = 1e-20
    routed_scaling_factor: float = 1.0
    n_shared_experts: int = 1
    first_k_dense_replace: int = 0
    #: How many of a group's best experts decide its rank.
    best_of_group: ClassVar[int] = 2

    def __post_init__(self) -> None:
        ExpertsConfig.__post_init__(self)
        set_floats(self, ("moe_norm_min", "routed_scaling_factor"))
        for key in ("n_shared_experts", "first_k_dense_replace"):
            check_count(key, getattr(self, key))
        for key in ("n_group", "topk_group"):
            check_size(key, getattr(self, key))
        self._check_groups()

    def _check_groups(self) -> None:
        size, rest = divmod(self.num_local_experts, self.n_group)
        few = self.topk_group < self.n_group
        if rest or self.topk_group > self.n_group or few and size < self.best_of_group:
            raise ValueError(
                f"topk_group {self.topk_group} of n_group {self.n_group} must be groups of equal "
                f"size, two or more of num_local_experts {self.num_local_experts} in each"
            )
        if self.num_experts_per_tok > self.topk_group * size:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} is more than the experts in "
                f"topk_group {self.topk_group} groups of {size}"
            )

    @property
    def shared_inner(self) -> int | None:
        return self.n_shared_experts * (self.moe_intermediate_size or 0)

    def is_dense(self, layer: int) -> bool:
        return layer < self.first_k_dense_replace or ExpertsConfig.is_dense(self, layer)


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
class Multipliers:
    """Factors, and a divisor (``logits_divisor``), of token embeddings, scores (None for 1 /
    sqrt(head_dim)), the outputs of attention and MLP, and logits."""

    embedding: float = 1.0
    attention: float | None = None
    residual: float = 1.0
    logits: float = 1.0
    logits_divisor: float = 1.0

    def __post_init__(self) -> None:
        set_floats(self, ("embedding", "residual", "logits", "logits_divisor"))
        set_floats(self, ("attention",), null=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScaling:
    """Queries at position p are multiplied by 1 + ``growth`` * log(1 + floor((p + ``offset``) /
    ``length``)), which sharpens attention in long texts (Meta, 2025: Llama 4; after Nakanishi,
    2025, scalable softmax); ``length`` and ``offset`` are in tokens."""

    growth: float
    length: int
    offset: int = 0

    def __post_init__(self) -> None:
        set_floats(self, ("growth",))
        check_size("length", self.length)


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor that a layer with a state keeps for each row of a cache; dtype None for the
    cache's."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    def __str__(self) -> str:
        kind = "" if self.dtype is None else f" {str(self.dtype).removeprefix('torch.')}"
        return f"{self.name}{kind} {list(self.shape)}"


@dataclass(frozen=True, kw_only=True)  # no slots: classes inherit it beside ExpertsConfig
class LinearAttentionConfig(Specific):
    """Layers of linear attention: ``linear_num_key_heads`` heads of queries and keys with
    ``linear_key_head_dim`` features, ``linear_num_value_heads`` of values with
    ``linear_value_head_dim``, after a convolution over ``linear_conv_kernel_dim`` tokens."""

    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32

    def __post_init__(self) -> None:
        Specific.__post_init__(self)
        check_state_sizes(self, (each.name for each in dataclasses.fields(LinearAttentionConfig)))
        check_convolution("linear_conv_kernel_dim", self.linear_conv_kernel_dim)
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads {self.linear_num_value_heads} is not a multiple of "
                f"linear_num_key_heads {self.linear_num_key_heads}"
            )

    @property
    def key_size(self) -> int:
        """Features of all heads' keys."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_size(self) -> int:
        """Features of all heads' values."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """The convolution's last inputs, and the recurrent state of each head."""
        inputs = 2 * self.key_size + self.value_size
        heads = self.linear_num_value_heads, self.linear_key_head_dim, self.linear_value_head_dim
        return (
            StateTensor("conv", (self.linear_conv_kernel_dim - 1, inputs)),
            StateTensor("recurrent", heads, torch.float32),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentHeads:
    """Multi-head latent attention (DeepSeek, 2024, arXiv 2405.04434): keys and values of all heads
    are projected from one latent vector a token, and keys have rotated features that all heads
    share; a cache stores these two. Sizes in features.

    Attributes:
        kv_lora_rank: size of the latent vector.
        qk_rope_head_dim: rotated features of a head's queries and keys.
        qk_nope_head_dim: their features without rotation.
        v_head_dim: features of a head's values.
        q_lora_rank: size of the vector from which queries are projected; None for the hidden state.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if value is not None or each.name != "q_lora_rank":
                check_size(each.name, value)
        for key in ("kv_lora_rank", "qk_rope_head_dim"):
            if getattr(self, key) % 2:
                raise ValueError(f"{key} {getattr(self, key)} must be even: features go in pairs")

    @property
    def qk_head_dim(self) -> int:
        """Features of a head's queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def stored(self) -> int:
        """Features that a cache stores a token: one head of keys, shared by all heads of
        queries."""
        return self.qk_rope_head_dim + self.kv_lora_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names in a checkpoint of the layers (before their number), the embedding table, the last norm
    and the head."""

    layers: str = "model.layers"
    table: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"


#: Names of a text model beside an image model, in older and newer checkpoints, and by itself.
BESIDE_IMAGES = (
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
    TensorNames(),
)


def beside_images(family: Family, architecture: str, model_type: str, **changes: Any) -> Family:
    """The text model of an architecture that also takes images or sound: ``family`` with these
    changes. Its GGUF files are named as the text model's, unless the changes say otherwise."""
    own: dict[str, Any] = {"text_config": "text_config", "names": BESIDE_IMAGES, "gguf": None}
    return replace(family, architecture=architecture, model_type=model_type, **own | changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPNames:
    """Names in a checkpoint of an MTP head's parts. ``{layer}`` is the layer after the last one,
    e.g. model.layers.61."""

    layer: str = "{layer}"
    embedding_norm: str = "{layer}.enorm"
    hidden_norm: str = "{layer}.hnorm"
    projection: str = "{layer}.eh_proj"
    norm: str = "{layer}.shared_head.norm"

    def of(self, layer: str) -> dict[str, str]:
        """Part -> name, where ``layer`` would be the model's next layer."""
        parts = (each.name for each in dataclasses.fields(self))
        return {part: getattr(self, part).format(layer=layer) for part in parts}


def _layer_list(layers: Any) -> tuple[int, ...]:
    if layers is None:
        return ()
    if not isinstance(layers, list | tuple) or not all(is_int(each) for each in layers):
        raise ValueError(f"mlp_only_layers must be a list of integers, not {layers!r}")
    return tuple(layers)


#: Keys of other models beside a text model.
_OTHER_MODELS = ("vision_config", "audio_config")
#: Keys beside the text model's config that override its own.
_SHARED = (
    *("model_type", "dtype", "torch_dtype", "quantization_config"),
    *("tie_word_embeddings", "eos_token_id"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to read the config.json of one architecture.

    Attributes:
        architecture: ``architectures[0]``; if that covers several text models, followed by a colon
            and this one's ``model_type``.
        model_type: the architecture's name in files without ``architectures``.
        published: other names of the architecture, in files from before transformers had the class.
        units: makes the model's units, in the order in which a token passes them.
        defaults: values of missing keys, where they differ from a Llama's.
        derived: values that follow from others (with defaults filled in).
        windows: which layers have a sliding window.
        reads: keys beyond those of every architecture.
        refuses: keys that change transformers' logits and that exkv doesn't support -> the value
            without effect, beside null.
        act_key: the key of the activation.
        learned_acts: activations with parameters in the checkpoint, which only its layers have.
        specific: the class of the settings that only this architecture has.
        ignores: settings of that class that it doesn't have.
        rope_theta: default base of rotary frequencies.
        rope_local_base_freq: default base of sliding layers, if they have their own.
        rope_parameters: default for files without any about rotary positions.
        partial_rotary_factor: default for the rotated part of a head; None if it is always the
            whole head.
        rotary_dim: alternative key with the number of rotated features.
        rope_interleaved: whether adjacent features are rotated as pairs, and not the two halves of
            a head.
        rotated: which layers have rotary positions.
        aliases: keys of every architecture -> this one's names.
        query_scaling: how queries are scaled by position, from values with defaults filled in.
        latent: whether attention is :class:`LatentHeads`, whose sizes are keys of config.json.
        multipliers: fields of :class:`Multipliers` -> keys of config.json.
        names: names of the model's parts in checkpoints; the first present one counts.
        stacked_experts: whether a layer has all experts' matrices in one tensor.
        text_config: key of the text model's config in a model of several; if it is missing, the
            text model's keys are among the others.
        rope_aliases: older names of a rope_type.
        rope_keys: its names of keys of rope_parameters -> the usual ones.
        original_max_position_embeddings: default trained length for longrope.
        gguf: its form in GGUF files; None if they have it under another's name, or not at all.
        states: state tensors of a row in layers without keys and values.
        mtp: names of the MTP head's parts in checkpoints; None if exkv reads none.
    """

    architecture: str
    model_type: str
    units: Callable[[ModelConfig, torch.dtype], list[UnitSpec]]
    published: tuple[str, ...] = ()
    defaults: dict[str, Any] = field(default_factory=dict)
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: {}
    windows: Windows = nowhere
    reads: tuple[str, ...] = ()
    refuses: Mapping[str, Any] = field(default_factory=dict)
    act_key: str = "hidden_act"
    learned_acts: tuple[str, ...] = ()
    specific: type[Specific] | None = None
    ignores: frozenset[str] = frozenset()
    rope_theta: float = 10000.0
    rope_local_base_freq: float | None = None
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    partial_rotary_factor: float | None = None
    rotary_dim: str | None = None
    rope_interleaved: bool = False
    rotated: Rotated = lambda values, types: ()
    query_scaling: Callable[[Mapping[str, Any]], QueryScaling | None] = lambda values: None
    latent: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)
    multipliers: Mapping[str, str] = field(default_factory=dict)
    names: tuple[TensorNames, ...] = (TensorNames(),)
    stacked_experts: bool = False
    text_config: str | None = None
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    rope_keys: Mapping[str, str] = field(default_factory=dict)
    original_max_position_embeddings: int | None = None
    gguf: GGUFFamily | None = None
    states: Callable[[ModelConfig], tuple[StateTensor, ...]] | None = None
    mtp: MTPNames | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "defaults", LLAMA | self.defaults)

    def translated(self, values: Mapping[str, Any]) -> Fields:
        """The values with this architecture's own keys repeated under the usual ones; for a model
        of several, those of the text model."""
        text = values.get(self.text_config) if self.text_config is not None else None
        if text is not None:
            if not isinstance(text, dict):
                raise ValueError(f"{self.text_config} must be an object, not {text!r}")
            shared = {key: values[key] for key in _SHARED if values.get(key) is not None}
            values = {**text, "model_type": self.model_type, **shared}
        ours = {ours: values[own] for ours, own in self.aliases.items() if own in values}
        of_others = {"architectures", *_OTHER_MODELS} if self.text_config else {"architectures"}
        return Fields({**values, **ours}, {*of_others, *self.aliases.values()})

    def read_multipliers(self, values: Mapping[str, Any]) -> Multipliers:
        """The model's factors."""
        found = {ours: values.get(key) for ours, key in self.multipliers.items()}
        return Multipliers(**{key: value for key, value in found.items() if value is not None})

    def read_latent(self, values: Mapping[str, Any]) -> LatentHeads | None:
        """The sizes of latent attention."""
        if not self.latent:
            return None
        sizes = {each.name: values[each.name] for each in dataclasses.fields(LatentHeads)}
        latent = LatentHeads(**sizes)
        stated = values.get("qk_head_dim")
        if stated not in (None, latent.qk_head_dim):
            raise ValueError(
                f"qk_head_dim {stated!r} is not qk_nope_head_dim {latent.qk_nope_head_dim} plus "
                f"qk_rope_head_dim {latent.qk_rope_head_dim}"
            )
        return latent

    def read_specific(self, values: Mapping[str, Any]) -> Specific | None:
        """The settings that only this architecture has."""
        if self.specific is None:
            return None
        names = {field.name for field in dataclasses.fields(self.specific)} - self.ignores
        return self.specific(**{name: values[name] for name in names if name in values})


#: ``architectures[0]`` -> family. Filled by ``exkv.models``, which ``import exkv`` imports.
FAMILIES: dict[str, Family] = {}
