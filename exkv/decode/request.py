"""Reading and checking the arguments of ``generate``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from exkv.generation import arguments
from exkv.generation.config import GenerationConfig, ResolvedConfig
from exkv.models import Transformer
from exkv.text import Tokenizer

from .hooks import Hooks, StoppingCriterion
from .prompts import PromptIds, Prompts, read_prompts
from .speculation import Draft, check_has_head, check_promised, check_same_vocabulary
from .stopping import MaxTime, StopStrings


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of a call. ``tokenizer`` is None if nothing needs one."""

    prompts: Prompts
    config: ResolvedConfig
    hooks: Hooks
    tokenizer: Tokenizer | None
    adapter: str | None = None
    negative: Prompts | None = None

    @property
    def speculates(self) -> bool:
        """Whether tokens are proposed."""
        config = self.config
        return bool(self.hooks.assistant_model or config.prompt_lookup_num_tokens or config.use_mtp)

    @property
    def sequences_each(self) -> int:
        """Rows for each prompt."""
        return max(self.config.num_beams, self.config.num_return_sequences)


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
    """ValueError if ``assistant_model`` or ``use_mtp`` can't propose tokens in this call."""
    draft, lookup = hooks.assistant_model, config.prompt_lookup_num_tokens
    asked = {"assistant_model": draft, "prompt_lookup_num_tokens": lookup}
    asked["use_mtp"] = config.use_mtp
    given = [name for name, value in asked.items() if value]
    if draft is None and not config.use_mtp:
        return
    if config.num_beams > 1:
        raise ValueError(
            f"{given[0]} with num_beams = {config.num_beams}: tokens are proposed for greedy "
            "decoding and sampling only"
        )
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are both given: leave out one of them")
    if draft is None:
        check_has_head(model)
        return
    assistant = draft.model if isinstance(draft, Draft) else draft
    if not assistant.loaded:
        raise ValueError("assistant_model is not loaded: call load or load_autosplit first")
    check_same_vocabulary(model, assistant)


def read_negative(
    hooks: Hooks, tokenizer: Tokenizer | None, config: GenerationConfig, vocab_size: int
) -> Prompts | None:
    """Read the negative prompts, if given."""
    if hooks.negative_prompt_ids is None:
        return None
    mask = hooks.negative_prompt_attention_mask
    return read_prompts(hooks.negative_prompt_ids, mask, tokenizer, config, vocab_size)


def check_guidance(request: Request) -> None:
    """ValueError for a call that can't be guided, or has negative prompts without guidance."""
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
            f"guidance_scale is {scale} with proposed tokens, which would run ahead of the "
            "negative prompt: leave out one of them"
        )


def check_speculation(model: Transformer, request: Request) -> None:
    """ValueError if tokens can't be proposed for these prompts."""
    config, hooks = request.config, request.hooks
    if not request.speculates:
        return
    if not config.use_cache:
        raise ValueError(
            "use_cache is False, and proposed tokens are verified with a cache: leave it out"
        )
    check_promised(model)
    watched = hooks.see_scores or hooks.streamer or config.output_scores or config.output_logits
    several = len(request.prompts.lengths) * request.sequences_each
    if several > 1 and watched:
        raise ValueError(
            f"{several} sequences with proposed tokens, which advance at different rates, and with "
            "a streamer, a function of your own, output_scores or output_logits, which need steps "
            "in common: leave out one of them, or generate one sequence at a time"
        )


def default_config(model: Transformer) -> GenerationConfig:
    """The config set as ``model.generation_config``, else the checkpoint's recommendation."""
    if (own := getattr(model, "own_generation_config", None)) is not None:
        return cast(GenerationConfig, own)
    path = model.config.path
    return GenerationConfig() if path is None else GenerationConfig.from_pretrained(path)


def resolve(model: Transformer, given: Any, changes: dict[str, Any]) -> GenerationConfig:
    """Merge a call's config, with the model's token ids unless it has others."""
    if isinstance(given, GenerationConfig):
        config = given
    else:
        config = default_config(model)
        if given is not None:
            config = config.updated(**arguments.of_config(given))
    config = config.updated(**changes)
    ids = {name: getattr(config, name) for name in ("eos_token_id", "pad_token_id")}
    for name in ids:  # as in transformers, a None given to the call means no such token
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
    """The given tokenizer, or the checkpoint's if the call needs one."""
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
    """The criteria that the config asks for."""
    criteria: list[StoppingCriterion] = []
    if config.max_time is not None:
        criteria.append(MaxTime(config.max_time))
    if config.stop_strings is not None:
        assert tokenizer is not None, "ready_tokenizer found one"
        criteria.append(StopStrings(config.stop_strings, tokenizer))
    return tuple(criteria)


def _has_text(prompts: PromptIds | None) -> bool:
    if isinstance(prompts, list | tuple):
        return any(isinstance(prompt, str) for prompt in prompts)
    return isinstance(prompts, str)
