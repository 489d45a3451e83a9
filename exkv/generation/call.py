"""Where a call of ``generate`` comes in: check everything up front, make a cache, run a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from exkv.cache import KVCache, LayerSpec, cache_kind
from exkv.models import Transformer
from exkv.text import Tokenizer

from .beams import beam_search
from .config import GenerationConfig
from .fallback import Fallback, OnOom, Rescue, Step
from .groups import group_beam_search
from .hooks import Hooks
from .prompts import PromptIds, Prompts, read_prompts
from .runner import Runner
from .sampling import sample_sequences
from .task import Completions, GenerateOutput, Task

#: Tokens that beams save by sharing their prompts, at least, or each has a copy: attention over
#: what is shared and what comes behind are two calls and a merge. With 4 beams on the demo model
#: a step takes 1.5 times as long on a CPU after 16 tokens, and 1.2 times after 2,000.
WORTH_SHARING = 1024


def generate(
    model: Transformer,
    input_ids: PromptIds,
    generation_config: GenerationConfig | None = None,
    cache: KVCache | None = None,
    *,
    attention_mask: Tensor | None = None,
    tokenizer: Tokenizer | None = None,
    on_oom: str | Sequence[Step] = "fallback",
    on_fallback: Callable[[Fallback], Any] | None = None,
    **kwargs: Any,
) -> Tensor | GenerateOutput:
    """Complete prompts, in the words and with the results of transformers' ``generate``.

    Args:
        model: loaded.
        input_ids: int64 (B, T), or lists of ids of unlike length, or texts; one or several.
        generation_config: how to decode; None for what the checkpoint recommends.
        cache: None builds one for the call, of the kind that ``cache_implementation`` says, and
            frees it afterwards; in it a prompt that isn't short is stored once for all its beams.
            One that is given needs a row for each sequence (for each beam), and keeps what it holds
            at the end; what it holds of a prompt's beginning already is not run again.
        attention_mask: (B, T), 0 at padding, which stands on the left.
        tokenizer: for texts; None for the checkpoint's.
        on_oom: what to do where memory runs out, though all was planned for:

            - "fallback": store the cache in another way, and go on from the token where it
              stopped. First it moves to host memory ("offload"), which changes no token; if that
              is not enough, it is rounded to 8 bits ("8bit"), then to 4 ("4bit").
            - a list of steps to take instead, each at most once: these names, and callables that
              get the cache in use. ``["offload"]`` never changes a token.
            - "raise": nothing.

            Each step is logged as a warning. A cache that was given is converted in place, with
            all that shares storage with it, and stays so.
        on_fallback: called with a :class:`exkv.generation.Fallback` after each step; with
            ``return_dict_in_generate`` they also stand in ``GenerateOutput.fallbacks``.
        kwargs: what runs in each step (:class:`exkv.generation.hooks.Hooks`), and fields of
            ``GenerationConfig``, in place of those of ``generation_config``:

            - ``logits_processor``: a list of callables, ids so far (N, T + new), padded on the
              left, and the step's scores (N, V) -> scores (N, V).
            - ``prefix_allowed_tokens_fn``: the number of a prompt, the ids of one of its
              sequences (T + new,) -> the ids that may follow.
            - ``stopping_criteria``: a list of callables, ids so far and the step's scores, None
              with beams -> whether a sequence ends.
            - ``streamer``: gets the prompts, then each step's tokens; not with beams.

    Returns:
        int64 (N, T + new) on the host: prompts and new tokens, ``num_return_sequences`` for each
        prompt beside each other. Shorter rows are filled up on the right; a tensor's own columns
        come back as they were given. With ``return_dict_in_generate`` a :class:`GenerateOutput`.

    Raises:
        ValueError: the model is not loaded, a prompt is empty or has an id outside the
            vocabulary, a number makes no sense, or the cache is too small; nothing has run then.
        TypeError: an argument that isn't known, or isn't what it should be.
        PlacementError: there is no room for a cache, and ``on_oom`` knows no remedy.
        OutOfMemoryError: memory ran out, and ``on_oom`` knows no remedy that is left. A cache that
            was given holds the tokens that were run, and can be used.
    """
    if not model.loaded:
        raise ValueError("the model is not loaded: call load or load_autosplit first")
    rescue = Rescue(OnOom(on_oom=on_oom, on_fallback=on_fallback))
    hooks = Hooks.taken_from(kwargs)
    config = resolve(model, generation_config, kwargs)
    if hooks.streamer is not None and config.num_beams > 1:
        raise ValueError(f"a streamer takes one sequence, and num_beams is {config.num_beams}")
    if tokenizer is None and _has_text(input_ids) and model.config.path is not None:
        tokenizer = Tokenizer(model.config)
    pad, vocab_size = config.pad_token_id, model.config.vocab_size
    prompts = read_prompts(input_ids, attention_mask, tokenizer, pad, vocab_size)
    config = config.for_prompts(prompts.width, vocab_size)
    rng = None if config.seed is None else torch.Generator().manual_seed(config.seed)
    with ready_runner(model, cache, prompts, config, rescue) as runner:
        task = Task(runner=runner, prompts=prompts, config=config, hooks=hooks, rng=rng)
        completions = decode(task)
    return output(task, completions, tokenizer)


def resolve(
    model: Transformer, config: GenerationConfig | None, changes: dict[str, Any]
) -> GenerationConfig:
    """The config of a call, with the model's own ids where it names none."""
    if config is None:
        path = model.config.path
        config = GenerationConfig() if path is None else GenerationConfig.from_pretrained(path)
    config = config.updated(**changes)
    ends, pad = config.eos_token_id, config.pad_token_id
    if ends is None:
        ends = model.config.eos_token_id
    if pad is None:
        pad = model.config.pad_token_id
    if pad is None:
        pad = ends[0] if ends else 0
    return config.updated(eos_token_id=ends, pad_token_id=pad)


