"""compressed-tensors' ``transform_config``: transforms of layers' inputs.

A scheme has a type and the places where it is applied: to weights, which the file has in
transformed form, so that nothing is left to do, or to a layer's ``input`` in every call. For inputs
``hadamard`` without ``randomize`` is supported: Sylvester's matrix of size ``head_dim``, or of all
inputs, divided by the root of its size. It is symmetric, so ``inverse`` has no effect.

Source: the package compressed-tensors, ``transform/``; llm-compressor's QuIP and SpinQuant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .hadamard import LEAST
from .settings import Settings
from .targets import check_pattern, names_layer, patterns_of

#: The key of quantization_config.
TRANSFORMS = "transform_config"
#: Locations of transforms of the stored weights, and of layers' inputs.
_OF_WEIGHTS, _OF_INPUTS = ("weight_input", "weight_output"), "input"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Layers whose inputs are transformed, in blocks of ``block``; 0 for all inputs at once."""

    targets: tuple[str, ...]
    ignored: tuple[str, ...]
    block: int
    settings: Settings

    def has(self, layer: str) -> bool:
        if any(names_layer(name, layer) for name in self.ignored):
            return False
        return any(names_layer(name, layer) for name in self.targets)


def blocks_of(settings: Settings) -> Callable[[str, int], int]:
    """Lookup from a layer's name and inputs to the block size of its transform; 0 for none.

    Raises:
        ValueError: an unsupported transform of inputs. The lookup raises it for a layer with two
            transforms, or a block that doesn't fit its inputs.
    """
    places = _places(settings)

    def block_of(layer: str, inputs: int) -> int:
        found = [place for place in places if place.has(layer)]
        if not found:
            return 0
        if len(found) > 1:
            raise unknown_transform(settings, layer, "after another one")
        block = found[0].block or inputs
        if inputs % block or block & block - 1 or block < LEAST:
            raise found[0].settings.bad(
                "head_dim", f"a power of two from {LEAST} on that divides {layer}'s {inputs} inputs"
            )
        return block

    return block_of


def unknown_transform(settings: Settings, layer: str, what: str) -> ValueError:
    return ValueError(
        f"{settings.where}: {TRANSFORMS} has a transform of the input of {layer}, {what}, which is "
        "not supported; integers in groups may have one. Take another version of the model"
    )


def _places(settings: Settings) -> list[_Place]:
    part = settings.part(TRANSFORMS)
    groups = None if part is None else part.part("config_groups")
    if part is None or groups is None:
        return []
    part.only("config_groups")
    return [
        place
        for name in groups.values
        if (scheme := groups.part(name)) is not None
        for place in _places_of(scheme)
    ]


def _places_of(scheme: Settings) -> list[_Place]:
    """The places where a scheme transforms inputs."""
    scheme.only("type", "apply", "randomize", "requires_grad", "head_dim", "precision")
    applied = scheme.values.get("apply") or []
    if not isinstance(applied, list) or not all(isinstance(each, Mapping) for each in applied):
        raise scheme.bad("apply", "a list of objects")
    found = []
    for place, values in enumerate(applied):
        part = Settings(where=f"{scheme.where}.apply[{place}]", values=values)
        part.only("targets", "location", "inverse", "ignore")
        where = part.choice("location", (*_OF_WEIGHTS, _OF_INPUTS))
        if where in _OF_WEIGHTS:
            continue
        scheme.choice("type", ("hadamard",))
        scheme.choice("randomize", (False,), False)
        targets, ignored = _layers(part, "targets"), _layers(part, "ignore")
        found.append(
            _Place(targets=targets, ignored=ignored, block=_head_dim(scheme), settings=scheme)
        )
    return found


def _layers(part: Settings, key: str) -> tuple[str, ...]:
    """Names, patterns and types; a single one needs no list."""
    one = part.values.get(key)
    found = (one,) if isinstance(one, str) else part.names(key)
    for name in found:
        check_pattern(part.where, name)
    return found


def _head_dim(scheme: Settings) -> int:
    value = scheme.values.get("head_dim")
    if value is None:
        return 0
    if type(value) is not int or not LEAST <= value < 2**31 or value & value - 1:
        raise scheme.bad("head_dim", f"a power of two from {LEAST} on")
    return value


def transform_settings(blocks: Mapping[str, int], ignore: list[str]) -> dict[str, Any]:
    """The ``transform_config`` of layers' transforms, under its key; empty if there are none.

    Args:
        blocks: name of a layer -> block size, or 0.
        ignore: layers without quantization.
    """
    layers: dict[int, list[str]] = {}
    for layer, block in blocks.items():
        layers.setdefault(block, []).append(layer)
    whole = len(layers) == 1
    groups = {}
    for block in sorted(layers.keys() - {0}):
        apply = {
            "targets": ["Linear"] if whole else patterns_of(layers[block]),
            "ignore": ignore if whole else [],
        }
        groups[f"hadamard_{block}"] = {
            "type": "hadamard",
            "head_dim": block,
            "randomize": False,
            "requires_grad": False,
            "precision": "torch.float32",
            "apply": [
                {**apply, "location": "weight_input", "inverse": True},
                {**apply, "location": _OF_INPUTS, "inverse": False},
            ],
        }
    return {TRANSFORMS: {"config_groups": groups}} if groups else {}
