"""Proposals by the model's own head for multi-token prediction (``exkv.models.mtp``), run
repeatedly on its own output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from exkv.cache import KVCache
from exkv.cache.hidden import KEPT
from exkv.errors import Attempt
from exkv.models import Transformer
from exkv.sampling.bounds import check_count

from ..rows import Row
from .draft import Guess, likely

#: Stands for ``MTP()`` in place of a draft.
OWN_HEAD = "mtp"


@dataclass(frozen=True, slots=True, kw_only=True)
class MTP:
    """Propose by the MTP head of a model that was built with ``mtp=True``.

    Attributes:
        tokens: most tokens to propose at a time.
        confidence: stop after a token of less than this probability.

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
    """Propose tokens after the newest ones of some rows, in shared calls; fewer, or none, if memory
    runs out.

    The head stores keys and values of the newest token and of the proposed ones, in its layer only.
    The call of the model that verifies them overwrites these.

    Args:
        rows: of the cache.
        most: row -> most tokens to propose; there is room for them.
        guesses: row -> its chooser.
    """
    asked = {at: row for at, row in enumerate(rows) if row is not None and row in most}
    found: dict[int, list[int]] = {at: [] for at in asked}
    newest = [0 if row is None else row.newest for row in rows]
    with cache.use("model.forward"), torch.no_grad(), Attempt():
        drafting = model.drafting(cache, len(rows))
        going = [at for at, row in asked.items() if most[row] > 0]
        while going:
            each = [found.get(at, []) for at in range(len(rows))]
            last = [(mine or [first])[-1] for mine, first in zip(each, newest, strict=True)]
            goes = [int(at in going) for at in range(len(rows))]
            logits = drafting.step(last, list(map(len, each)), goes)
            if logits is None:
                break  # hosts died
            tokens = [guesses[asked[at]](logits[at : at + 1], found[at]) for at in going]
            sure = likely(logits[going], tokens, confidence)
            for at, token in zip(going, tokens, strict=True):
                found[at].append(token)
            pairs = zip(going, sure, strict=True)
            going = [at for at, on in pairs if on and len(found[at]) < most[asked[at]]]
    cache.layers[model.config.num_hidden_layers].prefetched = None  # left by a failed call
    return {row: found[at] for at, row in asked.items()}
