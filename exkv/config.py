"""ModelConfig: a folder's ``config.json`` as a frozen dataclass in Hugging Face's field names.

Everything that is wrong with a configuration is found here, before a tensor is touched, and said
with the file, the keys, the values and the remedy.  Both spellings in the wild are read: the one
of transformers 4 (``rope_theta`` and ``rope_scaling`` side by side, ``torch_dtype``) and the one
of transformers 5 (``rope_parameters`` holding both, ``dtype``).  Keys that a Llama has no use for
are ignored.  The frequencies that a RopeScaling stands for are computed in ``layers/rope.py``;
whether the tensors agree with the configuration is asked of ``checkpoint.py``, which is the file
to read next.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
HIDDEN_ACTS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}

_REMEDY = f"correct {CONFIG_NAME}, or download the model again"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary positions are stretched beyond the trained length; lengths are in tokens.

    rope_type "linear" (positions divided by `factor`) needs `factor` alone; "llama3" (Llama 3.1's
    frequency bands) also needs the trained length `original_max_position_embeddings` and the two
    band edges `low_freq_factor` and `high_freq_factor`; "yarn" (arXiv 2309.00071) takes the
    trained length, `beta_fast`, `beta_slow` (rotations), and the attention temperature, either
    as `attention_factor` or to be derived from `factor`, `mscale` and `mscale_all_dim`.
    `truncate` rounds YaRN's band edges to whole dimensions.

    Raises ValueError for a number that is missing, of a wrong type, or out of range.
    """

    rope_type: str
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES[1:]:
            raise ValueError(
                f"rope_type {self.rope_type!r} is unknown; exkv knows {', '.join(ROPE_TYPES)}"
            )
        _set_floats(self, ("factor", "beta_fast", "beta_slow"))
        _set_floats(self, ("low_freq_factor", "high_freq_factor", "attention_factor"), null=True)
        _set_floats(self, ("mscale", "mscale_all_dim"), null=True)
        if self.factor < 1:
            raise ValueError(
                f"factor {self.factor} of rope_type {self.rope_type!r} would shrink the context; "
                f"it must be at least 1"
            )
        if self.original_max_position_embeddings is not None:
            _check_size("original_max_position_embeddings", self.original_max_position_embeddings)
        _check_bool("truncate", self.truncate)
        self._check_bands()

    def _check_bands(self) -> None:
        """The keys that only one rope_type needs, and their order."""
        needed = {
            "linear": (),
            "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
            "yarn": ("original_max_position_embeddings",),
        }[self.rope_type]
        missing = [key for key in needed if getattr(self, key) is None]
        if missing:
            raise ValueError(f"rope_type {self.rope_type!r} needs {', '.join(missing)}")
        pairs = {
            "linear": (),
            "llama3": (("low_freq_factor", "high_freq_factor"),),
            "yarn": (("beta_slow", "beta_fast"),),
        }[self.rope_type]
        for low, high in pairs:
            if getattr(self, low) >= getattr(self, high):
                raise ValueError(
                    f"{low} {getattr(self, low)} must be below {high} {getattr(self, high)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What a decoder model is made of; defaults are those of transformers' LlamaConfig.

    Sizes are counts of features, heads, layers or tokens.  `path` is the folder that it was read
    from (None when made from a dict).  `num_key_value_heads` and `head_dim` left out (None) are
    filled in: num_attention_heads, and hidden_size // num_attention_heads.  `dtype` None means
    "as the tensors are stored in the checkpoint": a file that states none has nothing to guess
    from.  `eos_token_id` is always a tuple, empty if the model has no end.  `pad_token_id`
    outside of the vocabulary (older conversions write -1) becomes None: nothing is padded here.

    Raises ValueError, naming the file, the keys and their values, for whatever contradicts
    itself; that holds for `replace` and for the constructor too.
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
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    dtype: torch.dtype | None = None
    bos_token_id: int | None = 1
    eos_token_id: tuple[int, ...] = (2,)
    pad_token_id: int | None = None

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> ModelConfig:
        """The configuration of a model folder: config.json, and generation_config.json's ends.

        A config.json alone will do for planning; `path` is None then, since there are no weights.

        Raises FileNotFoundError where there is no config.json, ValueError where a file is not
        JSON, contradicts itself, or asks for what exkv doesn't do.
        """
        folder = Path(folder)
        if folder.is_file():
            return cls.from_dict(parse_json_object(folder.read_bytes(), folder))
        config = cls.from_dict(_read_config(folder), path=folder)
        file = folder / GENERATION_CONFIG_NAME
        if not file.is_file():
            return config
        stated = parse_json_object(file.read_bytes(), file).get("eos_token_id")
        try:
            ends = _token_ids("eos_token_id", stated)
            _check_in_vocab("eos_token_id", ends, config.vocab_size)
        except ValueError as error:
            raise ValueError(f"{file}: {error}; {_REMEDY}") from None
        return config.replace(eos_token_id=tuple(dict.fromkeys(config.eos_token_id + ends)))

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], path: str | os.PathLike[str] | None = None
    ) -> ModelConfig:
        """A configuration from the contents of a config.json; `path` is its folder, for messages.

        Raises ValueError as `from_pretrained` does.
        """
        try:
            _refuse_unsupported(values)
            fields = {key: values[key] for key in _PLAIN_KEYS if key in values}
            fields["architecture"] = _architecture(values)
            fields["dtype"] = _dtype(values)
            if "eos_token_id" in values:
                fields["eos_token_id"] = _token_ids("eos_token_id", values["eos_token_id"])
            fields |= _rope(values)
        except ValueError as error:
            raise ValueError(f"{_where(path)}: {error}; {_REMEDY}") from None
        return cls(path=path, **fields)

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed, checked like a new one.

        Nothing is derived again: who changes hidden_size states head_dim too if it follows.
        """
        return dataclasses.replace(self, **changes)

    def __post_init__(self) -> None:
        if self.path is not None:
            object.__setattr__(self, "path", Path(self.path))
        try:
            self._check_types()
            self._fill_in_heads()
            self._check_heads()
            self._check_vocabulary()
        except ValueError as error:
            raise ValueError(f"{_where(self.path)}: {error}; {_REMEDY}") from None

    def _check_types(self) -> None:
        for key in _SIZES:
            _check_size(key, getattr(self, key))
        for key in ("num_key_value_heads", "head_dim"):
            if getattr(self, key) is not None:
                _check_size(key, getattr(self, key))
        for key in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
            _check_bool(key, getattr(self, key))
        for key in ("architecture", "model_type", "hidden_act"):
            if not isinstance(getattr(self, key), str):
                raise ValueError(f"{key} must be a string, not {getattr(self, key)!r}")
        if self.hidden_act not in HIDDEN_ACTS:
            raise ValueError(
                f"hidden_act {self.hidden_act!r} is unknown; exkv knows {', '.join(HIDDEN_ACTS)}"
            )
        for key, kind in (("rope_scaling", RopeScaling), ("dtype", torch.dtype)):
            if not isinstance(getattr(self, key), kind | None):
                raise ValueError(f"{key} must be a {kind.__name__}, not {getattr(self, key)!r}")
        _set_floats(self, ("rms_norm_eps", "rope_theta"))
        if self.rope_theta <= 1:
            raise ValueError(f"rope_theta {self.rope_theta} must be above 1, it is a base")

    def _fill_in_heads(self) -> None:
        heads = self.num_attention_heads
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

    def _check_heads(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim {self.head_dim} (hidden_size {self.hidden_size}, num_attention_heads "
                f"{self.num_attention_heads}) is odd; rotary positions turn pairs of features"
            )

    def _check_vocabulary(self) -> None:
        for key in ("bos_token_id", "pad_token_id"):
            value = getattr(self, key)
            if value is not None and not _is_int(value):
                raise ValueError(f"{key} must be an integer or null, not {value!r}")
        ends = _token_ids("eos_token_id", self.eos_token_id)
        object.__setattr__(self, "eos_token_id", ends)
        _check_in_vocab("eos_token_id", ends, self.vocab_size)
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
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "hidden_act",
    "bos_token_id",
    "pad_token_id",
)


def parse_json_object(
    data: bytes, what: object, error: type[ValueError] = ValueError
) -> dict[str, Any]:
    """`data` as one JSON object without repeated keys; `what` names it in the errors raised."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise ValueError(f"the key {twice!r} is there twice")
        return found

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError as bad:
        raise error(f"{what} is not UTF-8 text at byte {bad.start}; download it again") from None
    except RecursionError:
        raise error(f"{what} is not usable: its JSON is nested too deeply") from None
    except ValueError as bad:  # JSONDecodeError says line and column; also numbers without end
        raise error(f"{what} is not valid JSON: {bad}; download it again") from None
    if not isinstance(value, dict):
        raise error(f"{what} must hold a JSON object, not a {type(value).__name__}")
    return value


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_NAME
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; exkv reads a model from a local folder")
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is missing; a model folder holds {CONFIG_NAME}, the weights "
            f"(model.safetensors, or shards with model.safetensors.index.json) and the tokenizer"
        )
    return parse_json_object(file.read_bytes(), file)


