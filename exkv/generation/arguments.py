"""Arguments of transformers' ``generate``, its configs and its ``forward`` that exkv doesn't have.

Some have no meaning here and are ignored; the others ask for something that exkv doesn't do, and
are refused with an alternative, unless their value asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

#: Bookkeeping, and arguments that only other backends read.
_WITHOUT_MEANING = {
    "assistant_early_exit",
    "assistant_lookbehind",
    "bos_token_id",
    "compile_config",
    "continuous_batching_config",
    "decoder_start_token_id",
    "disable_compile",
    "is_assistant",
    "low_memory",
    "max_cache_len",
    "num_assistant_tokens_schedule",
    "speculation_type",
    "target_lookbehind",
    "transformers_version",
    "trust_remote_code",
    "use_model_defaults",
}
_SPECULATION = (
    "leave it out, the tokens are the same: assistant_model is a model of the same vocabulary"
)
_LOSSLESS = "leave it out: an assistant_model never changes what is drawn here"
_LOGITS = "write it as a logits_processor, which takes the ids so far and the scores"
_FORWARD = "run model.forward in a loop of your own (examples/own_loop.py)"
#: name -> (values that ask for nothing, besides None and False; what to do instead).
_NOT_DONE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "assistant_tokenizer": ((), _SPECULATION),
    "assistant_ensemble_weight": ((), _LOSSLESS),
    "top_h": ((), _LOGITS),
    "watermarking_config": ((), _LOGITS),
    "dola_layers": ((), "transformers 5 no longer has it either: " + _FORWARD),
    "penalty_alpha": ((0.0,), "transformers 5 no longer has it either: use do_sample and top_p"),
    "constraints": ((), "use prefix_allowed_tokens_fn, which says what may follow"),
    "force_words_ids": ((), "use prefix_allowed_tokens_fn, or sequence_bias"),
    "token_healing": ((), "leave the last token of the prompt out, and use "
                          "prefix_allowed_tokens_fn"),
    "custom_generate": ((), _FORWARD),
    "inputs_embeds": ((), "pass token ids as input_ids"),
    "decoder_input_ids": ((), "pass token ids as input_ids: there are no encoders here"),
    "encoder_outputs": ((), "pass token ids as input_ids: there are no encoders here"),
    "position_ids": ((), "positions follow from attention_mask: leave it out"),
    "cache_position": ((), "positions follow from the cache: leave it out"),
    "token_type_ids": ((), "the model has none: leave it out"),
    "output_attentions": ((), "attention's weights are never stored here"),
    "output_hidden_states": ((), "put a forward hook on model.units[i].module"),
    "synced_gpus": ((), "one process runs the whole model: leave it out"),
    "prefill_chunk_size": ((), "Model(..., max_input_len=...) is the size of a chunk"),
}  # fmt: skip


def taken(given: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """Drop arguments without a meaning here; known and unknown names stay.

    Raises:
        ValueError: an argument asks for something that exkv doesn't do; says what to do instead.
    """
    left = {}
    for name, value in given.items():
        if name in known or not (name in _WITHOUT_MEANING or name in _NOT_DONE):
            left[name] = value
        elif name in _NOT_DONE:
            neutral, remedy = _NOT_DONE[name]
            if not (value is None or value is False or value in neutral):
                raise ValueError(
                    f"{name} = {_short(value)} is not supported by exkv's generate(): {remedy}"
                )
    return left


def of_config(config: Any) -> dict[str, Any]:
    """The values, except None, of a dict or an object such as transformers' GenerationConfig.

    Raises:
        TypeError: it is neither.
    """
    for name in ("to_diff_dict", "to_dict"):  # the first leaves out defaults
        if callable(method := getattr(config, name, None)):
            config = method()
    if not isinstance(config, Mapping):
        raise TypeError(
            f"generation_config is a {type(config).__name__}; it must be a GenerationConfig, of "
            "exkv or of transformers, or a dict of its fields"
        )
    stated = {name: value for name, value in config.items() if value is not None}
    return {name: value for name, value in stated.items() if not str(name).startswith("_")}


def one_of(name: str, value: T | None, other: str, other_value: T | None) -> T | None:
    """The value of an argument with two names; ValueError if both are given."""
    if value is not None and other_value is not None:
        raise ValueError(f"{name} and {other} are both given, and are the same: leave out one")
    return other_value if value is None else value


def check_step(past: Sequence[int], new: int, **given: Tensor | None) -> None:
    """Check arguments that a loop written for transformers passes to ``forward``: they may say
    only what follows from the cache. Rows have ``past`` tokens there and bring ``new`` more, none
    masked, at the positions that follow.

    Args:
        given: ``attention_mask`` (B, past + new) or (B, new), ``position_ids`` (B, new),
            ``cache_position`` (new,); None if not given.

    Raises:
        ValueError: an argument says something else.
    """
    mask = given.pop("attention_mask", None)
    if mask is not None:
        widths = {new, max(past) + new}
        if mask.dim() != 2 or len(mask) != len(past) or mask.shape[1] not in widths:
            raise ValueError(
                f"attention_mask is {tuple(mask.shape)}; for {len(past)} rows it must be "
                f"({len(past)}, {new}) or ({len(past)}, {max(past) + new})"
            )
        if not bool((mask != 0).all()):
            raise ValueError(
                "attention_mask hides tokens: there is no padding inside a cache; pad input_ids on "
                "the right and pass new_lens, how many tokens of each row are real"
            )
    for name, places in given.items():
        if places is None:
            continue
        expected = torch.tensor(past)[:, None] + torch.arange(new)
        if (
            places.dim() > 2
            or places.shape[-1] != new
            or not bool((places.cpu() == expected).all())
        ):
            raise ValueError(
                f"{name} doesn't match the tokens' positions, which follow the {list(past)[:8]} "
                "that rows have in the cache: leave it out, or crop the cache first"
            )


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
