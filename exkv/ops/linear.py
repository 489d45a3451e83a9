"""The linear map of every projection: weights as checkpoints store them, read once a call."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .registry import define_op


def _fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@define_op("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", fake=_fake)
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (..., in), weight (out, in), bias (out,) or None -> x weight^T + bias (..., out).

    The CPU kernels serve decoding: for few rows the time is that of reading the weights, which
    they do as fast as memory delivers them. They sum in float32, and a row's result doesn't
    depend on the rows beside it. More rows than an instruction set is good for are torch's own.
    """
    return F.linear(x, weight, bias)
