"""Convolutions and the gated delta rule, kernels and references, against transformers' loop over
tokens and torch's convolution."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from native import BACKENDS, ops_of
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

import exkv  # noqa: F401 # defines the ops
from exkv.ops import REFERENCES

#: Keys' heads and size, values' heads and size: also such as fill no vector of any processor.
SIZES = [(2, 128, 4, 128), (1, 16, 3, 40), (2, 6, 2, 5)]


def inputs(
    tokens: int,
    sizes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    rows: int = 2,
    *,
    fading: float | None = None,
):
    """q, k, v, decay, beta, and a state; decays of channels about ``fading`` times those of
    heads."""
    generator = torch.Generator().manual_seed(tokens)
    key_heads, key_dim, heads, dim = sizes

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    both = random(rows, tokens, 2 * key_heads, key_dim).to(dtype)
    q, k = both.chunk(2, dim=2)  # as views, whose tokens lie apart
    v = random(rows, tokens, heads, dim).to(dtype)
    beta = random(rows, tokens, heads).sigmoid()
    decay = -random(rows, tokens, heads, 1 if fading is None else key_dim).abs()
    if fading is not None:  # channels that keep everything beside ones that keep nothing
        decay *= fading * torch.linspace(0, 1, key_dim) ** 3
    return q, k, v, decay, beta, random(rows, heads, key_dim, dim)


@pytest.fixture(params=["reference", *BACKENDS])
def op(request):
    """The gated delta rule's reference, and its kernels."""
    if request.param == "reference":
        return REFERENCES["gated_delta"]
    return ops_of(request.param).gated_delta


def theirs(q, k, v, decay, beta, state):
    wide = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    q, k, v = (x.float() for x in (q, k, v))
    if decay.shape[-1] == 1:
        return torch_recurrent_gated_delta_rule(q, k, v, g=decay[..., 0], beta=beta, **wide)
    q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], dim=2) for x in (q, k))
    return recurrent_kimi_delta_attention(q, k, v, g=decay, beta=beta, **wide)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 64, 150])
def test_outputs_and_states_match_a_loop_over_tokens(op, sizes, tokens):
    *given, state = inputs(tokens, sizes)
    expected, after = theirs(*given, state)
    out = op(*given, state, None)
    torch.testing.assert_close(out, expected, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(state, after, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 64, 150])
@pytest.mark.parametrize("fading", [0.01, 1, 100])
def test_channelwise_decay_matches_a_loop_over_tokens(op, sizes, tokens, fading):
    """Over a block of 64 tokens the slowest channel decays by nothing, the fastest by e^-5000."""
    *given, state = inputs(tokens, sizes, fading=fading)
    expected, after = theirs(*given, state)
    out = op(*given, state, None)
    torch.testing.assert_close(out, expected, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(state, after, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_computed_in_float32(op, dtype):
    *given, state = inputs(5, SIZES[0], dtype)
    expected, after = theirs(*given, state)
    out = op(*given, state, None)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected.to(dtype))
    torch.testing.assert_close(state, after, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("fading", [None, 1])
def test_padding_leaves_the_state_unchanged(op, fading):
    *given, state = inputs(70, SIZES[1], rows=3, fading=fading)
    lens = torch.tensor([70, 11, 0], dtype=torch.int32)
    before, padded = state.clone(), state.clone()
    out = op(*given, padded, lens)
    assert torch.equal(padded[2], before[2])
    for row, tokens in ((0, 70), (1, 11)):
        alone = [x[row : row + 1, :tokens] for x in given]
        expected, after = theirs(*alone, before[row : row + 1])
        torch.testing.assert_close(out[row, :tokens], expected[0], rtol=2e-4, atol=2e-5)
        torch.testing.assert_close(padded[row], after[0], rtol=2e-4, atol=2e-5)


def test_bits_do_not_depend_on_other_rows_or_later_tokens(kernels):
    *given, state = inputs(9, SIZES[0], torch.bfloat16, rows=4)
    before = state.clone()
    together = kernels.gated_delta(*given, state, None)
    own = before[2:3].clone()
    steps = [
        kernels.gated_delta(*(x[2:3, at : at + 1] for x in given), own, None) for at in range(9)
    ]
    assert torch.equal(torch.cat(steps, dim=1), together[2:3])
    assert torch.equal(own, state[2:3])


def test_contradicting_tensors_are_refused_by_name(kernels):
    q, k, v, decay, beta, state = inputs(2, SIZES[0])
    run = kernels.gated_delta
    with pytest.raises(RuntimeError, match="state must be float32 with q's rows"):
        run(q, k, v, decay, beta, state[..., :-1], None)
    with pytest.raises(RuntimeError, match="a multiple of its heads"):
        run(q, k, v[:, :, :3], decay[..., :3], beta[..., :3], state[:, :3], None)
    with pytest.raises(RuntimeError, match="decay must be float32 with q's rows"):
        run(q, k, v, decay[..., 0], beta, state, None)
    with pytest.raises(RuntimeError, match="decay must be float32 with q's rows"):
        run(q, k, v, decay.expand(-1, -1, -1, 2), beta, state, None)
    with pytest.raises(RuntimeError, match="beta must be float32"):
        run(q, k, v, decay, beta.half(), state, None)
    with pytest.raises(RuntimeError, match="new_lens must be int32"):
        run(q, k, v, decay, beta, state, torch.tensor([1, 2]))


@pytest.mark.parametrize("heads", [0, 3])
def test_reference_refuses_unmatched_heads(heads):
    q, k, v, *rest = inputs(2, SIZES[0])
    k = k.repeat(1, 1, 2, 1)[:, :, :heads]
    with pytest.raises(ValueError, match="H_v a multiple of H_k"):
        REFERENCES["gated_delta"](k, k, v, *rest, None)


@pytest.mark.parametrize("tokens", [1, 2, 30])
@pytest.mark.parametrize("with_bias", [True, False])
def test_convolutions_are_torchs_over_all_tokens(ops, tokens, with_bias):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((2, 8 + tokens, 6), generator=generator)
    weight = torch.randn((6, 1, 4), generator=generator)
    bias = torch.randn(6, generator=generator) if with_bias else None
    expected = F.conv1d(x.mT, weight, bias, padding=3, groups=6)[..., :-3].mT
    state = x.new_zeros((2, 3, 6))
    lens = torch.tensor([8, 2], dtype=torch.int32)
    first = ops.causal_conv(x[:, :8], weight, bias, state, lens)
    torch.testing.assert_close(first[0], expected[0, :8])
    torch.testing.assert_close(first[1, :2], expected[1, :2])
    torch.testing.assert_close(
        state, torch.stack((x[0, 5:8], torch.cat((x.new_zeros(1, 6), x[1, :2]))))
    )
    rest = ops.causal_conv(x[:1, 8:], weight, bias, state[:1], None)
    torch.testing.assert_close(rest[0], expected[0, 8:])
    torch.testing.assert_close(state[0], x[0, -3:])
