"""GenerationConfig: how to decode, in the names of transformers' class, checked as it is made."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from exkv.checks import is_int, is_number
from exkv.config import parse_json_object

# field: (lowest, lowest is allowed, highest, what the range is in words)
_RANGES = {
    "temperature": (0.0, False, math.inf, "a finite number > 0; do_sample=False is greedy"),
    "top_p": (0.0, False, 1.0, "in (0, 1]; 1 switches it off"),
    "min_p": (0.0, True, 1.0, "in [0, 1], or None to switch it off"),
    "repetition_penalty": (0.0, False, math.inf, "finite and > 0; 1 switches it off"),
    "diversity_penalty": (0.0, True, math.inf, "finite and >= 0"),
    "length_penalty": (-math.inf, False, math.inf, "finite; above 0 favours long sequences"),
}
_COUNTS = {
    "max_new_tokens": (1, "an int >= 1"),
    "top_k": (0, "an int >= 0; 0 switches it off"),
    "no_repeat_ngram_size": (0, "an int >= 0; 0 switches it off"),
    "num_beams": (1, "an int >= 1; 1 is no beam search"),
    "num_beam_groups": (1, "an int >= 1; 1 is one group"),
    "num_return_sequences": (1, "an int >= 1"),
}
_SWITCHES = ("do_sample", "return_dict_in_generate")

# What a generation_config.json may ask for beyond the fields here, and the value that asks nothing.
_UNKNOWN_HERE = {
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "penalty_alpha": 0.0,
    "guidance_scale": 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """How to decode. Names, meanings and defaults are those of transformers 5's class, beside
    ``seed``; group beams are those of transformers 4.48, which later versions no longer have.

    Attributes:
        max_new_tokens: tokens to generate for each sequence, at most.
        do_sample: draw the next token; else take the likeliest, and ``temperature``, ``top_k``,
            ``top_p`` and ``min_p`` have no effect.
        temperature: divides the logits.
        top_k: keep the k likeliest tokens, and what is as likely as the last of them.
        top_p: keep the smallest set of tokens with at least this mass (Holtzman et al. 2020).
        min_p: drop what is less than min_p times as likely as the likeliest (Nguyen et al. 2024).
        repetition_penalty: makes what the sequence holds less likely (Keskar et al. 2019, CTRL).
        no_repeat_ngram_size: no n tokens of this many in a row occur twice (Paulus et al. 2018).
        num_beams: sequences that are searched at once; rows that the cache needs for a prompt.
        num_beam_groups, diversity_penalty: split the beams into groups, each of which loses this
            much log-probability on a token for every beam of an earlier group that has just
            taken it (Vijayakumar et al. 2018).
        num_return_sequences: for each prompt; with beams, at most ``num_beams``.
        early_stopping: when a beam search that has ``num_beams`` finished sequences ends: True at
            once, False when the best beam is no better by now, "never" when it cannot become so.
        length_penalty: finished sequences are ranked by their log-probability divided by their new
            tokens to this power.
        eos_token_id: one id or several that end a sequence; () for none, None for the model's.
        pad_token_id: fills the sequences that are shorter, and need not be in the vocabulary; None
            for the model's, else its first end-of-sequence token, else 0.
        seed: draw with a generator of this seed; None draws with torch's global one, which
            ``torch.manual_seed`` seeds. With either, the tokens are those of transformers.
        return_dict_in_generate: return a ``GenerateOutput``, not its ``sequences`` alone.

    Raises:
        ValueError, TypeError: naming the field, its value and what is allowed.
    """

    max_new_tokens: int = 20
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
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

    def __post_init__(self) -> None:
        for name, (low, low_allowed, high, words) in _RANGES.items():
            _check_range(name, getattr(self, name), low, low_allowed, high, words)
        for name, (low, words) in _COUNTS.items():
            _check_count(name, getattr(self, name), low, words)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(
                f'early_stopping is {self.early_stopping!r}; it must be True, False or "never"'
            )
        _check_beams(self)
        object.__setattr__(self, "eos_token_id", _checked_ids(self.eos_token_id))
        for name in ("pad_token_id", "seed"):
            value = getattr(self, name)
            if value is not None:
                _check_count(name, value, 0, "an int >= 0, or None")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> GenerationConfig:
        """What the checkpoint's generation_config.json recommends; the defaults without one.

        Its ``max_length``, which counts the prompt, and what changes no token are left aside.

        Raises:
            ValueError: the file is broken, or asks for something that isn't done here.
        """
        file = Path(folder) / "generation_config.json"
        if not file.is_file():
            return cls()
        stated = parse_json_object(file.read_bytes(), file)
        stated = {name: value for name, value in stated.items() if value is not None}
        for name, neutral in _UNKNOWN_HERE.items():
            if stated.get(name, neutral) != neutral:
                raise ValueError(
                    f"{file} asks for {name} = {stated[name]!r}, which generate() doesn't do: pass "
                    "a generation_config=GenerationConfig(...) of your own"
                )
        names = {field.name for field in fields(cls)} - {"seed", "return_dict_in_generate"}
        try:
            return cls(**{name: value for name, value in stated.items() if name in names})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}: {error}") from None

    def updated(self, **changes: Any) -> GenerationConfig:
        """A copy with other values of some fields.

        Raises:
            TypeError: there is no such field; names those that are spelt like it.
        """
        known = [field.name for field in fields(self)]
        for name in changes:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=3)
                hint = f": did you mean {' or '.join(near)}?" if near else f"; it knows {known}"
                raise TypeError(f"generate() knows no argument {name!r}{hint}")
        return replace(self, **changes)


def _check_range(
    name: str, value: Any, low: float, low_allowed: bool, high: float, words: str
) -> None:
    if value is None and name == "min_p":
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; it must be {words}")
    inside = low <= value if low_allowed else low < value
    if not (is_number(value) and inside and value <= high):
        raise ValueError(f"{name} is {value!r}; it must be {words}")


def _check_count(name: str, value: Any, low: int, words: str) -> None:
    if not is_int(value):
        raise TypeError(f"{name} is {value!r}; it must be {words}")
    if value < low:
        raise ValueError(f"{name} is {value}; it must be {words}")


def _check_beams(config: GenerationConfig) -> None:
    beams, groups = config.num_beams, config.num_beam_groups
    wanted = config.num_return_sequences
    if beams > 1 and wanted > beams:
        raise ValueError(f"num_return_sequences is {wanted}, more than the {beams} of num_beams")
    if beams == 1 and wanted > 1 and not config.do_sample:
        raise ValueError(
            f"num_return_sequences is {wanted}, but greedy decoding has one sequence only: set "
            "do_sample=True or num_beams"
        )
    if beams % groups:
        raise ValueError(f"num_beams is {beams}, not a multiple of num_beam_groups = {groups}")
    if groups == 1 and config.diversity_penalty:
        raise ValueError(
            f"diversity_penalty is {config.diversity_penalty}, but there is one group of beams "
            "only: set num_beam_groups"
        )
    if groups > 1 and not config.diversity_penalty:
        raise ValueError(
            f"num_beam_groups is {groups} with a diversity_penalty of 0: all groups would be alike"
        )
    if groups > 1 and config.do_sample:
        raise ValueError(f"num_beam_groups is {groups} with do_sample=True: groups don't sample")


def _checked_ids(ids: Any) -> tuple[int, ...] | None:
    if ids is None:
        return None
    ids = (ids,) if isinstance(ids, int) else tuple(ids)
    for token in ids:
        _check_count("eos_token_id", token, 0, "a token id, or several, or None for the model's")
    return tuple(dict.fromkeys(ids))
