"""Conversion of prompts (tensors, lists or texts) to rows padded on the left."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeAlias

import torch
from torch import Tensor

from exkv.batch import pad_rows
from exkv.generation.config import GenerationConfig
from exkv.text import Tokenizer

PromptIds: TypeAlias = Tensor | Sequence[int] | Sequence[Sequence[int]] | str | Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """B prompts of at most W tokens.

    Attributes:
        ids: int64 (B, W) on the host, padded on the left as in transformers; ``Model.forward`` gets
            the rows without padding.
        lengths: tokens of each row.
        as_tensor: whether they were given as a tensor, whose columns the result keeps.
    """

    ids: Tensor
    lengths: tuple[int, ...]
    as_tensor: bool

    @property
    def width(self) -> int:
        return self.ids.shape[1]

    @property
    def rows(self) -> list[list[int]]:
        """The token ids without padding."""
        pairs = zip(self.ids.tolist(), self.lengths, strict=True)
        return [row[self.width - length :] for row, length in pairs]

    def histories(self, tokens: Tensor, device: torch.device) -> list[Tensor]:
        """The tokens of each sequence so far without padding, on the device; new tokens (N, n), N /
        B rows for each prompt."""
        per_row = len(tokens) // len(self.lengths)
        ids = self.ids.repeat_interleave(per_row, 0)
        lengths = [length for length in self.lengths for _ in range(per_row)]
        whole = torch.cat((ids, tokens), -1).to(device)
        return [each[self.width - n :] for each, n in zip(whole, lengths, strict=True)]

    def only(self, row: int) -> Prompts:
        """One of the prompts, with the same width."""
        ids = self.ids[row : row + 1]
        return Prompts(ids=ids, lengths=(self.lengths[row],), as_tensor=self.as_tensor)

    def followed_by(self, tokens: Tensor) -> Tensor:
        """Prompts and new tokens (N, n), N / B rows for each prompt -> (N, W + n)."""
        per_row = len(tokens) // len(self.lengths)
        return torch.cat((self.ids.repeat_interleave(per_row, 0), tokens), -1)


def read_prompts(
    prompts: PromptIds | None,
    mask: Tensor | None,
    tokenizer: Tokenizer | None,
    config: GenerationConfig,
    vocab_size: int,
) -> Prompts:
    """Check and pad prompts; see ``generate`` for the forms and the errors."""
    pad = 0 if config.pad_token_id is None else config.pad_token_id
    if isinstance(prompts, Tensor):
        mask = _inferred_mask(prompts, config) if mask is None else mask
        rows = _rows_of_tensor(prompts, mask)
    elif mask is not None:
        raise ValueError("attention_mask is given with lists, which need none: leave it out")
    else:
        rows = _rows_of_list(prompts, tokenizer)
    _check_rows(rows, vocab_size)
    if isinstance(prompts, Tensor):
        ids = torch.atleast_2d(prompts.to("cpu", torch.int64))
    else:
        ids, _ = pad_rows(rows, fill=pad, left=True)
    return Prompts(ids=ids, lengths=tuple(map(len, rows)), as_tensor=isinstance(prompts, Tensor))


def _inferred_mask(ids: Tensor, config: GenerationConfig) -> Tensor | None:
    """The mask of a tensor without one, by transformers' rule: pad tokens are padding unless the
    pad token also ends sequences."""
    pad = config.pad_token_id
    if pad is None or pad in config.ends or ids.dim() != 2 or not bool((ids == pad).any()):
        return None
    mask = (ids != pad).cpu()
    if not bool(_is_left_padded(mask).all()):
        row = int((~_is_left_padded(mask)).nonzero()[0])
        raise ValueError(
            f"row {row} of input_ids has the pad token {pad} after another one: pad on the left, "
            "or, if it belongs to the prompt, pass attention_mask=torch.ones_like(input_ids)"
        )
    return mask


def _is_left_padded(mask: Tensor) -> Tensor:
    """Which rows have no padding after a token: (B, T) -> bool (B,)."""
    real = mask != 0
    return ~(real[:, :-1] & ~real[:, 1:]).any(1)


def _rows_of_tensor(ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    if ids.dim() not in (1, 2) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(
            f"input_ids must be whole numbers of shape (rows, tokens), not {ids.dtype} of "
            f"{tuple(ids.shape)}"
        )
    if mask is None:
        return torch.atleast_2d(ids).tolist()
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask is a {type(mask).__name__}; it must be a tensor")
    if mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask has the shape {tuple(mask.shape)}, and input_ids {tuple(ids.shape)}"
        )
    ids, mask = torch.atleast_2d(ids.cpu(), mask.cpu())
    if not bool(_is_left_padded(mask).all()):
        row = int((~_is_left_padded(mask)).nonzero()[0])
        raise ValueError(
            f"attention_mask hides a token of row {row} after one that it shows: pad on the left, "
            "or give lists, which need no padding"
        )
    return [row[keep].tolist() for row, keep in zip(ids, mask != 0, strict=True)]


def _rows_of_list(prompts: Any, tokenizer: Tokenizer | None) -> list[list[int]]:
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, Sequence):
        raise TypeError(
            f"input_ids is {'missing' if prompts is None else type(prompts).__name__}; it must be "
            "a tensor (rows, tokens), a list of ids or of lists of ids, or texts"
        )
    rows = [prompts] if len(prompts) and isinstance(prompts[0], Integral) else prompts
    return [_row(index, row, tokenizer) for index, row in enumerate(rows)]


def _row(index: int, row: Any, tokenizer: Tokenizer | None) -> list[int]:
    if isinstance(row, str):
        if tokenizer is None:
            raise ValueError("prompts are text, and the model has no folder: pass tokenizer")
        return tokenizer.encode(row)
    try:
        return [operator.index(token) for token in row]
    except TypeError:
        raise TypeError(
            f"prompt {index} is {_short(row)}; it must be token ids or a text"
        ) from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_rows(rows: list[list[int]], vocab_size: int) -> None:
    if not rows:
        raise ValueError("there is no prompt: give at least one")
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompt {index} is empty: give at least one token")
        wrong = next((token for token in row if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"prompt {index} has the token id {wrong}, outside the vocabulary of {vocab_size}: "
                "is this the model's own tokenizer?"
            )
