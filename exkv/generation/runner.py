"""The model and the cache as the loops see them: rows of tokens in, each row's last logits out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exkv.cache import KVCache, common_prefix
from exkv.models import Transformer


class Runner:
    """Runs rows through the model; logits come as float32 (N, V) on the host, where the next
    tokens are chosen whatever devices the model lies on."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self.model = model
        self.cache = cache

    def prefill(self, prompts: list[list[int]], repeats: int) -> Tensor:
        """Run each prompt once, and make ``repeats`` rows beside each other of it.

        What the cache holds of a prompt's beginning already is kept. B prompts -> (B * repeats, V).
        """
        held = self.cache.sequences
        # The last token always runs again: its logits are not in the cache.
        keep = [min(common_prefix(ids, held[row]), len(ids) - 1) for row, ids in enumerate(prompts)]
        self.cache.crop(keep + [0] * (self.cache.batch_size - len(keep)))
        logits = self._forward([ids[kept:] for ids, kept in zip(prompts, keep, strict=True)])
        if repeats > 1:
            self.cache.repeat_interleave(repeats, rows=len(prompts))
        return logits.repeat_interleave(repeats, 0)

    def step(self, tokens: Tensor, going: Tensor) -> Tensor:
        """Run one token of each row that still goes on; int64, bool (N,) -> (N, V).

        The logits of the other rows are 0: nothing that they run into can upset a sum.
        """
        pairs = zip(tokens.tolist(), going.tolist(), strict=True)
        logits = self._forward([[token] if goes else [] for token, goes in pairs])
        return torch.where(going[:, None], logits, 0.0)

    def reorder(self, rows: Sequence[int]) -> None:
        """Row ``i`` of the cache becomes what row ``rows[i]`` was."""
        if list(rows) != list(range(len(rows))):
            self.cache.reorder(rows)

    def _forward(self, rows: list[list[int]]) -> Tensor:
        lengths = [len(ids) for ids in rows]
        width = max(lengths)
        padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in rows])
        logits = self.model.forward(padded, self.cache, new_lens=lengths, last_id_only=True)
        return logits[:, 0].cpu().float()  # copied first: no plan has room for a second, wider one
