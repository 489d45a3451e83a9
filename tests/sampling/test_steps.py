"""Each sampling step against its definition or transformers, and the fields that every step must
have."""

import math
import random
from dataclasses import fields, replace

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from native import ROOT

from exkv import GenerationConfig, SamplingParams
from exkv.decode.hooks import Hooks
from exkv.decode.processors import SoFar, processors
from exkv.decode.prompts import Prompts
from exkv.generation import validation
from exkv.sampling import EXLLAMAV2, HUGGING_FACE, exllamav2, steps
from exkv.sampling.chain import distribution, sample
from exkv.sampling.penalties import penalize_continuing
from exkv.sampling.step import Candidates, Entry, Step
from exkv.sampling.temperature import dynamic_temperature, skewed, smooth
from exkv.sampling.truncation import exclude_top_choices, keep_tail_free, keep_top_a

INF = math.inf
ROUNDING = 1e-5
rows = st.lists(st.floats(-8, 8, width=16), min_size=2, max_size=24)
histories = st.lists(st.integers(0, 4), max_size=40)


def probabilities(scores: list[float]) -> list[float]:
    largest = max(scores)
    weights = [math.exp(score - largest) for score in scores]
    return [weight / sum(weights) for weight in weights]


def of(scores: torch.Tensor) -> list[float]:
    """The probabilities of one row of scores."""
    return scores[0].double().softmax(-1).tolist()


def plain(**fields: object) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "token_repetition_penalty": 1.0, **fields}
    )


# The distribution of each step of ExLlamaV2's vocabulary ------------------------------------------

P = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]
HISTORY = [0, 1, 2, 0, 1]
ENTROPY = -sum(p * math.log(p) for p in P)


def weighted(*weights: float) -> list[float]:
    """P with each probability times a weight."""
    products = [p * weight for p, weight in zip(P, weights, strict=True)]
    return [product / sum(products) for product in products]


def kept(*tokens: int) -> list[float]:
    """P of these tokens only."""
    return weighted(*(float(token in tokens) for token in range(len(P))))


def powered(power: float) -> list[float]:
    return weighted(*(p ** (power - 1) for p in P))


def drawn_by(power: float) -> list[float]:
    """Shares of tokens drawn from P by uniform numbers raised to a power."""
    edges = [sum(P[:i]) ** power for i in range(len(P))] + [1.0]
    return [high - low for low, high in zip(edges, edges[1:], strict=False)]


