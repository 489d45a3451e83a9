"""Where a call of ``generate`` comes in: check everything up front, make a cache, run a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from exkv.cache import KVCache, LayerSpec, Paged, cache_kind
from exkv.models import Transformer
from exkv.text import Tokenizer

from . import arguments
from .assisted import DraftProposals, NGramProposals, assisted_sequences
from .beams import beam_search
from .config import GenerationConfig, ResolvedConfig
from .fallback import Fallback, OnOom, Rescue, Step
from .groups import group_beam_search
from .guidance import Guidance
from .hooks import Hooks, StoppingCriterion
from .processors import processors
from .prompts import PromptIds, Prompts, read_prompts
from .runner import Runner
from .sampling import sample_sequences
from .speculation import Draft, check_promised, check_same_vocabulary
from .stopping import MaxTime, StopStrings
from .task import Completions, GenerateOutput, Task

T = TypeVar("T")

#: Tokens that beams save by sharing their prompts, at least, or each has a copy: attention over
#: what is shared and what comes behind are two calls and a merge. With 4 beams on the demo model
#: a step takes 1.5 times as long on a CPU after 16 tokens, and 1.2 times after 2,000.
WORTH_SHARING = 1024


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
    """Complete prompts, in the words and with the results of transformers' ``generate``.

    ``inputs`` is another name of ``input_ids``, ``past_key_values`` of ``cache``.

    Args:
        model: loaded.
        input_ids: int64 (B, T), or lists of ids of unlike length, or texts; one or several.
        generation_config: how to decode; None for what the checkpoint recommends. Of a dict, or
            of transformers' GenerationConfig, what it leaves open is as the checkpoint recommends.
        cache: None builds one for the call, of the kind that ``cache_implementation`` says, and
            frees it afterwards; in it a prompt that isn't short is stored once for all its beams.
            One that is given needs a row for each sequence (for each beam), and keeps what it holds
            at the end; what it holds of a prompt's beginning already is not run again.
        attention_mask: (B, T), 0 at padding, which is on the left. Without one, transformers' rule:
            a tensor's pad tokens are padding unless the pad token ends sequences, too.
        tokenizer: for texts, and ``stop_strings``; None for the checkpoint's.
        on_oom: what to do where memory runs out, though all was planned for: "fallback" (store the
            cache in host memory, then in fewer bits, and go on), "raise", or a list of steps; see
            :class:`exkv.generation.fallback.OnOom`.
        on_fallback: called with a :class:`exkv.generation.Fallback` after each step; see also
            ``GenerateOutput.fallbacks``.
        kwargs: ``adapter``, the name of one of ``model.adapters``; what runs in each step (see
            :class:`exkv.generation.hooks.Hooks`); and fields of ``GenerationConfig``, in place of
            those of ``generation_config``.

    Returns:
        int64 (N, T + new) on the host: prompts and new tokens, ``num_return_sequences`` for each
        prompt beside each other. Shorter rows are filled up on the right; a tensor's own columns
        come back as they were given. With ``return_dict_in_generate`` a :class:`GenerateOutput`.

    Raises:
        ValueError: the model is not loaded, a prompt is empty or has an id outside the
            vocabulary, a number makes no sense, or the cache is too small; nothing has run then.
            Later, where no token can be chosen: logits with NaN or infinity, or all at -inf.
        TypeError: an argument that isn't known, or isn't what it should be.
        PlacementError, OutOfMemoryError: there is no room for a cache, or memory ran out later, and
            ``on_oom`` knows no remedy. A cache that was given holds the tokens that were run.
        CacheUseError: somebody else uses the cache.
    """
    if not model.loaded:
        raise ValueError("the model is not loaded: call load or load_autosplit first")
    one_of("input_ids", input_ids, "inputs", inputs)
    given = inputs if input_ids is None else input_ids
    cache = one_of("cache", cache, "past_key_values", past_key_values)
    rescue = Rescue(OnOom(on_oom=on_oom, on_fallback=on_fallback))
    request = read_request(model, given, attention_mask, tokenizer, generation_config, kwargs)
    return complete(model, cache, request, rescue)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A call's arguments, checked and read. ``tokenizer`` is None where nobody needs one."""

    prompts: Prompts
    config: ResolvedConfig
    hooks: Hooks
    tokenizer: Tokenizer | None
    adapter: str | None = None
    negative: Prompts | None = None

    @property
    def speculates(self) -> bool:
        """Whether tokens are proposed and checked."""
        return bool(self.hooks.assistant_model or self.config.prompt_lookup_num_tokens)

    def task(self, runner: Runner, guidance: Guidance | None = None) -> Task:
        """What a loop gets, on this runner."""
        config = self.config
        return Task(
            runner=runner,
            prompts=self.prompts,
            config=config,
            hooks=self.hooks,
            processors=processors(config, self.hooks, guidance),
            criteria=stopping_criteria(config, self.tokenizer),
        )


