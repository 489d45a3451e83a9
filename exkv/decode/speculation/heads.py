"""Proposals by the model's own head for multi-token prediction (``exkv.models.mtp``), run again and
again on what it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from exkv.batch import Batch, Lengths
from exkv.cache import KVCache
from exkv.cache.hidden import KEPT, before
from exkv.devices import move
from exkv.errors import Attempt
from exkv.models import Transformer
from exkv.models.decoder import Head
from exkv.models.mtp import MTPHead
from exkv.sampling.bounds import check_count

from ..rows import Row
from .draft import Guess, likely

#: What is given in a draft's place for ``MTP()``.
OWN_HEAD = "mtp"


@dataclass(frozen=True, slots=True, kw_only=True)
class MTP:
    """Propose by the head of a model that was built with ``mtp=True``.

    Attributes:
        tokens: proposed at a time, at most.
        confidence: stop behind a token of less than this probability.

    Raises:
        TypeError, ValueError: a number out of range.
    """

    most: ClassVar[int] = KEPT - 1

    tokens: int = 5
    confidence: float = 0.4

    def __post_init__(self) -> None:
        check_count("tokens", self.tokens, 1, self.most, f"an int from 1 to {self.most}")
        if not 0 <= self.confidence <= 1:
            raise ValueError(f"confidence is {self.confidence!r}; it must be from 0 to 1")


def check_has_head(model: Transformer) -> None:
    """ValueError for a model that was built without its MTP head."""
    if not model.config.mtp:
        raise ValueError(
            "the model was built without its head for multi-token prediction: build it with "
            "Model(..., mtp=True), if its checkpoint has one"
        )


def propose(
    model: Transformer,
    cache: KVCache,
    rows: Sequence[Row | None],
    most: Mapping[Row, int],
    guesses: Mapping[Row, Guess],
    confidence: float,
) -> dict[Row, list[int]]:
    """Propose tokens behind the newest ones of some rows, in shared calls; fewer, or none, where
    memory runs out.

    The head stores keys and values of the newest token and of its own, in its layer only. The call
    of the model that verifies them stores others in their place.

    Args:
        rows: of the cache.
        most: tokens to propose for each that is asked, at most; there is room for them.
        guesses: how each chooses.
    """
    asked = {at: row for at, row in enumerate(rows) if row is not None and row in most}
    found: dict[int, list[int]] = {at: [] for at in asked}
    drafts = _Drafts(model, cache, [0 if row is None else row.newest for row in rows])
    with cache.use("model.forward"), torch.no_grad(), Attempt():
        going = [at for at, row in asked.items() if most[row] > 0]
        while going:
            logits = drafts.step(going, found)
            tokens = [guesses[asked[at]](logits[at : at + 1], found[at]) for at in going]
            sure = likely(logits[going], tokens, confidence)
            for at, token in zip(going, tokens, strict=True):
                found[at].append(token)
            pairs = zip(going, sure, strict=True)
            going = [at for at, on in pairs if on and len(found[at]) < most[asked[at]]]
    cache.layers[model.config.num_hidden_layers].prefetched = None  # of a call that failed
    return {row: found[at] for at, row in asked.items()}


class _Drafts:
    """Rows of a cache, each of which goes on from its newest token."""

    def __init__(self, model: Transformer, cache: KVCache, newest: Sequence[int]) -> None:
        self._model, self._cache, self._newest = model, cache, newest
        mtp_head, last = model.units[-2:]
        module, device = model.standing(mtp_head)
        head, self._last = model.standing(last)
        assert isinstance(module, MTPHead) and isinstance(head, Head)
        self._module, self._head, self._device = module, head, device
        self._past = cache.seq_lens[: len(newest)]
        self._hidden = before(cache, self._past, module.norm.weight)

    def step(self, going: Sequence[int], found: Mapping[int, Sequence[int]]) -> Tensor:
        """Run these rows' last tokens -> logits (B, V), undefined for other rows."""
        rows = range(len(self._past))
        past = tuple(at + len(found.get(row, ())) for row, at in enumerate(self._past))
        new = tuple(int(row in going) for row in rows)
        lengths = Lengths(past=past, new=new)
        self._cache.make_room(lengths.final)
        lengths = self._cache.placed(lengths)
        batch = Batch.on(self._device, lengths, self._model.rotary, self._model.dtype)
        tokens = [[*found.get(row, ())][-1:] or [self._newest[row]] for row in rows]
        embedded = self._model.embedded(torch.tensor(tokens), self._device)
        own = self._cache.layers[self._model.config.num_hidden_layers]
        self._hidden = self._module(embedded, self._hidden, batch, own)
        return self._head.project(move(self._hidden, self._last))[:, 0]