#: Step -> fields that switch it on, and what P, after HISTORY, is then.
WANTED: dict[Step, tuple[dict, list[float]]] = {
    steps.TOKEN_BIAS: ({"token_bias": {1: 0.5, 3: -INF}}, weighted(1, math.e**0.5, 1, 0, 1, 1)),
    steps.PENALTIES: (
        {"token_frequency_penalty": 0.5, "token_presence_penalty": 0.2},
        weighted(math.exp(-1.2), math.exp(-1.2), math.exp(-0.7), 1, 1, 1),
    ),
    # 2 followed the last two tokens before.
    steps.DRY: (
        {"dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 1},
        weighted(1, 1, math.exp(-0.8 * 1.5), 1, 1, 1),
    ),
    steps.SMOOTHING: (
        {"smoothing_factor": 0.3},
        weighted(*(math.exp(-0.3 * math.log(P[0] / p) ** 2) / p for p in P)),
    ),
    steps.TOP_N_SIGMA: ({"top_n_sigma": 1.0}, kept(0, 1)),  # logits from -1.71
    steps.TEMPERATURE: ({"temperature": 0.5}, powered(2)),
    steps.TOP_K: ({"top_k": 3}, kept(0, 1, 2)),
    steps.TOP_P: ({"top_p": 0.6}, kept(0, 1)),
    steps.TOP_A: ({"top_a": 0.5}, kept(0, 1, 2, 3)),  # at least 0.08
    steps.MIN_P: ({"min_p": 0.3}, kept(0, 1, 2)),  # at least 0.12
    steps.TAIL_FREE: ({"tfs": 0.5}, kept(0, 1)),  # curvatures of 5, 5, 1 and 2 hundredths
    steps.TYPICAL: ({"typical": 0.3}, kept(1, 2)),  # the nearest to 1.53 are 1.39 and 1.90
    steps.XTC: (
        {"xtc_probability": 0.5, "xtc_threshold": 0.2},
        [(p + q) / 2 for p, q in zip(P, kept(1, 2, 3, 4, 5), strict=True)],
    ),
    steps.DYNAMIC_TEMPERATURE: (
        {"min_temp": 0.5, "max_temp": 1.5},
        powered(1 / (0.5 + ENTROPY / math.log(len(P)))),
    ),
    steps.SKEW: ({"skew": -0.5}, drawn_by(math.exp(-0.5))),
}


@pytest.mark.parametrize("step", WANTED, ids=lambda step: step.settings[0].does[:40])
def test_a_step_gives_the_distribution_of_its_definition(step):
    options, wanted = WANTED[step]
    params, logits = plain(**options), torch.tensor([P]).log()
    shares, ids = distribution(logits, params, [HISTORY])
    found = torch.zeros(len(P)).index_add(0, ids[0], shares[0])
    torch.testing.assert_close(found, torch.tensor(wanted))
    draws, seed = 5000, torch.Generator().manual_seed(1)
    tokens = sample(logits.expand(draws, -1), params, [HISTORY] * draws, seed)
    counted = torch.bincount(tokens, minlength=len(P)) / draws
    # 5 standard deviations of a share.
    assert ((counted - found).abs() <= 5 * (found * (1 - found) / draws).sqrt()).all()


# The scores of each step of Hugging Face's vocabulary ---------------------------------------------

ENDS = [2, 9]
WORDS = [[5], [2], [1, 3], [0, 0, 4]]
BIAS = [[[1], 2.0], [[0, 3], -1.5], [[4], -INF]]
#: Step -> options, and transformers' class with its arguments; prompts are (2, WIDTH).
THEIRS: dict[Step, tuple[dict, object]] = {
    steps.SEQUENCE_BIAS: ({"sequence_bias": BIAS}, hf.SequenceBiasLogitsProcessor(BIAS)),
    steps.ENCODER_REPETITION: (
        {"encoder_repetition_penalty": 1.5},
        lambda ids: hf.EncoderRepetitionPenaltyLogitsProcessor(1.5, ids),
    ),
    steps.PENALTIES: ({"repetition_penalty": 1.5}, hf.RepetitionPenaltyLogitsProcessor(1.5)),
    steps.NGRAMS: ({"no_repeat_ngram_size": 2}, hf.NoRepeatNGramLogitsProcessor(2)),
    steps.ENCODER_NGRAMS: (
        {"encoder_no_repeat_ngram_size": 2},
        lambda ids: hf.EncoderNoRepeatNGramLogitsProcessor(2, ids),
    ),
    steps.BAD_WORDS: ({"bad_words_ids": WORDS}, hf.NoBadWordsLogitsProcessor(WORDS, ENDS)),
    steps.MIN_LENGTH: (
        {"min_new_tokens": 2},
        lambda ids: hf.MinNewTokensLengthLogitsProcessor(ids.shape[1], 2, torch.tensor(ENDS)),
    ),
    steps.FORCED_FIRST: ({"forced_bos_token_id": 0}, hf.ForcedBOSTokenLogitsProcessor(0)),
    steps.FORCED_LAST: (
        {"forced_eos_token_id": [3, 4]},
        lambda ids: hf.ForcedEOSTokenLogitsProcessor(ids.shape[1] + 3, torch.tensor([3, 4])),
    ),
    steps.INVALID: ({"remove_invalid_values": True}, hf.InfNanRemoveLogitsProcessor()),
    steps.LENGTH_DECAY: (
        {"exponential_decay_length_penalty": (1, 1.5)},
        lambda ids: hf.generation.ExponentialDecayLengthPenalty(
            (1, 1.5), torch.tensor(ENDS), ids.shape[1]
        ),
    ),
    steps.SUPPRESSED: (
        {"suppress_tokens": [1, 5]},
        hf.generation.SuppressTokensLogitsProcessor(torch.tensor([1, 5])),
    ),
    steps.SUPPRESSED_FIRST: (
        {"begin_suppress_tokens": [1, 5]},
        lambda ids: hf.generation.SuppressTokensAtBeginLogitsProcessor([1, 5], ids.shape[1]),
    ),
    steps.TEMPERATURE: ({"temperature": 0.7}, hf.TemperatureLogitsWarper(0.7)),
    steps.TOP_K: ({"top_k": 3}, hf.TopKLogitsWarper(3)),
    steps.TOP_P: ({"top_p": 0.6}, hf.TopPLogitsWarper(0.6)),
    steps.MIN_P: ({"min_p": 0.2}, hf.MinPLogitsWarper(0.2)),
    steps.TYPICAL: ({"typical_p": 0.6}, hf.TypicalLogitsWarper(0.6)),
    steps.EPSILON: ({"epsilon_cutoff": 0.05}, hf.EpsilonLogitsWarper(0.05)),
    steps.ETA: ({"eta_cutoff": 0.3}, hf.EtaLogitsWarper(0.3)),
    steps.LOG_PROBABILITIES: ({"renormalize_logits": True}, hf.LogitNormalization()),
}


@pytest.mark.parametrize("step", THEIRS, ids=lambda step: step.settings[0].does[:40])
@pytest.mark.parametrize("width", [1, 4])
def test_a_step_gives_the_scores_of_transformers(step, width):
    options, theirs = THEIRS[step]
    source = torch.Generator().manual_seed(width)
    ids = torch.randint(0, 5, (2, width), generator=source)
    theirs = theirs if isinstance(theirs, hf.LogitsProcessor) else theirs(ids)
    config = GenerationConfig(
        **{"top_k": 0, "do_sample": step.is_drawn, "max_new_tokens": 3, "eos_token_id": ENDS}
        | options
    )
    prompts = Prompts(ids=ids, lengths=(width, width), as_tensor=True)
    ours = processors(config.for_prompts(width, 12), Hooks())
    for new in range(3):
        tokens = torch.randint(0, 5, (2, new), generator=source)
        scores = torch.randn(2, 12, generator=source) * 3
        if step is steps.INVALID:
            scores[0, :3] = torch.tensor([INF, -INF, math.nan])
        expected, found = theirs(torch.cat((ids, tokens), 1), scores.clone()), scores
        at = SoFar(prompts=prompts, tokens=tokens, vocab_size=12, device=scores.device)
        for processor in ours:
            found = processor(found, at)
        torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=0.0)


