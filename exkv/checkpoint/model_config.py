"""ModelConfig: a folder's ``config.json`` as a frozen dataclass in Hugging Face's field names.

Every error in a configuration is found here, before a tensor is touched, and reported with the
file, the keys, the values and the remedy. The spellings of transformers 4 and 5 are both read. The
meaning of keys, and their defaults, differ by architecture: each defines a ``Family``
(``families.py``); rotary positions are in ``rope_config.py``. Unread keys are named in a warning,
or refused (``fields.py``). ``safetensors.py``, the file to read next, checks that the tensors match
the configuration.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from exkv.errors import UnsupportedArchitecture

from .families import (
    FAMILIES,
    Family,
    LatentHeads,
    Multipliers,
    QueryScaling,
    Specific,
    StateTensor,
)
from .fields import Fields, refuse_unsupported, warn_of_unread
from .files import quoted, read_json_object, shortened
from .gguf.contents import SUFFIX, GGUFContents, find_gguf
from .gguf.metadata import config_values
from .open_file import CheckpointError
from .rope_config import ROPE_TYPES, RopeParameters, RopeScaling, read_rope
from .value_checks import (
    check_at_most,
    check_bool,
    check_layers,
    check_size,
    is_int,
    refuses_assignment,
    set_floats,
)
from .windows import (
    FULL_ATTENTION,
    HYBRID,
    SLIDING_ATTENTION,
    STATELESS,
    STATES,
    check_layer_types,
)

__all__ = [
    "DTYPES",
    "HIDDEN_ACTS",
    "ROPE_TYPES",
    "ModelConfig",
    "RopeParameters",
    "RopeScaling",
]

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
HIDDEN_ACTS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2")
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}

#: Other names of these activations, or of the same function computed differently.
_SAME_ACTS = {
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh",
    "gelu_python_tanh": "gelu_pytorch_tanh",
}
#: Upper bounds on experts in all layers, features of a head, and numbers in a matrix.
MOST_NETWORKS, WIDEST_HEAD, LARGEST_MATRIX = 1 << 16, 1 << 16, 1 << 40

#: Keys that are refused for every architecture -> the value without effect, beside null.
_REFUSED = {"use_bidirectional_attention": False}
_REMEDY = f"correct {CONFIG_NAME}"
_Settings = TypeVar("_Settings", bound=Specific)


@refuses_assignment
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The structure of a decoder model; defaults are those of transformers' LlamaConfig.

    Sizes are counts of features, heads, layers or tokens. `path` is the folder that it was read
    from, or the GGUF file (None for a dict). `num_key_value_heads` and `head_dim` default (None) to
    num_attention_heads, and hidden_size // num_attention_heads. `dtype` None means the checkpoint's
    own dtype. `eos_token_id` is always a tuple, empty if no token ends a text. `pad_token_id`
    outside of the vocabulary (older conversions write -1) becomes None: nothing is padded here.
    `layer_types` is empty if every layer attends to everything; otherwise it has each layer's type:
    sliding ones see the last `sliding_window` tokens, some have a `state` in place of keys and
    values. `local_rope` are the rotary positions of sliding layers, if they have their own.
    `partial_rotary_factor` is the rotated part of a head, in pairs of adjacent features if
    `rope_interleaved`; `rotated` says for each layer whether it has rotary positions, and is empty
    if all have. `query_scaling` is how queries are scaled by position, None for no scaling.
    `latent` are the sizes of multi-head latent attention, None for other attention; with it there
    is one key/value head, of the `head_dim` features that a cache stores a token. `multipliers` are
    the model's factors. `specific` has the settings of this architecture alone. `mtp` says whether
    the checkpoint's MTP head is used, a layer after the last one; see ``exkv.models.mtp``.
    `quantization` is the file's quantization_config, None without one; ``exkv.weights`` reads it.

    Raises ValueError, with the file, the keys and their values, for any contradiction; `replace`
    and the constructor do, too.
    """

    path: Path | None = None
    architecture: str = "LlamaForCausalLM"
    model_type: str = "llama"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = None  # type: ignore[assignment]  # filled in by __post_init__
    head_dim: int = None  # type: ignore[assignment]  # filled in by __post_init__
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    local_rope: RopeParameters | None = None
    partial_rotary_factor: float = 1.0
    rope_interleaved: bool = False
    rotated: tuple[bool, ...] = ()
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    dtype: torch.dtype | None = None
    bos_token_id: int | None = 1
    eos_token_id: tuple[int, ...] = (2,)
    pad_token_id: int | None = None
    query_scaling: QueryScaling | None = None
    latent: LatentHeads | None = None
    multipliers: Multipliers = Multipliers()
    specific: Specific | None = None
    mtp: bool = False
    quantization: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> ModelConfig:
        """The configuration of a model folder, from config.json and the end tokens of
        generation_config.json; or of a GGUF file, or a folder with one, from its metadata.

        A config.json alone suffices for planning; `path` is None then, since there are no weights.

        Raises FileNotFoundError if there is no config.json, ValueError if a file is not JSON,
        contradicts itself, or asks for something that exkv doesn't support.
        """
        if (gguf := find_gguf(folder)) is not None:
            return cls.from_gguf(gguf)
        folder = Path(folder)
        if folder.is_file():
            return cls.from_dict(_read_config_file(folder))
        config = cls.from_dict(_read_config(folder), path=folder)
        file = folder / GENERATION_CONFIG_NAME
        if not file.exists():
            return config
        stated = read_json_object(file).get("eos_token_id")
        try:
            ends = _token_ids("eos_token_id", stated)
            _check_in_vocab("eos_token_id", ends, config.vocab_size)
        except ValueError as error:
            raise ValueError(f"{file}: {shortened(str(error))}; correct it") from None
        return config.replace(eos_token_id=tuple(dict.fromkeys(config.eos_token_id + ends)))

    @classmethod
    def from_gguf(cls, file: Path) -> ModelConfig:
        """The configuration of a GGUF file; `path` is that file.

        Raises ValueError as `from_pretrained` does, CheckpointError for a damaged file.
        """
        contents = GGUFContents(file)
        try:
            values = config_values(contents)
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            raise ValueError(f"{file}: {shortened(str(error))}; {_remedy(file)}") from None
        return cls.from_dict(values, path=file)

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], path: str | os.PathLike[str] | None = None
    ) -> ModelConfig:
        """The configuration from the contents of a config.json; `path` is its folder, for messages.

        Raises ValueError as `from_pretrained` does.
        """
        where = _where(path)
        architecture = _architecture(values, where)
        family = FAMILIES[architecture]
        try:
            stated = family.translated(values)
            refuse_unsupported(stated, {**_REFUSED, **family.refuses}, family.model_type)
            stated = stated.under(family.derived(stated.over(family.defaults)))
            fields: dict[str, Any] = {"architecture": architecture, "dtype": _dtype(stated)}
            fields |= read_rope(stated, family) | _read_fields(stated, family)
            fields["quantization"] = _quantization(stated)
        except ValueError as error:
            raise ValueError(f"{where}: {shortened(str(error))}; {_remedy(path)}") from None
        warn_of_unread(stated, where, architecture)
        return cls(path=None if path is None else Path(path), **fields)

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed, checked like a new one.

        Nothing is derived again: when changing hidden_size, pass head_dim too if it follows.
        """
        return dataclasses.replace(self, **changes)

    @property
    def rope(self) -> RopeParameters:
        """The rotary positions of all layers, or of those without `local_rope`."""
        return RopeParameters(rope_theta=self.rope_theta, rope_scaling=self.rope_scaling)

    @property
    def rotary_dim(self) -> int:
        """How many features of a head, from the first on, are rotated."""
        if self.latent is not None:
            return self.latent.qk_rope_head_dim
        return int(self.head_dim * self.partial_rotary_factor)

    def rotary_dim_where(self, *, slides: bool) -> int:
        """:attr:`rotary_dim` of layers that slide, or that don't, which may have heads of other
        sizes or rotate another part."""
        if self.latent is not None:
            return self.rotary_dim
        own = self.local_rope.partial_rotary_factor if slides and self.local_rope else None
        of_kind = (i for i in range(self.num_hidden_layers) if self.slides(i) == slides)
        width = self.heads(next(of_kind, 0))[1]
        return int(width * (self.partial_rotary_factor if own is None else own))

    def query_heads(self, layer: int) -> int:
        """Heads of queries in this layer."""
        slides, own = self.slides(layer), None
        if self.specific is not None:
            own = self.specific.query_heads(layer, slides=slides)
        return self.num_attention_heads if own is None else own

    def settings(self, kind: type[_Settings]) -> _Settings:
        """`specific`, for an architecture whose settings are of this kind."""
        assert isinstance(self.specific, kind)  # checked by the constructor
        return self.specific

    @property
    def cache_layers(self) -> int:
        """Layers of a cache: the decoder layers, and the MTP head's."""
        return self.num_hidden_layers + self.mtp

    def _type(self, layer: int) -> str:
        """The layer's type; an MTP head attends to everything."""
        if not self.layer_types or layer >= self.num_hidden_layers:
            return FULL_ATTENTION
        return self.layer_types[layer]

    def slides(self, layer: int) -> bool:
        """Whether the layer sees only a window of tokens."""
        return self._type(layer) == SLIDING_ATTENTION

    def state(self, layer: int) -> tuple[StateTensor, ...] | None:
        """State tensors of a row that the layer has in place of keys and values, perhaps none; None
        for attention."""
        kind = self._type(layer)
        if kind in STATELESS:
            return ()
        if kind not in STATES:
            return None
        return self._states()

    def state_beside(self, layer: int) -> tuple[StateTensor, ...]:
        """State tensors of a row that the layer has beside keys and values."""
        return self._states() if self._type(layer) == HYBRID else ()

    def _states(self) -> tuple[StateTensor, ...]:
        states = FAMILIES[self.architecture].states
        assert states is not None  # see _check_windows
        return states(self)

    def heads(self, layer: int) -> tuple[int, int]:
        """Heads of keys and values in this layer, and features of a head."""
        count = width = None
        if self.specific is not None:
            count, width = self.specific.heads_of_layer(layer, slides=self.slides(layer))
        return count or self.num_key_value_heads, width or self.head_dim

    def kv_source(self, layer: int) -> int | None:
        """The earlier layer whose keys and values this layer attends to; None for its own."""
        first = self.num_hidden_layers - getattr(self.specific, "num_kv_shared_layers", 0)
        if not first <= layer < self.num_hidden_layers:
            return None
        return max(i for i in range(first) if self.slides(i) == self.slides(layer))

    def reads(self, layer: int) -> int | None:
        """The previous layer that attends to the same keys and values; None for the layer that
        makes them."""
        source = self.kv_source(layer)
        if source is None:
            return None
        before = range(source, layer)
        return max(i for i in before if i == source or self.kv_source(i) == source)

    @property
    def shared_keys(self) -> tuple[int, ...]:
        """The layers whose keys and values later layers also attend to."""
        found = map(self.kv_source, range(self.num_hidden_layers))
        return tuple(sorted({layer for layer in found if layer is not None}))

    @property
    def handed_on(self) -> int:
        """Values a token that units hand on: the hidden state, and what is carried with it."""
        carried = self.specific.carried(self) if self.specific is not None else 0
        return self.hidden_size + carried

    @property
    def has_states(self) -> bool:
        """Whether any layer has a state in place of keys and values, or beside them."""
        return not {*STATES, HYBRID}.isdisjoint(self.layer_types)

    def rotates(self, layer: int) -> bool:
        """Whether the layer has rotary positions."""
        return not self.rotated or layer >= len(self.rotated) or self.rotated[layer]

    def window(self, layer: int) -> int:
        """How many of the last tokens the layer sees; 0 for all."""
        return self.sliding_window or 0 if self.slides(layer) else 0

    def kind_of_layer(self, layer: int) -> Hashable:
        """Everything that depends on the layer's index: layers of one kind have equal modules."""
        types = self._type(layer)
        own = self.specific.kind_of_layer(layer) if self.specific is not None else None
        shared = self.kv_source(layer) is not None, layer in self.shared_keys
        return types, self.rotates(layer), self.query_heads(layer), self.heads(layer), shared, own

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"exkv's ModelConfig has no {name!r}. transformers' classes take its own config, "
                "AutoConfig.from_pretrained(folder); exkv's caches, which have the same names as "
                "transformers', take this one"
            )

    def __post_init__(self) -> None:
        if self.path is not None:
            object.__setattr__(self, "path", Path(self.path))
        try:
            self._check_types()
            self._fill_in_heads()
            self._check_heads(self.num_key_value_heads, self.head_dim)
            self._check_matrices()
            self._check_rope()
            self._check_windows()
            self._check_specific()
            self._check_query_heads()
            self._check_sharing()
            self._check_heads_of_layers()
            self._check_vocabulary()
        except ValueError as error:
            where, remedy = _where(self.path), _remedy(self.path)
            raise ValueError(f"{where}: {shortened(str(error))}; {remedy}") from None

    def _check_types(self) -> None:
        for key in _SIZES:
            check_size(key, getattr(self, key))
        check_layers(self.num_hidden_layers)
        for key in ("num_key_value_heads", "head_dim"):
            if getattr(self, key) is not None:
                check_size(key, getattr(self, key))
        for key in ("attention_bias", "mlp_bias", "tie_word_embeddings", "rope_interleaved"):
            check_bool(key, getattr(self, key))
        for key in ("architecture", "model_type", "hidden_act"):
            if not isinstance(getattr(self, key), str):
                raise ValueError(f"{key} must be a string, not {getattr(self, key)!r}")
        if self.hidden_act not in (known := self._known_acts()):
            raise ValueError(
                f"hidden_act {self.hidden_act!r} is unknown; exkv knows {', '.join(known)}"
            )
        kinds = {"local_rope": RopeParameters, "query_scaling": QueryScaling, "dtype": torch.dtype}
        kinds |= {"latent": LatentHeads}
        for key, kind in kinds.items():
            if not isinstance(getattr(self, key), kind | None):
                raise ValueError(f"{key} must be a {kind.__name__}, not {getattr(self, key)!r}")
        set_floats(self, ("rms_norm_eps", "rope_theta", "partial_rotary_factor"))

    def _known_acts(self) -> tuple[str, ...]:
        """Activations of every architecture, and learned ones that only this one's layers have."""
        family = FAMILIES.get(self.architecture)
        own = family.learned_acts if family is not None else ()
        return (*HIDDEN_ACTS, *own)

    def _fill_in_heads(self) -> None:
        heads = self.num_attention_heads
        if self.latent is not None:
            object.__setattr__(self, "num_key_value_heads", 1)
            object.__setattr__(self, "head_dim", self.latent.stored)
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", heads)
        if self.head_dim is not None:
            return
        if self.hidden_size % heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {heads}, "
                f"and there is no head_dim"
            )
        object.__setattr__(self, "head_dim", self.hidden_size // heads)

    def _check_heads(self, count: int, width: int) -> None:
        """Check ``count`` heads of keys and values with ``width`` features."""
        check_at_most("head_dim", width, WIDEST_HEAD)
        if self.num_attention_heads % count:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {count}"
            )
        if width % 2:
            raise ValueError(
                f"head_dim {width} (hidden_size {self.hidden_size}, num_attention_heads "
                f"{self.num_attention_heads}) is odd; rotary positions rotate pairs of features"
            )

    def _check_sharing(self) -> None:
        """Check that layers with shared keys and values have a source for them."""
        shared = getattr(self.specific, "num_kv_shared_layers", 0)
        first = self.num_hidden_layers - shared
        for layer in range(max(first, 0), self.num_hidden_layers):
            if not any(self.slides(i) == self.slides(layer) for i in range(first)):
                kind = self.layer_types[layer] if self.layer_types else "attention"
                raise ValueError(
                    f"num_kv_shared_layers {shared} of num_hidden_layers {self.num_hidden_layers}: "
                    f"layer {layer} ({kind}) has no earlier layer of its kind to share keys with"
                )

    def _check_heads_of_layers(self) -> None:
        """Check that layers of one type have equal heads, since they share tables of rotary
        positions."""
        for slides in (False, True):
            layers = [i for i in range(self.num_hidden_layers) if self.slides(i) == slides]
            found = {self.heads(layer) for layer in layers}
            if len(found) > 1:
                raise ValueError(
                    f"layers {', '.join(map(str, layers))} are of one type, and have "
                    + ", or ".join(f"{count} heads of {width}" for count, width in sorted(found))
                )
            for count, width in found:
                self._check_heads(count, width)
                self._check_matrix(
                    "num_attention_heads * head_dim", self.num_attention_heads * width
                )

    def _check_matrices(self) -> None:
        for key in ("vocab_size", "intermediate_size"):
            self._check_matrix(key, getattr(self, key))
        width = self.num_attention_heads * self.head_dim
        self._check_matrix("num_attention_heads * head_dim", width)
        if self.latent is not None:
            made = self.latent.qk_nope_head_dim + self.latent.v_head_dim
            name = "num_attention_heads * (qk_nope_head_dim + v_head_dim)"
            self._check_matrix(name, self.num_attention_heads * made)

    def _check_matrix(self, name: str, rows: int) -> None:
        if rows * self.hidden_size > LARGEST_MATRIX:
            raise ValueError(
                f"{name} {rows} by hidden_size {self.hidden_size} are more numbers than the "
                f"{LARGEST_MATRIX} that exkv supports in a matrix"
            )

    def _check_rope(self) -> None:
        factor, latent = self.partial_rotary_factor, self.latent
        if latent is not None and factor not in (1, latent.qk_rope_head_dim / latent.qk_head_dim):
            raise ValueError(
                f"partial_rotary_factor {factor} is not qk_rope_head_dim {latent.qk_rope_head_dim} "
                f"of the {latent.qk_head_dim} features of a head"
            )
        for rope in filter(None, (self.rope, self.local_rope)):
            part = factor if rope.partial_rotary_factor is None else rope.partial_rotary_factor
            rotated = self.rotary_dim if latent is not None else int(self.head_dim * part)
            if rope.rope_scaling is not None:
                rope.rope_scaling.check_width(rotated)
            if not 0 < rotated <= self.head_dim or rotated % 2:
                raise ValueError(
                    f"partial_rotary_factor {part} of head_dim {self.head_dim} is {rotated} "
                    "features; rotary positions rotate pairs of them"
                )

    def _check_windows(self) -> None:
        if self.sliding_window is not None:
            check_size("sliding_window", self.sliding_window)
        if self.layer_types != ():
            family = FAMILIES.get(self.architecture)
            has_states = family is not None and family.states is not None
            states = (*STATES, *STATELESS, HYBRID) if has_states else ()
            how = self.num_hidden_layers, self.sliding_window, states
            types = check_layer_types(self.layer_types, *how)
            object.__setattr__(self, "layer_types", types)
        if len(self.rotated) not in (0, self.num_hidden_layers):
            raise ValueError(
                f"rotated names {len(self.rotated)} layers, and num_hidden_layers is "
                f"{self.num_hidden_layers}"
            )

    def _check_specific(self) -> None:
        family = FAMILIES.get(self.architecture)
        wanted = family.specific if family is not None else None
        if wanted is not None and not isinstance(self.specific, wanted):
            raise ValueError(
                f"architecture {self.architecture} needs specific to be a {wanted.__name__}, not "
                f"{self.specific!r}"
            )
        if family is not None and family.latent != (self.latent is not None):
            wanted_heads = "LatentHeads" if family.latent else "None"
            raise ValueError(
                f"architecture {self.architecture} needs latent to be {wanted_heads}, not "
                f"{self.latent!r}"
            )
        experts = getattr(self.specific, "num_local_experts", None) or 1
        if self.num_hidden_layers * experts > MOST_NETWORKS:
            raise ValueError(
                f"num_hidden_layers {self.num_hidden_layers} with num_local_experts {experts}: "
                f"exkv supports at most {MOST_NETWORKS} experts in all"
            )

    def _check_query_heads(self) -> None:
        for layer in range(self.num_hidden_layers):
            heads, (count, width) = self.query_heads(layer), self.heads(layer)
            if heads % count:
                raise ValueError(
                    f"layer {layer} has {heads} heads of queries, which is not a multiple of "
                    f"num_key_value_heads {count}"
                )
            if heads != self.num_attention_heads:
                self._check_matrix(f"heads of layer {layer} by head_dim", heads * width)

    def _check_vocabulary(self) -> None:
        for key in ("bos_token_id", "pad_token_id"):
            value = getattr(self, key)
            if value is not None and not is_int(value):
                raise ValueError(f"{key} must be an integer or null, not {value!r}")
        ends = _token_ids("eos_token_id", self.eos_token_id)
        object.__setattr__(self, "eos_token_id", ends)
        _check_in_vocab("eos_token_id", ends, self.vocab_size)
        if self.bos_token_id is not None and self.bos_token_id < 0:
            object.__setattr__(self, "bos_token_id", None)
        if self.bos_token_id is not None:
            _check_in_vocab("bos_token_id", (self.bos_token_id,), self.vocab_size)
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            object.__setattr__(self, "pad_token_id", None)


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_PLAIN_KEYS = (
    *_SIZES,
    "model_type",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "tie_word_embeddings",
    "bos_token_id",
    "pad_token_id",
)


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_NAME
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder; exkv reads models from a local folder or a GGUF file, and "
            "doesn't download any: `hf download REPO --local-dir FOLDER` does"
        )
    if not file.exists():
        raise FileNotFoundError(
            f"{file} is missing; a model folder holds {CONFIG_NAME}, the weights "
            f"(model.safetensors, or shards with model.safetensors.index.json) and the tokenizer"
        )
    return read_json_object(file)


