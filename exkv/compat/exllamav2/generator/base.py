"""``ExLlamaV2BaseGenerator``: one batch at a time, over :class:`exkv.Generator`."""

from __future__ import annotations

import operator
import random
import threading
import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from exkv import Generator, Job
from exkv.batch import pad_rows
from exkv.compat.exllamav2.cache import ExLlamaV2CacheBase
from exkv.compat.exllamav2.loras import adapter_of
from exkv.compat.exllamav2.missing import (
    Adapter,
    check_kind,
    instead_of,
    missing_from,
    refuse_arguments,
)
from exkv.compat.exllamav2.model import ExLlamaV2
from exkv.compat.exllamav2.tokenizer import ExLlamaV2Tokenizer
from exkv.decode import Event, Handle
from exkv.decode.scheduler import Scheduler

from .filters import ExLlamaV2Filter, filters_of
from .sampler import Settings

_MOST_SEED = 62  # bits

__all__ = ["ExLlamaV2BaseGenerator", "ExLlamaV2Filter"]


class ExLlamaV2BaseGenerator(Adapter):
    """Generates with one model, one cache and one tokenizer."""

    _scheduler: Scheduler  # of the last jobs

    def __init__(
        self, model: ExLlamaV2, cache: ExLlamaV2CacheBase, tokenizer: ExLlamaV2Tokenizer
    ) -> None:
        check_kind("model", model, ExLlamaV2)
        check_kind("cache", cache, ExLlamaV2CacheBase)
        check_kind("tokenizer", tokenizer, ExLlamaV2Tokenizer)
        self.model = model
        self.cache = cache
        self.tokenizer = tokenizer
        self.abort_event: threading.Event | None = None
        self._handles: list[Handle] = []

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse settings of ExLlamaV2's generators that exkv doesn't have, unless they are off."""
        advice = None if hasattr(type(self), name) else instead_of(f"{type(self).__name__}.{name}")
        if advice is None:
            super().__setattr__(name, value)
        elif value:
            raise AttributeError(f"{type(self).__name__}.{name} can't be set: {advice}")

    @property
    def sequence_ids(self) -> Tensor | None:
        """Prompts and completions so far, int64 (B, T), left-padded; None before any."""
        rows = self._rows()
        return pad_rows(rows, fill=self.tokenizer.pad_token_id, left=True)[0] if rows else None

    def full(self) -> bool:
        """Whether a row has ``config.max_seq_len`` tokens."""
        return max(map(len, self._rows()), default=0) >= self._limit

    def _rows(self) -> list[list[int]]:
        """Prompt and completion of each row, without the token that ended it."""
        return [part.prompt + _shown(handle) for handle in self._handles for part in handle.parts]

    @property
    def _limit(self) -> int:
        return min(self.model.config.max_seq_len, self.cache.max_seq_len)

    def warmup(self) -> None:
        """Run one token, so that the first prompt doesn't pay for one-time set-up."""
        Generator(self.model.exkv, self.cache.exkv, self.tokenizer.exkv).warmup()

    def generate_simple(
        self,
        prompt: str | Sequence[str],
        gen_settings: Settings,
        num_tokens: int,
        seed: int | None = None,
        token_healing: bool = False,
        encode_special_tokens: bool = False,
        decode_special_tokens: bool = False,
        loras: object = None,
        stop_token: int | None = -1,
        add_bos: bool = False,
        abort_event: threading.Event | None = None,
        input_embeddings: object = None,
        completion_only: bool = False,
        filters: object = None,
        filter_prefer_eos: bool = False,
    ) -> str | list[str]:
        """Complete a text, or several as one batch.

        Args:
            num_tokens: most tokens to generate for each.
            seed: row ``i`` samples like exkv's Generator with ``seed + i``; None for seeds from
                Python's ``random``.
            encode_special_tokens, decode_special_tokens: in the prompts, and in the completions.
            stop_token: ends a completion, and is left out; -1 for the tokenizer's EOS token, None
                for none.
            add_bos: begin each prompt with the BOS token.
            abort_event: cleared first; once it is set, the texts so far are returned.
            completion_only: return the completions without the prompts.
            loras: an ``ExLlamaV2Lora``, or a list with one.
            filters, filter_prefer_eos, token_healing: see :class:`ExLlamaV2DynamicJob`.

        Returns:
            The text, or a list of texts for a list. A prompt without room for ``num_tokens`` is
            truncated at its beginning, with a warning.

        Raises:
            ValueError: an empty prompt, more prompts than rows, no room for ``num_tokens``, an
                unsupported argument, or logits that allow no token.
        """
        refuse_arguments("generate_simple", input_embeddings=input_embeddings)
        _check_settings(gen_settings)
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        rows = self.tokenizer.rows(texts, add_bos, False, encode_special_tokens)
        shown = self._fitted(texts, rows, num_tokens)
        stop = self.tokenizer.eos_token_id if stop_token == -1 else stop_token
        common: dict[str, Any] = {
            "settings": gen_settings.for_jobs(self.tokenizer),
            "max_new_tokens": max(num_tokens, 1),
            "stop": () if stop is None else (stop,),
            "ignore_eos": True,
            "grammar": filters_of("generate_simple", filters, filter_prefer_eos),
            "token_healing": token_healing,
            "adapter": adapter_of(self.model, loras),
        }
        seeds = [any_seed() if seed is None else seed + row for row in range(len(rows))]
        self._begin(
            [Job(prompt=ids, seed=own, **common) for ids, own in zip(rows, seeds, strict=True)]
        )
        self.abort_event = abort_event
        if abort_event is not None:
            abort_event.clear()
        while num_tokens and self._scheduler.busy:
            self._step()
            if self._aborted:
                break
        self._scheduler.cancel_all()
        found = [self._text_of(handle, decode_special_tokens) for handle in self._handles]
        if not completion_only:
            found = list(map(operator.add, shown, found))
        return found[0] if isinstance(prompt, str) else found

    def _fitted(self, texts: list[str], rows: list[list[int]], num_tokens: int) -> list[str]:
        """Truncate rows that leave no room for ``num_tokens`` -> the texts of the rows."""
        room = self._limit - num_tokens
        if not rows or not all(rows) or num_tokens < 0 or room < 1:
            raise ValueError(
                f"prompts of {[len(row) for row in rows]} tokens and num_tokens {num_tokens}, with "
                f"room for {self._limit}: each prompt needs at least one token, and room for it"
            )
        longest = max(map(len, rows))
        if longest <= room:
            return texts
        warnings.warn(
            f"a prompt of {longest} tokens and num_tokens {num_tokens} exceed the limit of "
            f"{self._limit}: only the prompt's last {room} are used",
            stacklevel=3,
        )
        for row in rows:
            del row[:-room]
        return [self.tokenizer.exkv.decode(row) for row in rows]

    def _begin(self, jobs: Sequence[Job], **proposing: Any) -> None:
        """Replace the current jobs; for ``draft`` and ``ngrams`` see exkv's Generator."""
        if self._handles:
            self._scheduler.cancel_all()  # such as a stream that wasn't read to its end
        self.cache.take_over(None)
        self.cache.pads = ()
        self._runs = Generator(self.model.exkv, self.cache.exkv, self.tokenizer.exkv, **proposing)
        self._scheduler, self._handles = self._runs.begin(jobs)

    def _step(self) -> list[Event]:
        """Run one step -> its events; raises the error of a failed job."""
        with self._runs.leased():
            events = self._scheduler.iterate()
        for event in events:
            if event.reason == "error" and event.handle.error is not None:
                raise event.handle.error
        return events

    @property
    def _aborted(self) -> bool:
        return self.abort_event is not None and self.abort_event.is_set()

    def _text_of(self, handle: Handle, special: bool) -> str:
        """A job's completion."""
        text = Continuation(self.tokenizer, handle, special)
        return "".join([*map(text.push, _shown(handle)), text.flush()])