# What a step must have ----------------------------------------------------------------------------

ENTRIES = [(row, SamplingParams, WANTED) for row in EXLLAMAV2]
ENTRIES += [(row, GenerationConfig, THEIRS) for row in HUGGING_FACE]


@pytest.mark.parametrize(
    ("row", "config", "tests"), ENTRIES, ids=[next(iter(row.bounds)) for row, *_ in ENTRIES]
)
def test_step_is_complete(row: Entry, config: type, tests: dict):
    assert row.step in tests, "its distribution is tested above"
    assert row.step.source and row.settings
    assert row.step.columns is not None or (config is SamplingParams and row.step.candidates)
    off = config()
    for name, setting in row.settings.items():
        declared = {field.name: field for field in fields(config)}[name]
        bounds = row.bounds[name]
        assert setting.does and bounds.words
        if bounds.kind is None:
            assert declared.default is None
            continue
        assert str(declared.type).removesuffix(" | None") == bounds.kind.__name__
        if declared.default is not None:
            assert bounds.check(name, declared.default) == declared.default
        if bounds.off:
            off = replace(off, **{name: bounds.off[0]})
        if bounds.kind is not bool:
            for wrong in (-INF, INF, math.nan):
                with pytest.raises((TypeError, ValueError), match=f"{name} is "):
                    config(**{name: wrong})
    assert row.switched_on(off) == []
    on = config(**tests[row.step][0])
    assert row.switched_on(on) or row in on.chain.candidates


def test_the_vocabularies_have_the_fields_of_their_dataclasses():
    assert {field.name for field in fields(SamplingParams)} == set(exllamav2.BOUNDS)
    others = {"cache_implementation", "cache_config"}
    assert {field.name for field in fields(GenerationConfig)} == {*validation.BOUNDS, *others}


