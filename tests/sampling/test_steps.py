"""Steps that bend or cut a distribution, each beside its definition written out in plain Python."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exkv.sampling import SamplingParams
from exkv.sampling.chain import distribution, sample
from exkv.sampling.penalties import penalize_continuing
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


# Each beside its definition -----------------------------------------------------------------------


@given(rows, st.floats(0.01, 4))
def test_smoothing_squares_the_distance_from_the_largest(row, factor):
    wanted = [max(row) - factor * (max(row) - score) ** 2 for score in row]
    torch.testing.assert_close(smooth(torch.tensor([row]), factor), torch.tensor([wanted]))


def continued(ids: list[int], longest: int, breakers: set[int]) -> dict[int, int]:
    """For each token the most of the last ids that stand before it somewhere in the history."""
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


@given(histories, st.integers(1, 4), st.integers(1, 12), st.integers(0, 20), st.sets(st.just(4)))
def test_dry_penalizes_what_would_go_on_repeating(ids, allowed, longest, window, breakers):
    scores = torch.zeros(1, 6)
    got = penalize_continuing(
        scores, [torch.tensor(ids).long()], 0.8, 1.75, allowed, longest, window, breakers
    )
    wanted = [0.0] * 6
    for token, length in continued(ids[-window:] if window else ids, longest, breakers).items():
        if length >= allowed:
            wanted[token] = -0.8 * 1.75 ** (length - allowed)
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


def test_xtc_leaves_tokens_that_are_to_be_ignored():
    row = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    params = plain(xtc_probability=1.0, xtc_threshold=0.15, xtc_ignore_tokens={0})
    shares, ids = distribution(row, params)
    found = dict(zip(ids[0].tolist(), shares[0].tolist(), strict=True))
    # 1 and 2 are top choices, of which 2 stays; 0 is none.
    assert found == pytest.approx({0: 4 / 7, 1: 0, 2: 2 / 7, 3: 1 / 7})


@given(rows, st.floats(-1.5, 1.5).filter(lambda skew: skew != 0))
def test_skew_looks_up_a_power_of_the_random_number(row, skew):
    scores, ids = skewed(torch.tensor([row]), torch.arange(len(row))[None], skew)
    p = probabilities(row)
    assert [p[i] for i in ids[0].tolist()] == pytest.approx(sorted(p, reverse=True))
    cumulated = torch.tensor([p[i] for i in ids[0].tolist()], dtype=torch.float64).cumsum(-1)
    numbers = torch.arange(20_000, dtype=torch.float64).add(0.5) / 20_000
    looked_up = torch.searchsorted(cumulated, numbers ** math.exp(-skew)).clamp(max=len(row) - 1)
    counted = torch.bincount(looked_up, minlength=len(row)) / 20_000
    assert of(scores) == pytest.approx(counted.tolist(), abs=1e-3)


# In the chain -------------------------------------------------------------------------------------

CHAINS = [
    plain(smoothing_factor=0.4),
    plain(top_a=0.3, tfs=0.9),
    plain(min_temp=0.3, max_temp=2.0, temp_exponent=0.7, top_k=20),
    plain(xtc_probability=0.5, xtc_threshold=0.05, temperature=1.4, temperature_last=True),
    plain(skew=-0.6, top_p=0.9),
    plain(dry_multiplier=1.5, dry_allowed_length=1, skew=0.3, xtc_probability=0.3, min_p=0.02),
]


@pytest.mark.parametrize("params", CHAINS)
def test_a_distribution_is_what_is_drawn_from(params):
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3)) * 3
    history = [[1, 2, 3, 2]]
    shares, ids = distribution(logits, params, history)
    assert shares.sum().item() == pytest.approx(1)
    many, seed = logits.expand(3000, -1), torch.Generator().manual_seed(1)
    drawn = torch.bincount(sample(many, params, history * 3000, seed), minlength=50) / 3000
    expected = torch.zeros(50).index_add(0, ids[0], shares[0])
    assert not drawn[expected < 1e-9].any()
    # 5 standard deviations of a share of 3,000 draws.
    assert ((drawn - expected).abs() <= 5 * (expected * (1 - expected) / 3000).sqrt()).all()


@pytest.mark.parametrize("params", CHAINS)
def test_a_row_of_a_batch_draws_what_it_draws_alone(params):
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(5)) * 2
    history = [[1, 2, 1], [3], [4, 4, 4]]
    together = sample(logits, params, history, [torch.Generator().manual_seed(i) for i in range(3)])
    for row in range(3):
        generator = torch.Generator().manual_seed(row)
        alone = sample(logits[row : row + 1], params, history[row : row + 1], generator)
        assert alone.item() == together[row].item()


def test_xtc_is_the_coin_of_its_definition():
    """Excluding in so many of all steps is drawing from the mixture."""
    row = [2.0, 1.8, 1.0, -1.0]
    p = probabilities(row)
    without = probabilities([-INF, -INF, 1.0, -1.0])  # 0 and 1 are over the threshold, 2 stays
    shares, ids = distribution(torch.tensor([row]), plain(xtc_probability=0.3, xtc_threshold=0.15))
    got = torch.zeros(4).index_add(0, ids[0], shares[0]).tolist()
    assert got == pytest.approx([0.7 * a + 0.3 * b for a, b in zip(p, without, strict=True)])


def test_shaping_leaves_greedy_choices_alone():
    logits = torch.tensor([[0.1, 0.3, 0.2]])
    params = plain(temperature=0.0, xtc_probability=1.0, xtc_threshold=0.0, skew=3.0, top_a=0.5)
    assert sample(logits, params).tolist() == [1]


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_logits_that_are_no_distribution_are_refused(bad):
    with pytest.raises(ValueError, match="row 1 of the logits holds"):
        sample(torch.tensor([[0.0, 1.0], [0.0, bad]]), plain(top_a=0.2, smoothing_factor=0.3))


def test_dry_ends_a_loop():
    """A model that would repeat for ever takes another way out of it."""
    words = [random.Random(2).randrange(3, 40) for _ in range(12)]
    history = words * 3 + words[:6]
    logits = torch.zeros(1, 50)
    logits[0, words[6]] = 5.0
    params = plain(temperature=0.0, dry_multiplier=0.8)
    assert sample(logits, params, [history]).item() != words[6]
    assert sample(logits, plain(temperature=0.0), [history]).item() == words[6]


def test_a_tokenizer_gives_the_tokens_that_are_not_named():
    class Characters:
        def ids_with(self, characters: str) -> frozenset[int]:
            return frozenset(map(ord, characters))

    params = plain(dry_multiplier=1.0, xtc_probability=0.5).for_tokenizer(Characters())
    assert ord("[") in params.dry_sequence_breakers
    assert params.xtc_ignore_tokens == {ord("\n")}
    named = plain(dry_multiplier=1.0, dry_sequence_breakers={7}).for_tokenizer(Characters())
    assert named.dry_sequence_breakers == {7}
    assert plain().for_tokenizer(Characters()).dry_sequence_breakers is None


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("xtc_probability", 1.5, ValueError),
        ("dry_base", 0.5, ValueError),
        ("dry_allowed_length", 0, ValueError),
        ("dry_sequence_breakers", "\n", TypeError),
        ("dry_sequence_breakers", [-1], ValueError),
        ("xtc_ignore_tokens", [1.5], ValueError),
        ("tfs", -0.1, ValueError),
        ("smoothing_factor", math.nan, ValueError),
        ("temp_exponent", 0.0, ValueError),
        ("skew", 1e3, ValueError),
    ],
)
def test_a_setting_out_of_range_is_named(field, value, error):
    with pytest.raises(error, match=f"SamplingParams.{field}"):
        SamplingParams(**{field: value})
