"""``ExLlamaV2BaseGenerator``: a batch at a time, over exkv's ``Runner`` and ``sample``."""

from __future__ import annotations

import math
import operator
import random
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exkv import Generator
from exkv.batch import pad_rows
from exkv.compat.exllamav2.cache import ExLlamaV2CacheBase
from exkv.compat.exllamav2.gone import (
    Adapter,
    check_kind,
    instead_of,
    missing_from,
    refuse_arguments,
)
from exkv.compat.exllamav2.loras import adapter_of
from exkv.compat.exllamav2.model import ExLlamaV2
from exkv.compat.exllamav2.tokenizer import ExLlamaV2Tokenizer
from exkv.decode.runner import Runner
from exkv.sampling.chain import sample
from exkv.sampling.grammar import Follower

from .filters import grammar_of
from .sampler import Settings

_MOST_SEED = 62  # bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """How the tokens of a batch are chosen.

    Attributes:
        generators: random numbers for each row.
        followers: of each row's grammar; none for no grammar.
    """

    settings: Settings
    generators: Sequence[torch.Generator]
    followers: Sequence[Follower]

    def allowed(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Logits of these rows, (rows, V), without what their grammar doesn't allow."""
        if not self.followers:
            return logits
        masks = [self.followers[row].allowed(logits.shape[-1]) for row in rows]
        return logits.masked_fill(~torch.stack(masks).to(logits.device), -math.inf)

    def go_on(self, row: int, token: int) -> bool:
        """Whether anything may follow this token of a row."""
        if not self.followers:
            return True
        self.followers[row].take(token)
        return not self.followers[row].is_over


