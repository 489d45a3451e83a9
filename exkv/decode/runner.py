"""The model over one cache: rows of tokens in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from exkv.batch import pad_rows
from exkv.cache import KVCache, common_prefix
from exkv.cache.lease import Leased
from exkv.models import Transformer

from .fallback import OnOom, Rescue


class Runner(Leased):
    """Runs rows through the model. Logits are of the model's dtype, (N, V), on its last device.

    Args:
        rescue: fallback steps for out of memory; None for none.
        fork_len: final length of the longest row, if the cache has only a row for each prompt and
            is forked; None for a cache with all rows.
        adapter: the adapter's name; None for none.

    Attributes:
        cached_tokens: tokens of the last prompts that the cache already held.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        rescue: Rescue | None = None,
        fork_len: int | None = None,
        adapter: str | None = None,
    ) -> None:
        cache.bind(model)
        self.model = model
        self.cache = cache
        self.rescue = rescue or Rescue(OnOom(on_oom="raise"))
        self.cached_tokens: int = 0
        self.adapter = adapter
        self._fork_len = fork_len
        self._prompts: KVCache | None = None  # the cache that was forked

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Run B prompts -> logits (B, V). A cached prefix of a prompt is not run again."""
        with self.using():
            held, made_with = self.cache.sequences, self.cache.made_with
            (key,) = self.model.keys_of(self.adapter, 1)
            held = [ids if by == key else [] for ids, by in zip(held, made_with, strict=True)]
            # The last token always runs again: its logits are not in the cache.
            same = [common_prefix(ids, held[row]) for row, ids in enumerate(prompts)]
            keep = [min(n, len(ids) - 1) for n, ids in zip(same, prompts, strict=True)]
            self.cache.crop(keep)
            self.cached_tokens = sum(keep)
            rows = [ids[kept:] for ids, kept in zip(prompts, keep, strict=True)]
            if self.cache.has_snapshots:  # so that another answer to these prompts can begin there
                firsts = [ids[:-1] for ids in rows]
                self.rescue.run(lambda: self._prefill_to_snapshot(firsts), self.cache)
                rows = [ids[-1:] for ids in rows]
            return self._forward(rows)

    def repeat(self, prompts: int, repeats: int) -> None:
        """Repeat each prompt's row ``repeats`` times."""
        if repeats == 1:
            return
        cache, fork_len = self.cache, self._fork_len
        with self.using():
            if fork_len is None:
                self.rescue.run(
                    lambda: cache.repeat_interleave(repeats, prompts), cache, "reordering rows"
                )
                return
            cache.call_len = 1  # no more long calls
            forked = partial(cache.fork, repeats, fork_len, call_len=1)
            self.cache = self.rescue.run(forked, cache, "forking the prompt")
            self._prompts = cache

    def step(
        self, tokens: Sequence[int], going: Sequence[bool], placed: Tensor | None = None
    ) -> Tensor:
        """Run one token of each running row of N -> logits (N, V), undefined for other rows.
        ``placed`` are the tokens on the device where they were chosen, int64 (N,)."""
        rows = [[token] if goes else [] for token, goes in zip(tokens, going, strict=True)]
        with self.using():
            return self._forward(rows, placed)

    def verify(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Run the tokens of N rows -> logits (tokens, V), row after row."""
        before = self.cache.seq_lens

        def call() -> Tensor:
            self.cache.crop(before)
            padded, lengths = pad_rows(rows)
            logits = self.model.forward(
                padded, self.cache, new_lens=lengths, each_token=True, adapter=self.adapter
            )
            assert logits is not None  # they were asked for
            return logits[:, 0]

        with self.using():
            return self.rescue.run(call, self.cache)

    def crop(self, lengths: Sequence[int]) -> None:
        """Truncate each row to its length."""
        with self.using():
            self.cache.crop(lengths)

    def reorder(self, rows: Sequence[int]) -> None:
        """Make row ``i`` of the cache what row ``rows[i]`` was."""
        if list(rows) != list(range(len(rows))):
            with self.using():
                self.rescue.run(lambda: self.cache.reorder(rows), self.cache, "reordering rows")

    def free(self) -> None:
        """Release the call's own caches."""
        for cache in (self.cache, self._prompts):
            if cache is not None:
                cache.free()
                self.model.forget_cache(cache)

    def _prefill_to_snapshot(self, rows: Sequence[Sequence[int]]) -> None:
        """Run tokens of rows, and take snapshots of the recurrent states after them."""
        padded, lengths = pad_rows(rows)
        if any(lengths):
            self.model.forward(
                padded,
                self.cache,
                new_lens=lengths,
                preprocess_only=True,
                adapter=self.adapter,
                snapshot_at=lengths,
            )

    def _forward(self, rows: Sequence[Sequence[int]], placed: Tensor | None = None) -> Tensor:
        held = self.cache.seq_lens
        ends = [length + len(ids) for length, ids in zip(held, rows, strict=False)]
        return self.rescue.run(lambda: self._go_on(rows, ends, placed), self.cache)

    def _go_on(
        self, rows: Sequence[Sequence[int]], ends: Sequence[int], placed: Tensor | None
    ) -> Tensor:
        """Run rows up to these lengths, from where the cache ends: after a failed call it has the
        chunks that were complete. A row's last token always runs again, for its logits."""
        held = self.cache.seq_lens
        limits = [
            min(end - bool(ids), has) for has, ids, end in zip(held, rows, ends, strict=False)
        ]
        if limits != held[: len(limits)]:
            self.cache.crop([*limits, *held[len(limits) :]])
        rows = [ids[len(ids) - end + at :] for ids, end, at in zip(rows, ends, limits, strict=True)]
        padded, lengths = pad_rows(rows)
        logits = self.model.forward(
            padded,
            self.cache,
            new_lens=lengths,
            last_id_only=True,
            keep_chunks=True,
            placed_ids=None if placed is None else placed[:, None],
            adapter=self.adapter,
        )
        assert logits is not None  # they were asked for
        return logits[:, 0]
