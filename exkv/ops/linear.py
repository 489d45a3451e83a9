"""Linear layers with float weights in the checkpoint's layout, read once a call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .registry import define_op


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@define_op("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", fake=_fake)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., in), weight (out, in), bias (out,) or None -> x weight^T + bias (..., out).

    The CPU kernels are for decoding: with few rows, reading the weights dominates, and they read at
    memory bandwidth. They sum in float32, and a row's result doesn't depend on other rows. Calls
    with more rows than a limit, which depends on the instruction set, go to torch.
    """
    return F.linear(x, weight, bias)


@define_op(
    "linears(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor[]",
    fake=lambda x, weights, biases: [_fake(x, weight, None) for weight in weights],
)
def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """:func:`linear` of one x by several weights, with a bias for each or without any (``[]``).

    The results are bit-identical. The CPU kernels read all weights in one parallel region, so that
    threads synchronize once, and not once a weight.
    """
    added: Sequence[Tensor | None] = biases or [None] * len(weights)
    return [F.linear(x, weight, bias) for weight, bias in zip(weights, added, strict=True)]


@define_op(
    "linear_heads(Tensor x, Tensor weight) -> Tensor",
    fake=lambda x, weight: x.new_empty((*x.shape[:2], weight.shape[1])),
    kernels_fall_back=True,
)
def linear_heads(x: Tensor, weight: Tensor) -> Tensor:
    """x (H, N, in), weight (H, out, in) -> (H, N, out): each head's rows times its own matrix.

    The CPU kernels run all heads in one parallel region, bit-identical to :func:`linear` for each.
    """
    return torch.bmm(x, weight.transpose(1, 2))
