"""``ExLlamaV2StreamingGenerator``: one stream, a chunk of text per call.

Before each step, the stream checks that the cache still holds its tokens, and runs them again if
not: what a script does with the cache in between costs time, but changes no token.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exkv import Draft, Job
from exkv.compat.exllamav2.cache import ExLlamaV2CacheBase
from exkv.compat.exllamav2.loras import adapter_of
from exkv.compat.exllamav2.missing import check_kind, missing_from, refuse_arguments
from exkv.compat.exllamav2.model import ExLlamaV2
from exkv.compat.exllamav2.rows import padding
from exkv.compat.exllamav2.tokenizer import ExLlamaV2Tokenizer
from exkv.decode import Event, Handle, NGrams
from exkv.decode.completion import StopText
from exkv.sampling.chain import distribution

from .base import Continuation, ExLlamaV2BaseGenerator, any_seed
from .filters import filters_of
from .sampler import Settings, most_likely

logger = logging.getLogger(__name__)


_NONE = torch.empty(0)


@dataclass(frozen=True, slots=True)
class _Token:
    """A token that is held back, with the requested probabilities and logits."""

    id: int
    probability: Tensor = _NONE  # (1,)
    top_tokens: Tensor = _NONE  # (k,)
    top_probabilities: Tensor = _NONE
    logits: Tensor = _NONE  # (V,)


class ExLlamaV2StreamingGenerator(ExLlamaV2BaseGenerator):
    """Generates one stream; with ``cfg_scale`` from two rows, the prompt and the negative prompt.

    Args:
        draft_model, draft_cache, num_speculative_tokens: a smaller model that proposes up to this
            many tokens at a time; the stream's tokens stay the same.

    Attributes:
        settings: the stream's; read at each step.
        stop_tokens, stop_strings: end a stream; initially the tokenizer's EOS token.
        speculative_ngram: from the next stream on, propose tokens that followed the last
            ``speculative_ngram_max`` tokens earlier in the text.
        total_tokens, total_draft_tokens, accepted_draft_tokens: since :meth:`reset_sd_stats`.
    """

    speculative_ngram = False
    speculative_ngram_max = 3
    speculative_ngram_min = 1  # this and the next three have no effect
    speculative_ngram_max_inf = 2
    speculative_ngram_threshold = 1
    speculative_prob_threshold = 0.25

    def __init__(
        self,
        model: ExLlamaV2,
        cache: ExLlamaV2CacheBase,
        tokenizer: ExLlamaV2Tokenizer,
        draft_model: ExLlamaV2 | None = None,
        draft_cache: ExLlamaV2CacheBase | None = None,
        num_speculative_tokens: int = 5,
    ) -> None:
        super().__init__(model, cache, tokenizer)
        self.draft_model, self.draft_cache = draft_model, draft_cache
        self.num_speculative_tokens = num_speculative_tokens
        self._propose()  # checks the draft
        self._stops = StopText([])
        self.stop_tokens: set[int | None] = {tokenizer.eos_token_id}
        self.stop_strings: set[str] = set()
        self.settings = Settings()
        self.return_probabilities = False
        self.return_top_tokens = 0
        self.return_logits = False
        self.decode_special_tokens = False
        self.banned_strings: list[str] = []
        self._stream: list[Handle] = []  # one, once there is a stream
        self.reset_sd_stats()

    def set_stop_conditions(self, stop_conditions: Collection[int | str | None]) -> None:
        """Replace the ids and texts that end a stream; they don't appear in it.

        Raises:
            ValueError: an empty text, or another type.
        """
        wrong = [c for c in stop_conditions if not isinstance(c, int | str | None) or c == ""]
        if wrong or isinstance(stop_conditions, str):
            raise ValueError(
                f"stop_conditions has {wrong or stop_conditions!r}: give ids and texts"
            )
        self.stop_strings = {each for each in stop_conditions if isinstance(each, str)}
        self.stop_tokens = {each for each in stop_conditions if isinstance(each, int)}
        held, self._stops = self._stops.held, StopText(sorted(self.stop_strings))
        self._stops.held = held

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
        """The older name of :meth:`begin_stream_ex`."""
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
        filters: Any = None,
        filter_prefer_eos: bool = False,
    ) -> None:
        """Run a prompt; a prefix that the cache holds is reused.

        Args:
            input_ids: int64 (1, T), or (2, T) with ``gen_settings.cfg_scale``, left-padded.
            loras, input_mask, position_offsets: see ``model.forward``.
            return_probabilities, return_top_tokens, return_logits: further entries of
                :meth:`stream_ex`.
            decode_special_tokens: show control tokens.
            banned_strings: texts that must not appear, in upper or lower case: when one would, the
                stream goes back to its first token and chooses another.
            filters, filter_prefer_eos, token_healing: see :class:`ExLlamaV2DynamicJob`.

        The seed comes from Python's ``random``; :meth:`stream_ex` ends the stream once
        ``abort_event`` is set.

        Raises:
            ValueError: no token, rows that don't match the settings, padding that isn't on the
                left, a longer prompt than the cache holds, or an unsupported argument.
        """
        refuse_arguments("begin_stream_ex", input_embeddings=input_embeddings)
        check_kind("gen_settings", gen_settings, Settings)
        _check_ids(input_ids, gen_settings)
        self.settings = gen_settings
        self.return_probabilities = return_probabilities
        self.return_top_tokens = return_top_tokens
        self.return_logits = return_logits
        self.decode_special_tokens = decode_special_tokens
        self.banned_strings = [text for text in banned_strings or () if text]
        self.abort_event = abort_event
        pads = padding(input_mask, position_offsets) or [0] * len(input_ids)
        rows = [row[pad:] for row, pad in zip(input_ids.tolist(), pads, strict=True)]
        self._start(
            rows,
            token_healing=token_healing,
            grammar=filters_of("begin_stream_ex", filters, filter_prefer_eos),
            adapter=adapter_of(self.model, loras),
        )

    def _start(self, rows: list[list[int]], **options: Any) -> None:
        """Submit the stream's job and run its prompt."""
        prompt, *negative = rows
        scale = 1.0 if self.settings.cfg_scale is None else self.settings.cfg_scale
        wants = bool(self.return_probabilities or self.return_top_tokens or self.return_logits)
        job = Job(
            prompt=prompt,
            settings=self.settings.for_jobs(self.tokenizer),
            max_new_tokens=max(self.cache.max_seq_len + 1 - len(prompt), 1),
            seed=any_seed(),
            ignore_eos=True,
            banned_strings=self.banned_strings,
            logprobs=0 if wants else None,
            return_logits=wants,
            guidance_scale=scale,
            negative_prompt=None if scale == 1 else negative[0],
            **options,
        )
        self._begin([job], **self._propose())
        self._stream = self._handles
        self._continued = Continuation(self.tokenizer, self._stream[0], self.decode_special_tokens)
        self._stops = StopText(sorted(self.stop_strings))
        self._events: deque[Event] = deque()
        self._held: list[_Token] = []
        self._taken_ids: list[int] = []
        self._restore()

    def _propose(self) -> dict[str, Any]:
        """Draft and n-grams for exkv's Generator."""
        most, draft = self.num_speculative_tokens, None
        if self.draft_model is not None:
            check_kind("draft_model", self.draft_model, ExLlamaV2)
            check_kind("draft_cache", self.draft_cache, ExLlamaV2CacheBase)
            assert self.draft_cache is not None
            self.draft_cache.take_over(None)
            draft = Draft(self.draft_model.exkv, self.draft_cache.exkv, tokens=most)
        longest = self.speculative_ngram_max
        ngrams = NGrams(tokens=most, longest=longest) if self.speculative_ngram else None
        return {"draft": draft, "ngrams": ngrams}

    def ngram_preload(self, input_ids: Tensor) -> None:
        """Without effect: exkv looks n-grams up in the stream's own text."""
        logger.warning("ngram_preload has no effect: n-grams are looked up in the text itself")

    def reset_sd_stats(self) -> None:
        """Reset the counts of tokens."""
        self.total_tokens = self.total_draft_tokens = self.accepted_draft_tokens = 0

    def get_sd_stats(self) -> tuple[float, float, int, int, int]:
        """Accepted tokens as a share of all and of proposed tokens, and the three counts."""
        total, proposed = self.total_tokens, self.total_draft_tokens
        accepted = self.accepted_draft_tokens
        of_all, of_proposed = accepted / max(total, 1), accepted / max(proposed, 1)
        return of_all, of_proposed, total, proposed, accepted

    def stream_ex(self, ban_tokens: Sequence[int | None] | None = None) -> dict[str, Any]:
        """Run a step -> the text that is final now.

        Args:
            ban_tokens: tokens that are banned in this step; None is skipped.

        Returns:
            ``chunk``: text, "" while it may become a stop or banned text or is half a character;
            ``eos``; ``chunk_token_ids`` (1, n). If requested from :meth:`begin_stream_ex`,
            ``probs`` (1, n), ``top_tokens`` and ``top_probs`` (1, n, k), ``logits`` (1, n, V).
            ``suppressed`` if a banned text was removed.

        Raises:
            ValueError: there is no stream, the cache is full, or no token is left.
        """
        if not self._stream or self._handles is not self._stream:
            raise ValueError("call begin_stream_ex before stream_ex: there is no stream")
        if self._aborted:
            return self._chunk("", eos=True, count=0)
        if not self._events:
            self._events.extend(self._next_events(ban_tokens or ()))
        if self._events:
            return self._take(self._events.popleft())
        completion = self._stream[0].completion
        found, suppressed = self._chunk("", count=0), completion.suppressed
        completion.suppressed = ""
        return {**found, "suppressed": suppressed} if suppressed else found

    def stream(self) -> tuple[Any, ...]:
        """:meth:`stream_ex` as a tuple: text, eos, ids, and requested probabilities and logits.

        Raises:
            ValueError: top tokens were requested; only the dict has them.
        """
        if self.return_top_tokens:
            raise ValueError("stream() can't return top tokens: use stream_ex()")
        found = self.stream_ex()
        found.pop("suppressed", None)
        return tuple(found.values())

    # A step -------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Make the cache hold the stream's tokens."""
        with self._runs.leased():
            self._runs.restore(self._stream)

    def _rows(self) -> list[list[int]]:
        if not self._stream or self._handles is not self._stream:
            return super()._rows()
        return [part.prompt + self._taken_ids for part in self._stream[0].parts]

    def _next_events(self, banned: Sequence[int | None]) -> list[Event]:
        """Run a step -> events of the tokens that it makes final, none, one or several."""
        (handle,) = self._stream
        if handle.done:
            raise ValueError(
                f"the stream has ended ({handle.reason}; the cache has max_seq_len = "
                f"{self.cache.max_seq_len}): call begin_stream_ex"
            )
        ids = [token for token in banned if token is not None]
        self._used = self.settings.for_jobs(self.tokenizer)
        self._used = handle.settings = self._used.disallow_tokens(ids) if ids else self._used
        self._restore()
        before = (handle.proposed_tokens, handle.accepted_tokens)
        events = self._step()
        self.total_tokens += sum(event.token is not None for event in events)
        self.total_draft_tokens += handle.proposed_tokens - before[0]
        self.accepted_draft_tokens += handle.accepted_tokens - before[1]
        return events

    def _take(self, event: Event) -> dict[str, Any]:
        """Take a token -> the chunk of text that can no longer become a stop text."""
        if event.token is None or event.reason == "eos" or event.token in self.stop_tokens:
            return self._end(self._rest())
        self._held.append(self._token(event))
        self._taken_ids.append(event.token)
        text = self._stops.push(self._continued.push(event.token))
        if self._stops.found:
            return self._end(text)
        if event.reason == "grammar":
            return self._end(text + self._rest())
        return self._chunk(text, count=None if text and not self._stops.held else 0)

    def _rest(self) -> str:
        """The held text at the end."""
        return self._stops.push(self._continued.flush()) + self._stops.flush()

    def _end(self, text: str) -> dict[str, Any]:
        """The last chunk; drops accepted tokens after it."""
        self._scheduler.cancel_all()
        return self._chunk(text, eos=True)

    def _token(self, event: Event) -> _Token:
        assert event.token is not None
        if event.logprobs is None or event.logprobs.logits is None:
            return _Token(event.token)
        logits = event.logprobs.logits
        return _Token(event.token, *self._probabilities(logits, event.token), logits)

    def _probabilities(self, logits: Tensor, token: int) -> tuple[Tensor, Tensor, Tensor]:
        """Probability of a token, the most likely tokens, and theirs, as sampled from."""
        so_far = self._stream[0].prompt + self._taken_ids
        probabilities, ids = distribution(logits[None], self._used, [so_far])
        top_tokens, top = (x[0] for x in most_likely(probabilities, ids, self.return_top_tokens))
        return probabilities[ids == token], top_tokens, top

    def _chunk(self, text: str, *, eos: bool = False, count: int | None = None) -> dict[str, Any]:
        """A chunk with the first ``count`` held tokens; all by default."""
        tokens = self._held[:count]
        del self._held[: len(tokens)]
        ids = torch.tensor([[token.id for token in tokens]], dtype=torch.int64)
        found: dict[str, Any] = {"chunk": text, "eos": eos, "chunk_token_ids": ids}
        if self.return_probabilities:
            found["probs"] = _stacked([token.probability for token in tokens], ())
        if self.return_top_tokens:
            shape = (self.return_top_tokens,)
            found["top_probs"] = _stacked([token.top_probabilities for token in tokens], shape)
            found["top_tokens"] = _stacked([token.top_tokens for token in tokens], shape).long()
        if self.return_logits:
            shape = (self.model.config.vocab_size,)
            found["logits"] = _stacked([token.logits for token in tokens], shape)
        return found


def _stacked(parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Stack to (1, n, *shape)."""
    parts = [part.view(shape) for part in parts]
    return torch.stack(parts)[None] if parts else torch.empty((1, 0, *shape))


def _check_ids(input_ids: Tensor, settings: Settings) -> None:
    expected = 1 if settings.cfg_scale is None else 2
    if input_ids.dim() != 2 or len(input_ids) != expected or not input_ids.shape[1]:
        raise ValueError(
            f"input_ids are {tuple(input_ids.shape)}: a stream takes (1, tokens), or (2, "
            f"tokens) with settings.cfg_scale, which is {settings.cfg_scale}"
        )


__getattr__ = missing_from(__name__)
