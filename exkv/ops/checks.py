"""Argument checks shared by several ops; messages name the op and the argument."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .kv_formats import KVFormat, Shape


def check_row_numbers(op: str, name: str, x: torch.Tensor, rows: int) -> None:
    """Raise ValueError unless x is int32 (rows,)."""
    if x.dtype != torch.int32 or x.shape != (rows,):
        raise ValueError(
            f"{op}: {name} must be int32 ({rows},), a number for each row; it is {x.dtype} "
            f"{tuple(x.shape)}"
        )


def check_tensor_count(
    op: str, name: str, kind: KVFormat, tensors: Sequence[torch.Tensor], rows: str
) -> None:
    """Raise ValueError unless there are as many tensors as the format stores, of four dimensions.

    Args:
        rows: allowed number of rows, for the message.
    """
    if len(tensors) != len(kind.names) or any(tensor.dim() != 4 for tensor in tensors):
        raise ValueError(
            f"{op}: {name} must be {len(kind.names)} tensors ({rows}, S, H_kv, ...) to be "
            f"{kind.name}; it is {[tuple(tensor.shape) for tensor in tensors]}"
        )


def check_layout(
    op: str,
    name: str,
    kind: KVFormat,
    tensors: Sequence[torch.Tensor],
    shape: Shape,
    dtype: torch.dtype,
    *,
    roomy: bool = False,
) -> None:
    """Raise ValueError unless the tensors are those of the format's layout for keys or values of
    this shape and dtype; if ``roomy``, they may have room for more tokens."""
    for (part, (expected, wanted)), tensor in zip(
        kind.layout(shape, dtype).items(), tensors, strict=True
    ):
        rows, entries, *rest = expected
        found = tuple(tensor.shape)
        fits = found[1] >= entries if roomy else found[1] == entries
        if not fits or found[0] != rows or [*found[2:]] != rest or tensor.dtype != wanted:
            label = f"{name}'s {part}" if part else name
            more = f", or have more than {entries} entries," if roomy else ""
            raise ValueError(
                f"{op}: {label} must be {wanted} {expected}{more} to be {kind.name} of {shape}; it "
                f"is {tensor.dtype} {found}"
            )
