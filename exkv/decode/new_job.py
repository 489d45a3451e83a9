"""From a job to its handle: all checks of a job's fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from exkv.cache import KVCache
from exkv.models import Transformer
from exkv.sampling.banned_strings import BannedStrings
from exkv.sampling.bounds import check_count
from exkv.sampling.grammar import Constraint
from exkv.sampling.huggingface import GUIDANCE
from exkv.sampling.logprobs import MOST
from exkv.sampling.penalties import check_bias
from exkv.text import Tokenizer

from .completion import Completion, Healed, StopText, checked_settings, read_stops
from .job import Driver, Handle, Job, Prompt


def check_parts(model: Transformer, cache: KVCache, tokenizer: Tokenizer) -> None:
    """TypeError for a part that isn't exkv's, ValueError for a cache of another model."""
    given = {"model": model, "cache": cache, "tokenizer": tokenizer}
    for (name, value), kind in zip(given.items(), (Transformer, KVCache, Tokenizer), strict=True):
        if not isinstance(value, kind):
            raise TypeError(f"{name} is a {type(value).__name__}; it must be exkv's")
    cache.bind(model)


def new_handle(
    job: Job,
    number: int,
    seed: int | None,
    model: Transformer,
    tokenizer: Tokenizer,
    driver: Driver,
) -> Handle:
    """Check a job, and make its handle.

    Args:
        seed: of its random numbers; None for torch's generator.

    Raises:
        ValueError: an empty prompt, ids outside the vocabulary, a number out of range, an adapter
            that isn't loaded.
        TypeError: a prompt or a setting of the wrong type.
    """
    vocab_size = model.config.vocab_size
    completion = begin_completion(job, tokenizer, vocab_size, seed)
    negative = _read_negative(job, completion.prompt, tokenizer, vocab_size)
    settings = job.settings.for_tokenizer(tokenizer)
    handle = Handle(job, number, completion, settings, driver, negative)
    model.use_adapter(job.adapter, handle)
    return handle


def begin_completion(
    job: Job, tokenizer: Tokenizer, vocab_size: int, seed: int | None
) -> Completion:
    """The empty completion of a job; arguments and errors as of :func:`new_handle`."""
    settings = checked_settings(job.settings)
    check_bias(settings.token_bias, vocab_size)
    check_count("max_new_tokens", job.max_new_tokens, 1, 2**31 - 1, "an int from 1")
    if job.seed is not None:
        check_count("seed", job.seed, 0, 2**62, "an int from 0 to 2**62, or None")
    for name in ("logprobs", "prompt_logprobs"):
        if (count := getattr(job, name)) is not None:
            check_count(name, count, 0, MOST, f"an int from 0 to {MOST}, or None")
    check_count("min_new_tokens", job.min_new_tokens, 0, 2**31 - 1, "an int from 0")
    if not isinstance(job.grammar, Constraint | None):
        raise TypeError(f"grammar is a {type(job.grammar).__name__}; it must be a Grammar")
    stop_ids, stop_texts = read_stops(job.stop)
    if not job.ignore_eos or job.grammar is not None:  # a complete grammar ends with these
        stop_ids += tokenizer.eos_ids
    banned = BannedStrings(job.banned_strings)
    ids = _read_prompt(job.prompt, tokenizer, vocab_size, special=job.encode_special_tokens)
    healed = Healed.of(ids, tokenizer) if job.token_healing else None
    continues = isinstance(job.prompt, str) if job.continues is None else job.continues
    return Completion(
        ids if healed is None else ids[:-1],
        tokenizer.stream(after=ids if continues else (), shown=job.shown_tokens),
        StopText(stop_texts),
        set(stop_ids),
        job.max_new_tokens,
        seed,
        None if job.grammar is None else job.grammar.follow(tokenizer),
        banned if job.banned_strings else None,
        healed,
        job.min_new_tokens,
    )


def _read_negative(
    job: Job, prompt: list[int], tokenizer: Tokenizer, vocab_size: int
) -> list[int] | None:
    """Token ids of a job's negative prompt; None if it isn't guided."""
    GUIDANCE.check("guidance_scale", job.guidance_scale)
    if job.guidance_scale == 1:
        if job.negative_prompt is not None:
            raise ValueError("negative_prompt is given, and guidance_scale is 1: raise it")
        return None
    if job.negative_prompt is None:
        return prompt[-1:]
    special = job.encode_special_tokens
    return _read_prompt(
        job.negative_prompt, tokenizer, vocab_size, special=special, name="negative_prompt"
    )


def _read_prompt(
    prompt: Prompt,
    tokenizer: Tokenizer,
    vocab_size: int,
    *,
    special: bool,
    name: str = "a prompt",
) -> list[int]:
    """Token ids of a text, of ids, or of a chat's messages."""
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_special=special)
    else:
        ids = _ids_of(prompt, tokenizer, name)
    if not ids:
        raise ValueError(f"{name} is empty: give at least one token")
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {vocab_size}")
    return ids


def _ids_of(
    prompt: Sequence[int] | Sequence[Mapping[str, Any]], tokenizer: Tokenizer, name: str
) -> list[int]:
    parts = prompt if isinstance(prompt, Sequence) else [prompt]
    ids = [part for part in parts if isinstance(part, int)]
    messages = [part for part in parts if isinstance(part, Mapping)]
    if parts is not prompt or len(ids) + len(messages) < len(parts):
        raise TypeError(f"{name} is {prompt!r:.60}: give a text, token ids or messages")
    if ids and messages:
        raise TypeError(f"{name} has token ids and messages: give one or the other")
    return tokenizer.encode_chat(messages) if messages else ids
