"""``ExLlamaV2Sampler``: its mutable settings, and its ``sample``.

:meth:`Settings.for_exkv` converts them to exkv's frozen SamplingParams, for each token. A step that
exkv's sampler doesn't have is refused when it is switched on.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from exkv import SamplingParams
from exkv.compat.exllamav2.missing import (
    Adapter,
    AdapterType,
    instead_of,
    missing_attribute,
    missing_from,
    refuse_arguments,
)
from exkv.sampling.chain import distribution
from exkv.sampling.exllamav2 import BOUNDS

if TYPE_CHECKING:
    from exkv.compat.exllamav2.tokenizer import ExLlamaV2Tokenizer

_GREEDY_BELOW = 0.01  # temperatures that ExLlamaV2 treats as greedy

#: Setting of a step that exkv's sampler doesn't have -> values that leave it off.
_OFF: dict[str, tuple[Any, ...]] = {
    "mirostat": (False,),
    "post_sampling_hooks": (None, []),
}


@dataclass
class Settings(Adapter):
    """Sampler settings with ExLlamaV2's names and defaults.

    Attributes:
        temperature: below 0.01, greedy.
        top_k, top_p, min_p, typical: 0 switches each off.
        token_bias: (vocabulary or more,), added to the logits; -inf bans a token.
        cfg_scale: weight of the first of a stream's two rows (classifier-free guidance).

    Raises:
        AttributeError: an unknown setting; TypeError by the constructor.
        ValueError: a step is switched on that exkv's sampler doesn't have.
    """

    token_repetition_penalty: float = 1.025
    token_repetition_range: int = -1
    token_repetition_decay: int = 0
    token_frequency_penalty: float = 0.0
    token_presence_penalty: float = 0.0
    temperature: float = 0.8
    smoothing_factor: float = 0.0
    min_temp: float = 0.0
    max_temp: float = 0.0
    temp_exponent: float = 1.0
    top_k: int = 50
    top_p: float = 0.8
    top_a: float = 0.0
    min_p: float = 0.0
    tfs: float = 0.0
    typical: float = 0.0
    skew: float = 0.0
    temperature_last: bool = False
    mirostat: bool = False
    mirostat_tau: float = 1.5
    mirostat_eta: float = 0.1
    mirostat_mu: float | None = None
    token_bias: Tensor | None = None
    cfg_scale: float | None = None
    post_sampling_hooks: list[Any] = field(default_factory=list)
    dry_allowed_length: int = 2
    dry_base: float = 1.75
    dry_multiplier: float = 0.0
    dry_sequence_breakers: set[int] | None = None
    dry_range: int = 0
    dry_max_ngram: int = 20
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_ignore_tokens: frozenset[int] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        kind, known = type(self).__qualname__, type(self).__dataclass_fields__
        if name not in known:
            raise missing_attribute(kind, name, known)
        if name in _OFF and value not in _OFF[name]:
            advice = instead_of(f"{kind}.{name}")
            raise ValueError(f"settings.{name} is {value!r:.40}, which exkv doesn't do: {advice}")
        super().__setattr__(name, value)

    @staticmethod
    def greedy(**kwargs: Any) -> Settings:
        """Greedy decoding without penalties; ``kwargs`` are further settings."""
        greedy = {"temperature": 1.0, "token_repetition_penalty": 1.0, "top_p": 0.0, "top_k": 1}
        return Settings(**{**greedy, **kwargs})

    def clone(self) -> Settings:
        """A shallow copy, which shares token_bias."""
        return copy.copy(self)

    def greedy_clone(self) -> Settings:
        """Greedy decoding with the same penalties."""
        chosen = copy.copy(self)
        chosen.top_k, chosen.top_p, chosen.token_bias = 1, 0.0, None
        return chosen

    def disallow_tokens(self, tokenizer: ExLlamaV2Tokenizer, tokens: Sequence[int]) -> None:
        """Ban these tokens."""
        if self.token_bias is None:
            self.token_bias = torch.zeros(tokenizer.config.vocab_size)
        self.token_bias[self._known(tokens)] = -math.inf

    def allow_tokens(self, tokenizer: ExLlamaV2Tokenizer, tokens: Sequence[int | str]) -> None:
        """Allow only these tokens, ids or texts, and those allowed before.

        Raises:
            ValueError: no token has this text.
        """
        if self.token_bias is None:
            self.token_bias = torch.full((tokenizer.config.vocab_size,), -math.inf)
        ids = [tokenizer.single_id(each) if isinstance(each, str) else each for each in tokens]
        if None in ids:
            raise ValueError(f"there is no token {tokens[ids.index(None)]!r}")
        self.token_bias[self._known([i for i in ids if i is not None])] = 0.0

    def _known(self, tokens: Sequence[int]) -> list[int]:
        assert self.token_bias is not None
        outside = [token for token in tokens if not 0 <= token < len(self.token_bias)]
        if outside:
            raise ValueError(
                f"token {outside[0]} is outside of the vocabulary of {len(self.token_bias)}"
            )
        return list(tokens)

    def for_exkv(self, tokenizer: ExLlamaV2Tokenizer | None = None) -> SamplingParams:
        """Convert to SamplingParams, without ``token_bias`` and ``cfg_scale``, which
        :meth:`prepared` applies.

        Args:
            tokenizer: determines the tokens at which DRY and XTC stop if the settings don't.

        Raises:
            ValueError, TypeError: a number is out of range.
        """
        same = {name: getattr(self, name) for name in BOUNDS if name in vars(self)}
        params = SamplingParams(
            **same
            | {
                "temperature": 0.0 if self.temperature < _GREEDY_BELOW else self.temperature,
                "top_k": max(self.top_k, 0),
                "top_p": self.top_p or 1.0,
                "token_bias": None,
            }
        )
        return params if tokenizer is None else params.for_tokenizer(tokenizer.exkv)

    def for_jobs(self, tokenizer: ExLlamaV2Tokenizer) -> SamplingParams:
        """:meth:`for_exkv` with ``token_bias``; returns the same object until a setting changes."""
        bias = self.token_bias
        numbers = {name: v for name, v in vars(self).items() if name not in ("token_bias", "_memo")}
        known = vars(self).get("_memo")
        if known is not None and known[0] == (tokenizer, numbers) and _same(known[1], bias):
            return known[2]
        params = self.for_exkv(tokenizer)
        if bias is not None:
            known_tokens = bias[: tokenizer.config.vocab_size]
            ids = known_tokens.nonzero().flatten().tolist()
            params = params.with_bias(dict(zip(ids, known_tokens[ids].tolist(), strict=True)))
        vars(self)["_memo"] = (tokenizer, numbers), None if bias is None else bias.clone(), params
        return params

    def prepared(self, logits: Tensor, banned: Sequence[int] = ()) -> Tensor:
        """Apply guidance, bias and bans to logits (B, V) -> (B, V), or (1, V) with guidance.

        Raises:
            ValueError: guidance without two rows, or a bias for too few tokens.
        """
        if self.cfg_scale is not None:
            if len(logits) != 2:
                raise ValueError(
                    f"settings.cfg_scale is {self.cfg_scale}, but there are {len(logits)} rows: "
                    "give two, for the prompt and the negative prompt"
                )
            positive, negative = logits.float().cpu().log_softmax(-1)
            logits = (self.cfg_scale * positive + (1 - self.cfg_scale) * negative)[None]
        if self.token_bias is not None:
            if len(self.token_bias) < logits.shape[-1]:
                raise ValueError(
                    f"settings.token_bias has {len(self.token_bias)} numbers, but the vocabulary "
                    f"has {logits.shape[-1]} tokens: make it longer"
                )
            logits = logits.float().cpu() + self.token_bias[: logits.shape[-1]].float().cpu()
        if banned:
            logits = logits.float().index_fill(
                -1, torch.tensor(banned, device=logits.device), -math.inf
            )
        return logits


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


Settings.__qualname__ = "ExLlamaV2Sampler.Settings"
_Settings: TypeAlias = Settings


class ExLlamaV2Sampler(metaclass=AdapterType):
    """Has the class of settings, and samples tokens by them."""

    Settings = Settings

    @staticmethod
    def sample(
        logits: Tensor,
        settings: _Settings,
        sequence_ids: Tensor,
        random: float,
        tokenizer: ExLlamaV2Tokenizer,
        prefix_token: Tensor | None = None,
        return_top_tokens: int = 0,
        blocked_tokens: Sequence[int] | None = None,
        filters: object = None,
        filter_prefer_eos: bool = False,
        sync: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
        """Choose a token for each row.

        Args:
            logits: (B, 1, V).
            sequence_ids: int64 (B, T), the tokens so far.
            random: in [0, 1), looked up in each row's cumulative probabilities.
            blocked_tokens: banned in this step.
            sync: without effect.

        Returns:
            Tokens (B, 1); the most likely candidates and their probabilities, (B, 1,
            ``return_top_tokens``); the tokens' probabilities (B, 1); False.

        Raises:
            ValueError: no token is left, or an unsupported argument.
        """
        refuse_arguments(
            "ExLlamaV2Sampler.sample",
            prefix_token=prefix_token is not None,
            filters=filters,
            filter_prefer_eos=filter_prefer_eos,
        )
        chosen = settings.prepared(logits[:, -1], blocked_tokens or ())
        history = list(sequence_ids[: len(chosen)])
        probabilities, ids = distribution(chosen.cpu(), settings.for_exkv(tokenizer), history)
        cumulative = probabilities.double().cumsum(-1)
        target = random * cumulative[:, -1:]
        column = torch.searchsorted(cumulative, target, right=True)
        top_tokens, top_probabilities = most_likely(probabilities, ids, return_top_tokens)
        return (
            ids.gather(-1, column),
            top_tokens[:, None],
            top_probabilities[:, None],
            probabilities.gather(-1, column),
            False,
        )


def most_likely(probabilities: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The most likely tokens and their probabilities, (B, count) each, padded with 0."""
    candidates = min(count, ids.shape[-1])
    best, columns = probabilities.topk(candidates)
    missing = (0, count - candidates)
    return (
        torch.nn.functional.pad(ids.gather(-1, columns), missing),
        torch.nn.functional.pad(best, missing),
    )


__getattr__ = missing_from(__name__)
