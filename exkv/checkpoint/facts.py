"""What a model's structure owes to its checkpoint, beside config.json."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from .config import ModelConfig
from .gguf import open_checkpoint
from .open_file import CheckpointError

logger = logging.getLogger(__name__)

_TABLE, _HEAD = "model.embed_tokens", "lm_head"
#: Rows that are compared at once.
_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Names of the matrices at both ends in the checkpoint; one name if they share a tensor."""

    table: str
    head: str


def facts_of(config: ModelConfig) -> Facts:
    """What the config says, corrected by the checkpoint's headers, if there is one.

    As in transformers, a config that ties embedding and head is overruled by a checkpoint that has
    both and whose numbers differ; one that has the head alone stands for both. A head that is
    quantized is another than the table (EXL2 does that).

    Raises ValueError for a config with more layers or experts than the checkpoint has tensors.
    """
    tied = Facts(table=_TABLE, head=_TABLE)
    stated = tied if config.tie_word_embeddings else Facts(table=_TABLE, head=_HEAD)
    if config.path is None:
        return stated
    try:
        checkpoint = open_checkpoint(config.path)
    except (OSError, CheckpointError):
        return stated  # whoever loads it is told
    with checkpoint:
        _check_count(config, len(checkpoint), checkpoint.described_by)
        table, head = f"{_TABLE}.weight", f"{_HEAD}.weight"
        if not config.tie_word_embeddings:
            return stated
        if head not in checkpoint:
            quantized = any(
                name.startswith(f"{_HEAD}.") and not name.endswith(".bias")
                for name in checkpoint.names()
            )
            return Facts(table=_TABLE, head=_HEAD) if quantized else stated
        if table not in checkpoint:
            return Facts(table=_HEAD, head=_HEAD)
        if _same(checkpoint.tensor(table), checkpoint.tensor(head)):
            return tied
    logger.warning(
        "%s: config.json ties the embedding to the head, and the checkpoint has two that differ: "
        "both are used. State tie_word_embeddings false",
        config.path,
    )
    return Facts(table=_TABLE, head=_HEAD)


def _check_count(config: ModelConfig, tensors: int, described_by: str) -> None:
    experts = getattr(config.specific, "num_local_experts", 1)
    if config.num_hidden_layers * experts > tensors:
        mixture = f" with num_local_experts {experts}" if experts > 1 else ""
        raise ValueError(
            f"{config.path}: {described_by} says num_hidden_layers {config.num_hidden_layers}"
            f"{mixture}, and the checkpoint has {tensors} tensors in all: they are not of the same "
            "model"
        )


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dim() != 2:
        return False
    pairs = zip(a.split(_ROWS), b.split(_ROWS), strict=True)
    return all(torch.equal(x, y.to(x.dtype)) for x, y in pairs)
