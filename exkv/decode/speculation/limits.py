"""How many proposed tokens a call may verify."""

from __future__ import annotations

from collections.abc import Sequence

from exkv.cache import KVCache
from exkv.devices import CPU, ELSEWHERE
from exkv.models import Transformer
from exkv.models.bound_run import MOST_TOKENS


def check_same_vocabulary(model: Transformer, draft: Transformer) -> None:
    """ValueError unless draft and model have the same vocabulary."""
    own, other = draft.config.vocab_size, model.config.vocab_size
    if own != other:
        raise ValueError(
            f"the draft has a vocabulary of {own} tokens, and the model one of {other}: they must "
            "be the same"
        )


def check_promised(model: Transformer) -> None:
    """ValueError for a model placed without room for logits of several tokens a row."""
    plan = getattr(model, "plan", None)
    if plan is not None and plan.last_id_only:
        raise ValueError(
            "the model was placed for logits of each row's last token only, and verifying proposed "
            "tokens takes those of all: load it with last_id_only=False"
        )


def check_rollback(cache: KVCache) -> None:
    """ValueError for a cache whose recurrent states have no snapshots to roll back to."""
    if cache.model.config.has_states and not cache.has_snapshots:
        raise ValueError(
            "this cache can't roll back recurrent states after rejected tokens: make it with "
            f"snapshots=True ({type(cache).__name__}(model, ..., snapshots=True)), which doubles "
            "the bytes of its states"
        )


class Limits:
    """Limits of one model and one cache.

    On the CPU a call has at most as many tokens as the bound run takes: they have the bits of
    single tokens, and cost little more than one while reading weights dominates. Nothing is
    proposed where rejected tokens would overwrite needed ones, in a ring that has wrapped around.
    """

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        returns = cache.has_snapshots
        layers = [layer for layer in cache.layers if not (layer.spec.state and returns)]
        self._arrangements = {layer.spec.arrangement for layer in layers}
        on_host = all(device in (CPU, ELSEWHERE) for device in model.device_map.values())
        self._most_tokens = MOST_TOKENS if on_host else None

    def shared(self, wanted: Sequence[int]) -> list[int]:
        """How many proposed tokens of each row one call takes beside its newest: as many as
        wanted, or equal shares of what a call takes."""
        room = None if self._most_tokens is None else max(self._most_tokens - len(wanted), 0)
        if room is None or sum(wanted) <= room:
            return list(wanted)
        given = [0] * len(wanted)
        # Smallest first, so that the others share the rest.
        order = sorted(range(len(wanted)), key=lambda row: wanted[row])
        for done, row in enumerate(order):
            given[row] = min(wanted[row], room // (len(wanted) - done))
            room -= given[row]
        return given

    def of_row(self, row: int, most: int) -> int:
        """How many of ``most`` tokens a row may store after its next one, and drop without running
        any again."""
        kept = len(self._cache.sequences[row]) + 1
        again = self._cache.rerun_lens(row + 1).get(row, 0)  # in the same call
        most = min(most, self._model.logits_len - 1 - again, self._cache.row_limit(row) - kept)
        while most > 0 and not self._returns(row, kept + most, kept):
            most -= 1
        return max(most, 0)

    def _returns(self, row: int, length: int, kept: int) -> bool:
        """Whether a row of ``length`` tokens can be cropped to ``kept``."""
        rotary = self._model.rotary
        if rotary.varies and rotary.variant(length) != rotary.variant(kept):
            return False
        written = max(self._cache.written[row], length)
        return not any(arranged.lost(written, kept) for arranged in self._arrangements)