def test_every_step_is_in_a_vocabulary_and_documented():
    every = {name for name, value in vars(steps).items() if isinstance(value, Step)}
    known = {row.step for row in (*EXLLAMAV2, *HUGGING_FACE)}
    assert {name for name in every if getattr(steps, name) not in known} == set()
    page = (ROOT / "docs/sampling.md").read_text()
    assert ".. sampler-steps:: EXLLAMAV2" in page and ".. sampler-steps:: HUGGING_FACE" in page
    for row, config, _ in ENTRIES:
        for name, setting in row.settings.items():
            assert f"{name}: {setting.does[:30]}" in config.__doc__


# Each beside its definition -----------------------------------------------------------------------


@given(rows, st.floats(0.01, 4))
def test_smoothing_squares_the_distance_from_the_largest(row, factor):
    wanted = [max(row) - factor * (max(row) - score) ** 2 for score in row]
    torch.testing.assert_close(smooth(torch.tensor([row]), factor), torch.tensor([wanted]))


def continued(ids: list[int], longest: int, breakers: set[int]) -> dict[int, int]:
    """For each token, the longest match of the last ids that it once followed."""
    found: dict[int, int] = {}
    for end in range(1, len(ids)):
        length = 0
        while length < min(longest, end) and ids[end - 1 - length] == ids[-1 - length]:
            if ids[-1 - length] in breakers:
                break
            length += 1
        if ids[end] not in breakers:
            found[ids[end]] = max(found.get(ids[end], 0), length)
    return found


@given(
    histories,
    st.sampled_from([0.0, 0.5, 1.75]),
    st.integers(0, 4),
    st.integers(1, 12),
    st.integers(0, 20),
    st.sets(st.just(4)),
)
def test_dry_penalizes_continued_repetition(ids, base, allowed, longest, window, breakers):
    scores = torch.zeros(1, 6)
    got = penalize_continuing(
        scores, [torch.tensor(ids).long()], 0.8, base, allowed, longest, window, breakers
    )
    wanted = [0.0] * 6
    for token, length in continued(ids[-window:] if window else ids, longest, breakers).items():
        if length >= max(allowed, 1):
            wanted[token] = -0.8 * base ** (length - allowed)
    torch.testing.assert_close(got, torch.tensor([wanted]))
    assert not scores.any()


def test_dry_stays_finite_however_long_the_repetition():
    got = penalize_continuing(
        torch.zeros(1, 2), [torch.zeros(3000, dtype=torch.int64)], 1.0, 100.0, 1, 1000
    )
    assert got.isfinite().all()
    assert got[0, 0] == -1e30


@given(rows, st.floats(0, 1))
def test_top_a_is_relative_to_the_square_of_the_likeliest(row, top_a):
    p = probabilities(row)
    least = top_a * max(p) ** 2
    for token, score in enumerate(keep_top_a(torch.tensor([row]), top_a)[0].tolist()):
        if abs(p[token] - least) > ROUNDING:  # what lies on the border may fall either way
            assert (score == -INF) == (p[token] < least)


@given(st.lists(st.floats(-8, 8, width=16), min_size=3, max_size=24), st.floats(0.05, 0.95))
def test_tail_free_cuts_where_the_curvature_is_used_up(row, share):
    row = sorted(row, reverse=True)
    p = probabilities(row)
    curvature = [abs(a - 2 * b + c) for a, b, c in zip(p, p[1:], p[2:], strict=False)]
    kept = keep_tail_free(torch.tensor([row]), share)[0].isfinite().sum().item()
    if sum(curvature) < 1e-6:
        return
    used = [sum(curvature[: i + 1]) / sum(curvature) for i in range(len(curvature))]
    if all(abs(each - share) > 1e-4 for each in used):
        assert kept == next(i for i, each in enumerate(used) if each > share) + 1


@given(rows, st.floats(0.1, 1), st.floats(1.1, 3), st.floats(0.3, 3))
def test_the_dynamic_temperature_follows_the_entropy(row, low, high, exponent):
    p = probabilities(row)
    entropy = -sum(x * math.log(x) for x in p if x)
    share = min(max(entropy / math.log(len(p)), 0.0), 1.0)
    temperature = low + (high - low) * share**exponent
    got = of(dynamic_temperature(torch.tensor([row]), low, high, exponent))
    assert got == pytest.approx(probabilities([score / temperature for score in row]), abs=1e-3)