def _read_config_file(file: Path) -> dict[str, Any]:
    if file.suffix.lower() != ".json":
        raise ValueError(
            f"{file} is not a model: give the folder with config.json and the weights, a GGUF "
            f"file, or for a plan a {CONFIG_NAME} alone"
        )
    return read_json_object(file)


def _where(path: str | os.PathLike[str] | None) -> str:
    if path is None:
        return CONFIG_NAME
    return str(path) if _is_gguf(path) else str(Path(path) / CONFIG_NAME)


def _remedy(path: str | os.PathLike[str] | None) -> str:
    return "convert the model again" if _is_gguf(path) else _REMEDY


def _is_gguf(path: str | os.PathLike[str] | None) -> bool:
    return path is not None and Path(path).suffix.lower() == SUFFIX


def _quantization(values: Mapping[str, Any]) -> dict[str, Any] | None:
    found = values.get("quantization_config")
    if found is not None and not isinstance(found, dict):
        raise ValueError(f"quantization_config must be an object, not {found!r}")
    return found


def _read_fields(values: Fields, family: Family) -> dict[str, Any]:
    """The fields that config.json has under their own names, with defaults filled in."""
    filled = values.over({"model_type": family.model_type, **family.defaults})
    fields = {key: filled[key] for key in (*_PLAIN_KEYS, *family.reads) if key in filled}
    fields["intermediate_size"] = _largest(fields["intermediate_size"])
    fields["eos_token_id"] = _token_ids("eos_token_id", filled["eos_token_id"])
    fields["hidden_act"] = _activation(values, family)
    fields["sliding_window"], fields["layer_types"] = family.windows(filled)
    fields.setdefault("rope_interleaved", family.rope_interleaved)
    fields["rotated"] = family.rotated(filled, fields["layer_types"])
    fields["query_scaling"] = family.query_scaling(filled)
    fields["latent"] = family.read_latent(filled)
    fields["multipliers"] = family.read_multipliers(filled)
    fields["specific"] = family.read_specific(filled)
    return fields


