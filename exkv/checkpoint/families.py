"""What a config.json means by architecture: defaults for the keys that it leaves out, keys under
other names, and the settings that only one architecture has.

A :class:`Family` stands beside its layers in ``exkv/models/<name>.py``; that package finds those of
all of its files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .fields import Fields
from .gguf.names import GGUFFamily
from .value_checks import check_at_most, check_bool, check_size, is_int, set_floats
from .windows import WindowOfLayers, nowhere

if TYPE_CHECKING:
    from exkv.models.units import UnitSpec

    from .model_config import ModelConfig

#: From a config.json's values with defaults filled in: which layers have a sliding window.
Windows = Callable[[Mapping[str, Any]], WindowOfLayers]
#: From the same, and the types of the layers: which of them have rotary positions; () for all.
Rotated = Callable[[Mapping[str, Any], tuple[str, ...]], tuple[bool, ...]]

#: More than any layer's state has: heads, or features of one.
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
    """Settings that one architecture has and others don't, under their names in config.json; the
    fields' defaults are for files that leave them out. Booleans are checked."""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            if isinstance(each.default, bool):
                check_bool(each.name, getattr(self, each.name))

    def kind_of_layer(self, layer: int) -> Hashable:
        """What these settings say of this layer by itself."""
        return None

    def query_heads(self, layer: int, *, slides: bool) -> int | None:
        """Heads of queries in this layer; None for the config's."""
        return None

    def heads_of_layer(self, layer: int, *, slides: bool) -> tuple[int | None, int | None]:
        """Heads of keys and values in this layer, and features of a head; None for those of the
        config."""
        return None, None

    def carried(self, config: ModelConfig) -> int:
        """Values of a token that layers hand on beside the hidden state."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig(Specific):
    """A mixture of experts: of ``num_local_experts``, each token takes ``num_experts_per_tok``.

    Experts have ``moe_intermediate_size`` inner values, None for the config's intermediate_size;
    beside them may be one that all tokens take, of ``shared_expert_intermediate_size``, 0 for none.
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
    """Experts in ``n_group`` groups of equal size, of which a token's experts are in
    ``topk_group``; their weights are divided by at least ``moe_norm_min`` and multiplied by
    ``routed_scaling_factor``. ``n_shared_experts`` as large as the others are taken by all tokens.
    The first ``first_k_dense_replace`` layers have an MLP instead."""

    n_group: int = 1
    topk_group: int = 1
    moe_norm_min: float = 1e-20
    routed_scaling_factor: float = 1.0
    n_shared_experts: int = 1
    first_k_dense_replace: int = 0
    #: Experts that a group is judged by, the best ones.
    best_of_group: ClassVar[int] = 2

    def __post_init__(self) -> None:
        ExpertsConfig.__post_init__(self)
        set_floats(self, ("moe_norm_min", "routed_scaling_factor"))
        for key in ("n_shared_experts", "first_k_dense_replace"):
            if not is_int(getattr(self, key)) or getattr(self, key) < 0:
                raise ValueError(f"{key} must be an integer, 0 or more, not {getattr(self, key)!r}")
        for key in ("n_group", "topk_group"):
            check_size(key, getattr(self, key))
        self._check_groups()

    def _check_groups(self) -> None:
        size, rest = divmod(self.num_local_experts, self.n_group)
        few = self.topk_group < self.n_group
        if rest or self.topk_group > self.n_group or few and size < self.best_of_group:
            raise ValueError(
                f"topk_group {self.topk_group} of n_group {self.n_group} must be groups of two or "
                f"more of num_local_experts {self.num_local_experts}, as many in each"
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
    """A tensor that each row of a cache has in a layer with a state; of the cache's dtype for
    None."""

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
    ``linear_value_head_dim``, behind a convolution over ``linear_conv_kernel_dim`` tokens."""

    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32

    def __post_init__(self) -> None:
        Specific.__post_init__(self)
        for each in dataclasses.fields(LinearAttentionConfig):
            check_size(each.name, getattr(self, each.name))
            check_at_most(each.name, getattr(self, each.name), WIDEST_STATE)
        if self.linear_conv_kernel_dim < 2:
            raise ValueError("linear_conv_kernel_dim 1: a convolution is over at least 2 tokens")
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
        """The last inputs of the convolution, and the sum of values by keys."""
        inputs = 2 * self.key_size + self.value_size
        heads = self.linear_num_value_heads, self.linear_key_head_dim, self.linear_value_head_dim
        return (
            StateTensor("conv", (self.linear_conv_kernel_dim - 1, inputs)),
            StateTensor("recurrent", heads, torch.float32),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentHeads:
    """Multi-head latent attention (DeepSeek, 2024, arXiv 2405.04434): keys and values of all heads
    are made of one latent vector a token, which is what a cache stores, and of rotated features of
    a key that all heads share. Sizes in features.

    Attributes:
        kv_lora_rank: of the latent vector.
        qk_rope_head_dim: of a head that are rotated.
        qk_nope_head_dim: of a head's queries and keys that are not.
        v_head_dim: of a head's values.
        q_lora_rank: of the vector that queries are made of; None where they are made of the hidden
            state.
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
        """What a cache stores of a token: the one head of keys that all heads of queries share."""
        return self.qk_rope_head_dim + self.kv_lora_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """What a checkpoint calls the layers (before their number), the embedding table, the last norm
    and the head."""

    layers: str = "model.layers"
    table: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"


#: Of a text model beside one of images, in older checkpoints and in newer ones, and alone in one.
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
    """What a checkpoint calls the parts of its head for multi-token prediction. ``{layer}`` stands
    for the layer behind the last one, e.g. model.layers.61."""

    layer: str = "{layer}"
    embedding_norm: str = "{layer}.enorm"
    hidden_norm: str = "{layer}.hnorm"
    projection: str = "{layer}.eh_proj"
    norm: str = "{layer}.shared_head.norm"

    def of(self, layer: str) -> dict[str, str]:
        """Each part's name behind the layers of this model, of which ``layer`` would be the
        next."""
        parts = (each.name for each in dataclasses.fields(self))
        return {part: getattr(self, part).format(layer=layer) for part in parts}


def _layer_list(layers: Any) -> tuple[int, ...]:
    if layers is None:
        return ()
    if not isinstance(layers, list | tuple) or not all(is_int(each) for each in layers):
        raise ValueError(f"mlp_only_layers must be a list of integers, not {layers!r}")
    return tuple(layers)


#: Keys of the models beside a text model.
_OTHER_MODELS = ("vision_config", "audio_config")
#: Keys beside the text model's config, which count for it before its own.
_SHARED = (
    *("model_type", "dtype", "torch_dtype", "quantization_config"),
    *("tie_word_embeddings", "eos_token_id"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to read the config.json of one architecture.

    Attributes:
        architecture: ``architectures[0]``; where that has text models of several architectures,
            behind a colon the ``model_type`` of this one.
        model_type: its name for the architecture, where it doesn't state ``architectures``.
        published: other names of the architecture, in files from before transformers had the class.
        units: the model's units, in the order in which a token passes them.
        defaults: keys that a config.json may leave out, and what that means; what is left out here
            means what it means to a Llama.
        derived: keys whose values follow from those of others, of the values with defaults filled
            in.
        windows: which layers have a sliding window.
        reads: keys beyond those that every architecture has.
        refuses: keys that change transformers' logits and that exkv doesn't do -> the value that
            means nothing, beside null.
        act_key: the key of the activation.
        learned_acts: activations with parameters in the checkpoint, which only its layers have.
        specific: the class of the settings that only this architecture has.
        ignores: settings of that class that it doesn't have.
        rope_theta: the base of rotary frequencies where none is stated.
        rope_local_base_freq: the same of sliding layers, where these have their own.
        rope_parameters: what a config.json says that says nothing of rotary positions.
        partial_rotary_factor: the part of a head that is rotated, where none is stated; None where
            it is always all of it.
        rotary_dim: the key under which the number of rotated features may be stated instead.
        rope_interleaved: whether pairs of neighbours are rotated, and not the halves of a head.
        rotated: which layers have rotary positions.
        aliases: keys of every architecture -> what this one calls them.
        query_scaling: how queries are scaled by position, of the values with defaults filled in.
        latent: whether attention is :class:`LatentHeads`, whose sizes are keys of config.json.
        multipliers: fields of :class:`Multipliers` -> keys of a config.json.
        names: what checkpoints call the parts of the model; the first that is there counts.
        stacked_experts: whether the experts' matrices lie together, in one tensor of a layer.
        text_config: the key under which the text model's config lies, in one of several models;
            where it isn't there, the text model's keys lie among the others.
        rope_aliases: older names of a rope_type.
        rope_keys: its names of keys of rope_parameters -> everybody's.
        original_max_position_embeddings: the trained length for longrope where none is stated.
        gguf: how GGUF files have it; None where they have it under another's name, or not at all.
        states: what those layers keep a row that have no keys and values.
        mtp: what its checkpoints call the head for multi-token prediction; None where exkv reads
            none.
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
        """The values with those under this architecture's own keys under everybody's, too; and of
        several models' those of the text model."""
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
        """What the model multiplies by."""
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
                f"qk_head_dim {stated!r} is not qk_nope_head_dim {latent.qk_nope_head_dim} and "
                f"qk_rope_head_dim {latent.qk_rope_head_dim}"
            )
        return latent

    def read_specific(self, values: Mapping[str, Any]) -> Specific | None:
        """The settings that only this architecture has."""
        if self.specific is None:
            return None
        names = {field.name for field in dataclasses.fields(self.specific)} - self.ignores
        return self.specific(**{name: values[name] for name in names if name in values})


#: ``architectures[0]`` -> how to read the rest of config.json, and what the layers are. Filled
#: by ``exkv.models``, which ``import exkv`` imports.
FAMILIES: dict[str, Family] = {}
