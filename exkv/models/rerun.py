"""Tokens that rows have to rerun: those after their snapshots of recurrent states, when later
states were rolled back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from exkv.batch import Lengths, pad_rows
from exkv.cache import KVCache


@dataclass(frozen=True, slots=True)
class Rerun:
    """The tokens after their snapshots, for some rows of a call.

    Attributes:
        tokens: row -> token ids; () if the snapshot covers all of the row's tokens.
    """

    tokens: Mapping[int, list[int]]

    @classmethod
    def of(cls, cache: KVCache, lengths: Lengths) -> Rerun:
        """For the rows to which a call adds tokens."""
        rows = cache.rerun_lens(len(lengths.new)).items()
        found = {row: cache.sequences[row][-n:] if n else [] for row, n in rows}
        return cls({row: ids for row, ids in found.items() if lengths.new[row]})

    @contextmanager
    def restored(self, cache: KVCache) -> Iterator[None]:
        """Restore the rows' snapshots; after an error they have their tokens again."""
        cache.restore_snapshots(self.tokens)
        try:
            yield
        except BaseException:
            for row, tokens in self.tokens.items():
                cache.sequences[row] += tokens
                cache.stale.add(row)
            raise

    def alone(self, lengths: Lengths) -> tuple[torch.Tensor, Lengths]:
        """A call for these tokens only, before one of these lengths."""
        rows = [self.tokens.get(row, []) for row in range(len(lengths.new))]
        return self._call(rows, replace(lengths, later=lengths.new, snapshot_at=()))

    def joined(self, ids: torch.Tensor, lengths: Lengths) -> tuple[torch.Tensor, Lengths]:
        """A call for these tokens followed by its own (B, T)."""
        own = zip(ids.tolist(), lengths.new, strict=True)
        rows = [[*self.tokens.get(row, ()), *new[:n]] for row, (new, n) in enumerate(own)]
        pairs = enumerate(lengths.snapshot_at)
        later = tuple(n + len(self.tokens.get(row, ())) if n else 0 for row, n in pairs)
        return self._call(rows, replace(lengths, snapshot_at=later))

    def _call(self, rows: list[list[int]], lengths: Lengths) -> tuple[torch.Tensor, Lengths]:
        ids, new = pad_rows(rows)
        past = tuple(n - len(self.tokens.get(row, ())) for row, n in enumerate(lengths.past))
        return ids, replace(lengths, past=past, new=tuple(new))

    def own_logits(self, logits: torch.Tensor, lengths: Lengths, each_token: bool) -> torch.Tensor:
        """Logits of the call's own tokens, from those of the :meth:`joined` call: (N, 1, V) with
        ``each_token``, otherwise (B, T, V)."""
        skipped = [len(self.tokens.get(row, ())) for row in range(len(lengths.new))]
        if each_token:
            counts = zip(skipped, lengths.new, strict=True)
            own = [at >= n for n, new in counts for at in range(n + new)]
            return logits[torch.tensor(own, device=logits.device)]
        rows = torch.arange(len(skipped), device=logits.device).unsqueeze(-1)
        at = torch.arange(lengths.chunk) + torch.tensor(skipped).unsqueeze(-1)
        return logits[rows, at.clamp_(max=logits.shape[1] - 1).to(logits.device)]
