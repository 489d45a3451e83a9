"""Heads for multi-token prediction (MTP), which some checkpoints have behind the last layer.

A head is a decoder layer whose input at a token is that token's embedding beside the model's last
hidden state of the token before (DeepSeek-V3, 2024, arXiv 2412.19437, section 2.2). What it makes
of that, projected to logits by the model's own head, is a guess at the next token; run on its own
output it guesses on, which makes it a draft (``exkv.decode.speculation.heads``). Norms and their
order are those of transformers' ``MtpModel``: the model's hidden state is that behind the last
norm, and so is the head's own.

It is a unit of the model, between the last layer and the head, and its keys and values are one more
layer of each cache, behind the decoder layers': :func:`follow` runs it on the tokens of every call,
as the layers are, so that they are found, moved and dropped together with those of the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from exkv.batch import Batch
from exkv.cache import KVCache
from exkv.cache.hidden import before, keep, newest
from exkv.checkpoint import CheckpointError, Facts, ModelConfig, facts_of, open_checkpoint
from exkv.checkpoint.families import FAMILIES, MTPNames
from exkv.devices import move
from exkv.layers import LayerNorm, Linear, PlainModule, RMSNorm
from exkv.layers.attention import Attend
from exkv.weights import FormatOf, Source

from .units import UnitSpec, unit_spec

if TYPE_CHECKING:
    from .transformer import Transformer


class MTPHead(PlainModule):
    """A decoder layer between norms.

    Args:
        layer: (x, batch, cache) -> x.
        norm: makes the norms.

    Attributes:
        target_norm: the model's last norm, once more.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        layer: nn.Module,
        norm: Callable[[int], RMSNorm | LayerNorm],
    ) -> None:
        super().__init__()
        size = config.hidden_size
        self.target_norm, self.norm = norm(size), norm(size)
        self.embedding_norm, self.hidden_norm = norm(size), norm(size)
        self.projection = Linear(2 * size, size, bias=False, dtype=dtype)
        self.layer = layer

    def forward(self, embedded: Tensor, hidden: Tensor, batch: Batch, cache: Attend) -> Tensor:
        """Embeddings of tokens and hidden states of those before, both (B, T, hidden) -> hidden
        states (B, T, hidden), from which the model's head makes logits without its norm."""
        x = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        return self.norm(self.layer(self.projection(x), batch, cache))


def store(
    module: nn.Module, embedded: Tensor, x: Tensor, first: Tensor, batch: Batch, cache: Attend
) -> Tensor:
    """Store a call's keys and values.

    Args:
        embedded: the tokens' embeddings (B, T, hidden).
        x: the last layer's output (B, T, hidden).
        first: hidden states of the tokens before the call's (B, 1, hidden).

    Returns:
        Hidden states of each row's newest tokens (B, N, hidden), see :func:`newest`.
    """
    assert isinstance(module, MTPHead)
    hidden = module.target_norm(x)
    module(embedded, torch.cat((first, hidden[:, :-1]), dim=1), batch, cache)
    return newest(hidden, batch.lengths)


def follow(
    model: Transformer, module: nn.Module, x: Tensor, ids: Tensor, batch: Batch, cache: KVCache
) -> None:
    """Run the MTP head on the tokens of a call (B, T), behind the last layer's output x."""
    lengths, device = batch.lengths, batch.past_lens.device
    x = move(x, device)
    first = before(cache, lengths.past, x)
    own = cache.layers[model.config.num_hidden_layers]
    kept = store(module, model.embedded(ids, device), x, first, batch, own)
    keep(cache, kept, lengths)


def with_mtp(config: ModelConfig) -> ModelConfig:
    """The config with the checkpoint's MTP head in use.

    Raises:
        ValueError: exkv reads none of this architecture, or the checkpoint has none.
    """
    family, where = FAMILIES[config.architecture], config.path or "the config"
    if family.mtp is None:
        known = sorted(name for name, each in FAMILIES.items() if each.mtp is not None)
        raise ValueError(
            f"{where}: exkv reads no heads for multi-token prediction of {config.architecture}, "
            f"only those of {', '.join(known)}: leave out mtp, and give a draft model or ngrams"
        )
    if config.path is not None:
        name = _names(config, family.mtp, facts_of(config))["projection"]
        try:
            checkpoint = open_checkpoint(config.path)
        except (OSError, CheckpointError):
            return config.replace(mtp=True)  # whoever loads it is told
        with checkpoint:
            if not any(each.startswith(f"{name}.") for each in checkpoint.names()):
                raise ValueError(
                    f"{where}: the checkpoint has no head for multi-token prediction ({name} is "
                    "missing): leave out mtp, or take a checkpoint that has one"
                )
    return config.replace(mtp=True)


def mtp_unit(
    config: ModelConfig,
    dtype: torch.dtype,
    layer: Callable[[], nn.Module],
    norm: Callable[[int], RMSNorm | LayerNorm],
    *,
    facts: Facts,
    formats: FormatOf,
    stored_name: Callable[[str], str],
    made: Callable[[ModelConfig, torch.dtype, str, nn.Module], list[Source]] | None,
) -> UnitSpec:
    """The unit of an MTP head.

    Args:
        layer: makes its decoder layer.
        stored_name, made: of a decoder layer, as in ``exkv.models.decoder``.
    """
    index, names = config.num_hidden_layers, FAMILIES[config.architecture].mtp
    assert names is not None, "checked by with_mtp"
    parts = {"target_norm": facts.norm, **_names(config, names, facts)}

    def rename(name: str) -> str:
        part, _, rest = name.partition(".")
        return ".".join(filter(None, (parts[part], stored_name(rest) if part == "layer" else rest)))

    def sources(module: nn.Module) -> list[Source]:
        assert made is not None and isinstance(module, MTPHead)
        return [_inside(each) for each in made(config, dtype, parts["layer"], module.layer)]

    return unit_spec(
        f"model.layers.{index}",
        lambda: MTPHead(config, dtype, layer(), norm),
        rename,
        formats=formats,
        layer=index,
        kind=("mtp", config.kind_of_layer(index)),
        made=None if made is None else sources,
        is_mtp=True,
    )


def _names(config: ModelConfig, names: MTPNames, facts: Facts) -> dict[str, str]:
    return names.of(f"{facts.layers}.{config.num_hidden_layers}")


def _inside(source: Source) -> Source:
    """A layer's source, for a module that has it as ``layer``."""

    def named(name: str) -> str:
        return f"layer.{name}"

    return replace(
        source,
        parameters=tuple(map(named, source.parameters)),
        convert=lambda found: {named(n): x for n, x in source.convert(found).items()},
        matrices=tuple(replace(each, layer=named(each.layer)) for each in source.matrices),
    )
