"""Find NaN and infinity in weights while they are read.

A single one makes every logit NaN, and nothing else reports it. A pass over values that were just
read costs little compared with reading them (`docs/quantized-weights.md` has figures).
"""

from __future__ import annotations

import torch

from exkv.checkpoint import ExpectedTensor

_E4M3 = torch.float8_e4m3fn
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def first_not_finite(values: torch.Tensor, dtype: torch.dtype | None = None) -> int | None:
    """Index, in row-major order, of the first value that is NaN or infinite; None if all are
    finite, and for integers.

    Args:
        values: floats of any number of dimensions.
        dtype: dtype to which they are cast later, which they must not overflow.
    """
    if values.numel() == 0:
        return None
    if values.dtype == _E4M3:
        codes = values.view(torch.uint8)  # NaN is 0x7F and 0xFF, the largest int8 and uint8
        if int(codes.amax()) < 0xFF and int(codes.view(torch.int8).amax()) < 0x7F:
            return None
        return _first(codes & 0x7F == 0x7F)
    if values.dtype not in _FLOATS:
        return None
    most = torch.finfo(values.dtype if dtype is None else dtype).max
    low, high = (float(end) for end in values.aminmax())  # NaN if any is
    if -most <= low and high <= most:
        return None
    return _first((values.abs() <= most).logical_not_())


def first_in_stored(
    piece: torch.Tensor, stored: torch.dtype, expected: ExpectedTensor, dtype: torch.dtype
) -> int | None:
    """:func:`first_not_finite` of bytes of a stored tensor.

    Args:
        piece: uint8 (n,), whole values or blocks.
        stored: dtype of the tensor.
        expected: where packed blocks have floats.
        dtype: dtype of the resulting parameter.

    Returns:
        Index of the value, or of the block, in the piece.
    """
    if not expected.halves:
        return first_not_finite(piece.view(stored), dtype if dtype.is_floating_point else None)
    blocks = piece.view(-1, expected.block)
    halves = [blocks[:, place : place + 2] for place in expected.halves]
    values = torch.cat(halves, 1).view(torch.float16)
    found = first_not_finite(values)
    return None if found is None else found // len(halves)


def check_finite(name: str, values: torch.Tensor) -> None:
    """ValueError, with the first, if any of these values is NaN or infinite."""
    if first_not_finite(values) is not None:
        refuse_any(values.isfinite().logical_not_(), values, f"{name} are not finite")


def refuse_any(
    wrong: torch.Tensor,
    values: torch.Tensor,
    what: str,
    remedy: str = "download the model again",
) -> None:
    """ValueError, with their number and the first, if any of these values is wrong.

    Args:
        wrong: bool, of the shape of ``values``.
        what: the values and what is wrong with them, as in "scales are not finite".
    """
    if wrong.any():
        first = _first(wrong)
        raise ValueError(
            f"{int(wrong.sum())} of {values.numel()} {what}; the first is number {first}, "
            f"{values.flatten()[first].item()}: {remedy}"
        )


def _first(wrong: torch.Tensor) -> int:
    return int(wrong.flatten().nonzero()[0])