def complete(
    model: Transformer, cache: KVCache | None, request: Request, rescue: Rescue
) -> Tensor | GenerateOutput:
    """Run a request; cache, result and errors as of :func:`generate`."""
    with (
        ready_runner(model, cache, request, rescue) as runner,
        ready_draft(request, rescue) as draft,
        ready_guidance(model, request, rescue) as guidance,
    ):
        task = request.task(runner, guidance)
        completions = decode(task, draft)
    return output(task, completions, request.tokenizer)


def read_request(
    model: Transformer,
    input_ids: PromptIds | None,
    attention_mask: Tensor | None,
    tokenizer: Tokenizer | None,
    generation_config: GenerationConfig | Mapping[str, Any] | None,
    further: dict[str, Any],
) -> Request:
    """Arguments and errors as of :func:`generate`; ``further`` are its ``kwargs``."""
    hooks, adapter = Hooks.taken_from(further), further.pop("adapter", None)
    if adapter is not None:
        model.chosen([adapter], 1)
    config = resolve(model, generation_config, further)
    if hooks.streamer is not None and config.num_beams > 1:
        raise ValueError(f"a streamer takes one sequence, and num_beams is {config.num_beams}")
    check_assistant(model, hooks, config)
    tokenizer = ready_tokenizer(model, tokenizer, input_ids, config)
    vocab_size = model.config.vocab_size
    prompts = read_prompts(input_ids, attention_mask, tokenizer, config, vocab_size)
    request = Request(
        prompts=prompts,
        config=config.for_prompts(prompts.width, vocab_size),
        hooks=hooks,
        tokenizer=tokenizer,
        adapter=adapter,
        negative=read_negative(hooks, tokenizer, config, vocab_size),
    )
    check_speculation(model, request)
    check_guidance(request)
    return request


def check_assistant(model: Transformer, hooks: Hooks, config: GenerationConfig) -> None:
    """ValueError where an ``assistant_model`` can't propose tokens in this call."""
    draft = hooks.assistant_model
    if draft is None:
        return
    if config.num_beams > 1:
        raise ValueError(
            f"assistant_model with num_beams = {config.num_beams}: tokens are proposed for greedy "
            "decoding and sampling only"
        )
    if config.prompt_lookup_num_tokens:
        raise ValueError(
            "assistant_model and prompt_lookup_num_tokens are both given: leave out one of them"
        )
    assistant = draft.model if isinstance(draft, Draft) else draft
    if not assistant.loaded:
        raise ValueError("assistant_model is not loaded: call load or load_autosplit first")
    check_same_vocabulary(model, assistant)


def read_negative(
    hooks: Hooks, tokenizer: Tokenizer | None, config: GenerationConfig, vocab_size: int
) -> Prompts | None:
    """The negative prompts that were given."""
    if hooks.negative_prompt_ids is None:
        return None
    mask = hooks.negative_prompt_attention_mask
    return read_prompts(hooks.negative_prompt_ids, mask, tokenizer, config, vocab_size)


