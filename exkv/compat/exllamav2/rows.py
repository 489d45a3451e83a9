"""Conversion between left padding (ExLlamaV2) and right padding (exkv)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def padding(mask: Tensor | None, offsets: Tensor | None) -> tuple[int, ...] | None:
    """Left padding of each row in tokens; None if neither argument is given.

    Args:
        mask: (B, columns), below 0 at padding.
        offsets: minus the padding of each row.

    Raises:
        ValueError: padding after a token, or the two arguments contradict each other.
    """
    moved = None if offsets is None else tuple(-int(n) for n in offsets.flatten().tolist())
    if mask is None:
        if moved is not None and any(moved):
            raise ValueError("position_offsets move rows, but there is no input_mask: pass both")
        return None
    masked = mask < 0
    leading = masked.long().cumprod(-1).bool()
    if not torch.equal(masked, leading):
        raise ValueError(
            "input_mask has padding after a row's first token: exkv takes left padding, as "
            "tokenizer.encode of a list makes it"
        )
    pads = tuple(leading.sum(-1).tolist())
    if moved is not None and moved != pads:
        raise ValueError(f"rows begin at {moved} by position_offsets, but at {pads} by input_mask")
    return pads


def new_tokens(width: int, pads: Sequence[int], held: int) -> list[int]:
    """Tokens of each row in the ``width`` columns after the first ``held``.

    Raises:
        ValueError: all columns are padding.
    """
    new = [width - min(max(pad - held, 0), width) for pad in pads]
    if not any(new):
        raise ValueError(f"all {width} columns are padding")
    return new


def to_right_padding(input_ids: Tensor, new: Sequence[int]) -> Tensor:
    """(B, T) with ``new`` tokens at the end of each row -> (B, max(new)) with them first."""
    width = max(new)
    out = input_ids.new_zeros((len(new), width))
    for row, count in enumerate(new):
        out[row, :count] = input_ids[row, input_ids.shape[1] - count :]
    return out


def to_left_padding(logits: Tensor, new: Sequence[int], width: int) -> Tensor:
    """(B, max(new), V) -> (B, width, V), 0 at padding."""
    out = logits.new_zeros((len(new), width, logits.shape[-1]))
    for row, count in enumerate(new):
        out[row, width - count :] = logits[row, :count]
    return out
