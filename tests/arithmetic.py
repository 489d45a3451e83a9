"""What tests of arithmetic share: random tensors, errors, memory that is poison, and threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from native_ops import tensors_of
from torch import Tensor


def normal(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def poisoned(tensor: Tensor) -> Tensor:
    """The same values amid NaN, and not aligned."""
    space = torch.full((tensor.numel() + 67,), torch.nan, dtype=tensor.dtype)
    return space[3 : 3 + tensor.numel()].view(tensor.shape).copy_(tensor)


def error(out: Tensor, expected: Tensor) -> float:
    """Root of the mean square."""
    return (out.double() - expected).square().mean().sqrt().item()


def near(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> bool:
    """Whether the largest difference is below this share of the largest magnitude."""
    return ((found - expected).abs().max() / expected.abs().max()).item() < tolerance


def float_error(x: Tensor, weight: Tensor, expected: Tensor) -> float:
    """Error of the weights in x's dtype, multiplied by torch."""
    return error(F.linear(x, weight.to(x.dtype)), expected)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit; any NaN is as good as another, and zeros are of one kind."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0), b.nan_to_num(0))


def equal(outs: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))


def assert_same_on_threads(call: Callable[[], Any], counts: Iterable[int] = (1, 2, 3)) -> None:
    """The tensors that a call gives are the same to the bit with any number of threads."""
    threads, expected = torch.get_num_threads(), tensors_of(call())
    try:
        for count in counts:
            torch.set_num_threads(count)
            assert equal(tensors_of(call()), expected), count
    finally:
        torch.set_num_threads(threads)