def check_guidance(request: Request) -> None:
    """ValueError where a call can't be guided, or has negative prompts and isn't."""
    negative, scale = request.negative, request.config.guidance_scale
    if negative is not None and scale == 1:
        raise ValueError("negative_prompt_ids are given, and guidance_scale is 1: raise it")
    prompts = len(request.prompts.lengths)
    if negative is not None and len(negative.lengths) not in (1, prompts):
        raise ValueError(
            f"negative_prompt_ids has {len(negative.lengths)} rows for {prompts} prompts: give "
            "one, or one for each"
        )
    if request.speculates and scale != 1:
        raise ValueError(
            f"guidance_scale is {scale} with proposed tokens, which run ahead of the negative "
            "prompt: leave out one of them"
        )


def check_speculation(model: Transformer, request: Request) -> None:
    """ValueError where tokens can't be proposed for these prompts."""
    config, hooks = request.config, request.hooks
    if not request.speculates:
        return
    if not config.use_cache:
        raise ValueError(
            "use_cache is False, and proposed tokens are checked in a cache: leave it out"
        )
    check_promised(model)
    watched = hooks.is_watching or config.output_scores or config.output_logits
    several = len(request.prompts.lengths) * sequences_each(config)
    if several > 1 and watched:
        raise ValueError(
            f"{several} sequences with proposed tokens, which run ahead of each other, and with a "
            "streamer, a function of your own, output_scores or output_logits, which go step by "
            "step: leave out one of them, or generate one sequence at a time"
        )


def one_of(name: str, value: T | None, other: str, other_value: T | None) -> T | None:
    """An argument that has two names; ValueError where it is given by both."""
    if value is not None and other_value is not None:
        raise ValueError(f"{name} and {other} are both given, and are the same: leave out one")
    return other_value if value is None else value


def resolve(model: Transformer, given: Any, changes: dict[str, Any]) -> GenerationConfig:
    """The config of a call, with the model's own ids where it names none."""
    if isinstance(given, GenerationConfig):
        config = given
    else:
        path = model.config.path
        config = GenerationConfig() if path is None else GenerationConfig.from_pretrained(path)
        if given is not None:
            config = config.updated(**arguments.of_config(given))
    config = config.updated(**changes)
    ids = {name: getattr(config, name) for name in ("eos_token_id", "pad_token_id")}
    for name in ids:  # None as an argument of the call means none, as in transformers
        if ids[name] is None and name not in changes:
            ids[name] = getattr(model.config, name)
    config = config.updated(**ids)
    if config.pad_token_id is None and config.ends:
        config = config.updated(pad_token_id=config.ends[0])
    return config


def ready_tokenizer(
    model: Transformer,
    tokenizer: Tokenizer | None,
    prompts: PromptIds | None,
    config: GenerationConfig,
) -> Tokenizer | None:
    """The one that was given, or the checkpoint's where the call needs one."""
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        raise TypeError(
            f"tokenizer is a {type(tokenizer).__name__}; it must be an exkv.Tokenizer: "
            "Tokenizer(folder) reads the same files, or pass token ids"
        )
    if tokenizer is None and (_has_text(prompts) or config.stop_strings is not None):
        if model.config.path is None:
            what = "prompts are text" if _has_text(prompts) else "stop_strings are given"
            raise ValueError(f"{what}, and the model has no folder: pass tokenizer")
        return Tokenizer(model.config)
    return tokenizer


def stopping_criteria(
    config: ResolvedConfig, tokenizer: Tokenizer | None
) -> tuple[StoppingCriterion, ...]:
    """Those that the config asks for."""
    criteria: list[StoppingCriterion] = []
    if config.max_time is not None:
        criteria.append(MaxTime(config.max_time))
    if config.stop_strings is not None:
        assert tokenizer is not None, "ready_tokenizer found one"
        criteria.append(StopStrings(config.stop_strings, tokenizer))
    return tuple(criteria)


def decode(task: Task, draft: Draft | None) -> Completions:
    """Run the loop that the config asks for."""
    lookup = task.config.prompt_lookup_num_tokens
    if draft is not None:
        return assisted_sequences(task, DraftProposals(draft, task.config.num_assistant_tokens))
    if lookup:
        return assisted_sequences(task, NGramProposals(lookup, task.config.max_matching_ngram_size))
    if task.config.num_beam_groups > 1:
        return group_beam_search(task)
    if task.config.num_beams > 1:
        return beam_search(task)
    return sample_sequences(task)


