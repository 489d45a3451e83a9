"""Rounding with feedback, against GPTQ as its paper defines it and against rounding without
data."""

from __future__ import annotations

import pytest
import torch

from exkv.weights.feedback import DAMPING, cholesky_factor, compensated, rounded_for
from exkv.weights.rounding import Rounded, rounded

OUTPUTS, INPUTS = 96, 256


def inputs_of(tokens: int, seed: int) -> torch.Tensor:
    """Correlated inputs (tokens, in), some channels of which are a hundred times as large."""
    mix = torch.randn(INPUTS, INPUTS, generator=torch.Generator().manual_seed(0))
    mix *= torch.logspace(0, -2, INPUTS)
    return torch.randn(tokens, INPUTS, generator=torch.Generator().manual_seed(seed)) @ mix.T


def moments_of(x: torch.Tensor) -> torch.Tensor:
    return x.T @ x / len(x)


TEXT, HELD_OUT = inputs_of(1000, 1), inputs_of(500, 2)
WEIGHT = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(3)) / 50


def output_error(made: Rounded, bits: int, x: torch.Tensor) -> float:
    """The squared error relative to the outputs' squares."""
    lost = x @ (made.values(bits) - WEIGHT).T
    return float(lost.square().sum() / (x @ WEIGHT.T).square().sum())


def by_the_inverse(moments: torch.Tensor, made: Rounded, bits: int, group: int):
    """Codes by Frantar et al.'s algorithm 1 in doubles, for given scales and zero points: columns
    after the rounded one are changed by the Cholesky factor of the inverse."""
    damped = moments.double()
    damped = damped + DAMPING * damped.diagonal().mean() * torch.eye(INPUTS)
    factor = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    left, codes = WEIGHT.double().clone(), torch.empty(OUTPUTS, INPUTS)
    zeros = torch.full_like(made.scale, 1 << bits - 1) if made.zero is None else made.zero
    for column in range(INPUTS):
        step, zero = (each[:, column // group].double() for each in (made.scale, zeros))
        code = (left[:, column] / step).round().clamp(-zero, (1 << bits) - 1 - zero)
        codes[:, column] = code + zero
        error = (left[:, column] - code * step) / factor[column, column]
        left[:, column:] -= error.unsqueeze(1) * factor[column, column:]
    return codes


@pytest.mark.parametrize(
    ("bits", "group", "scale", "zeros"),
    [
        (4, 64, torch.float16, False),
        (8, 32, torch.bfloat16, False),
        (5, 32, torch.float32, False),
        (3, 64, torch.float16, True),
    ],
)
def test_the_codes_are_those_of_the_algorithm_with_an_inverse_in_doubles(bits, group, scale, zeros):
    moments = moments_of(TEXT)
    made = rounded_for(moments, WEIGHT, bits, group, scale, zeros)
    assert (made.zero is not None) == zeros
    assert made.scale.dtype == scale and made.scale.shape == (OUTPUTS, INPUTS // group)
    expected = by_the_inverse(moments, made, bits, group)
    assert (made.codes == expected).float().mean() > 0.998  # the others were near half a step


def test_feedback_halves_the_loss_on_other_inputs():
    for bits, group in ((4, 64), (8, 64), (4, 32)):
        made = rounded_for(moments_of(TEXT), WEIGHT, bits, group, torch.float16)
        blind = rounded(WEIGHT, bits, group, torch.float16)
        assert output_error(made, bits, HELD_OUT) < 0.5 * output_error(blind, bits, HELD_OUT)


def test_scales_are_searched_for_the_inputs_not_for_the_weights():
    """Inputs that are independent and unlike leave no feedback to give, only scales to weigh."""
    sizes = torch.logspace(0, -3, INPUTS)[torch.randperm(INPUTS, generator=torch.Generator())]
    made = rounded_for(sizes.square().diag(), WEIGHT, 4, 64, torch.float16)
    blind, x = rounded(WEIGHT, 4, 64, torch.float16), sizes.diag()
    assert output_error(made, 4, x) < 0.8 * output_error(blind, 4, x)


def test_compensation_is_ridge_regression():
    floats = TEXT + inputs_of(1000, 4) / 10
    x, goal = TEXT.double(), floats.double() @ WEIGHT.double().T
    moments = x.T @ x / len(x)
    damped = moments + DAMPING * moments.diagonal().mean() * torch.eye(INPUTS)
    missing = (goal - x @ WEIGHT.double().T).T @ x / len(x)
    expected = WEIGHT + missing @ torch.linalg.inv(damped)
    root = cholesky_factor(moments_of(TEXT))
    found = compensated(root, WEIGHT, TEXT, floats)
    assert (found - expected).abs().max() < 1e-3 * (expected - WEIGHT).abs().max()
    assert torch.equal(compensated(root, WEIGHT, TEXT, TEXT), WEIGHT)


def test_result_is_deterministic():
    first, again = (rounded_for(moments_of(TEXT), WEIGHT, 4, 64, torch.float16) for _ in range(2))
    assert torch.equal(first.codes, again.codes) and torch.equal(first.scale, again.scale)


def test_rank_deficient_text_suffices():
    """Three tokens, a dead channel, and none at all: what the text doesn't show is rounded as
    without data, within what the damping costs."""
    dead = TEXT.clone()
    dead[:, 70] = 0
    blind = rounded(WEIGHT, 4, 64, torch.float16)
    for x in (TEXT[:3], dead, torch.zeros(1, INPUTS)):
        made = rounded_for(moments_of(x), WEIGHT, 4, 64, torch.float16)
        assert made.scale.isfinite().all()
        assert (made.values(4) - WEIGHT).abs().max() < 0.1  # a few steps
    plain = output_error(blind, 4, torch.eye(INPUTS))
    assert output_error(made, 4, torch.eye(INPUTS)) <= 1.01 * plain  # without any
    made = rounded_for(moments_of(dead), WEIGHT, 4, 64, torch.float16)
    assert output_error(made, 4, dead) < 0.5 * output_error(blind, 4, dead)
    column = (made.values(4) - WEIGHT)[:, 70]
    assert column.square().mean() < 2 * (blind.values(4) - WEIGHT).square().mean()


def test_zeros_stay_zeros():
    weight = WEIGHT.clone()
    weight[5], weight[6, :64] = 0, 0
    made = rounded_for(moments_of(TEXT), weight, 4, 64, torch.float16).values(4)
    assert not made[5].any() and not made[6, :64].any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_invalid_moments_are_refused(value):
    moments = moments_of(TEXT)
    moments[3, 7] = value
    with pytest.raises(
        ValueError, match="squares of .* are not finite: .* leave the calibration out"
    ):
        rounded_for(moments, WEIGHT, 4, 64, torch.float16)
    with pytest.raises(ValueError, match="are not positive semidefinite"):
        rounded_for(torch.ones(INPUTS).neg().diag(), WEIGHT, 4, 64, torch.float16)
