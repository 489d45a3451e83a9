"""A gated network's product, ``act(gate) * up`` (Shazeer, 2020), written over the gate.

In place, since a chunk's gate is among the largest tensors of a forward call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .registry import define_op


def _fake(gate: torch.Tensor, up: torch.Tensor) -> None:
    return None


@define_op("silu_mul_(Tensor(a!) gate, Tensor up) -> ()", fake=_fake, kernel_uses={})
def silu_mul_(gate: torch.Tensor, up: torch.Tensor) -> None:
    """gate (..., N) becomes silu(gate), rounded to its dtype, times up (..., N), another tensor."""
    F.silu(gate, inplace=True).mul_(up)


@define_op("gelu_mul_(Tensor(a!) gate, Tensor up) -> ()", fake=_fake, kernel_uses={})
def gelu_mul_(gate: torch.Tensor, up: torch.Tensor) -> None:
    """The same with gelu in its tanh form (Hendrycks and Gimpel, 2016)."""
    torch.ops.aten.gelu_(gate, approximate="tanh").mul_(up)


#: Activation by config.json's name -> what writes ``act(gate) * up`` over its first argument.
GATES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "silu": torch.ops.exkv.silu_mul_.default,
    "gelu_pytorch_tanh": torch.ops.exkv.gelu_mul_.default,
    "gelu": lambda gate, up: torch.ops.aten.gelu_(gate).mul_(up),
    "relu": lambda gate, up: F.relu_(gate).mul_(up),
}