def test_the_dynamic_temperature_of_a_single_candidate_and_of_equals():
    single = torch.tensor([[3.0, -INF]])
    assert of(dynamic_temperature(single, 0.5, 2.0, 1.0)) == [1.0, 0.0]
    equals = torch.zeros(1, 4)
    assert of(dynamic_temperature(equals, 0.5, 2.0, 1.0)) == pytest.approx([0.25] * 4)


@given(rows, st.floats(0.01, 0.5))
def test_xtc_drops_all_top_choices_but_the_least_likely(row, threshold):
    p = probabilities(row)
    if any(abs(x - threshold) < ROUNDING for x in p):
        return
    top = [token for token, x in enumerate(p) if x >= threshold]
    got = exclude_top_choices(
        torch.tensor([row]), threshold, torch.ones(1, len(row), dtype=torch.bool)
    )
    dropped = (got[0] == -INF).nonzero()[:, 0].tolist()
    assert len(dropped) == max(len(top) - 1, 0)
    assert set(dropped) <= set(top)
    left = set(top) - set(dropped)
    assert all(p[token] == pytest.approx(min(p[t] for t in top)) for token in left)


def test_xtc_keeps_ignored_tokens():
    row = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    params = plain(xtc_probability=1.0, xtc_threshold=0.15, xtc_ignore_tokens={0})
    shares, ids = distribution(row, params)
    found = dict(zip(ids[0].tolist(), shares[0].tolist(), strict=True))
    # 1 and 2 are top choices, of which 2 stays; 0 is none.
    assert found == pytest.approx({0: 4 / 7, 1: 0, 2: 2 / 7, 3: 1 / 7})


@given(rows, st.floats(-1.5, 1.5).filter(lambda skew: skew != 0))
def test_skew_looks_up_a_power_of_the_random_number(row, skew):
    those = Candidates(scores=torch.tensor([row]), ids=torch.arange(len(row))[None])
    those = skewed(those, skew)
    scores, ids = those.scores, those.ids
    p = probabilities(row)
    assert [p[i] for i in ids[0].tolist()] == pytest.approx(sorted(p, reverse=True))
    cumulated = torch.tensor([p[i] for i in ids[0].tolist()], dtype=torch.float64).cumsum(-1)
    numbers = torch.arange(20_000, dtype=torch.float64).add(0.5) / 20_000
    looked_up = torch.searchsorted(cumulated, numbers ** math.exp(-skew)).clamp(max=len(row) - 1)
    counted = torch.bincount(looked_up, minlength=len(row)) / 20_000
    assert of(scores) == pytest.approx(counted.tolist(), abs=1e-3)


# In the chain -------------------------------------------------------------------------------------


def test_shaping_leaves_greedy_choices_alone():
    logits = torch.tensor([[0.1, 0.3, 0.2]])
    params = plain(temperature=0.0, xtc_probability=1.0, xtc_threshold=0.0, skew=3.0, top_a=0.5)
    assert sample(logits, params).tolist() == [1]


def test_dry_ends_a_loop():
    """A model that would repeat for ever leaves its loop."""
    words = [random.Random(2).randrange(3, 40) for _ in range(12)]
    history = words * 3 + words[:6]
    logits = torch.zeros(1, 50)
    logits[0, words[6]] = 5.0
    params = plain(temperature=0.0, dry_multiplier=0.8)
    assert sample(logits, params, [history]).item() != words[6]
    assert sample(logits, plain(temperature=0.0), [history]).item() == words[6]


def test_missing_token_sets_come_from_the_tokenizer():
    class Characters:
        def ids_with(self, characters: str) -> frozenset[int]:
            return frozenset(map(ord, characters))

    params = plain(dry_multiplier=1.0, xtc_probability=0.5).for_tokenizer(Characters())
    assert ord("[") in params.dry_sequence_breakers
    assert params.xtc_ignore_tokens == {ord("\n")}
    named = plain(dry_multiplier=1.0, dry_sequence_breakers={7}).for_tokenizer(Characters())
    assert named.dry_sequence_breakers == {7}
    assert plain().for_tokenizer(Characters()).dry_sequence_breakers is None
