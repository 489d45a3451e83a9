"""The experts of a mixture that are in host memory, bound for native code.

Their matrices, copied or mapped, are described to it once per epoch (``exkv.epochs``). A call
passes hidden states and choices, and all threads compute the chosen experts together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exkv import epochs
from exkv.ops import has_kernel
from exkv.ops.activations import is_native
from exkv.ops.bound_run import RunHandle

from .descriptions import (
    GatedBlock,
    NotDescribed,
    Projection,
    is_usable,
    native_matrices,
    parameters_in,
)
from .linear import is_watched

if TYPE_CHECKING:
    from .mlp import Experts


class HostExperts:
    """A mixture's experts in host memory as one native call, which takes up to ``most_rows`` rows.
    Results have the bits of the op ``experts``.

    Args:
        experts: all of the mixture's; only those ``on_host`` are bound.
        taken: experts of each token.
    """

    def __init__(
        self, experts: Sequence[GatedBlock], on_host: Sequence[int], dtype: torch.dtype, taken: int
    ) -> None:
        self.hidden = experts[0].gate.weight.size[1]
        self._handle = RunHandle(dtype, self.hidden)
        self.most_rows = self._handle.most_tokens
        there = frozenset(on_host)
        projections = [part for each in sorted(there) for part in experts[each].projections]
        elsewhere = [each for each in range(len(experts)) if each not in there]
        _add_empty_layer(self._handle.tensor)
        torch.ops.exkv.add_experts(
            self._handle.tensor,
            *native_matrices(*(projection.weight for projection in projections)),
            [projection.bias for projection in projections],
            *(None, experts[0].act, len(experts), False),
            *(taken, False, False, 0.0, 1, 1, 1, 1.0),  # no router: calls bring choices
            *(True, False, False, experts[0].alpha, experts[0].limit),
            elsewhere,
        )

    def sum(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sums (..., hidden), where all chosen experts are bound; arguments as of
        :meth:`parts`."""
        return torch.ops.exkv.chosen_of_run.default(self._handle.tensor, x, chosen, weights, True)

    def parts(
        self, x: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor | None = None
    ) -> Tensor:
        """Each choice's weighted and rounded output (..., K, hidden), undefined for experts that
        aren't bound; for x (..., hidden), and int64 choices and float32 weights (..., K).

        Args:
            counts: int64 (experts,), to which all choices are added.
        """
        run = torch.ops.exkv.chosen_of_run.default
        return run(self._handle.tensor, x, chosen, weights, False, counts)


class _Memo:
    """What :func:`bound_experts` found in an epoch, for calls of one kind."""

    def __init__(self, key: tuple[Any, ...], experts: HostExperts | None) -> None:
        self.key, self.experts = key, experts

    def release(self) -> None:
        self.experts = None


def bound_experts(mixture: Experts, x: Tensor, taken: int) -> HostExperts | None:
    """The mixture's experts in host memory, for calls of x (N, hidden); None if native code can't
    run them, or something must see every op."""
    if is_watched():
        return None
    key = epochs.current(), x.dtype, taken
    memo: _Memo | None = mixture.__dict__.get("_bound_experts")
    if memo is None or memo.key != key:
        memo = _Memo(key, _bind(mixture, x.dtype, taken))
        mixture.__dict__["_bound_experts"] = memo
        epochs.bind(memo, key[0])
    bound = memo.experts
    return bound if bound is not None and len(x) <= bound.most_rows else None


def _bind(mixture: Experts, dtype: torch.dtype, taken: int) -> HostExperts | None:
    if not has_kernel("chosen_of_run", "cpu"):
        return None
    try:
        experts = mixture.describe_experts()
    except NotDescribed:
        return None
    return bind(experts, sorted(mixture.on_host), dtype, taken)


def bind(
    experts: Sequence[GatedBlock], on_host: Sequence[int], dtype: torch.dtype, taken: int
) -> HostExperts | None:
    """Bind those on the host, if native code knows all experts: which kernels run must not depend
    on where they lie."""
    parts = [part for each in experts for part in each.projections]
    if not is_native(experts[0].act) or not all(_computes_in(each, dtype) for each in parts):
        return None
    here = tuple(experts[expert] for expert in on_host)
    if not all(is_usable(each, dtype, devices=("cpu",)) for each in parameters_in(here)):
        return None
    return HostExperts(experts, on_host, dtype, taken)


def _computes_in(part: Projection, dtype: torch.dtype) -> bool:
    return not part.low_rank and part.weight.format.arithmetic in (None, dtype)


def _add_empty_layer(run: Tensor) -> None:
    """Add a layer that asks for everything."""
    nothing: tuple[Any, ...] = ([None] * 6, [0.0] * 6, [0] * 6, [None] * 6, [], [], [])
    numbers = (0, "silu", 0, 1.0, False, 0, 1.0, 0, 0.0)
    torch.ops.exkv.add_layer(run, *nothing, *numbers, [], "", [], "", 0, False)