def decode(task: Task) -> Completions:
    """Run the loop that the config asks for."""
    if task.config.num_beam_groups > 1:
        return group_beam_search(task)
    if task.config.num_beams > 1:
        return beam_search(task)
    return sample_sequences(task)


@contextmanager
def ready_runner(
    model: Transformer,
    cache: KVCache | None,
    prompts: Prompts,
    config: GenerationConfig,
    rescue: Rescue,
) -> Iterator[Runner]:
    """A runner over the cache that was given, if it is large enough, or over the call's own."""
    if cache is not None:
        check_cache(model, cache, prompts, config)
        yield Runner(model, cache, rescue)
        return
    longest, each = max(prompts.lengths), sequences_each(config)
    whole, rows = longest + config.max_new_tokens, len(prompts.lengths)
    forked = each > 1 and (each - 1) * sum(prompts.lengths) >= WORTH_SHARING
    specs = own_specs(model, config, longest if forked else whole, rows if forked else rows * each)
    cache = rescue.build(model, own_kind(config), specs)
    runner = Runner(model, cache, rescue, whole if forked else None)
    try:
        yield runner
    finally:
        runner.free()


def sequences_each(config: GenerationConfig) -> int:
    """Rows for each prompt."""
    return max(config.num_beams, config.num_return_sequences)


def own_kind(config: GenerationConfig) -> type[KVCache]:
    return cache_kind(config.cache_implementation or "static")


def own_specs(
    model: Transformer, config: GenerationConfig, max_seq_len: int, rows: int
) -> list[LayerSpec]:
    """The layers of a cache for the call."""
    kind, options = own_kind(config), dict(config.cache_config or {})
    try:
        return kind.layer_specs(model, max_seq_len, rows, **options)
    except TypeError as error:
        raise TypeError(
            f"cache_config is {options}, which {config.cache_implementation!r} doesn't take: see "
            f"exkv.{kind.__name__} for what it does ({error})"
        ) from None


def check_cache(
    model: Transformer, cache: KVCache, prompts: Prompts, config: GenerationConfig
) -> None:
    """ValueError where a cache that was given doesn't do for the call."""
    if config.cache_implementation is not None:
        raise ValueError(
            f"cache_implementation is {config.cache_implementation!r}, and a cache is given as "
            "well: leave out one of them"
        )
    if cache.model is not model:
        raise ValueError("the cache was built for another model")
    each = sequences_each(config)
    rows = len(prompts.lengths) * each
    if rows > cache.batch_size:
        raise ValueError(
            f"{len(prompts.lengths)} prompts of {each} sequences each need {rows} rows, and the "
            f"cache has batch_size = {cache.batch_size}"
        )
    longest, new = max(prompts.lengths), config.max_new_tokens
    # The last token is never run.
    if longest + new - 1 > cache.max_seq_len:
        raise ValueError(
            f"a prompt of {longest} tokens and max_new_tokens = {new} need {longest + new - 1} "
            f"tokens a row, and the cache has max_seq_len = {cache.max_seq_len}"
        )


def output(
    task: Task, completions: Completions, tokenizer: Tokenizer | None
) -> Tensor | GenerateOutput:
    """Prompts and completions put together; see ``generate`` for where padding goes."""
    prompts, config = task.prompts, task.config
    each = len(completions.tokens) // len(prompts.lengths)
    starts = [prompts.width - length for length in prompts.lengths for _ in range(each)]
    whole = prompts.followed_by(completions.tokens)
    ends = [prompts.width + length for length in completions.lengths]
    if prompts.as_tensor:
        sequences = whole
    else:
        width = max(end - start for start, end in zip(starts, ends, strict=True))
        sequences = torch.full((len(whole), width), config.pad_token_id)
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            sequences[row, : end - start] = whole[row, start:end]
    if not config.return_dict_in_generate:
        return sequences
    texts = None
    if tokenizer is not None:
        spans = zip(whole.tolist(), starts, ends, strict=True)
        texts = tuple(tokenizer.decode(ids[start:end]) for ids, start, end in spans)
    return GenerateOutput(
        sequences=sequences,
        sequences_scores=completions.scores,
        texts=texts,
        scores=tuple(task.steps.scores) if config.output_scores else None,
        logits=tuple(task.steps.logits) if config.output_logits else None,
        beam_indices=completions.beam_indices,
        fallbacks=tuple(task.runner.rescue.taken),
    )


def _has_text(prompts: PromptIds) -> bool:
    if isinstance(prompts, Tensor):
        return False
    return isinstance(prompts, str) or any(isinstance(prompt, str) for prompt in prompts)
