"""Proposals by a smaller model of the same vocabulary, with a cache of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

from exkv.batch import pad_rows
from exkv.cache import KVCache, common_prefix
from exkv.cache.lease import Leased
from exkv.models import Transformer
from exkv.sampling.bounds import check_count

from .limits import check_rollback

#: (logits (1, V), proposed tokens so far) -> a token.
Guess: TypeAlias = Callable[[Tensor, Sequence[int]], int]


class Draft(Leased):
    """A draft model.

    Args:
        model: loaded.
        cache: of this model, for the draft alone, with a row for each text that it follows at once.
            When its pages run out, texts wait.
        tokens: most tokens to propose at a time.
        confidence: stop after a token of less than this probability.

    Raises:
        ValueError, TypeError: a cache of another model, or a number out of range.
    """

    def __init__(
        self, model: Transformer, cache: KVCache, *, tokens: int = 5, confidence: float = 0.4
    ) -> None:
        if not isinstance(model, Transformer) or not isinstance(cache, KVCache):
            raise TypeError(
                f"a draft is an exkv model with a cache of its own, not {model!r:.60} with "
                f"{cache!r:.60}"
            )
        cache.bind(model)
        check_rollback(cache)
        check_count("tokens", tokens, 1, 1024, "an int from 1 to 1024")
        if not 0 <= confidence <= 1:
            raise ValueError(f"confidence is {confidence!r}; it must be from 0 to 1")
        self.model = model
        self.cache = cache
        self.tokens = tokens
        self.confidence = confidence

    def propose(
        self,
        texts: Mapping[int, Sequence[int]],
        most: Mapping[int, int],
        guesses: Mapping[int, Guess],
        chunk: int | None = None,
    ) -> dict[int, list[int]]:
        """Propose continuations of some texts, in shared calls.

        Args:
            texts: row of the cache -> token ids; cached ones are not run again.
            most: row -> most tokens to propose.
            guesses: row -> its chooser.
            chunk: most tokens of a new text to run; proposals follow once all have run.
        """
        with self.using():
            rows = self._begun(texts, self._fitting(texts, most), chunk)
            found: dict[int, list[int]] = {row: [] for row in texts}
            snapshot_at = list(map(len, rows))  # texts stay, proposals may be dropped
            while any(rows):
                padded, lengths = pad_rows(rows)
                logits = self.model.forward(
                    padded, self.cache, new_lens=lengths, last_id_only=True, snapshot_at=snapshot_at
                )
                snapshot_at = [0] * len(rows)
                assert logits is not None
                going = [row for row, ids in enumerate(rows) if ids]
                rows = [[] for _ in rows]
                going = [row for row in going if len(self.cache.sequences[row]) >= len(texts[row])]
                for row, token, sure in self._chosen(logits[:, 0], going, found, guesses):
                    found[row].append(token)
                    room = self.cache.row_limit(row) - len(self.cache.sequences[row])
                    if sure and room > 0 and len(found[row]) < most[row]:
                        rows[row] = [token]
            return {row: ids[: most[row]] for row, ids in found.items()}

    def _fitting(self, texts: Mapping[int, Sequence[int]], most: Mapping[int, int]) -> list[int]:
        """Rows with room for their texts and proposals. When pages are short, rows that aren't
        requested release theirs, then those that request the most; they run again later."""
        limit, table = self.cache.row_limit, self.cache.pages
        rows = [row for row, text in texts.items() if len(text) <= limit(row)]
        if table is None:
            return rows
        ends = {row: min(len(texts[row]) + most[row], limit(row)) for row in rows}
        more = {row: table.pages_for(end) - len(table.rows[row]) for row, end in ends.items()}
        others = [row for row in range(self.cache.batch_size) if row not in ends]
        while sum(more[row] for row in rows) > table.pool.available:
            forgotten = others or [max(rows, key=more.__getitem__)]
            rows = [row for row in rows if row not in forgotten]
            kept = enumerate(self.cache.seq_lens)
            self.cache.crop([0 if row in forgotten else length for row, length in kept])
            others = []
        return rows

    def _begun(
        self, texts: Mapping[int, Sequence[int]], fitting: Sequence[int], chunk: int | None
    ) -> list[list[int]]:
        """Crop rows to the prefixes shared with their texts -> each row's tokens to run."""
        held = self.cache.sequences
        rows: list[list[int]] = [[] for _ in range(max(texts, default=-1) + 1)]
        keep = self.cache.seq_lens
        for row in fitting:
            text = texts[row]
            same = len(held[row]) if text[: len(held[row])] == held[row] else None
            keep[row] = common_prefix(text, held[row]) if same is None else same
            keep[row] = min(keep[row], len(text) - 1)
            rows[row] = list(text[keep[row] :][:chunk])
        self.cache.crop(keep)
        return rows

    def _chosen(
        self,
        logits: Tensor,
        going: Sequence[int],
        found: Mapping[int, Sequence[int]],
        guesses: Mapping[int, Guess],
    ) -> list[tuple[int, int, bool]]:
        """Each row's next token, and whether it is likely enough to continue after it."""
        tokens = [guesses[row](logits[row : row + 1], found[row]) for row in going]
        sure = likely(logits[going], tokens, self.confidence)
        return list(zip(going, tokens, sure, strict=True))


def likely(logits: Tensor, tokens: Sequence[int], confidence: float) -> list[bool]:
    """Whether each row's token has at least this probability; logits (N, V)."""
    if not confidence:
        return [True] * len(tokens)
    picked = logits.float().softmax(-1).cpu()
    return [float(p[token]) >= confidence for p, token in zip(picked, tokens, strict=True)]
