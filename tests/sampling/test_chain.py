"""Choosing a token: each step on distributions that are checked by hand, and against
transformers."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from exkv.ops import sample as op
from exkv.sampling import SamplingParams, penalties
from exkv.sampling.chain import distribution, sample

INF = math.inf
# Everything off: the model's own distribution.
PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, token_repetition_penalty=1.0)
# A few roundings of float32: the same formula written in another order.
ROUNDING = 8 * torch.finfo(torch.float32).eps


def logits_of(*rows: list[float]) -> torch.Tensor:
    """Logits whose softmax is these probabilities."""
    return torch.tensor(rows).log()


def kept(scores: torch.Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero()[:, 0].tolist() for row in scores]


def rows(*histories: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(history, dtype=torch.int64) for history in histories]


def changed(**fields: object) -> SamplingParams:
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "token_repetition_penalty": 1.0}
    return SamplingParams(**{**defaults, **fields})


# Each step by hand -------------------------------------------------------------------------------


def test_a_repetition_penalty_reaches_back_over_its_range_only():
    logits = torch.full((1, 5), 4.0)
    history = rows([0, 1, 2, 3])
    assert penalties.penalize_repetition(logits, history, 2.0, 2).tolist() == [[4, 4, 2, 2, 4]]
    assert penalties.penalize_repetition(logits, history, 2.0, 0).tolist() == [[4, 4, 4, 4, 4]]
    assert penalties.penalize_repetition(logits, history, 2.0, 99).tolist() == [[2, 2, 2, 2, 4]]


def test_a_repetition_penalty_fades_linearly_beyond_its_range():
    # Penalty 3 over one token, then 3, 2.5, 2, 1.5 over the four before it, then 1.
    history = rows([0, 1, 2, 3, 4, 5])
    out = penalties.penalize_repetition(torch.full((1, 6), 30.0), history, 3.0, 1, 4)
    assert out[0].tolist() == pytest.approx([30, 20, 15, 12, 10, 10], rel=ROUNDING)


def test_a_repeated_token_is_penalized_for_its_last_occurrence():
    out = penalties.penalize_repetition(torch.full((1, 3), 30.0), rows([0, 1, 2, 1, 0]), 3.0, 1, 4)
    assert out[0].tolist() == pytest.approx([10, 10, 12], rel=ROUNDING)


def test_frequency_counts_and_presence_does_not():
    logits = torch.zeros(2, 3)
    out = penalties.penalize_counts(logits, rows([0, 0, 0, 2], []), 0.5, 0.25)
    assert out.tolist() == [[-1.75, 0.0, -0.75], [0.0, 0.0, 0.0]]
    out = penalties.penalize_counts(logits, rows([0, 2, 0], [1]), -1.0, 0.0, window=2)
    assert out.tolist() == [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]


@pytest.mark.parametrize("temperature", [1e-30, 1e-300])
def test_a_tiny_temperature_is_greedy_and_shares_among_equals(temperature):
    tiny = op.apply_temperature(torch.tensor([[5e9, 6e9, 6e9]]), temperature)
    assert tiny.softmax(-1).tolist() == [[0.0, 0.5, 0.5]]


def test_top_k_sorts_and_takes_lower_ids_first_among_equals():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    values, ids = op.keep_top_k(logits, 3)
    assert ids.tolist() == [[1, 3, 2], [0, 1, 2]]
    assert values.tolist() == [[3.0, 3.0, 2.0], [0.0, 0.0, 0.0]]
    assert op.keep_top_k(logits, 0)[1].tolist() == [[1, 3, 2, 4, 0], [0, 1, 2, 3, 4]]
    assert op.keep_top_k(logits, 99)[1].tolist() == op.keep_top_k(logits, 0)[1].tolist()


def test_top_p_that_is_reached_exactly_needs_no_further_token():
    scores = torch.tensor([[0.0, 0.0, 0.0, 0.0]])
    assert kept(op.keep_top_p(scores, 0.5)) == [[0, 1]]


def test_typical_is_not_disturbed_by_dropped_tokens():
    scores = logits_of([0.5, 0.25, 0.125, 0.125, 0.0])
    assert kept(op.keep_typical(scores, 0.2)) == [[1]]


def test_draw_inverts_the_cumulated_probabilities():
    scores = torch.tensor([[-INF, 0.0, 0.0, -INF, math.log(2), -INF]]).expand(5, -1)
    uniforms = torch.tensor([0.0, 0.2, 0.25, 0.6, 1 - 2**-53], dtype=torch.float64)
    assert op.draw(scores, uniforms).tolist() == [1, 1, 2, 4, 4]


# Each step against transformers ------------------------------------------------------------------

# Distinct, so that it does not matter which of two equals a step takes, and apart by more than
# rounding, so that the order is the same in every formula.
distinct = st.lists(
    st.integers(-80, 80).map(lambda n: n / 10), min_size=2, max_size=30, unique=True
)
shares = st.floats(0.01, 0.99)


def oracle_kept(warper: object, scores: torch.Tensor) -> list[int]:
    return kept(warper(None, scores.clone()))[0]


@given(distinct, st.integers(1, 40))
def test_top_k_keeps_what_transformers_keeps(row, k):
    logits = torch.tensor([row])
    values, ids = op.keep_top_k(logits, k)
    assert sorted(ids[0].tolist()) == oracle_kept(TopKLogitsWarper(k), logits)
    assert torch.equal(values, logits.gather(-1, ids))


@given(distinct, st.floats(0.05, 5))
def test_temperature_gives_the_probabilities_of_transformers(row, temperature):
    logits = torch.tensor([row])
    ours = op.apply_temperature(logits, temperature).softmax(-1)
    theirs = TemperatureLogitsWarper(temperature)(None, logits).softmax(-1)
    # An exponent of 8 / 0.05 carries its rounding into the probability.
    torch.testing.assert_close(ours, theirs, rtol=ROUNDING * 160, atol=1e-30)


def near_an_edge(probs: torch.Tensor, order: torch.Tensor, mass: float) -> bool:
    """Whether the two formulas may round to different sides of the threshold."""
    return bool(((probs[0][order].cumsum(0) - mass).abs() < 1e-5).any())


@given(distinct, shares)
def test_top_p_keeps_what_transformers_keeps(row, p):
    scores, _ = op.keep_top_k(torch.tensor([row]), 0)
    if not near_an_edge(scores.softmax(-1), torch.arange(len(row)), p):
        assert kept(op.keep_top_p(scores, p))[0] == oracle_kept(TopPLogitsWarper(p), scores)


@given(distinct, shares)
def test_min_p_keeps_what_transformers_keeps(row, min_p):
    scores = torch.tensor([row])
    relative = scores.softmax(-1) / scores.softmax(-1).amax()
    if not ((relative - min_p).abs() < 1e-5).any():
        assert kept(op.keep_min_p(scores, min_p))[0] == oracle_kept(MinPLogitsWarper(min_p), scores)


@given(distinct, shares)
def test_typical_keeps_what_transformers_keeps(row, mass):
    scores = torch.tensor([row])
    probs = scores.double().softmax(-1)
    distance = (-probs.log() + (probs * probs.log()).sum()).abs()[0]
    is_clear = (distance.sort().values.diff() > 1e-4).all()
    if is_clear and not near_an_edge(probs, distance.argsort(), mass):
        assert kept(op.keep_typical(scores, mass))[0] == oracle_kept(
            TypicalLogitsWarper(mass), scores
        )


@given(distinct, st.lists(st.integers(0, 1), max_size=9), st.floats(0.5, 3))
def test_a_repetition_penalty_is_that_of_transformers(row, history, penalty):
    logits = torch.tensor([row])
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([history]).long(), logits)
    ours = penalties.penalize_repetition(logits, rows(history), penalty)
    torch.testing.assert_close(ours, theirs, rtol=ROUNDING, atol=0.0)


@given(distinct, st.floats(0.2, 2), st.integers(1, 20), shares, shares)
@settings(max_examples=200)
def test_the_whole_chain_never_leaves_the_set_of_transformers(row, temperature, k, p, min_p):
    logits = torch.tensor([row])
    scores = logits
    for warper in (
        TemperatureLogitsWarper(temperature),
        TopKLogitsWarper(k),
        TopPLogitsWarper(min(1.0, p + 1e-4)),  # the edge belongs to both
        MinPLogitsWarper(min_p * (1 - 1e-4)),
    ):
        scores = warper(None, scores)
    params = changed(temperature=temperature, top_k=k, top_p=p, min_p=min_p)
    generator = torch.Generator().manual_seed(0)
    drawn = sample(logits.expand(64, -1), params, generator=generator)
    assert set(drawn.tolist()) <= set(kept(scores)[0])


# sample ------------------------------------------------------------------------------------------


def test_every_token_comes_as_often_as_it_is_likely():
    probs = torch.tensor([0.02, 0.5, 0.08, 0.25, 0.0, 0.15])
    count = 20_000
    generator = torch.Generator().manual_seed(1)
    drawn = sample(probs.log().expand(count, -1), PLAIN, generator=generator)
    seen = torch.bincount(drawn, minlength=6)
    assert seen[4] == 0
    expected = probs * count
    chi_square = ((seen - expected) ** 2 / expected)[probs > 0].sum()
    assert chi_square < 18.47  # 4 degrees of freedom: one fair sampler in a thousand exceeds it


@pytest.mark.parametrize(
    "params", [SamplingParams.greedy(), changed(top_k=1), changed(temperature=0)]
)
def test_greedy_takes_the_first_largest_logit_and_no_random_number(params):
    logits = torch.randn(3, 100_003, generator=torch.Generator().manual_seed(3)).bfloat16()
    logits[0, [500, 70_000]] = 9.0
    logits[2] = -1.0
    state = torch.get_rng_state()
    chosen = sample(logits, params, history=[[0], [1], [2]])
    assert chosen.tolist() == [500, int(logits[1].float().argmax()), 0]
    assert torch.equal(torch.get_rng_state(), state)


def test_greedy_applies_biases():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert sample(logits, SamplingParams.greedy()).tolist() == [1]
    assert sample(logits, SamplingParams.greedy().disallow_tokens([1])).tolist() == [2]
    assert sample(logits, SamplingParams.greedy().disallowing([1, 2])).tolist() == [0]
    assert sample(logits, SamplingParams.greedy().with_bias({0: 3.0})).tolist() == [0]


def test_greedy_shortcuts_still_see_the_penalties():
    logits = torch.tensor([[2.0, 3.0]])
    params = changed(temperature=0, token_repetition_penalty=2.0)
    assert sample(logits, params).tolist() == [1]
    assert sample(logits, params, history=[[1]]).tolist() == [0]
    params = changed(temperature=0, token_presence_penalty=1.5)
    assert sample(logits, params, history=[[1]]).tolist() == [0]


RECIPES = [
    SamplingParams(),
    PLAIN,
    changed(min_p=0.05),
    changed(top_p=0.9, typical=0.9),
    changed(top_k=40, temperature=1.5, temperature_last=True, min_p=0.01),
    SamplingParams(token_frequency_penalty=0.3, token_bias={5: 2.0, 7: -INF}),
    changed(temperature=1.3, min_p=0.05),
    changed(temperature=0.7, top_p=0.6, typical=0.8, temperature_last=True),
    changed(smoothing_factor=0.4),
    changed(top_a=0.3, tfs=0.9),
    changed(min_temp=0.3, max_temp=2.0, temp_exponent=0.7, top_k=20),
    changed(xtc_probability=0.5, xtc_threshold=0.05, temperature=1.4, temperature_last=True),
    changed(skew=-0.6, top_p=0.9),
    changed(dry_multiplier=1.5, dry_allowed_length=1, skew=0.3, xtc_probability=0.3, min_p=0.02),
]


@pytest.mark.parametrize("params", RECIPES)
def test_a_row_of_a_batch_draws_what_it_draws_alone(params):
    source = torch.Generator().manual_seed(4)
    logits = (torch.randn(7, 1013, generator=source) * 3).to(torch.bfloat16)  # with many equals
    history = torch.randint(1013, (7, 30), generator=source).tolist()
    for step in range(5):
        seeds = [100 * step + row for row in range(7)]
        together = sample(
            logits, params, history, [torch.Generator().manual_seed(s) for s in seeds]
        )
        alone = [
            sample(logits[i : i + 1], params, history[i : i + 1], torch.Generator().manual_seed(s))
            for i, s in enumerate(seeds)
        ]
        assert together.tolist() == torch.cat(alone).tolist()


@pytest.mark.parametrize("params", RECIPES)
def test_a_seed_repeats_and_another_differs(params):
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(5))

    def drawn(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return sample(logits, params, generator=generator).tolist()

    assert drawn(6) == drawn(6) != drawn(7)


def test_without_a_generator_the_global_seed_counts():
    logits = torch.zeros(20, 50)
    torch.manual_seed(8)
    first = sample(logits, PLAIN).tolist()
    torch.manual_seed(8)
    assert sample(logits, PLAIN).tolist() == first


def test_the_float_type_of_the_logits_does_not_matter():
    logits = torch.randn(9, 80, generator=torch.Generator().manual_seed(9)).half()

    def drawn(dtype: torch.dtype) -> list[int]:
        return sample(logits.to(dtype), PLAIN, generator=torch.Generator().manual_seed(1)).tolist()

    assert drawn(torch.float16) == drawn(torch.float32) == drawn(torch.float64)
    logits = logits.to(torch.float8_e5m2).half()
    assert drawn(torch.float8_e5m2) == drawn(torch.bfloat16) == drawn(torch.float32)


def test_logits_are_not_modified():
    logits = torch.randn(2, 50)
    before = logits.clone()
    sample(logits, RECIPES[-1], [[1, 2], [3]])
    sample(logits, RECIPES[4], [[1, 2], [3]])
    assert torch.equal(logits, before)


def test_temperature_last_truncates_by_the_models_own_probabilities():
    logits = logits_of([0.9, 0.06, 0.04]).expand(500, -1)
    generator = torch.Generator().manual_seed(10)
    hot = changed(temperature=50.0, top_p=0.8)
    assert set(sample(logits, hot, generator=generator).tolist()) == {0, 1, 2}
    last = changed(temperature=50.0, top_p=0.8, temperature_last=True)
    assert set(sample(logits, last, generator=generator).tolist()) == {0}


def test_temperature_last_still_applies():
    logits = logits_of([0.9, 0.1]).expand(4000, -1)
    params = changed(temperature=1000.0, temperature_last=True)
    drawn = sample(logits, params, generator=torch.Generator().manual_seed(11))
    assert abs(drawn.double().mean() - 0.5) < 3.3 * 0.5 / math.sqrt(4000)


def test_history_may_be_tensors():
    logits = torch.tensor([[2.0, 3.0]])
    params = changed(temperature=0, token_repetition_penalty=2.0)
    assert sample(logits, params, history=[torch.tensor([1])]).tolist() == [0]
    assert sample(logits, params, history=[[]]).tolist() == [1]


# What is refused ---------------------------------------------------------------------------------


SHAPED = changed(top_a=0.2, smoothing_factor=0.3)


@pytest.mark.parametrize("params", [PLAIN, SHAPED, SamplingParams.greedy()])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([0.0, math.nan], "row 1 of the logits holds nan"),
        ([0.0, INF], "row 1 of the logits holds inf"),
        ([-INF, -INF], "row 1 of the logits is all -inf"),
    ],
)
def test_logits_that_are_no_distribution_are_refused(params, bad, message):
    with pytest.raises(ValueError, match=message):
        sample(torch.tensor([[0.0, 1.0], bad]), params)


def test_logits_that_overflow_when_penalized_are_refused():
    logits = torch.tensor([[3e38, 1.0]])
    params = changed(token_repetition_penalty=0.5)
    with pytest.raises(ValueError, match="row 0 of the logits after token_rep.* holds inf"):
        sample(logits, params, [[0]])


def test_forbidding_every_token_is_refused():
    with pytest.raises(ValueError, match="row 0 of the logits after token_bias is all -inf"):
        sample(torch.zeros(1, 2), PLAIN.disallow_tokens([0, 1]))


@pytest.mark.parametrize(
    ("logits", "error", "message"),
    [
        (torch.zeros(3), ValueError, r"shape \(B, V\), not \(3,\)"),
        (torch.zeros(1, 0), ValueError, r"not \(1, 0\)"),
        (torch.zeros(1, 3, dtype=torch.int64), TypeError, "not torch.int64"),
        ([[0.0]], TypeError, "not list"),
    ],
)
def test_other_shapes_of_logits_are_refused(logits, error, message):
    with pytest.raises(error, match=message):
        sample(logits, PLAIN)


@pytest.mark.parametrize(
    ("history", "message"),
    [
        ([[1]], "history has 1 rows, but the logits have 2"),
        ([[1], [7]], r"history\[1\] holds the id 7, outside of 0..4"),
        ([[-1], [0]], r"history\[0\] holds the id -1"),
        ([[[1]], [0]], r"history\[0\] must be a flat list"),
    ],
)
def test_mismatched_history_is_refused(history, message):
    with pytest.raises(ValueError, match=message):
        sample(torch.zeros(2, 5), SamplingParams(), history)


def test_mismatched_generators_and_biases_are_refused():
    with pytest.raises(ValueError, match="3 generators for 2 rows"):
        sample(torch.zeros(2, 5), PLAIN, generator=[torch.Generator()] * 3)
    with pytest.raises(ValueError, match="names the id 9, but the logits have only 5"):
        sample(torch.zeros(2, 5), PLAIN.with_bias({9: 1.0}))


#: Field -> values that it may not have, and what is no value of its kind.
WRONG: dict[str, tuple[list, list]] = {
    "temperature": ([-0.1, math.nan, INF, 1e-31], ["hot", None]),
    "top_k": ([-1], [2.5, True]),
    "top_p": ([0.0, 1.1], []),
    "min_p": ([-0.1, 1.1], []),
    "typical": ([1.1], []),
    "tfs": ([-0.1], []),
    "smoothing_factor": ([math.nan], []),
    "temp_exponent": ([0.0], []),
    "skew": ([1e3], []),
    "token_repetition_penalty": ([0.0], []),
    "token_repetition_range": ([-2], []),
    "token_repetition_decay": ([-1], []),
    "token_frequency_penalty": ([-INF], []),
    "token_presence_penalty": ([math.nan], []),
    "token_bias": ([{3: INF}, {3: math.nan}, {-3: 1.0}, {"a": 1.0}], [[3]]),
    "temperature_last": ([], [1]),
    "xtc_probability": ([1.5], []),
    "xtc_ignore_tokens": ([[1.5]], []),
    "dry_base": ([-0.5], []),
    "dry_allowed_length": ([-1], []),
    "dry_sequence_breakers": ([[-1]], ["\n"]),
}


@pytest.mark.parametrize("field", WRONG)
def test_a_setting_out_of_range_is_named(field):
    for values, error in zip(WRONG[field], (ValueError, TypeError), strict=True):
        for value in values:
            words = rf"SamplingParams.{field}.*must (be|hold)|{field} has the key"
            with pytest.raises(error, match=words):
                SamplingParams(**{field: value})


def test_params_are_values():
    bias = {1: 2.0}
    params = SamplingParams(token_bias=bias)
    bias[1] = 99.0
    assert params.token_bias == {1: 2.0}
    assert params == SamplingParams(token_bias={1: 2.0}) != SamplingParams()
    assert hash(params) == hash(SamplingParams(token_bias={1: 2.0}))
    assert pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(AttributeError):
        params.top_k = 3


def test_defaults_are_those_of_exllamav2():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p) == (0.8, 50, 0.8)
    assert (params.min_p, params.typical, params.temperature_last) == (0.0, 0.0, False)
    assert params.token_repetition_penalty == 1.025
    assert (params.token_repetition_range, params.token_repetition_decay) == (-1, 0)


# Without PLAIN, which has tokens that are too unlikely to be counted.
@pytest.mark.parametrize("params", [SamplingParams.greedy(), RECIPES[0], *RECIPES[2:]])
def test_a_distribution_is_what_is_drawn_from(params):
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3)) * 3
    history = [[1, 2, 3, 2]]
    probabilities, ids = distribution(logits, params, history)
    assert probabilities.sum().item() == pytest.approx(1)
    many, seed = logits.expand(3000, -1), torch.Generator().manual_seed(1)
    shares = torch.bincount(sample(many, params, history * 3000, seed), minlength=50) / 3000
    expected = torch.zeros(50).index_add(0, ids[0], probabilities[0])
    assert not shares[expected < 1e-9].any()
    # 5 standard deviations of a share of 3,000 draws.
    assert ((shares - expected).abs() <= 5 * (expected * (1 - expected) / 3000).sqrt()).all()
