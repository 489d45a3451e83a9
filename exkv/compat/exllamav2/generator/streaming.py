"""``ExLlamaV2StreamingGenerator``: one stream, a chunk of text a call.

What the stream knows is its tokens. Before each step the cache is asked how many of them it holds,
so that whatever a script does with it in between costs time, and changes nothing.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exkv.compat.exllamav2.cache import ExLlamaV2CacheBase
from exkv.compat.exllamav2.gone import check_kind, missing_from, refuse_arguments
from exkv.compat.exllamav2.loras import adapter_of
from exkv.compat.exllamav2.model import ExLlamaV2
from exkv.compat.exllamav2.rows import padding
from exkv.compat.exllamav2.tokenizer import ExLlamaV2Tokenizer
from exkv.sampling.chain import distribution, sample

from .base import ExLlamaV2BaseGenerator, seeded
from .sampler import Settings, likeliest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    """A token that isn't given out yet, and what was asked for beside it."""

    id: int
    probability: Tensor  # (1,)
    top_tokens: Tensor  # (k,)
    top_probabilities: Tensor
    logits: Tensor  # (V,)


class ExLlamaV2StreamingGenerator(ExLlamaV2BaseGenerator):
    """A stream at a time; two rows of which the second is steered away from, with ``cfg_scale``.

    Attributes:
        settings: of the stream, read anew at each token.
        stop_tokens, stop_strings: what ends a stream; at first the tokenizer's eos token.
    """

    def __init__(
        self,
        model: ExLlamaV2,
        cache: ExLlamaV2CacheBase,
        tokenizer: ExLlamaV2Tokenizer,
        draft_model: object = None,
        draft_cache: object = None,
        num_speculative_tokens: int = 5,
    ) -> None:
        refuse_arguments(
            "ExLlamaV2StreamingGenerator", draft_model=draft_model, draft_cache=draft_cache
        )
        super().__init__(model, cache, tokenizer)
        self.stop_tokens: set[int | None] = {tokenizer.eos_token_id}
        self.stop_strings: set[str] = set()
        self.settings = Settings()
        self.return_probabilities = False
        self.return_top_tokens = 0
        self.return_logits = False
        self.decode_special_tokens = False
        self.banned_strings: list[str] = []
        self._streamed: list[list[int]] = []  # the rows of the stream

    def set_stop_conditions(self, stop_conditions: Collection[int | str | None]) -> None:
        """Ids and texts that end a stream, in place of those before; both are left out of it.

        Raises:
            ValueError: something else, or an empty text.
        """
        wrong = [c for c in stop_conditions if not isinstance(c, int | str | None) or c == ""]
        if wrong or isinstance(stop_conditions, str):
            raise ValueError(
                f"stop_conditions has {wrong or stop_conditions!r}: give ids and texts"
            )
        self.stop_strings = {each for each in stop_conditions if isinstance(each, str)}
        self.stop_tokens = {each for each in stop_conditions if isinstance(each, int)}

    def begin_stream(
        self,
        input_ids: Tensor,
        gen_settings: Settings,
        token_healing: bool = False,
        loras: object = None,
        input_mask: Tensor | None = None,
        position_offsets: Tensor | None = None,
        abort_event: threading.Event | None = None,
        **kwargs: Any,
    ) -> None:
        """:meth:`begin_stream_ex`, by its older name."""
        self.begin_stream_ex(
            input_ids,
            gen_settings,
            token_healing,
            loras,
            input_mask,
            position_offsets,
            abort_event=abort_event,
            **kwargs,
        )

    def begin_stream_ex(
        self,
        input_ids: Tensor,
        gen_settings: Settings,
        token_healing: bool = False,
        loras: object = None,
        input_mask: Tensor | None = None,
        position_offsets: Tensor | None = None,
        return_probabilities: bool = False,
        return_top_tokens: int = 0,
        return_logits: bool = False,
        abort_event: threading.Event | None = None,
        input_embeddings: object = None,
        decode_special_tokens: bool = False,
        banned_strings: Sequence[str] | None = None,
        filters: object = None,
        filter_prefer_eos: bool = False,
    ) -> None:
        """Run a prompt; what the cache holds of its beginning is kept.

        Args:
            input_ids: int64 (1, T), or (2, T) with ``gen_settings.cfg_scale``, padded on the left.
            loras, input_mask, position_offsets: as ``model.forward`` takes them.
            return_probabilities, return_top_tokens, return_logits: what :meth:`stream_ex` gives
                beside text and ids.
            decode_special_tokens: show control tokens.
            banned_strings: texts that don't appear, however they are spelt: where one would, the
                stream goes back, and takes another token where it began.

        Random numbers follow from Python's ``random``; ``abort_event`` is looked at by
        :meth:`stream_ex`, which ends the stream then.

        Raises:
            ValueError: no token, rows that don't go with the settings, padding that isn't on the
                left, a longer prompt than the cache holds, or an argument that isn't taken here.
        """
        refuse_arguments(
            "begin_stream_ex",
            token_healing=token_healing,
            input_embeddings=input_embeddings,
            filters=filters,
            filter_prefer_eos=filter_prefer_eos,
        )
        check_kind("gen_settings", gen_settings, Settings)
        _check_ids(input_ids, gen_settings)
        self._adapter = adapter_of(self.model, loras)
        self.settings = gen_settings
        self.return_probabilities = return_probabilities
        self.return_top_tokens = return_top_tokens
        self.return_logits = return_logits
        self.decode_special_tokens = decode_special_tokens
        self.banned_strings = [text for text in banned_strings or () if text]
        self.abort_event = abort_event
        pads = padding(input_mask, position_offsets) or [0] * len(input_ids)
        rows = [row[pad:] for row, pad in zip(input_ids.tolist(), pads, strict=True)]
        self._start(rows)

    def _start(self, rows: list[list[int]]) -> None:
        """Run the rows of a prompt, and begin to choose and to hold back text."""
        self._runner, self._streamed = self._begin(rows), rows
        self._draws = seeded(None, 1)
        self._text_held = ""
        self._held: list[tuple[_Token, int]] = []  # and where its text ends
        self._blocked: dict[int, list[int]] = {}
        self._begin_text()
        self._logits: Tensor | None = self._runner.prefill(rows)

    def stream_ex(self, ban_tokens: Sequence[int] | None = None) -> dict[str, Any]:
        """Choose a token, and give out what text is certain by now.

        Args:
            ban_tokens: not to be chosen this time.

        Returns:
            ``chunk``, text, "" while it may yet become a stop or a banned text or is half a
            character; ``eos``; ``chunk_token_ids`` (1, n). With what :meth:`begin_stream_ex` asked
            for ``probs`` (1, n), ``top_tokens`` and ``top_probs`` (1, n, k), ``logits`` (1, n, V).
            ``suppressed`` where a banned text was taken back.

        Raises:
            ValueError: no stream is under way, the cache is full, or no token is left to choose.
        """
        if not self._streamed or self._sequences is not self._streamed:
            raise ValueError("call begin_stream_ex before stream_ex: no stream is under way")
        if self._aborted:
            return self._given("", eos=True, count=0)
        logits = self._next_logits()
        token = self._choose(logits, [*(ban_tokens or ()), *self._blocked.get(self._length, ())])
        if token.id in self.stop_tokens:
            return self._given(self._text_held + self._decoder.flush(), eos=True)
        for row in self._sequences:
            row.append(token.id)
        self._text_held += self._decoder.push(token.id)
        self._held.append((token, len(self._text_held)))
        return self._settled()

    def stream(self) -> tuple[Any, ...]:
        """:meth:`stream_ex` as a tuple: text, whether it ended, ids, and what else was asked for.

        Raises:
            ValueError: top tokens were asked for, which the dict has only.
        """
        if self.return_top_tokens:
            raise ValueError("stream() has no place for top tokens: use stream_ex()")
        found = self.stream_ex()
        found.pop("suppressed", None)
        return tuple(found.values())

    # A step -------------------------------------------------------------------------------

    @property
    def _length(self) -> int:
        return len(self._sequences[0])

    def _begin_text(self) -> None:
        special = self.decode_special_tokens
        self._decoder = self.tokenizer.exkv.stream(not special, after=self._sequences[0])

    def _next_logits(self) -> Tensor:
        """(rows, V), after the tokens so far."""
        if self._logits is None:
            held = self.cache.exkv.sequences
            rows = self._sequences
            if all(has == row[:-1] for has, row in zip(held, rows, strict=False)):
                return self._runner.step([row[-1] for row in rows], [True] * len(rows))
            self.cache.pads = ()
            return self._runner.prefill(rows)
        logits, self._logits = self._logits, None
        return logits

    def _choose(self, logits: Tensor, banned: Sequence[int]) -> _Token:
        chosen = self.settings.prepared(logits, banned)
        params, history = self.settings.for_exkv(self.tokenizer), [self._sequences[0]]
        token = int(sample(chosen, params, history, self._draws))
        count = self.return_top_tokens
        probabilities = ids = None
        if self.return_probabilities or count:
            probabilities, ids = distribution(chosen.cpu(), params, history)
        if probabilities is None or ids is None:
            probability = top_tokens = top_probabilities = torch.empty(0)
        else:
            probability = probabilities[ids == token]
            top_tokens, top_probabilities = (x[0] for x in likeliest(probabilities, ids, count))
        return _Token(
            id=token,
            probability=probability,
            top_tokens=top_tokens,
            top_probabilities=top_probabilities,
            logits=logits[0].float().cpu() if self.return_logits else torch.empty(0),
        )

    def _settled(self) -> dict[str, Any]:
        """Give out what is held, unless it may become a text that ends the stream or is banned."""
        text = self._text_held
        ban = _first(text, self.banned_strings, re.IGNORECASE)
        if ban is not None:
            return {**self._given("", count=0), "suppressed": self._taken_back(ban)}
        stop = _first(text, self.stop_strings)
        if stop is not None:
            return self._given(text[:stop], eos=True)
        waits = _may_become(text, self.stop_strings) or _may_become(
            text.lower(), [ban.lower() for ban in self.banned_strings]
        )
        if waits or not text:
            return self._given("", count=0)
        return self._given(text)

    def _taken_back(self, start: int) -> str:
        """Forget the tokens from the one that this place of what is held belongs to; their text.

        That token is not chosen again here, until something was given out.
        """
        ends = [end for _, end in self._held]
        kept = next(i for i, end in enumerate(ends) if end > start)
        first, begins = self._held[kept][0], ends[kept - 1] if kept else 0
        for row in self._sequences:
            del row[len(row) - len(self._held) + kept :]
        self._blocked.setdefault(self._length, []).append(first.id)
        taken, self._text_held = self._text_held[begins:], self._text_held[:begins]
        del self._held[kept:]
        self._begin_text()
        return taken

    def _given(self, text: str, *, eos: bool = False, count: int | None = None) -> dict[str, Any]:
        """A chunk with the first ``count`` tokens that are held; with all of them by default."""
        tokens = [token for token, _ in self._held[:count]]
        if tokens:
            self._held, self._text_held, self._blocked = [], "", {}
        ids = torch.tensor([[token.id for token in tokens]], dtype=torch.int64)
        found: dict[str, Any] = {"chunk": text, "eos": eos, "chunk_token_ids": ids}
        if self.return_probabilities:
            found["probs"] = _in_a_row([token.probability for token in tokens], ())
        if self.return_top_tokens:
            shape = (self.return_top_tokens,)
            found["top_probs"] = _in_a_row([token.top_probabilities for token in tokens], shape)
            found["top_tokens"] = _in_a_row([token.top_tokens for token in tokens], shape).long()
        if self.return_logits:
            shape = (self.model.config.vocab_size,)
            found["logits"] = _in_a_row([token.logits for token in tokens], shape)
        return found


def _in_a_row(parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """(1, n, *shape)."""
    parts = [part.view(shape) for part in parts]
    return torch.stack(parts)[None] if parts else torch.empty((1, 0, *shape))


def _first(text: str, among: Collection[str], flags: int = 0) -> int | None:
    """Where the first of these texts begins."""
    found = [hit.start() for each in among if (hit := re.search(re.escape(each), text, flags))]
    return min(found, default=None)


def _may_become(text: str, among: Collection[str]) -> bool:
    """Whether it ends as one of these begins."""
    return any(text.endswith(each[:n]) for each in among for n in range(1, len(each)))


__getattr__ = missing_from(__name__)


def _check_ids(input_ids: Tensor, settings: Settings) -> None:
    expected = 1 if settings.cfg_scale is None else 2
    if input_ids.dim() != 2 or len(input_ids) != expected or not input_ids.shape[1]:
        raise ValueError(
            f"input_ids are {tuple(input_ids.shape)}: a stream takes (1, tokens), or (2, "
            f"tokens) with settings.cfg_scale, which is {settings.cfg_scale}"
        )
