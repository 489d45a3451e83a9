"""Reading a config.json's ``quantization_config`` strictly: a setting that is not known, or not to
be followed, is refused by its name with what is known."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from exkv.checkpoint import CheckpointError, ModelConfig, TensorInfo, open_checkpoint
from exkv.checkpoint.files import quoted
from exkv.checkpoint.value_checks import is_int, stated_once

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
#: The routers of mixtures of experts, and what else weighs experts, or several hidden states.
ROUTERS = (
    *("block_sparse_moe.gate", "block_sparse_moe.router", "mlp.gate", "router.proj"),
    *("mlp.router", "mlp.shared_expert_gate", "altup.modality_router"),
    *("altup.prediction_coefs", "altup.correction_coefs"),
)
#: The table of the layers' own embeddings.
OF_LAYERS = "embed_tokens_per_layer"
#: Modules that methods leave as floats unless they say otherwise: both ends, and routers.
FLOATS = (EMBEDDING, OF_LAYERS, HEAD, *ROUTERS)

Headers = Mapping[str, TensorInfo]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings by their keys, each asked for by what it may be.

    Attributes:
        where: how messages name them.
        values: as they are in the file.
    """

    where: str
    values: Mapping[str, Any]

    @classmethod
    def of(cls, config: ModelConfig) -> Settings:
        """A config's quantization_config."""
        where = f"{config.path or 'the config'}: quantization_config"
        return cls(where=where, values=config.quantization or {})

    def part(self, key: str) -> Settings | None:
        """The object under a key, None where there is none."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.bad(key, "an object")
        return Settings(where=f"{self.where}.{key}", values=value)

    def bad(self, key: str, needed: str) -> ValueError:
        """The error of a value that isn't what is needed."""
        value = quoted(self.values.get(key))
        return ValueError(
            f"{self.where}: {key} {value} is not supported, it must be {needed}. "
            "Take another quantized version of the model, or the unquantized one"
        )

    def only(self, *known: str) -> None:
        """ValueError for a key that is none of these. One that is null says nothing."""
        for key, value in self.values.items():
            if value is not None and key not in known:
                raise ValueError(
                    f"{self.where}: the setting {quoted(key)} ({quoted(value)}) is not known; "
                    f"known are: {', '.join(sorted(known))}. Take another version of the model"
                )

    def choice(self, key: str, known: Iterable[Any], default: Any = None) -> Any:
        """A value that must be one of these; the default where it is missing or null."""
        value = self.values.get(key)
        if value is None:
            value = default
        known = tuple(known)
        # 1 is no True, 4.0 no 4.
        if not any(type(value) is type(each) and value == each for each in known):
            raise self.bad(key, f"one of {', '.join(map(repr, known))}")
        return value

    def key_of(self, *keys: str) -> str:
        """Which of these, that all mean the same, the settings have; the first one if none.

        Raises ValueError where they have several that don't agree.
        """
        try:
            stated_once({key: self.values.get(key) for key in keys})
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}; take another version of the model") from None
        return next((key for key in keys if self.values.get(key) is not None), keys[0])

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.choice(key, (True, False), default))

    def group_size(self, key: str, default: int | None = None) -> int | None:
        """Inputs that share a scale; None (-1 in the file) where all of a row do."""
        value = self.values.get(key, default)
        if value is None or value == -1:
            return None
        if not is_int(value) or not 0 < value < 2**31 or value % 32:
            raise self.bad(key, "a multiple of 32, or -1 for whole rows")
        return int(value)

    def two_sizes(self, key: str) -> tuple[int, int]:
        """A block's height and width."""
        value = self.values.get(key)
        if isinstance(value, list) and len(value) == 2:
            high, wide = value
            if all(is_int(n) and 0 < n < 2**31 for n in value):
                return high, wide
        raise self.bad(key, "two positive sizes, e.g. [128, 128]")

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names; none where it is missing or null."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.bad(key, "a list of names")
        return tuple(value)


def names_module(name: str, layer: str) -> bool:
    """Whether a name stands for the layer, or one around it: whole parts of its path, as in
    ``"gate"`` or ``"model.layers.0"``."""
    return f".{name.strip('.')}." in f".{layer}."


def stays_float(layer: str, floats: Iterable[str] = FLOATS) -> bool:
    """Whether methods leave the layer as floats, unless they say otherwise."""
    return _naming_any(tuple(floats)).search(f".{layer}.") is not None


@functools.lru_cache
def _naming_any(names: tuple[str, ...]) -> re.Pattern[str]:
    """Finds one of the names, as :func:`names_module` does."""
    parts = "|".join(re.escape(name.strip(".")) for name in names)
    return re.compile(rf"\.(?:{parts})\." if names else "(?!)")


def headers_of(config: ModelConfig) -> Headers | None:
    """The tensors of the config's checkpoint; None where there is none, or a damaged one, of which
    whoever loads it is told."""
    if config.path is None:
        return None
    try:
        with open_checkpoint(config.path) as checkpoint:
            return {name: checkpoint.info(name) for name in checkpoint.names()}
    except (OSError, CheckpointError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """Which layers a checkpoint has quantized, for methods whose settings say it roughly only.

    Attributes:
        where: how messages name the settings.
        ignored: names of the modules that they leave as floats.
        markers: names of tensors that every quantized layer has one of, and no other.
        headers: the checkpoint's tensors, which decide where they are known.
    """

    where: str
    ignored: tuple[str, ...]
    markers: tuple[str, ...]
    headers: Headers | None

    def __call__(self, layer: str) -> bool:
        """Raises ValueError where the checkpoint contradicts the settings."""
        name = next((name for name in self.ignored if names_module(name, layer)), None)
        if self.headers is None:
            return name is None and not stays_float(layer)
        marker = next((m for m in self.markers if f"{layer}.{m}" in self.headers), None)
        if marker is not None and name is not None:
            info = self.headers[f"{layer}.{marker}"]
            raise ValueError(
                f"{self.where} says that {quoted(name)} is not quantized, and {info.file} has "
                f"{info.name}: they contradict each other, download the model again"
            )
        return marker is not None or f"{layer}.weight" not in self.headers
