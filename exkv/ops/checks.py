"""Argument checks shared by several ops; messages name the op and the argument."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .kv_formats import KVFormat


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
