"""Activations of gated MLPs (Shazeer, 2020), and their product ``act(gate) * up``.

The product overwrites the gate, since a chunk's gate is among the largest tensors of a forward
call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .registry import define_op


@define_op("silu_mul_(Tensor(a!) gate, Tensor up) -> ()", kernels_fall_back=True)
def silu_mul_(gate: Tensor, up: Tensor) -> None:
    """Overwrite gate (..., N) with silu(gate), rounded to its dtype, times up (..., N)."""
    F.silu(gate, inplace=True).mul_(up)


@define_op("gelu_mul_(Tensor(a!) gate, Tensor up) -> ()", kernels_fall_back=True)
def gelu_mul_(gate: Tensor, up: Tensor) -> None:
    """As :func:`silu_mul_`, with the tanh form of gelu (Hendrycks and Gimpel, 2016)."""
    torch.ops.aten.gelu_(gate, approximate="tanh").mul_(up)


@define_op("sigmoid_(Tensor(a!) x) -> ()")
def sigmoid_(x: Tensor) -> None:
    """Overwrite x (..., N), contiguous, with its sigmoid."""
    torch.sigmoid_(x)


@define_op("activate_(Tensor(a!) x, int act) -> ()")
def activate_(x: Tensor, act: int) -> None:
    """Overwrite x (..., N), contiguous, with an activation: its index in :data:`NATIVE`."""
    if not 0 <= act < len(NATIVE):
        raise ValueError(f"activate_: act is {act}; there are {len(NATIVE)}")
    name = NATIVE[act]
    x.copy_(F.softplus(x.float()) if name == SOFTPLUS else ACTIVATIONS[name].apply(x))


def activated(x: Tensor, act: str) -> Tensor:
    """act(x), stored in x (..., N), contiguous, if ``act`` is native."""
    if act not in NATIVE:
        return ACTIVATIONS[act].apply(x)
    torch.ops.exkv.activate_(x, NATIVE.index(act))
    return x


@define_op("clamped_swiglu_(Tensor(a!) gate, Tensor up, float alpha, float limit) -> ()")
def clamped_swiglu_(gate: Tensor, up: Tensor, alpha: float, limit: float) -> None:
    """Overwrite gate (..., N) with (up + 1) * gate * sigmoid(alpha * gate), with gate clamped to at
    most ``limit`` and up (..., N) to +-``limit`` (OpenAI, 2025: gpt-oss)."""
    gate.clamp_(max=limit)
    raised = up.clamp(min=-limit, max=limit).add_(1)
    gate.mul_((gate * alpha).sigmoid_()).mul_(raised)


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """xIELU (Huang and Schlag, 2024, arXiv 2411.13010): a * x^2 + beta * x above zero,
    and b * (exp(min(x, eps)) - 1 - x) + beta * x below; a is the softplus of ``alpha_p``, b that of
    ``alpha_n`` and beta. x (..., N), the others one number each; a new tensor."""
    below = torch.expm1(torch.minimum(x, eps)).sub_(x).mul_(F.softplus(alpha_n) + beta)
    curved = torch.where(x > 0, F.softplus(alpha_p) * x * x, below)
    return curved.add_(x * beta)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """An activation function.

    Attributes:
        apply: x -> act(x), a new tensor.
        gate: writes ``act(gate) * up`` over its first argument, ``gate``; the second is ``up``.
        native: whether the kernels of bound runs support it; a test compares this with
            ``exkv_ext.activations``.
    """

    apply: Callable[[Tensor], Tensor]
    gate: Callable[[Tensor, Tensor], object]
    native: bool = False


def is_native(act: str) -> bool:
    """Whether bound runs support this activation."""
    return act in ACTIVATIONS and ACTIVATIONS[act].native


#: Activations by config.json's names: the only such table, used by MLPs, experts and bound runs.
#: ``exkv.checkpoint`` refuses other names.
ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation(apply=F.silu, gate=torch.ops.exkv.silu_mul_.default, native=True),
    "gelu_pytorch_tanh": Activation(
        apply=lambda x: F.gelu(x, approximate="tanh"),
        gate=torch.ops.exkv.gelu_mul_.default,
        native=True,
    ),
    "gelu": Activation(
        apply=F.gelu, gate=lambda gate, up: torch.ops.aten.gelu_(gate).mul_(up), native=True
    ),
    "relu": Activation(apply=F.relu, gate=lambda gate, up: F.relu_(gate).mul_(up), native=True),
    "relu2": Activation(
        apply=lambda x: F.relu(x).square_(),
        gate=lambda gate, up: F.relu_(gate).square_().mul_(up),
        native=True,
    ),
}
#: An activation that no config.json names.
SOFTPLUS = "softplus"
#: What bound runs support, in the order of ``Act`` in ``exkv_ext/cpu/rows.h``.
NATIVE = (*(name for name, activation in ACTIVATIONS.items() if activation.native), SOFTPLUS)