class ExLlamaV2BaseGenerator(Adapter):
    """Generates with one model, one cache and one tokenizer."""

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
        self._sequences: list[list[int]] = []
        self._adapter: str | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Settings of ExLlamaV2's generators that exkv has nothing for may be off only."""
        said = None if hasattr(type(self), name) else instead_of(f"{type(self).__name__}.{name}")
        if said is None:
            super().__setattr__(name, value)
        elif value:
            raise AttributeError(f"{type(self).__name__}.{name} can't be set here: {said}")

    @property
    def sequence_ids(self) -> Tensor | None:
        """Prompts and completions so far, int64 (B, T), padded on the left; None before any."""
        if not self._sequences:
            return None
        return pad_rows(self._sequences, fill=self.tokenizer.pad_token_id, left=True)[0]

    def full(self) -> bool:
        """Whether a row has ``config.max_seq_len`` tokens."""
        return max(map(len, self._sequences), default=0) >= self._limit

    @property
    def _limit(self) -> int:
        return min(self.model.config.max_seq_len, self.cache.max_seq_len)

    def warmup(self) -> None:
        """Run one token, so that the first prompt doesn't pay for what happens once."""
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
            gen_settings: how to choose tokens.
            num_tokens: the most to generate for each.
            seed: row ``i`` draws as exkv's Generator does with ``seed + i``; None draws seeds from
                Python's ``random``.
            encode_special_tokens, decode_special_tokens: of the prompts, and of the completions.
            stop_token: that ends a completion, and is left out; -1 for the tokenizer's eos token,
                None for none.
            add_bos: begin each prompt with the BOS token.
            abort_event: cleared at first; when it is set, what there is by then is returned.
            completion_only: leave the prompts out of what is returned.
            loras: an ``ExLlamaV2Lora``, or a list with one.

        Returns:
            The text, or a list of them if a list was given. What doesn't fit before ``num_tokens``
            tokens is cut from a prompt's beginning, with a warning.

        Raises:
            ValueError: an empty prompt, more prompts than rows, no room for ``num_tokens``, an
                argument that isn't taken here, or logits that no token can be chosen by.
        """
        refuse_arguments(
            "generate_simple",
            token_healing=token_healing,
            input_embeddings=input_embeddings,
        )
        _check_settings(gen_settings)
        self._adapter = adapter_of(self.model, loras)
        grammar = grammar_of("generate_simple", filters, filter_prefer_eos)
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        rows = self.tokenizer.rows(texts, add_bos, False, encode_special_tokens)
        shown = self._fitted(texts, rows, num_tokens)
        self._abort_at(abort_event)
        starts = [len(row) for row in rows]
        stop = self._stop_id(stop_token)
        choices = Choices(
            settings=gen_settings,
            generators=seeded(seed, len(rows)),
            followers=[grammar.follow(self.tokenizer.exkv) for _ in rows] if grammar else [],
        )
        self._complete(rows, num_tokens, choices, stop)
        found = self._new_texts(rows, starts, decode_special_tokens)
        if not completion_only:
            found = list(map(operator.add, shown, found))
        return found[0] if isinstance(prompt, str) else found

    def _stop_id(self, stop_token: int | None) -> int | None:
        """The token that ends a completion; -1 is the tokenizer's own."""
        return self.tokenizer.eos_token_id if stop_token == -1 else stop_token

    def _abort_at(self, event: threading.Event | None) -> None:
        """The event that ends a completion from now on, cleared."""
        self.abort_event = event
        if event is not None:
            event.clear()

    def _fitted(self, texts: list[str], rows: list[list[int]], num_tokens: int) -> list[str]:
        """Cut rows that leave no room for so many tokens; the texts of what is left."""
        room = self._limit - num_tokens
        if not rows or not all(rows) or num_tokens < 0 or room < 1:
            raise ValueError(
                f"prompts of {[len(row) for row in rows]} tokens and num_tokens {num_tokens}, with "
                f"room for {self._limit}: each prompt needs a token, and room for one"
            )
        longest = max(map(len, rows))
        if longest <= room:
            return texts
        warnings.warn(
            f"a prompt of {longest} tokens and num_tokens {num_tokens} are more than the "
            f"{self._limit} that there is room for: only the prompt's last {room} are used",
            stacklevel=3,
        )
        for row in rows:
            del row[:-room]
        return [self.tokenizer.exkv.decode(row) for row in rows]

    def _complete(
        self,
        rows: list[list[int]],
        num_tokens: int,
        choices: Choices,
        stop: int | None,
    ) -> None:
        """Append up to so many tokens to each row."""
        runner = self._begin(rows)
        with runner.leased("a generator"):
            logits = runner.prefill(rows)
            going, made = list(range(len(rows))), 0
            while made < num_tokens:
                drawn = self._drawn(logits, rows, going, choices)
                del logits  # not to be there beside those of the next step
                made += 1
                going = [row for row in going if drawn[row] != stop]
                for row in going:
                    rows[row].append(drawn[row])
                going = [row for row in going if choices.go_on(row, drawn[row])]
                if not going or made == num_tokens or self._aborted:
                    return
                newest = [row[-1] for row in rows]
                logits = runner.step(newest, [row in going for row in range(len(rows))])

    def _drawn(
        self,
        logits: Tensor,
        rows: Sequence[Sequence[int]],
        going: Sequence[int],
        choices: Choices,
    ) -> dict[int, int]:
        """A token for each row that goes on, by its index; logits are of all rows, (B, V)."""
        settings = choices.settings
        chosen = settings.prepared(logits if len(going) == len(rows) else logits[going])
        chosen = choices.allowed(chosen, going)
        history = [rows[row] for row in going]
        drawn_by = [choices.generators[row] for row in going]
        tokens = sample(chosen, settings.for_exkv(self.tokenizer), history, drawn_by)
        return dict(zip(going, tokens.tolist(), strict=True))

    def _begin(self, rows: list[list[int]]) -> Runner:
        """Go on with these rows from now on."""
        if len(rows) > self.cache.batch_size:
            raise ValueError(
                f"{len(rows)} rows, and the cache has batch_size = {self.cache.batch_size}"
            )
        self._sequences, self.cache.pads = rows, ()
        runner = Runner(self.model.exkv, self.cache.exkv)
        runner.adapter = self._adapter
        return runner

    @property
    def _aborted(self) -> bool:
        return self.abort_event is not None and self.abort_event.is_set()

    def _new_texts(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], special: bool
    ) -> list[str]:
        """What each row says from its start on."""
        return [
            self._text(row[:start], row[start:], special)
            for row, start in zip(rows, starts, strict=True)
        ]

    def _text(self, prompt: Sequence[int], new: Sequence[int], special: bool) -> str:
        """The text of new ids as it goes on after the prompt."""
        decoder = self.tokenizer.exkv.stream(skip_special=not special, after=prompt)
        return "".join([*map(decoder.push, new), decoder.flush()])


def seeded(seed: int | None, rows: int) -> list[torch.Generator]:
    """Random numbers for each row."""
    seeds = (random.getrandbits(_MOST_SEED) if seed is None else seed + i for i in range(rows))
    return [torch.Generator().manual_seed(each) for each in seeds]


__getattr__ = missing_from(__name__)


def _check_settings(settings: Settings) -> None:
    check_kind("gen_settings", settings, Settings)
    if settings.cfg_scale is not None:
        raise ValueError("generate_simple takes no cfg_scale: use begin_stream_ex with two rows")