@contextmanager
def ready_draft(request: Request, rescue: Rescue) -> Iterator[Draft | None]:
    """What proposes tokens, where a model does, over its cache or one of the call's own."""
    given, config = request.hooks.assistant_model, request.config
    if isinstance(given, Draft):
        with given.leased("model.generate"):
            yield given
        return
    if given is None:
        yield None
        return
    longest = max(request.prompts.lengths) + config.max_new_tokens
    rows = len(request.prompts.lengths) * sequences_each(config)
    kind = cache_kind("static")
    cache = rescue.build(given, kind, kind.layer_specs(given, longest, rows))
    try:
        yield Draft(given, cache, confidence=config.assistant_confidence_threshold)
    finally:
        cache.free()
        given.forget_cache(cache)


@contextmanager
def ready_guidance(
    model: Transformer, request: Request, rescue: Rescue
) -> Iterator[Guidance | None]:
    """What guides the call, over a cache of its own."""
    prompts, config = request.prompts, request.config
    if config.guidance_scale == 1:
        yield None
        return
    rows = [ids[-1:] for ids in prompts.rows] if request.negative is None else request.negative.rows
    rows = rows * (len(prompts.lengths) if len(rows) == 1 else 1)
    rows = [ids for ids in rows for _ in range(sequences_each(config))]
    longest = max(map(len, rows)) + config.max_new_tokens
    specs = own_specs(model, config, longest, len(rows))
    runner = Runner(model, rescue.build(model, own_kind(config), specs), rescue)
    runner.adapter = request.adapter  # both halves are the same model's
    runner.adapter = request.adapter
    try:
        yield Guidance(runner, rows, config.guidance_scale)
    finally:
        runner.free()


@contextmanager
def ready_runner(
    model: Transformer, cache: KVCache | None, request: Request, rescue: Rescue
) -> Iterator[Runner]:
    """A runner over the cache that was given, if it is large enough, or over the call's own."""
    prompts, config = request.prompts, request.config
    if cache is not None:
        check_cache(model, cache, prompts, config)
        runner = Runner(model, cache, rescue)
        runner.adapter = request.adapter
        with runner.leased("model.generate"):
            yield runner
        return
    longest, each = max(prompts.lengths), sequences_each(config)
    whole, rows = longest + config.max_new_tokens, len(prompts.lengths)
    forked = each > 1 and (each - 1) * sum(prompts.lengths) >= WORTH_SHARING
    if request.speculates or isinstance(own_specs(model, config, 1, 1)[0].growth, Paged):
        forked = False  # rows of one cache share their prompt's pages
    specs = own_specs(model, config, longest if forked else whole, rows if forked else rows * each)
    cache = rescue.build(model, own_kind(config), specs)
    runner = Runner(model, cache, rescue, whole if forked else None)
    runner.adapter = request.adapter
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
    model: Transformer, cache: KVCache, prompts: Prompts, config: ResolvedConfig
) -> None:
    """ValueError where a cache that was given doesn't do for the call."""
    if config.cache_implementation is not None:
        raise ValueError(
            f"cache_implementation is {config.cache_implementation!r}, and a cache is given as "
            "well: leave out one of them"
        )
    if not isinstance(cache, KVCache):
        raise TypeError(
            f"cache is a {type(cache).__name__}; it must be one of exkv's: exkv.make_cache(model, "
            "...) makes it, or leave it out and say cache_implementation"
        )
    if not config.use_cache:
        raise ValueError("use_cache is False, and a cache is given as well: leave out one of them")
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
        proposed_tokens=completions.proposed,
        accepted_tokens=completions.accepted,
    )


def _has_text(prompts: PromptIds | None) -> bool:
    if isinstance(prompts, list | tuple):
        return any(isinstance(prompt, str) for prompt in prompts)
    return isinstance(prompts, str)
