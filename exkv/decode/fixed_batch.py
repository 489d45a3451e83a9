"""``generate``: check everything up front, make a cache, run the loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from exkv.cache import KVCache, LayerSpec, Paged, cache_kind, check_kind
from exkv.generation import arguments
from exkv.generation.config import GenerationConfig
from exkv.models import Transformer
from exkv.text import Tokenizer

from .batch_chooser import BatchChooser, Completions, OneByOne, Task, Together
from .beam_groups import GroupBeamSearch
from .beams import BeamSearch
from .fallback import Fallback, OnOom, Rescue, Step
from .guidance import Guidance
from .in_place import InPlace
from .job import Job
from .processors import processors
from .prompts import PromptIds
from .request import Request, read_request, stopping_criteria
from .rows import Row
from .runner import Runner
from .scheduler import Scheduler
from .speculation import MTP, Draft, NGrams, Speculation, check_rollback

#: Fewest saved tokens for which beams share a prompt instead of copying it: attention over a shared
#: and an own part takes two calls and a merge. With 4 beams of the demo model on a CPU a step takes
#: 1.5 times as long after 16 tokens, and 1.2 times after 2,000.
WORTH_SHARING = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOutput:
    """The result of ``generate(..., return_dict_in_generate=True)``: N rows, those of a prompt
    adjacent.

    Attributes:
        sequences: int64 (N, tokens), prompts and new tokens.
        sequences_scores: float32 (N,), the beams' log-probability / length ** length_penalty; None
            without beams.
        texts: the sequences as text, if there is a tokenizer.
        scores, logits: float32 (N, V) of each step, or (B * num_beams, V) with beams: processed
            scores (log-probabilities with beams), and the model's logits. None unless
            ``output_scores``, ``output_logits``. 0 in rows that have ended.
        beam_indices: int64 (N, new tokens), the row of ``scores`` that each new token was chosen
            from, -1 after a sequence's end; None without beams, and with beam groups.
        fallbacks: steps that were taken because memory ran out, in order.
        proposed_tokens, accepted_tokens: with ``assistant_model``, ``use_mtp`` or
            ``prompt_lookup_num_tokens``.
        cache: the given one; None if the call built its own, which is freed.
    """

    sequences: Tensor
    sequences_scores: Tensor | None = None
    texts: tuple[str, ...] | None = None
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    beam_indices: Tensor | None = None
    fallbacks: tuple[Fallback, ...] = ()
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    cache: KVCache | None = None

    @property
    def past_key_values(self) -> KVCache | None:
        """The cache, under its name before transformers 5.24."""
        return self.cache


def generate(
    model: Transformer,
    input_ids: PromptIds | None = None,
    generation_config: GenerationConfig | Mapping[str, Any] | None = None,
    cache: KVCache | None = None,
    *,
    inputs: PromptIds | None = None,
    past_key_values: KVCache | None = None,
    attention_mask: Tensor | None = None,
    tokenizer: Tokenizer | None = None,
    on_oom: str | Sequence[Step] = "fallback",
    on_fallback: Callable[[Fallback], Any] | None = None,
    **kwargs: Any,
) -> Tensor | GenerateOutput:
    """Complete prompts, with the arguments and results of transformers' ``generate``.

    Args:
        input_ids: int64 (B, T), or one or several lists of ids of any length, or texts. ``inputs``
            is another name.
        generation_config: how to decode; None for the checkpoint's. A dict, or transformers'
            GenerationConfig, overrides the checkpoint's.
        cache: None builds one for the call, of the kind ``cache_implementation``, and frees it
            afterwards; it stores a long prompt once for all beams. A given cache needs a row for
            each sequence (for each beam), and keeps its contents; a prefix of a prompt that it
            holds already is not run again. ``past_key_values`` is another name.
        attention_mask: (B, T), 0 at padding, which is on the left. Without one, as in transformers,
            a tensor's pad tokens are padding unless the pad token also ends sequences.
        tokenizer: for texts, and ``stop_strings``; None for the checkpoint's.
        on_oom: what to do when memory runs out: "fallback" (move the cache to host memory, then
            round it to fewer bits, and continue), "raise", or a list of steps; see
            :class:`exkv.OnOom`.
        on_fallback: called with a :class:`exkv.Fallback` after each step; see also
            ``GenerateOutput.fallbacks``.
        kwargs: ``adapter``, the name of one of ``model.adapters``; fields of :class:`exkv.Hooks`;
            and fields of ``GenerationConfig``, which override ``generation_config``.

    Returns:
        int64 (N, T + new) on the host: prompts and new tokens, ``num_return_sequences`` adjacent
        rows for each prompt. Shorter rows are padded on the right; a tensor's own columns come back
        as they were. With ``return_dict_in_generate`` a :class:`GenerateOutput`.

    Raises:
        ValueError: before anything has run: the model is not loaded, a prompt is empty or has an id
            outside the vocabulary, a number is out of range, or the cache is too small. Later: no
            token can be chosen, since logits hold NaN or infinity, or all are -inf.
        TypeError: an unknown argument, or one of the wrong type.
        PlacementError, OutOfMemoryError: no room for a cache, or memory ran out later, and no step
            of ``on_oom`` helped. A given cache holds the tokens that were run.
        CacheUseError: the cache is in use.
    """
    if not model.loaded:
        raise ValueError("the model is not loaded: call load or load_autosplit first")
    arguments.one_of("input_ids", input_ids, "inputs", inputs)
    given = inputs if input_ids is None else input_ids
    cache = arguments.one_of("cache", cache, "past_key_values", past_key_values)
    rescue = Rescue(OnOom(on_oom=on_oom, on_fallback=on_fallback))
    request = read_request(model, given, attention_mask, tokenizer, generation_config, kwargs)
    return complete(model, cache, request, rescue)


def complete(
    model: Transformer, cache: KVCache | None, request: Request, rescue: Rescue
) -> Tensor | GenerateOutput:
    """Run a request to its end."""
    with ExitStack() as held:
        runner = ready_runner(model, cache, request, rescue, held)
        draft = ready_draft(request, rescue, held)
        guidance = ready_guidance(model, request, rescue, held)
        config, hooks = request.config, request.hooks
        task = Task(
            prompts=request.prompts,
            config=config,
            hooks=hooks,
            processors=processors(config, hooks, guidance),
            criteria=(*stopping_criteria(config, request.tokenizer), *hooks.stopping_criteria),
        )
        completions = run_loop(task, request.sequences_each, runner, draft, guidance)
    return output(request, completions, task, tuple(rescue.taken), cache)


def run_loop(
    task: Task, each: int, runner: Runner, draft: Draft | MTP | None, guidance: Guidance | None
) -> Completions:
    """Run the loop until all rows have ended; ``each`` is the number of rows of a prompt."""
    config = task.config
    place = InPlace(runner, each, guidance, on_host=task.is_watched)
    job = Job(prompt=(), max_new_tokens=config.max_new_tokens)
    prompts = [ids for ids in task.prompts.rows for _ in range(each)]
    rows = [Row(job, number, ids, []) for number, ids in enumerate(prompts)]
    ngrams, lookup = None, config.prompt_lookup_num_tokens
    if lookup:
        ngrams = NGrams(tokens=lookup, longest=config.max_matching_ngram_size or 2)
    speculation = Speculation(runner.model, draft, ngrams)
    if speculation.tokens:
        check_rollback(runner.cache)
    chooser = chooser_of(task, place, len(rows), speculation.tokens > 0)
    scheduler = Scheduler(place, chooser, speculation)
    task.stream(task.prompts.followed_by(torch.empty((len(rows), 0), dtype=torch.int64)))
    for row in rows:
        scheduler.submit(row)
    while scheduler.busy:
        scheduler.iterate()
    stats = scheduler.stats
    return replace(
        chooser.completions(rows), proposed=stats.proposed_tokens, accepted=stats.accepted_tokens
    )


def chooser_of(task: Task, place: InPlace, rows: int, speculates: bool) -> BatchChooser:
    """The chooser that the config asks for."""
    if task.config.num_beam_groups > 1:
        return GroupBeamSearch(task, place)
    if task.config.num_beams > 1:
        return BeamSearch(task, place)
    return OneByOne(task, place, rows) if speculates else Together(task, place, rows)


# What a call holds -----------------------------------------------------------------------------


def ready_runner(
    model: Transformer,
    cache: KVCache | None,
    request: Request,
    rescue: Rescue,
    held: ExitStack,
) -> Runner:
    """A runner over the given cache, or over one built for the call."""
    prompts, config = request.prompts, request.config
    if cache is not None:
        check_cache(model, cache, request)
        runner = Runner(model, cache, rescue, adapter=request.adapter)
        held.enter_context(runner.leased("model.generate"))
        return runner
    longest, each = max(prompts.lengths), request.sequences_each
    whole, rows = longest + config.max_new_tokens, len(prompts.lengths)
    forked = each > 1 and (each - 1) * sum(prompts.lengths) >= WORTH_SHARING
    if request.speculates or isinstance(own_specs(model, config, 1, 1)[0].growth, Paged):
        forked = False  # rows of one paged cache share their prompt's pages
    shape = (longest, rows) if forked else (whole, rows * each)
    specs = own_specs(model, config, *shape, snapshots=request.speculates)
    cache = rescue.build(model, own_kind(config), specs)
    runner = Runner(model, cache, rescue, whole if forked else None, request.adapter)
    held.callback(runner.free)
    return runner


def ready_draft(request: Request, rescue: Rescue, held: ExitStack) -> Draft | MTP | None:
    """The draft of ``assistant_model``, over its cache or one built for the call; or the model's
    MTP head."""
    given, config = request.hooks.assistant_model, request.config
    if config.use_mtp:
        tokens = min(config.num_assistant_tokens, MTP.most)
        return MTP(tokens=tokens, confidence=config.assistant_confidence_threshold)
    if given is None:
        return None
    if isinstance(given, Draft):
        draft = copy.copy(given)
    else:
        longest = max(request.prompts.lengths) + config.max_new_tokens
        rows = len(request.prompts.lengths) * request.sequences_each
        kind = cache_kind("static")
        cache = rescue.build(given, kind, kind.layer_specs(given, longest, rows, snapshots=True))
        held.callback(given.forget_cache, cache)
        held.callback(cache.free)
        draft = Draft(given, cache, confidence=config.assistant_confidence_threshold)
    draft.tokens = config.num_assistant_tokens
    held.enter_context(draft.leased("model.generate"))
    return draft


def ready_guidance(
    model: Transformer, request: Request, rescue: Rescue, held: ExitStack
) -> Guidance | None:
    """The call's guidance, over a cache of its own."""
    prompts, config = request.prompts, request.config
    if config.guidance_scale == 1:
        return None
    rows = [ids[-1:] for ids in prompts.rows] if request.negative is None else request.negative.rows
    rows = rows * (len(prompts.lengths) if len(rows) == 1 else 1)
    rows = [ids for ids in rows for _ in range(request.sequences_each)]
    longest = max(map(len, rows)) + config.max_new_tokens
    cache = rescue.build(model, own_kind(config), own_specs(model, config, longest, len(rows)))
    runner = Runner(model, cache, rescue, adapter=request.adapter)  # both are the same model's
    held.callback(runner.free)
    return Guidance(runner, rows, config.guidance_scale)


