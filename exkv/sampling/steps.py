"""The sampler's steps: each with its source, its settings and its functions on scores.

``exllamav2`` and ``huggingface`` name the settings, and say in which order the steps run.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from exkv.ops import sample as op

from . import bans, penalties, temperature, truncation
from .bounds import (
    BELOW_1,
    LARGEST,
    LARGEST_ID,
    MOST_TOKENS,
    SMALLEST,
    Bounds,
    count,
    length_decay,
    number,
    sequence_bias,
    switch,
    token_bias,
    token_ids,
    token_sequences,
    token_set,
)
from .step import Setting, alone, each, step

_SHARE = number(0.0, 1.0, off=(0.0,))
_MASS = number(0.0, 1.0, off=(1.0,), above=True)
_CUTOFF = number(0.0, BELOW_1, off=(0.0,))
_FACTOR = number(0.0, LARGEST, off=(0.0,))
_SUBTRACTED = number(-LARGEST, LARGEST, off=(0.0,))
_PENALTY = number(SMALLEST, LARGEST, off=(1.0,))
_COUNT = count(0, MOST_TOKENS, off=(0,))
_IDS = Bounds("a token id, or several, or None", token_ids)
_SET = Bounds("a set of ids, or None", token_set, switches=False)

# Biases and penalties ---------------------------------------------------------------------------

TOKEN_BIAS = step(
    "logit_bias of OpenAI's API",
    Setting("{token id: number added to its logit}", Bounds("-inf forbids it", token_bias)),
    columns=alone(penalties.add_bias),
)
SEQUENCE_BIAS = step(
    "transformers",
    Setting("added to a token that completes some ids", Bounds("{ids: number}", sequence_bias)),
    columns=lambda x, at, biases: penalties.bias_sequences(x, at.histories_on_host, biases),
)
PENALTIES = step(
    "Keskar et al. 2019, arXiv 1909.05858 (CTRL); OpenAI's API; ExLlamaV2 (range and decay)",
    Setting(
        "divides positive logits of tokens so far, and multiplies negative ones",
        _PENALTY,
        ("rep_pen", "repeat_penalty"),
        short="-repp",
    ),
    Setting("subtracted from a logit for each occurrence of its token", _SUBTRACTED),
    Setting("subtracted once from a logit if its token occurs", _SUBTRACTED),
    Setting(
        "how many of the last tokens the penalties count in full",
        count(-1, MOST_TOKENS, note="-1 is the whole history"),
        ("repetition_range", "repetition_penalty_range", "rep_pen_range", "repeat_last_n"),
        served="penalty_range",
    ),
    Setting(
        "over how many earlier tokens the penalties fade to nothing",
        count(0, MOST_TOKENS, note="0 ends them at the range"),
    ),
    columns=penalties.penalize,
    needs_history=True,
)
ENCODER_REPETITION = step(
    "transformers",
    Setting("above 1 makes the prompt's tokens likelier, below 1 less likely", _PENALTY),
    columns=lambda x, at, reward: penalties.penalize_repetition(x, at.prompt_histories, 1 / reward),
)
DRY = step(
    "p-e-w, oobabooga/text-generation-webui#5677 (don't repeat yourself)",
    Setting("the penalty for repeating n tokens, times dry_base^(n - dry_allowed_length)", _FACTOR),
    Setting("the base by which that penalty grows with n", number(0.0, 100.0)),
    Setting("the smallest n that is penalized, 1 or more", count(0, MOST_TOKENS)),
    Setting("the largest n", count(1, 1000), served=None),
    Setting(
        "how many of the last tokens are searched",
        count(0, MOST_TOKENS, note="0 searches the whole history"),
        ("dry_penalty_last_n",),
    ),
    Setting(
        "ids that end a repetition; None for those of punctuation, brackets, line breaks and "
        "control tokens in a Generator, and for none elsewhere",
        _SET,
    ),
    columns=lambda x, at, *values: penalties.penalize_continuing(x, at.histories, *values),
    needs_history=True,
)
LENGTH_DECAY = step(
    "transformers",
    Setting(
        "(start, factor): n tokens after that many new ones, the scores of end-of-sequence tokens "
        "grow by their magnitude times factor^n - 1",
        Bounds("two numbers, or None", length_decay),
    ),
    columns=lambda x, at, decay, ends: penalties.favour_ends(x, ends, decay[1], at.new - decay[0]),
)

# Forbidden and forced tokens ----------------------------------------------------------------------

NGRAMS = step(
    "Paulus et al. 2018, arXiv 1705.04304",
    Setting("no sequence of this many tokens occurs twice", _COUNT),
    columns=lambda x, at, n: bans.forbid_ngrams(x, at.histories, at.histories, n),
)
ENCODER_NGRAMS = step(
    "transformers",
    Setting("no sequence of this many tokens of the prompt occurs again", _COUNT),
    columns=lambda x, at, n: bans.forbid_ngrams(x, at.histories, at.prompt_histories, n),
)
BAD_WORDS = step(
    "transformers",
    Setting(
        "words that never occur as a whole; end-of-sequence tokens among them are ignored",
        Bounds("a list of lists of ids, or None", token_sequences),
    ),
    columns=bans.forbid_bad_words,
)
MIN_LENGTH = step(
    "transformers",
    Setting("fewest new tokens before a sequence may end; None for min_length", _COUNT),
    columns=lambda x, at, least, ends: bans.forbid(x, ends) if at.new < least else x,
)
FORCED_FIRST = step(
    "transformers",
    Setting(
        "the first new token if the longest prompt has one token",
        replace(count(0, LARGEST_ID, note="a token id, or None"), switches=True),
    ),
    columns=lambda x, at, token: bans.force(x, [token]) if at.new == 0 and at.width == 1 else x,
)
FORCED_LAST = step(
    "transformers",
    Setting(
        "the last token of a sequence that reaches its greatest length; of several ids the first, "
        "or a random one if tokens are drawn",
        _IDS,
    ),
    columns=lambda x, at, ids, most: bans.force(x, ids) if at.new == most - 1 else x,
)
SUPPRESSED = step(
    "Radford et al. 2022, arXiv 2212.04356 (Whisper)",
    Setting("never chosen; ids outside of the vocabulary have no effect", _IDS),
    columns=alone(bans.forbid),
)
SUPPRESSED_FIRST = step(
    "Radford et al. 2022, arXiv 2212.04356 (Whisper)",
    Setting("not chosen as the first new token, or after one that is forced", _IDS),
    columns=bans.suppress_first,
)
INVALID = step(
    "transformers",
    Setting("replace NaN by 0, and infinities by the largest numbers, without error", switch()),
    columns=lambda x, *_: bans.remove_invalid(x),
)
LOG_PROBABILITIES = step(
    "transformers",
    Setting("turn the scores into log-probabilities again after all other steps", switch()),
    columns=lambda x, *_: x.log_softmax(-1),
)

# Temperature --------------------------------------------------------------------------------------

TEMPERATURE = step(
    "Ackley et al. 1985, Cognitive Science 9",
    Setting(
        "divides the logits",
        number(SMALLEST, LARGEST, off=(1.0,), note="do_sample=False is greedy"),
        short="-temp",
    ),
    Setting("apply it after the steps that drop tokens instead of before", switch(switches=False)),
    columns=alone(torch.div),
    candidates=lambda those, degree, _: those.each(op.apply_temperature, degree),
)
DYNAMIC_TEMPERATURE = step(
    "kalomaze, ExLlamaV2",
    Setting("the lowest dynamic temperature", number(0.0, LARGEST), ("dynatemp_low",)),
    Setting(
        "above min_temp, the remaining scores are divided by a temperature between the two, by "
        "their entropy as a share of the largest possible one, to the power of temp_exponent",
        _FACTOR,
        ("dynatemp_high",),
    ),
    Setting(
        "the exponent of the entropy's share",
        number(0.0, LARGEST, above=True),
        ("dynatemp_exponent",),
    ),
    candidates=each(temperature.dynamic_temperature),
    is_on=lambda low, high, _: high > low,
)
SMOOTHING = step(
    "kalomaze, ExLlamaV2 (quadratic sampling)",
    Setting("replaces each logit's distance from the largest by this times its square", _FACTOR),
    columns=alone(temperature.smooth),
    is_drawn=True,
)
SKEW = step(
    "ExLlamaV2",
    Setting(
        "above 0 shifts choices towards less likely tokens, below 0 towards likelier ones",
        number(-50.0, 50.0, off=(0.0,)),
    ),
    candidates=temperature.skewed,
)

# Truncation ---------------------------------------------------------------------------------------

TOP_K = step(
    "Fan et al. 2018, arXiv 1805.04833",
    Setting("keep the k likeliest tokens", _COUNT, short="-topk"),
    columns=alone(truncation.mask_top_k),
    candidates=truncation.sort_top_k,
)
TOP_P = step(
    "Holtzman et al. 2020, arXiv 1904.09751",
    Setting("keep the smallest set of tokens with at least this mass", _MASS, short="-topp"),
    columns=alone(truncation.mask_top_p),
    candidates=each(op.keep_top_p),
)
TOP_A = step(
    "BlinkDL/RWKV-LM",
    Setting("drop tokens less likely than this times the square of the largest", _SHARE),
    candidates=each(truncation.keep_top_a),
)
TOP_N_SIGMA = step(
    "Tang et al. 2024, arXiv 2411.07641",
    Setting("drop logits this many standard deviations below the largest", _FACTOR, ("nsigma",)),
    columns=alone(truncation.mask_top_n_sigma),
    is_drawn=True,
)
MIN_P = step(
    "Nguyen et al. 2024, arXiv 2407.01082",
    Setting("drop tokens less likely than this times the largest", _SHARE, short="-minp"),
    columns=alone(truncation.mask_min_p),
    candidates=each(op.keep_min_p),
)
TAIL_FREE = step(
    "Phénix and Egan 2019, Tail Free Sampling",
    Setting(
        "drop the tail of the sorted probabilities, once this share of their curvature is used up",
        number(0.0, 1.0, off=(0.0, 1.0)),
        ("tfs_z",),
    ),
    candidates=each(truncation.keep_tail_free),
)
TYPICAL = step(
    "Meister et al. 2022, arXiv 2202.00666",
    Setting(
        "keep the tokens nearest to the expected surprise, with this mass",
        _MASS,
        ("typical",),
        short="-typical",
    ),
    columns=alone(truncation.mask_typical),
    candidates=each(op.keep_typical),
)
EPSILON = step(
    "Hewitt et al. 2022, arXiv 2210.15191",
    Setting("drop tokens with a probability below it", _CUTOFF),
    columns=alone(truncation.mask_epsilon),
    is_drawn=True,
)
ETA = step(
    "Hewitt et al. 2022, arXiv 2210.15191",
    Setting("as epsilon_cutoff, with a lower cutoff where many tokens are likely", _CUTOFF),
    columns=alone(truncation.mask_eta),
    is_drawn=True,
)
XTC = step(
    "p-e-w, oobabooga/text-generation-webui#6335 (exclude top choices)",
    Setting("how often all tokens above xtc_threshold except the least likely are dropped", _SHARE),
    Setting("the probability of a top choice", number(0.0, 1.0, note="above 0.5 it does nothing")),
    Setting(
        "ids that are never excluded; None for those of line breaks and control tokens in a "
        "Generator, and for none elsewhere",
        _SET,
        served=None,
    ),
    candidates=truncation.xtc,
)
