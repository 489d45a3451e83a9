"""GenerationConfig: how to decode, with the names of transformers' class, checked when built.

``arguments`` has transformers' names beyond the fields here.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from exkv.checkpoint.files import read_json_object
from exkv.checkpoint.value_checks import refuses_assignment
from exkv.sampling import huggingface
from exkv.sampling.bounds import check_fields
from exkv.sampling.step import filled

from . import arguments, validation

FILE_NAME = "generation_config.json"
# Not read from files: how a call draws, where it stores, and what it returns.
_OF_THE_CALL = {
    "seed",
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "cache_implementation",
    "cache_config",
    "use_cache",
}
# New tokens if neither the call nor the checkpoint says how many.
_NEW_TOKENS = 20


@refuses_assignment
@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """How to decode. Names, meanings and defaults are those of transformers 5's class, plus
    ``seed``; group beams are those of transformers 4.48, which later versions no longer have.

    Attributes:
        max_new_tokens: upper bound on new tokens of each sequence; None for ``max_length``.
        max_length: the same bound including the longest prompt with its padding; None for 20 new
            tokens. No effect beside ``max_new_tokens``.
        min_length: fewest tokens of a sequence, counted like ``max_length``; no effect beside
            ``min_new_tokens``.
        do_sample: draw the next token instead of taking the likeliest.
        {fields}
        stop_strings: texts; a sequence ends with the token that completes one.
        max_time: seconds after which a call ends, with the current token.
        num_beams: width of the beam search; rows of the cache that each prompt needs.
        num_beam_groups, diversity_penalty: split the beams into groups, each of which loses this
            much log-probability on a token for every beam of an earlier group that has just
            taken it (Vijayakumar et al. 2018).
        num_return_sequences: sequences for each prompt; with beams, at most ``num_beams``.
        early_stopping: when a beam search with ``num_beams`` finished sequences ends: True at once,
            False when the best running beam is no better now, "never" when none can become better.
        length_penalty: exponent of the number of new tokens by which the log-probability of a
            finished sequence is divided to rank it.
        eos_token_id: one id or several that end a sequence; () for none, None for the model's (as
            an argument of a call, for none).
        pad_token_id: fills shorter sequences, and need not be in the vocabulary; None for the
            model's, else its first end-of-sequence token, else 0.
        seed: seed of the generator to draw with; None for torch's global generator, which
            ``torch.manual_seed`` seeds. With either, the tokens are those of transformers.
        return_dict_in_generate: return a ``GenerateOutput`` instead of its ``sequences`` alone.
        output_scores, output_logits: also return each step's scores, or the logits before them;
            needs ``return_dict_in_generate``, and at most one group of beams.
        cache_implementation: the kind of cache for the call, by a name that
            :func:`exkv.make_cache` knows; None for "static".
        cache_config: options of that kind, e.g. ``{"nbits": 4}``; its size follows from the call.
        use_cache: accepted for compatibility, without effect: a cache is always used.
        guidance_scale: how far to move away from what follows a negative prompt; 1 is not at all.
            Takes a second cache for the call, of the same kind and with as many rows.
        prompt_lookup_num_tokens: draft up to this many tokens from those that followed an earlier
            occurrence of the last ones; the model verifies them in one call. Changes no token (see
            ``exkv.decode.speculation``).
        max_matching_ngram_size: longest match of these last tokens; None for 2.
        use_mtp: draft with the checkpoint's MTP head, in a model that was built with ``mtp=True``.
        num_assistant_tokens: upper bound on tokens that the call's ``assistant_model``, or the MTP
            head, drafts at a time.
        assistant_confidence_threshold: probability of a token below which drafting stops.

    Elsewhere, None switches a field off (and is False for a switch).

    Raises:
        ValueError, TypeError: naming the field, its value and what is allowed.
    """

    max_new_tokens: int | None = None
    max_length: int | None = None
    min_new_tokens: int | None = None
    min_length: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float | None = None
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    bad_words_ids: Sequence[Sequence[int]] | None = None
    suppress_tokens: Sequence[int] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | Sequence[int] | None = None
    sequence_bias: Mapping[Sequence[int], float] | Sequence[Any] | None = None
    encoder_repetition_penalty: float = 1.0
    encoder_no_repeat_ngram_size: int = 0
    exponential_decay_length_penalty: Sequence[float] | None = None
    remove_invalid_values: bool = False
    stop_strings: str | Sequence[str] | None = None
    max_time: float | None = None
    renormalize_logits: bool = False
    num_beams: int = 1
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    num_return_sequences: int = 1
    early_stopping: bool | str = False
    length_penalty: float = 1.0
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = None
    seed: int | None = None
    return_dict_in_generate: bool = False
    output_scores: bool = False
    output_logits: bool = False
    cache_implementation: str | None = None
    cache_config: Mapping[str, Any] | None = None
    use_cache: bool = True
    guidance_scale: float = 1.0
    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int | None = None
    use_mtp: bool = False
    num_assistant_tokens: int = 20
    assistant_confidence_threshold: float = 0.4

    def __post_init__(self) -> None:
        check_fields(self, validation.BOUNDS, none_is_off=True)
        validation.check_together(self)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, config_file_name: str = FILE_NAME
    ) -> GenerationConfig:
        """The settings of the checkpoint's generation_config.json; defaults without one. Settings
        that change no token are ignored.

        Raises:
            ValueError: the file is broken, or asks for something that exkv doesn't do.
        """
        file = Path(folder) / config_file_name
        if not file.exists():
            return cls()
        stated = read_json_object(file)
        try:
            known = [field.name for field in fields(cls) if field.name not in _OF_THE_CALL]
            used = validation.without_unused(arguments.taken(stated, known))
            return cls(**{name: used[name] for name in known if name in used})
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{file}: {error}; or pass a generation_config=GenerationConfig(...) of your own"
            ) from None

    def save_pretrained(
        self, save_directory: str | Path, config_file_name: str = FILE_NAME
    ) -> None:
        """Write the values that differ from the defaults, for :meth:`from_pretrained`.

        Raises:
            OSError: it can't be written.
        """
        default = GenerationConfig()
        stated = {
            name: value
            for name, value in self._values().items()
            if value != getattr(default, name) and name not in _OF_THE_CALL
        }
        if isinstance(bias := stated.get("sequence_bias"), Mapping):
            stated["sequence_bias"] = [[list(ids), value] for ids, value in bias.items()]
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / config_file_name).write_text(json.dumps(stated, indent=2) + "\n", "utf-8")

    def updated(self, **changes: Any) -> GenerationConfig:
        """A copy with other values of some fields.

        Raises:
            TypeError: there is no such field; suggests similar names.
            ValueError: transformers has it, and exkv doesn't.
        """
        known = [field.name for field in fields(self)]
        changes = arguments.taken(changes, known)
        for name in changes:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=3)
                hint = f": did you mean {' or '.join(near)}?" if near else f"; it takes {known}"
                raise TypeError(f"generate() has no argument {name!r}{hint}")
        return GenerationConfig(**{**self._values(), **changes})

    def for_prompts(self, width: int, vocab_size: int) -> ResolvedConfig:
        """Fill in everything left open, for prompts of ``width`` tokens including padding, as
        transformers does.

        Raises:
            ValueError: ``max_length`` leaves no room after the prompts, or an id that must be in
                the vocabulary isn't.
        """
        validation.check_vocabulary(self, vocab_size)
        most, least = self.max_new_tokens, self.min_new_tokens
        if most is None and self.max_length is not None:
            most = self.max_length - width
            if most < 1:
                raise ValueError(
                    f"max_length is {self.max_length}, and the longest prompt has {width} tokens "
                    "already: raise it, or pass max_new_tokens, which does not count the prompt"
                )
        ends, pad = self.eos_token_id or (), self.pad_token_id
        numbers = {
            "max_new_tokens": _NEW_TOKENS if most is None else most,
            "min_new_tokens": max(0, self.min_length - width) if least is None else least,
            "eos_token_id": ends,
            "pad_token_id": 0 if pad is None else pad,
        }
        return ResolvedConfig(**{**self._values(), **numbers})

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids of ``eos_token_id``; () for none."""
        ids = self.eos_token_id
        return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)

    @property
    def least(self) -> int:
        """How many tokens truncation must leave: with beams, enough to go on when a sequence
        ends."""
        return 1 + max(1, len(self.ends)) if self.num_beams > 1 else 1

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


GenerationConfig.__doc__ = filled(GenerationConfig.__doc__, huggingface.HUGGING_FACE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(GenerationConfig):
    """A GenerationConfig that leaves nothing open, for the decode loop."""

    max_new_tokens: int = _NEW_TOKENS
    min_new_tokens: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] | None = None
    suppress_tokens: tuple[int, ...] | None = None
    begin_suppress_tokens: tuple[int, ...] | None = None
    forced_eos_token_id: tuple[int, ...] | None = None
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] | None = None
    stop_strings: tuple[str, ...] | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int = 0
