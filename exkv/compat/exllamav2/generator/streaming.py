"""``ExLlamaV2StreamingGenerator``: one stream, a chunk of text a call.

Before each step the stream checks that the cache still holds its tokens, and runs them again if
not: whatever a script does with the cache in between costs time, and changes nothing.
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
from exkv.compat.exllamav2.gone import check_kind, missing_from, refuse_arguments
from exkv.compat.exllamav2.loras import adapter_of
from exkv.compat.exllamav2.model import ExLlamaV2
from exkv.compat.exllamav2.rows import padding
from exkv.compat.exllamav2.tokenizer import ExLlamaV2Tokenizer
from exkv.decode import Event, Handle, NGrams
from exkv.decode.completion import StopText
from exkv.sampling.chain import distribution

from .base import Continuation, ExLlamaV2BaseGenerator, any_seed
from .filters import filters_of
from .sampler import Settings, likeliest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    """A token that is held back, with the probabilities and logits that were asked for."""

    id: int
    probability: Tensor  # (1,)
    top_tokens: Tensor  # (k,)
    top_probabilities: Tensor
    logits: Tensor  # (V,)


class ExLlamaV2StreamingGenerator(ExLlamaV2BaseGenerator):
    """Generates one stream; with ``cfg_scale`` two rows, guided away from the second.

    Args:
        draft_model, draft_cache, num_speculative_tokens: a smaller model that proposes up to this
            many tokens at a time; the stream's tokens stay the same.

    Attributes:
        settings: of the stream; read at each step.
        stop_tokens, stop_strings: end a stream; at first the tokenizer's eos token.
        speculative_ngram: propose what followed the last ``speculative_ngram_max`` tokens earlier
            in the text, from the next stream on.
        total_tokens, total_draft_tokens, accepted_draft_tokens: since :meth:`reset_sd_stats`.
    """

    speculative_ngram = False
    speculative_ngram_max = 3
    speculative_ngram_min = 1  # this and the next three are without effect
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
        self._propose()  # says what is wrong with the draft
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
        """Replace the ids and texts that end a stream; neither appears in it.

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
            input_ids: int64 (1, T), or (2, T) with ``gen_settings.cfg_scale``, padded on the left.
            loras, input_mask, position_offsets: as ``model.forward`` takes them.
            return_probabilities, return_top_tokens, return_logits: further entries of
                :meth:`stream_ex`.
            decode_special_tokens: show control tokens.
            banned_strings: texts that don't appear in upper or lower case: where one would, the
                stream goes back to its first token and chooses another.
            filters, filter_prefer_eos, token_healing: as of :class:`ExLlamaV2DynamicJob`.

        The seed comes from Python's ``random``; :meth:`stream_ex` ends the stream once
        ``abort_event`` is set.

        Raises:
            ValueError: no token, rows that don't go with the settings, padding that isn't on the
                left, a longer prompt than the cache holds, or an argument that isn't taken here.
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

    def _start(self, rows: list[list[int]], **wanted: Any) -> None:
        """Submit the stream's job and run its prompt."""
        own, *negative = rows
        scale = 1.0 if self.settings.cfg_scale is None else self.settings.cfg_scale
        asks = bool(self.return_probabilities or self.return_top_tokens or self.return_logits)
        job = Job(
            prompt=own,
            settings=self.settings.for_jobs(self.tokenizer),
            max_new_tokens=max(self.cache.max_seq_len + 1 - len(own), 1),
            seed=any_seed(),
            ignore_eos=True,
            banned_strings=self.banned_strings,
            logprobs=0 if asks else None,
            return_logits=asks,
            guidance_scale=scale,
            negative_prompt=None if scale == 1 else negative[0],
            **wanted,
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
        logger.warning("ngram_preload changes nothing: n-grams are looked up in the text itself")

    def reset_sd_stats(self) -> None:
        """Reset the counts of tokens."""
        self.total_tokens = self.total_draft_tokens = self.accepted_draft_tokens = 0

    def get_sd_stats(self) -> tuple[float, float, int, int, int]:
        """Accepted tokens as a share of all and of the proposed ones; the three counts."""
        numbers = (self.total_tokens, self.total_draft_tokens, self.accepted_draft_tokens)
        by_all, by_proposed = (numbers[2] / max(count, 1) for count in numbers[:2])
        return by_all, by_proposed, *numbers

    def stream_ex(self, ban_tokens: Sequence[int | None] | None = None) -> dict[str, Any]:
        """Make a step, and return the text that is final by now.

        Args:
            ban_tokens: tokens that this step doesn't choose; None among them is skipped.

        Returns:
            ``chunk``, text, "" while it may become a stop or banned text or is half a character;
            ``eos``; ``chunk_token_ids`` (1, n). If :meth:`begin_stream_ex` asked for them,
            ``probs`` (1, n), ``top_tokens`` and ``top_probs`` (1, n, k), ``logits`` (1, n, V).
            ``suppressed`` when a banned text was taken back.

        Raises:
            ValueError: no stream is under way, the cache is full, or no token is left to choose.
        """
        if not self._stream or self._handles is not self._stream:
            raise ValueError("call begin_stream_ex before stream_ex: no stream is under way")
        if self._aborted:
            return self._given("", eos=True, count=0)
        if not self._events:
            self._events.extend(self._chosen(ban_tokens or ()))
        if self._events:
            return self._taken(self._events.popleft())
        completion = self._stream[0].completion
        found, suppressed = self._given("", count=0), completion.suppressed
        completion.suppressed = ""
        return {**found, "suppressed": suppressed} if suppressed else found

    def stream(self) -> tuple[Any, ...]:
        """:meth:`stream_ex` as a tuple: text, eos, ids, probabilities and logits if asked for.

        Raises:
            ValueError: top tokens were asked for; only the dict has them.
        """
        if self.return_top_tokens:
            raise ValueError("stream() has no place for top tokens: use stream_ex()")
        found = self.stream_ex()
        found.pop("suppressed", None)
        return tuple(found.values())

    # A step -------------------------------------------------------------------------------

    def _restore(self) -> None:
        """See that the cache holds the stream's tokens."""
        with self._runs.leased():
            self._runs.restore(self._stream)

    def _rows(self) -> list[list[int]]:
        if not self._stream or self._handles is not self._stream:
            return super()._rows()
        return [part.prompt + self._taken_ids for part in self._stream[0].parts]

    def _chosen(self, banned: Sequence[int | None]) -> list[Event]:
        """Make a step: the tokens that it makes final, none, one or several."""
        (handle,) = self._stream
        if handle.done:
            raise ValueError(
                f"the stream has ended ({handle.reason}), and the cache has max_seq_len = "
                f"{self.cache.max_seq_len}: call begin_stream_ex"
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

    def _taken(self, event: Event) -> dict[str, Any]:
        """The chunk for a token: the text that can't become a stop text any more."""
        if event.token is None or event.reason == "eos" or event.token in self.stop_tokens:
            return self._ended(self._stops.push(self._continued.flush()) + self._stops.flush())
        self._held.append(self._token(event))
        self._taken_ids.append(event.token)
        text = self._stops.push(self._continued.push(event.token))
        if self._stops.found:
            return self._ended(text)
        if event.reason == "grammar":
            return self._ended(
                text + self._stops.push(self._continued.flush()) + self._stops.flush()
            )
        return self._given(text, count=None if text and not self._stops.held else 0)

    def _ended(self, text: str) -> dict[str, Any]:
        """The last chunk; drops accepted proposals behind it."""
        self._scheduler.cancel_all()
        return self._given(text, eos=True)

    def _token(self, event: Event) -> _Token:
        none = torch.empty(0)
        probability = top_tokens = top_probabilities = logits = none
        assert event.token is not None
        if event.logprobs is not None and event.logprobs.logits is not None:
            logits = event.logprobs.logits
            probability, top_tokens, top_probabilities = self._likely(logits, event.token)
        return _Token(
            id=event.token,
            probability=probability,
            top_tokens=top_tokens,
            top_probabilities=top_probabilities,
            logits=logits,
        )

    def _likely(self, logits: Tensor, token: int) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities of a token and of the likeliest ones, as they were drawn from."""
        so_far = self._stream[0].prompt + self._taken_ids
        probabilities, ids = distribution(logits[None], self._used, [so_far])
        top_tokens, top = (x[0] for x in likeliest(probabilities, ids, self.return_top_tokens))
        return probabilities[ids == token], top_tokens, top

    def _given(self, text: str, *, eos: bool = False, count: int | None = None) -> dict[str, Any]:
        """A chunk with the first ``count`` held tokens; all by default."""
        tokens = self._held[:count]
        del self._held[: len(tokens)]
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


__getattr__ = missing_from(__name__)


def _check_ids(input_ids: Tensor, settings: Settings) -> None:
    expected = 1 if settings.cfg_scale is None else 2
    if input_ids.dim() != 2 or len(input_ids) != expected or not input_ids.shape[1]:
        raise ValueError(
            f"input_ids are {tuple(input_ids.shape)}: a stream takes (1, tokens), or (2, "
            f"tokens) with settings.cfg_scale, which is {settings.cfg_scale}"
        )
