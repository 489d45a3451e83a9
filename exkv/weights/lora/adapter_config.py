"""adapter_config.json, as PEFT writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exkv.checkpoint import CheckpointError
from exkv.checkpoint.files import quoted, read_json_object
from exkv.checkpoint.value_checks import is_int, is_number

from .patterns import compiled, key_of, means

CONFIG_NAME = "adapter_config.json"
ALL_LINEAR = "all-linear"
_LARGEST_RANK = 1 << 16


class AdapterError(CheckpointError):
    """An adapter's files are damaged, contradict each other or the model, or need something that
    exkv doesn't support."""


#: Keys without effect on what an adapter computes.
_WITHOUT_EFFECT = frozenset(
    (
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "lora_dropout", "fan_in_fan_out", "runtime_config", "eva_config"),
        *("megatron_config", "megatron_core", "loftq_config", "qalora_group_size"),
        *("ensure_weight_tying", "corda_config"),
    )
)
#: Keys that are read here.
_READ = frozenset(
    (
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("init_lora_weights", "bias"),
    )
)
_MERGE = "merge it into the model with PEFT (merge_and_unload), and load that"
#: Key -> what it asks for, and what to do about it.
_NOT_DONE = {
    "use_dora": ("DoRA, which rescales the whole matrix", _MERGE),
    "modules_to_save": ("whole matrices of its own", _MERGE),
    "lora_bias": ("biases beside its matrices", _MERGE),
    "target_parameters": ("parts of tensors that hold several matrices, e.g. experts", _MERGE),
    "trainable_token_indices": ("tokens of its own", _MERGE),
    "layer_replication": ("another number of layers", _MERGE),
    "alora_invocation_tokens": ("activation within a text (aLoRA)", "train it without"),
}
#: Initializations that change the model's own matrices.
_CHANGES_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """The checked contents of adapter_config.json.

    Attributes:
        file: the file.
        rank, alpha: those of matrices that no pattern names.
        rslora: whether the scale is alpha / sqrt(rank) (Kalajdzievski, 2023) and not alpha / rank.
        targets: names of modules or ends of names, a regular expression, or "all-linear".
        excluded: modules to exclude, likewise.
        layers: indices of the layers that it changes; None for all.
        layers_pattern: names of lists of layers; () for any.
    """

    file: Path
    rank: int
    alpha: float
    rslora: bool
    targets: tuple[str, ...] | str
    excluded: tuple[str, ...] | str = ()
    layers: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_folder(cls, folder: Path) -> AdapterConfig:
        """Read the file; FileNotFoundError if there is none, AdapterError if it can't be used."""
        file = folder / CONFIG_NAME
        try:
            return cls._read(file, read_json_object(file, AdapterError))
        except AdapterError:
            raise
        except ValueError as error:
            raise AdapterError(f"{file}: {error}") from None

    @classmethod
    def _read(cls, file: Path, values: dict[str, Any]) -> AdapterConfig:
        if (kind := values.get("peft_type")) != "LORA":
            raise ValueError(f"peft_type is {quoted(kind)}, and exkv runs LORA: {_MERGE}")
        _refuse_others(values)
        targets = _names("target_modules", values.get("target_modules"))
        if not targets:
            raise ValueError("target_modules is empty: it must be names or an expression")
        return cls(
            file=file,
            rank=_rank("r", values.get("r", 8)),
            alpha=_alpha("lora_alpha", values.get("lora_alpha", 8)),
            rslora=_flag("use_rslora", values.get("use_rslora")),
            targets=targets,
            excluded=_names("exclude_modules", values.get("exclude_modules")),
            layers=_layers(values.get("layers_to_transform")),
            layers_pattern=_as_tuple(_names("layers_pattern", values.get("layers_pattern"))),
            rank_pattern=_pattern("rank_pattern", values.get("rank_pattern"), _rank),
            alpha_pattern=_pattern("alpha_pattern", values.get("alpha_pattern"), _alpha),
        )

    def rank_of(self, module: str) -> int:
        """Rank of a module's matrices, by its name in the trained model."""
        key = key_of(self.rank_pattern, module)
        return self.rank if key is None else self.rank_pattern[key]

    def scale_of(self, module: str) -> float:
        """Factor of B A for a module."""
        key, rank = key_of(self.alpha_pattern, module), self.rank_of(module)
        alpha = self.alpha if key is None else self.alpha_pattern[key]
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def is_for(self, module: str) -> bool:
        """Whether it changes a linear layer or an embedding of this name."""
        if self.excluded and means(self.excluded, module):
            return False
        if self.targets == ALL_LINEAR:
            return True
        return means(self.targets, module) and self._is_for_layer(module)

    def _is_for_layer(self, module: str) -> bool:
        if self.layers is None or isinstance(self.targets, str):
            return True
        parts = module.split(".")
        for before, part in zip(parts, parts[1:], strict=False):
            if part.isdecimal() and (not self.layers_pattern or before in self.layers_pattern):
                return int(part) in self.layers
        return False


def _refuse_others(values: Mapping[str, Any]) -> None:
    if (bias := values.get("bias", "none")) != "none":
        raise ValueError(f"bias is {quoted(bias)}: it also changes the model's biases; {_MERGE}")
    begun = values.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_MODEL):
        raise ValueError(
            f"init_lora_weights is {quoted(begun)}: it needs a model whose own matrices were "
            "changed; convert it to a plain LoRA (PEFT's "
            "path_initial_model_for_weight_conversion)"
        )
    for key, value in values.items():
        if not value or key in _WITHOUT_EFFECT or key in _READ:
            continue
        what, remedy = _NOT_DONE.get(key, ("something that exkv doesn't know", _MERGE))
        raise ValueError(f"{key} is {quoted(value)}: the adapter asks for {what}; {remedy}")


def _rank(key: str, value: Any) -> int:
    if not is_int(value) or not 0 < value <= _LARGEST_RANK:
        raise ValueError(f"{key} is {quoted(value)}: it must be an int from 1 to {_LARGEST_RANK}")
    return int(value)


def _alpha(key: str, value: Any) -> float:
    if not is_number(value):
        raise ValueError(f"{key} is {quoted(value)}: it must be a finite number")
    return float(value)


def _flag(key: str, value: Any) -> bool:
    if value not in (None, True, False):
        raise ValueError(f"{key} is {quoted(value)}: it must be true or false")
    return bool(value)


def _names(key: str, value: Any) -> tuple[str, ...] | str:
    if isinstance(value, str):
        compiled(value)
        return value
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{key} is {quoted(value)}: it must be a list of names, or an expression")
    return tuple(value)


def _as_tuple(names: tuple[str, ...] | str) -> tuple[str, ...]:
    return ((names,) if names else ()) if isinstance(names, str) else names


def _layers(value: Any) -> tuple[int, ...] | None:
    numbers = [value] if is_int(value) else value
    if numbers is None or numbers == []:
        return None
    if not isinstance(numbers, list) or not all(is_int(number) for number in numbers):
        raise ValueError(f"layers_to_transform is {quoted(value)}: it must be numbers of layers")
    return tuple(numbers)


def _pattern(key: str, value: Any, check: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{key} is {quoted(value)}: it must be an object of names and numbers")
    for name in value:
        compiled(name)
    return {name: check(f"{key} of {quoted(name)}", number) for name, number in value.items()}