def own_kind(config: GenerationConfig) -> type[KVCache]:
    return cache_kind(config.cache_implementation or "static")


def own_specs(
    model: Transformer,
    config: GenerationConfig,
    max_seq_len: int,
    rows: int,
    *,
    snapshots: bool = False,
) -> list[LayerSpec]:
    """The layers of a cache for the call."""
    kind, options = own_kind(config), dict(config.cache_config or {})
    try:
        return kind.layer_specs(model, max_seq_len, rows, **{"snapshots": snapshots, **options})
    except TypeError as error:
        raise TypeError(
            f"cache_config is {options}, which {config.cache_implementation!r} doesn't take: see "
            f"exkv.{kind.__name__} for its arguments ({error})"
        ) from None


def check_cache(model: Transformer, cache: KVCache, request: Request) -> None:
    """ValueError if a given cache doesn't fit the call."""
    prompts, config = request.prompts, request.config
    if config.cache_implementation is not None:
        raise ValueError(
            f"cache_implementation is {config.cache_implementation!r}, and a cache is given as "
            "well: leave out one of them"
        )
    check_kind(cache)
    if not config.use_cache:
        raise ValueError("use_cache is False, and a cache is given as well: leave out one of them")
    each = request.sequences_each
    rows = len(prompts.lengths) * each
    cache.bind(model, rows)
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
    request: Request,
    completions: Completions,
    task: Task,
    fallbacks: tuple[Fallback, ...],
    cache: KVCache | None,
) -> Tensor | GenerateOutput:
    """Join prompts and completions; see ``generate`` for where padding goes."""
    prompts, config, tokenizer = request.prompts, request.config, request.tokenizer
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
        scores=tuple(task.scores) if config.output_scores else None,
        logits=tuple(task.logits) if config.output_logits else None,
        beam_indices=completions.beam_indices,
        fallbacks=fallbacks,
        proposed_tokens=completions.proposed,
        accepted_tokens=completions.accepted,
        cache=cache,
    )