def _where(path: str | os.PathLike[str] | None) -> str:
    return CONFIG_NAME if path is None else str(Path(path) / CONFIG_NAME)


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    quantization = values.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ValueError(
            f"quantization_config (quant_method {method!r}): exkv loads float weights only; take "
            f"the model's unquantized version"
        )
    if values.get("use_sliding_window") and values.get("sliding_window") is not None:
        raise ValueError(
            f"use_sliding_window with sliding_window {values['sliding_window']!r}: exkv's models "
            f"attend to everything"
        )


def _architecture(values: Mapping[str, Any]) -> str:
    names = values.get("architectures")
    if names is None or names == []:
        if values.get("model_type", "llama") == "llama":
            return "LlamaForCausalLM"
        raise ValueError(
            f"no architectures, and model_type is {values['model_type']!r}: state the architecture"
        )
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"architectures must be a list of strings, not {names!r}")
    return names[0]


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


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields rope_theta and rope_scaling, from either spelling or from both if they agree."""
    blocks = {
        key: values[key]
        for key in ("rope_parameters", "rope_scaling")
        if values.get(key) is not None
    }
    for key, block in blocks.items():
        if not isinstance(block, dict):
            raise ValueError(f"{key} must be an object or null, not {block!r}")
        if any(isinstance(value, dict) for value in block.values()):
            raise ValueError(f"{key} differs from layer to layer, which exkv does not do")
    places = {"": values} | {f"{key}.": block for key, block in blocks.items()}
    factor = _stated_once("partial_rotary_factor", places)
    if factor is not None and not (_is_number(factor) and factor == 1):
        raise ValueError(
            f"partial_rotary_factor {factor!r}: exkv's rotary positions turn all of a head, so it "
            f"must be 1"
        )
    theta = _stated_once("rope_theta", places)
    trained = _stated_once("original_max_position_embeddings", places)
    longest = values.get("max_position_embeddings", 2048)
    found = {key: _rope_scaling(key, block, trained, longest) for key, block in blocks.items()}
    if len(set(found.values())) > 1:
        raise ValueError(
            f"rope_parameters {values['rope_parameters']!r} contradicts rope_scaling "
            f"{values['rope_scaling']!r}"
        )
    fields: dict[str, Any] = {"rope_scaling": next(iter(found.values()), None)}
    return fields if theta is None else fields | {"rope_theta": theta}


def _stated_once(key: str, places: Mapping[str, Mapping[str, Any]]) -> Any:
    """The value of a key that may stand in several places, which must agree; None if in none."""
    found = {
        f"{prefix}{key}": block[key]
        for prefix, block in places.items()
        if block.get(key) is not None
    }
    distinct: list[Any] = []
    for value in found.values():
        if value not in distinct:
            distinct.append(value)
    if len(distinct) > 1:
        raise ValueError(" contradicts ".join(f"{k} {v!r}" for k, v in found.items()))
    return distinct[0] if distinct else None


def _rope_scaling(
    key: str, block: Mapping[str, Any], trained: Any, longest: Any
) -> RopeScaling | None:
    """One rope_scaling or rope_parameters object; None for plain rotary positions.

    `trained` is its original_max_position_embeddings, `longest` the max_position_embeddings.
    """
    block = {name: value for name, value in block.items() if value is not None}
    kind, old_kind = block.get("rope_type"), block.get("type")
    if kind is not None and old_kind is not None and kind != old_kind:
        raise ValueError(f"{key}: rope_type {kind!r} contradicts type {old_kind!r}")
    kind = old_kind if kind is None else kind
    if kind is None and "factor" in block:
        raise ValueError(f"{key} has a factor but no rope_type; exkv knows {', '.join(ROPE_TYPES)}")
    if kind is None or kind == "default":
        return None
    if kind not in ROPE_TYPES:
        raise ValueError(
            f"{key}: rope_type {kind!r} is unknown; exkv knows {', '.join(ROPE_TYPES)}"
        )
    if "factor" not in block:
        raise ValueError(f"{key}: rope_type {kind!r} needs factor")
    known = {field.name for field in dataclasses.fields(RopeScaling)}
    numbers = {name: block[name] for name in block if name in known and name != "rope_type"}
    # Zero stands for "not given" in these, and a derived value then takes its place.
    for name in ("mscale", "mscale_all_dim", "beta_fast", "beta_slow"):
        if _is_number(numbers.get(name)) and numbers[name] == 0:
            del numbers[name]
    if trained is None and kind == "yarn":
        _check_size("max_position_embeddings", longest)
        trained = longest
    numbers["original_max_position_embeddings"] = trained
    try:
        return RopeScaling(rope_type=kind, **numbers)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """A finite number, and no integer too large for a float."""
    if isinstance(value, float):
        return math.isfinite(value)
    return _is_int(value) and abs(value) < 2**63


def _check_size(key: str, value: Any) -> None:
    if not _is_int(value) or not 0 < value < 2**31:
        raise ValueError(f"{key} must be a positive integer below 2**31, not {value!r}")


def _check_bool(key: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, not {value!r}")


def _set_floats(obj: Any, keys: Iterable[str], *, null: bool = False) -> None:
    """Positive finite numbers, made float in place: JSON writes 500000 for 500000.0."""
    for key in keys:
        value = getattr(obj, key)
        if null and value is None:
            continue
        if not _is_number(value) or value <= 0:
            raise ValueError(f"{key} must be a positive number, not {value!r}")
        object.__setattr__(obj, key, float(value))


def _token_ids(key: str, value: Any) -> tuple[int, ...]:
    """None, one id, or several of them as a tuple without repetitions."""
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not all(_is_int(i) for i in ids):
        raise ValueError(f"{key} must be an integer, a list of them or null, not {value!r}")
    return tuple(dict.fromkeys(ids))


def _check_in_vocab(key: str, ids: Iterable[int], vocab_size: int) -> None:
    for i in ids:
        if not 0 <= i < vocab_size:
            raise ValueError(f"{key} {i} is outside of the vocabulary, vocab_size {vocab_size}")
