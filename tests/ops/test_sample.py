"""The sampling op: the kernel against the reference, both against transformers.

Evenly spaced uniform numbers make the distribution exact: of N, a token of probability p takes N *
p, give or take one.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from native import needs_kernels
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from exkv import ops
from exkv.ops import sample

INF = math.inf
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BELOW_ONE = math.nextafter(1.0, 0.0)

op = torch.ops.exkv.sample
reference = ops.REFERENCES["sample"]
#: The op that is dispatched to, and the reference where that is another.
BOTH = (op, reference) if ops.has_kernel("sample", "cpu") else (op,)
both = pytest.mark.parametrize("chosen", BOTH)


def steps(
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical: float = 0.0,
    temperature_last: bool = False,
) -> tuple:
    """The op's arguments behind logits and uniforms; all steps off unless given."""
    return temperature, top_k, top_p, min_p, typical, temperature_last


def normal(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def even(count: int) -> Tensor:
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def uniforms(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator, dtype=torch.float64)


def distinct(count: int, dtype: torch.dtype) -> Tensor:
    """Logits without ties; transformers keeps all that tie for the k-th place."""
    if dtype is torch.float32:
        return normal(count, seed=1)
    first, gap = {torch.bfloat16: (0x3E00, 1), torch.float16: (0x3C00, 4)}[dtype]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    return (first + gap * order).to(torch.int16).view(dtype)


# The distribution --------------------------------------------------------------------------------

WARPED = [
    (steps(), []),
    (steps(0.7), [TemperatureLogitsWarper(0.7)]),
    (steps(top_k=5), [TopKLogitsWarper(5)]),
    (steps(top_k=1000), [TopKLogitsWarper(1000)]),
    (steps(top_p=0.6), [TopPLogitsWarper(0.6)]),
    (steps(min_p=0.1), [MinPLogitsWarper(0.1)]),
    (steps(typical=0.6), [TypicalLogitsWarper(0.6)]),
    (
        steps(1.6, 30, 0.8, 0.02),
        [
            TemperatureLogitsWarper(1.6),
            TopKLogitsWarper(30),
            TopPLogitsWarper(0.8),
            MinPLogitsWarper(0.02),
        ],
    ),
    (
        steps(1.6, 30, 0.8, temperature_last=True),
        [TopKLogitsWarper(30), TopPLogitsWarper(0.8), TemperatureLogitsWarper(1.6)],
    ),
    (
        steps(0.5, top_p=0.9, min_p=0.001, temperature_last=True),
        [TopPLogitsWarper(0.9), MinPLogitsWarper(0.001), TemperatureLogitsWarper(0.5)],
    ),
]


@both
@pytest.mark.parametrize(("arguments", "warpers"), WARPED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_come_as_often_as_transformers_says(chosen, arguments, warpers, dtype):
    count = 4096
    logits = distinct(700, dtype)[None]
    probabilities = LogitsProcessorList(warpers)(None, logits.float()).double().softmax(-1)[0]
    tokens = chosen(logits.expand(count, -1), even(count), *arguments)
    seen = torch.bincount(tokens, minlength=700).double()
    assert ((seen - probabilities * count).abs() <= 1 + 1e-3).all()
    assert not seen[probabilities == 0].any()


@both
@pytest.mark.parametrize("arguments", [steps(0.0), steps(0.0, 50, 0.5), steps(1.0, 1), steps(2, 1)])
def test_greedy_takes_the_first_largest_and_needs_no_random_numbers(chosen, arguments):
    logits = normal(4, 3001, seed=2).bfloat16()
    logits[0, [70, 2000]] = 20.0
    logits[1] = -3.0
    logits[2] = -0.0
    logits[2, 3] = 0.0
    assert chosen(logits, None, *arguments).tolist() == [70, 0, 0, int(logits[3].float().argmax())]


# The kernel beside the reference -----------------------------------------------------------------

shares = st.sampled_from([0.0, 1.0]) | st.floats(0.01, 0.999)


@st.composite
def cases(draw):
    """Logits with few levels have many equals; small ks of large vocabularies look at few blocks"""
    rows, vocab = draw(st.integers(1, 3)), draw(st.integers(1, 200) | st.integers(1000, 3000))
    levels = draw(st.sampled_from([1, 4, 1000]))
    logits = normal(rows, vocab, seed=draw(st.integers(0, 1000)), scale=draw(st.floats(0.1, 8)))
    logits = ((logits * levels).round() / levels).to(draw(st.sampled_from(DTYPES)))
    out = draw(st.lists(st.integers(0, vocab - 1), max_size=3))
    logits[:, [id for id in out if id > 0]] = -INF
    arguments = steps(
        draw(st.sampled_from([1.0, 1e-40]) | st.floats(0.05, 4)),
        draw(st.integers(0, 20) | st.sampled_from([vocab - 1, vocab, vocab + 1])),
        draw(shares),
        draw(st.sampled_from([0.0, 1.0]) | st.floats(0.001, 1)),
        draw(shares),
        draw(st.booleans()),
    )
    return logits, uniforms(rows, draw(st.integers(0, 1000))), arguments


def near_a_mass(probabilities: Tensor, mass: Tensor | float) -> bool:
    """Whether a partial sum is close to the threshold."""
    return bool(((probabilities.cumsum(-1) - mass).abs() < 1e-9).any())


def typical_on_an_edge(scores: Tensor, mass: float) -> bool:
    log_p = scores.double().log_softmax(-1)
    entropy = -(log_p.exp() * log_p).nan_to_num(nan=0.0).sum(-1, keepdim=True)
    distance, order = (-log_p - entropy).abs().sort(dim=-1, stable=True)
    unlike = scores.gather(-1, order).diff() != 0
    close = (distance.diff() < 1e-9) & unlike
    return bool(close.any()) or near_a_mass(log_p.exp().gather(-1, order), mass)


def on_an_edge(logits: Tensor, numbers: Tensor, arguments: tuple) -> bool:
    """Whether the last bit of a sum or an exponential may decide the choice."""
    temperature, top_k, top_p, min_p, typical, last = arguments
    edges = []
    scores, _ = sample.keep_top_k(logits, top_k)
    if not last:
        scores = sample.apply_temperature(scores, temperature)
    if 0 < top_p < 1:
        edges.append(near_a_mass(scores.double().softmax(-1), top_p))
    scores = sample.keep_top_p(scores, top_p) if top_p < 1 else scores
    if 0 < min_p < 1:
        relative = (scores - scores.amax(-1, keepdim=True)).exp()
        edges.append(bool(((relative - min_p).abs() < 1e-6).any()))
    if 0 < typical < 1:
        edges.append(typical_on_an_edge(sample.keep_min_p(scores, min_p), typical))
    scores, _ = sample.candidates(logits, *arguments)
    edges.append(near_a_mass(scores.double().softmax(-1), numbers[:, None]))
    return any(edges)


@needs_kernels
@given(cases())
@settings(max_examples=400)
def test_the_kernel_draws_what_the_reference_draws(case):
    logits, numbers, arguments = case
    assume(not on_an_edge(logits.float(), numbers, arguments))
    assert op(logits, numbers, *arguments).tolist() == (
        reference(logits, numbers, *arguments).tolist()
    )


@both
@pytest.mark.parametrize("top_k", [0, 7, 64, 640])
def test_ties_keep_the_lowest_ids_in_order(chosen, top_k):
    logits = torch.full((1, 640), 1.5)
    logits[0, 333] = 2.0
    arguments = steps(top_k=top_k, top_p=0.999999)
    tokens = chosen(logits.expand(999, -1), even(999), *arguments).tolist()
    ids = list(dict.fromkeys(tokens))
    rest = [id for id in range(640) if id != 333]
    assert ids == [333, *rest][: top_k or 640]


@both
@pytest.mark.parametrize("arguments", [steps(), steps(top_k=9), steps(top_p=0.9), steps(min_p=0.1)])
def test_the_ends_of_the_range_draw_tokens_that_can_be_drawn(chosen, arguments):
    logits = torch.tensor([[-INF, 1.0, -2000.0, 1.0, -INF, -2000.0]]).expand(3, -1)
    numbers = torch.tensor([0.0, 0.5, BELOW_ONE], dtype=torch.float64)
    assert chosen(logits, numbers, *arguments).tolist() == [1, 3, 3]


@both
def test_tokens_of_probability_0_are_skipped(chosen):
    logits = torch.full((3, 400), -INF)
    logits[:, [150, 151]] = 2.0
    numbers = torch.tensor([0.0, 0.5, BELOW_ONE], dtype=torch.float64)
    assert chosen(logits, numbers, *steps()).tolist() == [150, 151, 151]


@both
def test_top_p_of_0_keeps_only_the_likeliest(chosen):
    logits = normal(50, 300, seed=3)
    tokens = chosen(logits, uniforms(50), *steps(top_p=0.0))
    assert torch.equal(tokens, logits.argmax(-1))


# Rows --------------------------------------------------------------------------------------------

RECIPES = [
    steps(),
    steps(0.0),
    steps(0.8, 50, 0.8),
    steps(top_p=0.9),
    steps(min_p=0.05, typical=0.9, temperature_last=True),
]


@both
@pytest.mark.parametrize("arguments", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_invalid_rows_yield_no_token(chosen, arguments, dtype):
    logits = normal(8, 150, seed=4).to(dtype)
    numbers = uniforms(8)
    good = chosen(logits, numbers, *arguments)
    for row, at, value in ((1, 0, math.nan), (2, 149, -math.nan), (4, 70, INF), (7, 64, math.nan)):
        logits[row, at] = value
    logits[6] = -INF
    bad = torch.tensor([1, 2, 4, 6, 7])
    assert chosen(logits, numbers, *arguments).tolist() == good.index_fill(0, bad, -1).tolist()


@both
@pytest.mark.parametrize("arguments", RECIPES)
def test_strided_rows_are_read_correctly(chosen, arguments):
    logits, numbers = normal(5, 130, seed=5), uniforms(5)
    space = torch.full((5, 400), math.nan)
    space[:, 1:131] = logits
    assert torch.equal(
        chosen(space[:, 1:131], numbers, *arguments), chosen(logits, numbers, *arguments)
    )
    assert torch.equal(
        chosen(logits.t().contiguous().t(), numbers, *arguments),
        chosen(logits, numbers, *arguments),
    )


@pytest.mark.parametrize("arguments", RECIPES)
def test_row_is_independent_of_others_and_of_threads(arguments):
    logits, numbers = normal(6, 40_000, seed=6), uniforms(6)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = op(logits, numbers, *arguments)
    finally:
        torch.set_num_threads(threads)
    alone = [op(logits[i : i + 1], numbers[i : i + 1], *arguments) for i in range(6)]
    assert together.tolist() == torch.cat(alone).tolist()


def test_no_rows_have_no_tokens():
    for chosen in BOTH:
        tokens = chosen(torch.zeros(0, 5), torch.zeros(0, dtype=torch.float64), *steps(top_k=2))
        assert tokens.shape == (0,) and tokens.dtype == torch.int64


# What the dispatcher asks, and what is refused ---------------------------------------------------


WRONG = [
    (None, "give uniforms, or temperature 0"),
    (torch.zeros(3, dtype=torch.float64), "one number for each row"),
    (torch.zeros(2), "must be float64"),
    (torch.tensor([0.5, 1.0], dtype=torch.float64), r"must be in \[0, 1\)"),
    (torch.tensor([0.5, -0.1], dtype=torch.float64), r"must be in \[0, 1\)"),
    (torch.tensor([math.nan, 0.1], dtype=torch.float64), r"must be in \[0, 1\)"),
]


@both
@pytest.mark.parametrize(("numbers", "message"), WRONG)
def test_uniforms_that_do_not_fit_are_refused(chosen, numbers, message):
    with pytest.raises((RuntimeError, ValueError), match=message):
        chosen(torch.zeros(2, 5), numbers, *steps(top_k=3))


@needs_kernels
@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(5), r"must be \(B, V\)"),
        (torch.zeros(2, 0), r"must be \(B, V\), with a token to choose"),
        (torch.zeros(2, 5, dtype=torch.float64), "float32, float16 or bfloat16"),
    ],
)
def test_the_kernel_refuses_logits_that_it_cannot_read(logits, message):
    with pytest.raises(RuntimeError, match=message):
        op(logits, uniforms(2), *steps())


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize(
    "changed, words",
    [
        ({"temperature": math.nan}, "temperature nan"),
        ({"temperature": math.inf}, "temperature inf"),
        ({"temperature": -1.0}, "temperature -1"),
        ({"top_k": -1}, "top_k -1"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": math.nan}, "min_p is nan"),
        ({"min_p": 2.0}, "min_p is 2"),
        ({"typical": -0.5}, "typical is -0.5"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(op, changed, words):
    numbers = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical": 0.0} | changed
    with pytest.raises((ValueError, RuntimeError), match=f"sample: .*{words}"):
        op(torch.zeros(1, 8), torch.zeros(1).double(), *numbers.values(), False)


@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (5, 1.0), (5, 0.6), (0, 0.6), (99, 1.0)])
def test_reference_runs_on_the_device_without_synchronization(top_k, top_p):
    """A meta device has no kernels to query."""
    logits, uniforms = torch.zeros(3, 50, device="meta"), torch.zeros(3, device="meta").double()
    tokens = reference(logits, uniforms, 0.7, top_k, top_p, 0.1, 0.9, False)
    assert tokens.shape == (3,) and tokens.device.type == "meta"


@pytest.mark.parametrize("k", [1, 3, 20, 50, 60])
def test_accelerators_find_the_largest_that_the_cpu_finds(k):
    """By a stable sort; many of the scores are equal."""
    scores = torch.randint(0, 6, (4, 50)).float()
    values, ids = sample.keep_top_k(scores, k)
    sorted_values, order = scores.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, sorted_values[:, :k]) and torch.equal(ids, order[:, :k])
