"""``ExLlamaV2DynamicJob``: a request for the dynamic generator, and its results so far."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exkv import Job
from exkv.compat.exllamav2.missing import Adapter, check_kind, missing_from, refuse_arguments
from exkv.compat.exllamav2.tokenizer import ExLlamaV2Tokenizer
from exkv.decode import Event, Handle
from exkv.decode.completion import StopText

from .base import Continuation
from .filters import filters_of
from .sampler import Settings

if TYPE_CHECKING:
    from .dynamic import ExLlamaV2DynamicGenerator

#: Reason for which an exkv job ends -> ``eos_reason``.
_REASONS = {
    "eos": "stop_token",
    "stop": "stop_string",
    "length": "max_new_tokens",
    "cache_full": "max_new_tokens",
    "grammar": "end_filter",
}


class ExLlamaV2DynamicJob(Adapter):
    """A prompt to complete.

    Args:
        input_ids: int64 (1, T), or a list with one such tensor; with ``gen_settings.cfg_scale``,
            with two: the prompt and the negative prompt.
        max_skips: without effect: jobs begin in their order of arrival.
        min_new_tokens: until there are this many, no id of the ``stop_conditions`` is chosen.
        stop_conditions: texts and ids that end the completion; nothing else ends it before
            ``max_new_tokens``.
        token_healing: choose the prompt's last token again, by its text.
        banned_strings: texts that must not appear; a token's result comes when it is final, and
            one with ``suppressed_text`` when a text was removed.
        return_probs, return_top_tokens: probabilities of the model's own distribution, before
            sampling steps; ``return_logits``: its logits, (1, 1, vocabulary).
        identifier: returned in each result.

    Attributes:
        full_completion: the text so far.
        new_tokens: number of tokens so far.
        cached_pages, cached_tokens: the part of the prompt found in the prefix cache.
        accepted_draft_tokens, rejected_draft_tokens: numbers of proposed tokens.
    """

    def __init__(
        self,
        input_ids: Tensor | list[Tensor],
        max_new_tokens: int,
        min_new_tokens: int = 0,
        max_skips: int | None = 4,
        gen_settings: Settings | None = None,
        seed: int | None = None,
        token_healing: bool = False,
        return_top_tokens: int = 0,
        return_logits: bool = False,
        return_probs: bool = False,
        filters: list[Any] | None = None,
        filter_prefer_eos: bool = False,
        stop_conditions: Sequence[int | str | None] | None = None,
        decode_special_tokens: bool = False,
        banned_strings: Sequence[str] | None = None,
        embeddings: object = None,
        identifier: object = None,
    ) -> None:
        refuse_arguments("ExLlamaV2DynamicJob", embeddings=embeddings)
        self.gen_settings = Settings() if gen_settings is None else gen_settings
        check_kind("gen_settings", self.gen_settings, Settings)
        scale = self.gen_settings.cfg_scale
        self.input_ids, *self._negative = _rows_of(input_ids, scale)
        self._scale = 1.0 if scale is None else scale
        self.max_new_tokens, self.min_new_tokens = max_new_tokens, min_new_tokens
        self.max_skips, self.return_logits = max_skips, return_logits
        self.return_top_tokens, self.return_probs = return_top_tokens, return_probs
        self.filters, self.filter_prefer_eos = filters or [], filter_prefer_eos
        stops = stop_conditions or ()
        self.stop_tokens = {each for each in stops if isinstance(each, int)}
        self.stop_strings = {each for each in stops if isinstance(each, str)}
        self.banned_strings = list(banned_strings or ())
        self.decode_special_tokens, self.identifier = decode_special_tokens, identifier
        self.full_completion, self.new_tokens = "", 0
        self.serial_number: int | None = None
        self.generator: ExLlamaV2DynamicGenerator | None = None
        self.time_enqueue = self.time_first_token = self.time_last_token = 0.0
        self._seed, self._heals = seed, token_healing
        self._handle: Handle | None = None

    def for_exkv(self, tokenizer: ExLlamaV2Tokenizer, adapter: str | None) -> Job:
        """The job for exkv's engine, with this adapter; raises as :class:`exkv.Job` does."""
        most = self.return_top_tokens
        wants_logprobs = most or self.return_probs or self.return_logits
        return Job(
            prompt=self.input_ids,
            settings=self.gen_settings.for_jobs(tokenizer),
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            seed=self._seed,
            stop=[*self.stop_strings, *self.stop_tokens],
            ignore_eos=True,
            grammar=filters_of("ExLlamaV2DynamicJob", self.filters, self.filter_prefer_eos),
            logprobs=most if wants_logprobs else None,
            return_logits=self.return_logits,
            banned_strings=self.banned_strings,
            token_healing=self._heals,
            adapter=adapter,
            guidance_scale=self._scale,
            negative_prompt=None if self._scale == 1 else self._negative[0],
        )

    def begin(self, generator: ExLlamaV2DynamicGenerator, serial: int, handle: Handle) -> None:
        """Enter a generator's queue."""
        self.generator, self.serial_number, self._handle = generator, serial, handle
        self.time_enqueue = time.time()
        self._stop = StopText(list(self.stop_strings))
        self._raw = ""
        self._continued = Continuation(generator.tokenizer, handle, self.decode_special_tokens)

    @property
    def handle(self) -> Handle:
        """exkv's own handle; ValueError before the job is in a queue."""
        if self._handle is None:
            raise ValueError("the job isn't in a queue yet: call generator.enqueue(job)")
        return self._handle

    @property
    def cached_tokens(self) -> int:
        return self.handle.cached_tokens

    @property
    def cached_pages(self) -> int:
        assert self.generator is not None
        return self.cached_tokens // self.generator.page_size

    @property
    def accepted_draft_tokens(self) -> int:
        return self.handle.accepted_tokens

    @property
    def rejected_draft_tokens(self) -> int:
        return self.handle.proposed_tokens - self.handle.accepted_tokens

    def is_finished(self) -> bool:
        return self.handle.done

    def is_prefill_done(self) -> bool:
        return bool(self.handle.tokens) or self.handle.done

    # Results ------------------------------------------------------------------------------

    def result(self, event: Event, tokenizer: ExLlamaV2Tokenizer) -> dict[str, Any]:
        """Convert one of exkv's events to ExLlamaV2's format."""
        now = time.time()
        self.time_first_token, self.time_last_token = self.time_first_token or now, now
        ended = event.reason == "eos"
        text = self._text(event)
        self.full_completion += text
        found = self.about("streaming", bool(event.reason) or self._stop.found)
        if text:
            found["text"] = text
        if event.token is not None and not ended:
            self.new_tokens += 1
            found["token_ids"] = torch.tensor([[event.token]])
            found |= self._probabilities(event)
        if found["eos"]:
            found |= self._end(event, tokenizer)
        return found

    def suppressed(self) -> list[dict[str, Any]]:
        """A result for the banned text that was removed since the last call, if any."""
        completion = self.handle.completion
        text, completion.suppressed = completion.suppressed, ""
        return [self.about("streaming") | {"suppressed_text": text}] if text else []

    def about(self, stage: str, eos: bool = False) -> dict[str, Any]:
        """The entries that every result has."""
        named = {} if self.identifier is None else {"identifier": self.identifier}
        return {"job": self, "stage": stage, "eos": eos, "serial": self.serial_number, **named}

    def _text(self, event: Event) -> str:
        """The text that this event makes final."""
        ended = event.reason not in ("", "stop")
        new = ""
        if event.token is not None and event.reason != "eos":
            new = self._continued.push(event.token)
        new += self._continued.flush() if ended else ""
        self._raw += new
        return self._stop.push(new) + (self._stop.flush() if ended else "")

    def _probabilities(self, event: Event) -> dict[str, Tensor]:
        """The token's probability, (1, 1); the most likely tokens', (1, 1, k); logits (1, 1, V)."""
        if event.logprobs is None:
            return {}
        found = {"token_probs": torch.tensor([[math.exp(event.logprobs.logprob)]])}
        if event.logprobs.logits is not None:
            found["logits"] = event.logprobs.logits[None, None]
        if event.logprobs.top:
            ids, logprobs = zip(*event.logprobs.top, strict=True)
            found["top_k_tokens"] = torch.tensor([[ids]])
            found["top_k_probs"] = torch.tensor([[logprobs]]).exp()
        return found

    def _end(self, event: Event, tokenizer: ExLlamaV2Tokenizer) -> dict[str, Any]:
        """Further entries of the last result."""
        reason = "stop_string" if self._stop.found else _REASONS[event.reason]
        found: dict[str, Any] = {"eos_reason": reason}
        if reason == "stop_token":
            assert event.token is not None
            found["eos_triggering_token_id"] = event.token
            found["eos_triggering_token_str"] = tokenizer.exkv.piece_of(event.token)
        if reason == "stop_string":
            found["eos_triggering_string"] = next(s for s in self.stop_strings if s in self._raw)
        if self.handle.proposed_tokens:
            found["accepted_draft_tokens"] = self.accepted_draft_tokens
            found["rejected_draft_tokens"] = self.rejected_draft_tokens
        return found | {
            "full_completion": self.full_completion,
            "new_tokens": self.new_tokens,
            "prompt_tokens": len(self.input_ids),
            "cached_pages": self.cached_pages,
            "cached_tokens": self.cached_tokens,
            "time_enqueued": 0.0,
            "time_prefill": self.time_first_token - self.time_enqueue,
            "time_generate": self.time_last_token - self.time_first_token,
        }


def _rows_of(input_ids: Tensor | list[Tensor], cfg_scale: float | None) -> list[list[int]]:
    """The ids of a prompt and, with guidance, of the negative prompt."""
    given = input_ids if isinstance(input_ids, list) else [input_ids]
    rows = [row.tolist() for each in given for row in each.reshape(-1, each.shape[-1])]
    if len(rows) != len(given) or len(rows) != (1 if cfg_scale is None else 2):
        raise ValueError(
            f"a job of {len(rows)} prompts with settings.cfg_scale {cfg_scale}: a job has one "
            "prompt or, with cfg_scale, a list of two, (1, tokens) each"
        )
    return rows


__getattr__ = missing_from(__name__)
