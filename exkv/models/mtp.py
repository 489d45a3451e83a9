"""Heads for multi-token prediction (MTP), which some checkpoints have after the last layer.

A head is a decoder layer whose input at a token is that token's embedding beside the model's last
hidden state of the previous token (DeepSeek-V3, 2024, arXiv 2412.19437, section 2.2). Its output,
projected to logits by the model's own head, is a guess at the next token; run on its own output it
guesses further, which makes it a draft (``exkv.decode.speculation.heads``). Norms and their order
are those of transformers' ``MtpModel``: the model's hidden state is taken after the last norm, and
so is the head's own.

It is a unit of the model, between the last layer and the head, and its keys and values are an extra
layer of each cache, after the decoder layers': :func:`follow` runs it on the tokens of every call,
like the layers, so that they are found, moved and dropped together with those of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from exkv.batch import Batch, Lengths
from exkv.cache import KVCache
from exkv.cache.hidden import before, keep, newest
from exkv.checkpoint import CheckpointError, Facts, ModelConfig, facts_of, open_checkpoint
from exkv.checkpoint.families import FAMILIES, MTPNames
from exkv.devices import ELSEWHERE, move
from exkv.layers import LayerNorm, Linear, PlainModule, RMSNorm
from exkv.layers.attention import Attend
from exkv.weights import FormatOf, Source

from .bound_run import Logits
from .units import PlacedUnit, UnitSpec, unit_spec

if TYPE_CHECKING:
    from .decoder import Head
    from .transformer import Transformer


class MTPHead(PlainModule):
    """A decoder layer between norms.

    Args:
        layer: (x, batch, cache) -> x.
        norm: makes the norms.

    Attributes:
        target_norm: another copy of the model's last norm.
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
        """Embeddings of tokens, and hidden states of the tokens before, both (B, T, hidden) ->
        hidden states (B, T, hidden), from which the model's head makes logits without its norm."""
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


def guesses(module: MTPHead, embedded: Tensor, x: Tensor, batch: Batch, cache: Attend) -> Tensor:
    """The head's output (B, T, hidden) for whole rows, given their embeddings and the last layer's
    output, both (B, T, hidden)."""
    hidden = module.target_norm(x)
    before = torch.cat((torch.zeros_like(hidden[:, :1]), hidden[:, :-1]), dim=1)
    made: Tensor = module(embedded, before, batch, cache)
    return made


def follow(
    model: Transformer, module: nn.Module, x: Tensor, ids: Tensor, batch: Batch, cache: KVCache
) -> None:
    """Run the MTP head on the tokens of a call (B, T), after the last layer's output x."""
    lengths, device = batch.lengths, batch.past_lens.device
    x = move(x, device)
    first = before(cache, lengths.past, x)
    own = cache.layers[model.config.num_hidden_layers]
    kept = store(module, model.embedded(ids, device), x, first, batch, own)
    keep(cache, kept, lengths)


class Drafting:
    """The head run repeatedly on its own output, from the rows' last tokens on. It stores keys and
    values of the tokens in its layer only.

    Where units lie in other processes, each runs its part; ``exkv.cluster`` makes all take each
    step.

    Args:
        cache: its first ``rows`` rows continue.
    """

    def __init__(self, model: Transformer, cache: KVCache, rows: int) -> None:
        self.model, self.cache = model, cache
        self._past = cache.seq_lens[:rows]
        self._hidden: Tensor | None = None

    def step(
        self, tokens: Sequence[int], done: Sequence[int], going: Sequence[int]
    ) -> Tensor | None:
        """Run each row's last token.

        Args:
            done: steps that each row has taken.
            going: for each row, 1 if it takes this step, otherwise 0.

        Returns:
            Logits (B, V), undefined for rows that don't take it; None in processes that get none.
        """
        model = self.model
        (at, mtp_head), (end, last) = ((unit.index, unit) for unit in model.units[-2:])
        ids, lengths = torch.tensor(tokens)[:, None], self._lengths(done, going)
        model.give_embedded(ids)
        x = None if mtp_head.device == ELSEWHERE else self._run(mtp_head, ids, lengths)
        if model.transport is not None:
            x = model.transport.hand(x, at, end, lengths)
        logits = torch.empty(0)
        if last.device != ELSEWHERE:
            head, device = model.standing(last)
            assert x is not None
            logits = cast("Head", head).project(move(x, device))
        if model.transport is not None:
            found = model.transport.logits(logits, lengths, Logits.LAST)
            return None if found is None else found[:, 0]
        return logits[:, 0]

    def make_room(self, done: Sequence[int], going: Sequence[int]) -> None:
        """Make room for what a step stores; errors as in ``cache.make_room``."""
        self.cache.make_room(self._lengths(done, going).final)

    def _lengths(self, done: Sequence[int], going: Sequence[int]) -> Lengths:
        past = tuple(a + b for a, b in zip(self._past, done, strict=True))
        return Lengths(past=past, new=tuple(going))

    def _run(self, unit: PlacedUnit, ids: Tensor, lengths: Lengths) -> Tensor:
        """The head's output (B, 1, hidden)."""
        model, cache = self.model, self.cache
        module, device = model.standing(unit)
        assert isinstance(module, MTPHead)
        cache.make_room(lengths.final)
        lengths = cache.placed(lengths)
        batch = Batch.on(device, lengths, model.rotary, model.dtype)
        if self._hidden is None:
            self._hidden = before(cache, self._past, module.norm.weight)
        own = cache.layers[model.config.num_hidden_layers]
        self._hidden = module(model.embedded(ids, device), self._hidden, batch, own)
        return self._hidden


def with_mtp(config: ModelConfig) -> ModelConfig:
    """The config with the checkpoint's MTP head in use.

    Raises:
        ValueError: exkv supports none for this architecture, or the checkpoint has none.
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
            return config.replace(mtp=True)  # loading will report what is missing
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
        return [_source_in_head(each) for each in made(config, dtype, parts["layer"], module.layer)]

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


def _source_in_head(source: Source) -> Source:
    """A layer's source, for a module that has the layer as ``layer``."""

    def named(name: str) -> str:
        return f"layer.{name}"

    return replace(
        source,
        parameters=tuple(map(named, source.parameters)),
        convert=lambda found: {named(n): x for n, x in source.convert(found).items()},
        matrices=tuple(replace(each, layer=named(each.layer)) for each in source.matrices),
    )
