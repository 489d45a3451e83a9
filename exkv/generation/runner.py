"""The model and the cache as the loops see them: rows of tokens in, each row's last logits out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exkv.cache import KVCache, common_prefix
from exkv.models import Transformer

from .fallback import OnOom, Rescue


class Runner:
    """Runs rows through the model; logits come as float32 (N, V) on the host, where the next
    tokens are chosen whatever devices the model lies on.

    Args:
        cache: that rows go into.
        rescue: what is done where memory runs out; None for nothing.
        fork_len: where the cache is this call's own, and has a row for each prompt only: tokens of
            the longest row at last. None for a cache with all the rows.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        rescue: Rescue | None = None,
        fork_len: int | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.rescue = rescue or Rescue(OnOom(on_oom="raise"))
        self._fork_len = fork_len
        self._prompts: KVCache | None = None  # whose rows those of the cache begin with

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
            self._repeat(len(prompts), repeats)
        return logits.repeat_interleave(repeats, 0)

    def _repeat(self, prompts: int, repeats: int) -> None:
        """Go on with ``repeats`` rows of each prompt."""
        cache = self.cache
        if self._fork_len is None:
            self.rescue.run(
                lambda: cache.repeat_interleave(repeats, prompts), cache, "reordering rows"
            )
            return
        cache.call_len = 1  # it is through, and needs no room for long calls any more
        self.cache = self.rescue.run(
            lambda: cache.fork(repeats, self._fork_len, call_len=1), cache, "forking the prompt"
        )
        self._prompts = cache

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
            self.rescue.run(lambda: self.cache.reorder(rows), self.cache, "reordering rows")

    def free(self) -> None:
        """Give the memory of the call's own caches back."""
        for cache in (self.cache, self._prompts):
            if cache is not None:
                cache.free()
                self.model.forget_cache(cache)

    def _forward(self, rows: list[list[int]]) -> Tensor:
        held = self.cache.seq_lens
        ends = [length + len(ids) for length, ids in zip(held, rows, strict=False)]
        return self.rescue.run(lambda: self._go_on(rows, ends), self.cache, "running the model")

    def _go_on(self, rows: list[list[int]], ends: list[int]) -> Tensor:
        """Run what the cache doesn't hold yet of rows that end at these lengths; after a call that
        failed, the chunks that were through are there.

        The last token of a row that was through has to run again, for its logits.
        """
        held = self.cache.seq_lens
        limits = [
            min(end - bool(ids), has) for has, ids, end in zip(held, rows, ends, strict=False)
        ]
        if limits != held[: len(limits)]:
            self.cache.crop([*limits, *held[len(limits) :]])
        rows = [ids[len(ids) - end + at :] for ids, end, at in zip(rows, ends, limits, strict=True)]
        lengths = [len(ids) for ids in rows]
        width = max(lengths)
        padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in rows])
        logits = self.model.forward(
            padded, self.cache, new_lens=lengths, last_id_only=True, keep_chunks=True
        )
        return logits[:, 0].cpu().float()  # copied first: no plan has room for a second, wider one
