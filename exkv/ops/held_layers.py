"""Decoder layers of which the native side holds what doesn't change from one call to the next.

A call of ``decoder_layers`` hands some twenty tensors a layer over, each of which waits for memory
that the weights have driven out of every cache: 3 % of a decode step of a 150M model. So layers
that go together again and again are handed over once and called by a number.

What the layers write to is no argument of :func:`held_layers`. A tracer or a dispatch mode that
wants to know of it is to see ``decoder_layers`` instead.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from .registry import define_op

_held: dict[int, tuple[Any, ...]] = {}
_numbers = itertools.count()


def _number(*layers) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64)


@define_op(
    "hold_layers(Tensor[] weights, Tensor?[] biases, Tensor[] stored, int head_dim, float eps, "
    "float scale, int[] windows, float softcap, str act) -> Tensor",
    fake=_number,
)
def hold_layers(*layers) -> torch.Tensor:
    """Keep the tensors, and what else ``decoder_layers`` takes of layers, until they are released.

    Returns:
        their number, int64 (1,) on the CPU.
    """
    number = next(_numbers)
    _held[number] = layers
    return torch.tensor([number])


@define_op(
    "held_layers(Tensor x, Tensor layers, Tensor past_lens, int kv_len, Tensor cos, Tensor sin) "
    "-> Tensor",
    fake=lambda x, *rest: torch.empty_like(x, memory_format=torch.contiguous_format),
    in_parts=True,
)
def held_layers(
    x: torch.Tensor,
    layers: torch.Tensor,
    past_lens: torch.Tensor,
    kv_len: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """``decoder_layers`` with the layers of this number; what they have stored is written to.

    Raises:
        RuntimeError: no layers are held by this number.
    """
    weights, biases, stored, *numbers = _of(layers)
    rows = (past_lens, kv_len, cos, sin)
    return torch.ops.exkv.decoder_layers(x, weights, biases, stored, *rows, *numbers)


@define_op("release_layers(Tensor layers) -> ()", fake=lambda layers: None)
def release_layers(layers: torch.Tensor) -> None:
    """Let go of them.

    Raises:
        RuntimeError: no layers are held by this number.
    """
    _of(layers)
    del _held[int(layers)]


def _of(layers: torch.Tensor) -> tuple[Any, ...]:
    if int(layers) not in _held:
        raise RuntimeError(
            f"no layers are held by the number {int(layers)}: it is what hold_layers returned, "
            "until release_layers takes it"
        )
    return _held[int(layers)]
