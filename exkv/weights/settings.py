"""Strict reading of a config.json's ``quantization_config``: an unknown or unsupported setting is
refused by name, with the known ones."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from exkv.checkpoint import ModelConfig, TensorInfo
from exkv.checkpoint.families import FAMILIES
from exkv.checkpoint.files import quoted
from exkv.checkpoint.opening import open_if_sound
from exkv.checkpoint.value_checks import is_int, stated_once

from .expert_groups import expert_of

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
#: Routers of mixtures of experts, and other layers that weigh experts or several hidden states.
ROUTERS = (
    *("block_sparse_moe.gate", "block_sparse_moe.router", "mlp.gate", "router.proj"),
    *("mlp.router", "mlp.shared_expert_gate", "altup.modality_router"),
    *("feed_forward.gate", "feed_forward.router", "mixer.gate", "moe.gate"),
    *("altup.prediction_coefs", "altup.correction_coefs"),
)
#: The table of per-layer embeddings.
OF_LAYERS = "embed_tokens_per_layer"
#: Modules that methods leave as floats unless they say otherwise: both ends, and routers.
FLOATS = (EMBEDDING, OF_LAYERS, HEAD, *ROUTERS)

Headers = Mapping[str, TensorInfo]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings by key, with a checked accessor for each kind of value.

    Attributes:
        where: name of the settings in messages.
        values: the values in the file.
    """

    where: str
    values: Mapping[str, Any]

    @classmethod
    def of(cls, config: ModelConfig) -> Settings:
        """A config's quantization_config."""
        where = f"{config.path or 'the config'}: quantization_config"
        return cls(where=where, values=config.quantization or {})

    def part(self, key: str) -> Settings | None:
        """The object under a key; None if missing or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.bad(key, "an object")
        return Settings(where=f"{self.where}.{key}", values=value)

    def section(self, key: str) -> Settings:
        """The object under a key; an empty one if missing or null."""
        return self.part(key) or Settings(where=self.where, values={})

    def quantized(
        self, headers: Headers | None, ignored: Iterable[str], *markers: str
    ) -> Quantized:
        """The layers that these settings quantize; arguments as of :class:`Quantized`."""
        return Quantized(
            where=self.where,
            ignored=tuple(ignored),
            markers=markers,
            headers=headers,
            stacks=float_stacks(headers),
        )

    def bad(self, key: str, needed: str) -> ValueError:
        """The error for an unsupported value, which says what is needed."""
        value = quoted(self.values.get(key))
        return ValueError(
            f"{self.where}: {key} {value} is not supported, it must be {needed}. "
            "Take another quantized version of the model, or the unquantized one"
        )

    def only(self, *known: str) -> None:
        """ValueError for any other key whose value isn't null."""
        for key, value in self.values.items():
            if value is not None and key not in known:
                raise ValueError(
                    f"{self.where}: the setting {quoted(key)} ({quoted(value)}) is not known; "
                    f"known are: {', '.join(sorted(known))}. Take another version of the model"
                )

    def choice(self, key: str, known: Iterable[Any], default: Any = None) -> Any:
        """A value that must be one of these; the default if missing or null."""
        value = self.values.get(key)
        if value is None:
            value = default
        known = tuple(known)
        # 1 is not True, nor 4.0 an int.
        if not any(type(value) is type(each) and value == each for each in known):
            raise self.bad(key, f"one of {', '.join(map(repr, known))}")
        return value

    def key_of(self, *keys: str) -> str:
        """The one of these synonymous keys that the settings have; the first if none.

        Raises:
            ValueError: they have several that disagree.
        """
        try:
            stated_once({key: self.values.get(key) for key in keys})
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}; take another version of the model") from None
        return next((key for key in keys if self.values.get(key) is not None), keys[0])

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.choice(key, (True, False), default))

    def group_size(self, key: str, default: int | None = None) -> int | None:
        """Inputs that share a scale; None (-1 in the file) for all inputs of a row."""
        value = self.values.get(key, default)
        if value is None or value == -1:
            return None
        if not is_int(value) or not 0 < value < 2**31 or value % 32:
            raise self.bad(key, "a multiple of 32, or -1 for whole rows")
        return int(value)

    def two_sizes(self, key: str) -> tuple[int, int]:
        """Height and width of a block."""
        value = self.values.get(key)
        if isinstance(value, list) and len(value) == 2:
            high, wide = value
            if all(is_int(n) and 0 < n < 2**31 for n in value):
                return high, wide
        raise self.bad(key, "two positive sizes, e.g. [128, 128]")

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names; empty if missing or null."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.bad(key, "a list of names")
        return tuple(value)