def _largest(sizes: Any) -> Any:
    """The largest size, of a list with one for each layer (which `specific` has)."""
    listed = isinstance(sizes, list | tuple) and sizes and all(map(is_int, sizes))
    return max(sizes) if listed else sizes


def _activation(values: Mapping[str, Any], family: Family) -> Any:
    """hidden_act; Gemma's files call it hidden_activation, and some have both."""
    act = values.get(family.act_key, family.defaults[family.act_key])
    other = values.get("hidden_act")
    if other is not None and other != act:
        raise ValueError(f"{family.act_key} {act!r} contradicts hidden_act {other!r}")
    return _SAME_ACTS.get(act, act) if isinstance(act, str) else act


def _architecture(values: Mapping[str, Any], where: str) -> str:
    """The key of FAMILIES; ValueError if there is none."""
    name = _named_architecture(values, where)
    text = values.get(FAMILIES[name].text_config or "")
    of_text = f"{name}:{text.get('model_type')}" if isinstance(text, dict) else name
    return of_text if of_text in FAMILIES else name


def _named_architecture(values: Mapping[str, Any], where: str) -> str:
    names, kind = values.get("architectures"), values.get("model_type", "llama")
    if names is None or names == []:
        known = sorted(name for name, family in FAMILIES.items() if family.model_type == kind)
        if not known:
            raise UnsupportedArchitecture(f"{where}: model_type {quoted(kind)} {_unsupported()}")
        return known[0]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"{where}: architectures must be a list of strings, not {quoted(names)}; {_REMEDY}"
        )
    # For a model without its head, e.g. LlamaModel, transformers also builds the one with a head.
    name = re.sub("Model$", "ForCausalLM", names[0])
    # Files from before transformers had the class may have capitals or underscores elsewhere.
    for architecture, family in FAMILIES.items():
        if _folded(name) in map(_folded, (architecture, *family.published)):
            return architecture
    raise UnsupportedArchitecture(f"{where}: architecture {quoted(names[0])} {_unsupported()}")


