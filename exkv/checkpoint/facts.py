"""Facts about a model's structure that its checkpoint decides, not config.json."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from .families import FAMILIES, TensorNames
from .model_config import ModelConfig
from .opening import open_if_sound
from .safetensors import Checkpoint

logger = logging.getLogger(__name__)

#: Rows compared at a time.
_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Names in the checkpoint: of the embedding table and the head (the same if they share a
    tensor), the head's bias, the last norm, and the layers before their numbers; and whether
    matrices that transformers saves in one tensor are ``apart``, as in GGUF files."""

    table: str
    head: str
    bias: str
    norm: str
    layers: str
    apart: bool = False


def facts_of(config: ModelConfig) -> Facts:
    """The config's facts, corrected by the checkpoint's headers, if there is one.

    As in transformers, a config that ties embedding and head is overruled by a checkpoint that has
    both with different values; a head alone serves as both. A quantized head is never tied (EXL2).

    Raises ValueError for a config with more layers or experts than the checkpoint has tensors.
    """
    family = FAMILIES.get(config.architecture)
    names = (TensorNames(),) if family is None else family.names
    if (checkpoint := open_if_sound(config.path)) is None:
        return _stated(config, names[0])
    with checkpoint:
        _check_count(config, len(checkpoint), checkpoint.described_by)
        found = next((each for each in names if f"{each.norm}.weight" in checkpoint), names[0])
        return replace(_corrected(config, found, checkpoint), apart=checkpoint.apart)


def has_tensors(config: ModelConfig, *names: str) -> bool:
    """Whether the config's checkpoint, if there is one, has tensors with these prefixes."""
    if (checkpoint := open_if_sound(config.path)) is None:
        return False
    with checkpoint:
        return any(name.startswith(names) for name in checkpoint.names())


def _stated(config: ModelConfig, names: TensorNames) -> Facts:
    head = names.table if config.tie_word_embeddings else names.head
    return Facts(
        table=names.table,
        head=head,
        bias=f"{names.head}.bias",
        norm=names.norm,
        layers=names.layers,
    )


def _corrected(config: ModelConfig, names: TensorNames, checkpoint: Checkpoint) -> Facts:
    stated = _stated(config, names)
    untied = replace(stated, head=names.head)
    table, head = f"{names.table}.weight", f"{names.head}.weight"
    if not config.tie_word_embeddings:
        return stated
    if head not in checkpoint:
        quantized = any(
            name.startswith(f"{names.head}.") and not name.endswith(".bias")
            for name in checkpoint.names()
        )
        return untied if quantized else stated
    if table not in checkpoint:
        return replace(untied, table=names.head)
    if _same(checkpoint.tensor(table), checkpoint.tensor(head)):
        return stated
    logger.warning(
        "%s: config.json ties the embedding to the head, and the checkpoint has two that differ: "
        "both are used. State tie_word_embeddings false",
        config.path,
    )
    return untied


def _check_count(config: ModelConfig, tensors: int, described_by: str) -> None:
    family = FAMILIES.get(config.architecture)
    together = family is not None and family.stacked_experts
    experts = 1 if together else getattr(config.specific, "num_local_experts", None) or 1
    if config.num_hidden_layers * experts > tensors:
        mixture = f" with num_local_experts {experts}" if experts > 1 else ""
        raise ValueError(
            f"{config.path}: {described_by} says num_hidden_layers {config.num_hidden_layers}"
            f"{mixture}, and the checkpoint has only {tensors} tensors: they are not of the same "
            "model"
        )


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dim() != 2:
        return False
    pairs = zip(a.split(_ROWS), b.split(_ROWS), strict=True)
    return all(torch.equal(x, y.to(x.dtype)) for x, y in pairs)