def names_module(name: str, layer: str) -> bool:
    """Whether a name matches the layer or a module around it, by whole parts of its path, such as
    ``"gate"`` or ``"model.layers.0"``."""
    return f".{name.strip('.')}." in f".{layer}."


def stays_float(layer: str, floats: Iterable[str] = FLOATS) -> bool:
    """Whether methods leave the layer as floats by default."""
    if floats is FLOATS and (is_table(layer) or layer in _names_of("head")):
        return True
    return _naming_any(tuple(floats)).search(f".{layer}.") is not None


def is_table(layer: str) -> bool:
    """Whether this is an architecture's name of the embedding table."""
    return layer in _names_of("table")


@functools.cache
def _names_of(end: str) -> frozenset[str]:
    """Names of an end in the checkpoints of all architectures."""
    return frozenset(getattr(names, end) for each in FAMILIES.values() for names in each.names)


@functools.lru_cache
def _naming_any(names: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern that finds any of the names, as :func:`names_module` does."""
    parts = "|".join(re.escape(name.strip(".")) for name in names)
    return re.compile(rf"\.(?:{parts})\." if names else "(?!)")


def headers_of(config: ModelConfig) -> Headers | None:
    """The tensors of the config's checkpoint; None if there is none, or if it is damaged, which
    loading it reports."""
    if (checkpoint := open_if_sound(config.path)) is None:
        return None
    with checkpoint:
        return {name: checkpoint.info(name) for name in checkpoint.names()}


_DECODER_LAYER = re.compile(r".*?\.\d+(?=\.)")


def float_stacks(headers: Headers | None) -> frozenset[str]:
    """Names of decoder layers whose experts lie stacked in tensors of floats (E, ., .)."""
    wide: dict[str, bool] = {}
    for name, info in (headers or {}).items():
        if len(info.shape) != 3 or info.shape[1] == 1:  # 1 in a convolution
            continue
        if layer := _DECODER_LAYER.match(name):
            floats = info.dtype.is_floating_point and info.dtype.itemsize > 1
            wide[layer[0]] = wide.get(layer[0], True) and floats
    return frozenset(layer for layer, floats in wide.items() if floats)


def in_stack(layer: str, stacks: frozenset[str]) -> bool:
    """Whether a layer is an expert's in such a stack, if the checkpoint doesn't have it by
    itself."""
    found = _DECODER_LAYER.match(layer)
    return found is not None and found[0] in stacks and expert_of(layer) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """Which layers of a checkpoint are quantized, for methods whose settings say so only roughly.

    Attributes:
        where: name of the settings in messages.
        ignored: names of modules that the settings leave as floats.
        markers: names of tensors of which every quantized layer, and no other, has one.
        headers: the checkpoint's tensors, which decide if known.
        stacks: as of :func:`float_stacks`.
    """

    where: str
    ignored: tuple[str, ...]
    markers: tuple[str, ...]
    headers: Headers | None
    stacks: frozenset[str]

    def __call__(self, layer: str) -> bool:
        """Raise ValueError if the checkpoint contradicts the settings."""
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
        if marker is not None:
            return True
        return f"{layer}.weight" not in self.headers and not in_stack(layer, self.stacks)