def _folded(name: str) -> str:
    return name.replace("_", "").lower()


def _unsupported() -> str:
    return f"is not supported; known are: {', '.join(sorted(FAMILIES))}"


def _dtype(values: Mapping[str, Any]) -> torch.dtype | None:
    found: dict[str, torch.dtype] = {}
    for key in ("dtype", "torch_dtype"):
        value = values.get(key)
        if value is None:
            continue
        name = value.removeprefix("torch.") if isinstance(value, str) else value
        if not isinstance(name, str) or name not in DTYPES:
            raise ValueError(f"{key} {value!r} is unknown; exkv knows {', '.join(DTYPES)}")
        found[key] = DTYPES[name]
    if len(set(found.values())) > 1:
        raise ValueError(
            f"dtype {values['dtype']!r} contradicts torch_dtype {values['torch_dtype']!r}"
        )
    return next(iter(found.values()), None)


def _token_ids(key: str, value: Any) -> tuple[int, ...]:
    """None, one id or several, as a tuple without repetitions."""
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not all(is_int(i) for i in ids):
        raise ValueError(f"{key} must be an integer, a list of them or null, not {value!r}")
    return tuple(dict.fromkeys(i for i in ids if i >= 0))  # -1 means none in some files


def _check_in_vocab(key: str, ids: Iterable[int], vocab_size: int) -> None:
    for i in ids:
        if not 0 <= i < vocab_size:
            raise ValueError(f"{key} {i} is outside of the vocabulary, vocab_size {vocab_size}")
