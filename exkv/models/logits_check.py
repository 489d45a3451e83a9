"""Check the first logits after a load for NaN and infinity.

Reading rejects weights that aren't finite. Finite ones may be so large, by damage or for the dtype,
that arithmetic overflows, which the first call shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from exkv import sim
from exkv.batch import Lengths
from exkv.weights.finite import first_not_finite

from .bound_run import Logits

if TYPE_CHECKING:
    from .transformer import Transformer


def check_logits(
    model: Transformer,
    logits: torch.Tensor,
    input_ids: torch.Tensor,
    lengths: Lengths,
    wanted: Logits,
) -> None:
    """Check the logits of a call.

    Raises:
        FloatingPointError: some are NaN or infinite; the message names the unit where that begins.
    """
    if sim.is_dry(logits) or _is_finite(logits, lengths, each=wanted is Logits.EACH):
        return
    where = "" if model.transport is not None else _first_unit(model, input_ids, lengths)
    raise FloatingPointError(
        f"{model.config.path or 'the model'}: the logits are NaN or infinite{where}. Weights are "
        f"damaged, or too large for {model.dtype}: download the model again, or load it with "
        "dtype='float32'"
    )


def _is_finite(x: torch.Tensor, lengths: Lengths, *, each: bool = False) -> bool:
    """Whether all values (B, T, n) except padding are finite; ``each`` for all of (N, 1, n)."""
    if each or not lengths.ragged:
        return first_not_finite(x) is None
    rows = (x[row, : min(new, x.shape[1])] for row, new in enumerate(lengths.new))
    return all(first_not_finite(values) is None for values in rows)


def _first_unit(model: Transformer, input_ids: torch.Tensor, lengths: Lengths) -> str:
    """Name the first unit whose output is not finite, by bisection: outputs after it aren't finite
    either."""
    alone = Lengths(past=(0,) * len(lengths.new), new=lengths.new, adapters=lengths.adapters)

    def is_finite_after(count: int) -> bool:
        x = model.forward_chunk(input_ids, None, alone, head=True, last_id_only=False, stop=count)
        assert x is not None
        return _is_finite(x, alone)

    begin, end = 0, len(model.units)
    while end - begin > 1:
        middle = (begin + end) // 2
        begin, end = (middle, end) if is_finite_after(middle) else (begin, middle)
    return f", from {model.units[begin].name} on"