class Continuation:
    """Decodes a job's tokens as the continuation of its prompt."""

    def __init__(self, tokenizer: ExLlamaV2Tokenizer, handle: Handle, special: bool) -> None:
        self._decoder = tokenizer.exkv.stream(not special, after=handle.prompt)
        given = handle.job.prompt
        healed = given[-1] if len(given) > len(handle.prompt) else None
        self._skip = len(tokenizer.exkv.bytes_of(healed)) if isinstance(healed, int) else 0

    def push(self, token: int) -> str:
        """The text that this token completes."""
        skip, self._skip = self._skip, 0
        return self._decoder.push(token, skip)

    def flush(self) -> str:
        """The rest of the text, after the last token."""
        return self._decoder.flush()


def _shown(handle: Handle) -> list[int]:
    """A completion's tokens, without the one that ended it."""
    return handle.tokens[:-1] if handle.reason == "eos" else list(handle.tokens)


def any_seed() -> int:
    """A seed from Python's ``random``."""
    return random.getrandbits(_MOST_SEED)


def _check_settings(settings: Settings) -> None:
    check_kind("gen_settings", settings, Settings)
    if settings.cfg_scale is not None:
        raise ValueError("generate_simple takes no cfg_scale: use begin_stream_ex with two rows")


__getattr__ = missing_from(__name__)
