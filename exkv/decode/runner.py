"""The model and a cache that is used in place: rows of tokens in, each row's last logits out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from torch import Tensor

from exkv.batch import pad_rows
from exkv.cache import KVCache, common_prefix
from exkv.cache.lease import Leased
from exkv.models import Transformer

from .fallback import OnOom, Rescue

T = TypeVar("T")


class Runner(Leased):
    """Runs rows through the model. Logits are of the model's dtype, (N, V), on its last device.

    Args:
        cache: that rows go into.
        rescue: what is done where memory runs out; None for nothing.
        fork_len: where the cache is this call's own, and has a row for each prompt only: tokens of
            the longest row at last. None for a cache with all the rows.
        adapter: that rows go through, by name; None for none.

    Attributes:
        cached_tokens: tokens of the last prompts that the cache held already.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        rescue: Rescue | None = None,
        fork_len: int | None = None,
        adapter: str | None = None,
    ) -> None:
        if cache.model is not model:
            raise ValueError("the cache was built for another model")
        self.model = model
        self.cache = cache
        self.rescue = rescue or Rescue(OnOom(on_oom="raise"))
        self.cached_tokens: int = 0
        self.adapter = adapter
        self._fork_len = fork_len
        self._prompts: KVCache | None = None  # whose rows those of the cache begin with

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Run B prompts -> logits (B, V). What the cache holds of a prompt's beginning is kept."""
        with self.using():
            held, made_with = self.cache.sequences, self.cache.made_with
            (key,) = self.model.keys_of(self.adapter, 1)
            held = [ids if by == key else [] for ids, by in zip(held, made_with, strict=True)]
            # The last token always runs again: its logits are not in the cache.
            same = [common_prefix(ids, held[row]) for row, ids in enumerate(prompts)]
            keep = [min(n, len(ids) - 1) for n, ids in zip(same, prompts, strict=True)]
            self.cache.crop(keep)
            self.cached_tokens = sum(keep)
            return self._forward([ids[kept:] for ids, kept in zip(prompts, keep, strict=True)])

    def repeat(self, prompts: int, repeats: int) -> None:
        """Go on with ``repeats`` rows beside each other of each of the first prompts."""
        if repeats == 1:
            return
        cache, fork_len = self.cache, self._fork_len
        with self.using():
            if fork_len is None:
                self._rescued(lambda: cache.repeat_interleave(repeats, prompts), "reordering rows")
                return
            cache.call_len = 1  # it is through, and needs no room for long calls any more
            forked = partial(cache.fork, repeats, fork_len, call_len=1)
            self.cache, self._prompts = self._rescued(forked, "forking the prompt"), cache

    def step(
        self, tokens: Sequence[int], going: Sequence[bool], placed: Tensor | None = None
    ) -> Tensor:
        """Run one token of each of N rows that still goes on -> logits (N, V); those of the other
        rows mean nothing.

        Args:
            placed: the same tokens int64 (N,) where they were chosen, if that is a device.
        """
        rows = [[token] if goes else [] for token, goes in zip(tokens, going, strict=True)]
        with self.using():
            return self._forward(rows, placed)

    def verify(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Run some tokens of each of N rows, or none -> logits (tokens, V), row after row."""
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
            return self._rescued(call)

    def crop(self, lengths: Sequence[int]) -> None:
        """Keep the first so many tokens of each row."""
        with self.using():
            self.cache.crop(lengths)

    def reorder(self, rows: Sequence[int]) -> None:
        """Row ``i`` of the cache becomes what row ``rows[i]`` was."""
        if list(rows) != list(range(len(rows))):
            with self.using():
                self._rescued(lambda: self.cache.reorder(rows), "reordering rows")

    def _rescued(self, call: Callable[[], T], during: str = "running the model") -> T:
        return self.rescue.run(call, self.cache, during)

    def free(self) -> None:
        """Give the memory of the call's own caches back."""
        for cache in (self.cache, self._prompts):
            if cache is not None:
                cache.free()
                self.model.forget_cache(cache)

    def _forward(self, rows: Sequence[Sequence[int]], placed: Tensor | None = None) -> Tensor:
        held = self.cache.seq_lens
        ends = [length + len(ids) for length, ids in zip(held, rows, strict=False)]
        return self._rescued(lambda: self._go_on(rows, ends, placed))

    def _go_on(
        self, rows: Sequence[Sequence[int]], ends: Sequence[int], placed: Tensor | None
    ) -> Tensor:
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
