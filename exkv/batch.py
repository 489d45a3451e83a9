"""What one forward call knows about its rows: lengths on the host, tensors on each device.

Rows of a batch may differ in how many tokens they hold and in how many they bring. Nothing is
padded inside a cache: rows that bring fewer tokens are padded on the right in ``input_ids``,
the padding is never written to the cache, and never seen by a real token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens per row: ``past`` are in the cache already, ``new`` are brought by this chunk of a
    call, ``later`` by the chunks of the same call that follow; () for none."""

    past: tuple[int, ...]
    new: tuple[int, ...]
    later: tuple[int, ...] = ()

    @classmethod
    def uniform(cls, batch_size: int, past: int, new: int) -> Lengths:
        return cls(past=(past,) * batch_size, new=(new,) * batch_size)

    @property
    def chunk(self) -> int:
        """T, the width of ``input_ids``."""
        return max(self.new)

    @property
    def kv_len(self) -> int:
        """Keys of the longest row once the new ones are in."""
        return max(past + new for past, new in zip(self.past, self.new, strict=True))

    @property
    def final(self) -> tuple[int, ...]:
        """Tokens of each row once the call is through."""
        later = self.later or (0,) * len(self.past)
        return tuple(map(sum, zip(self.past, self.new, later, strict=True)))

    @property
    def ragged(self) -> bool:
        return len(set(self.past)) > 1 or len(set(self.new)) > 1


#: Positions (B, T) on the host, and what else is known of the rows -> by name, since kinds of
#: layers may differ: cos, sin (B, T, R) on the host, float32.
RotaryTables = Callable[[torch.Tensor, Lengths], Mapping[str, tuple[torch.Tensor, torch.Tensor]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows of one forward call as tensors on one device; B rows, T tokens each.

    Attributes:
        lengths: the same on the host.
        past_lens: int32 (B,).
        rotary: by name of the kind of layer, rotary factors cos, sin (B, T, R) in the model's
            dtype.
        write_index: for a ragged batch, int64 ``(row, token, position)`` of every real token.
        last_index: for a ragged batch, int64 (B,), each row's last real token.
    """

    lengths: Lengths
    past_lens: torch.Tensor
    rotary: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    write_index: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    last_index: torch.Tensor | None

    @classmethod
    def on(
        cls, device: torch.device, lengths: Lengths, rotary: RotaryTables, dtype: torch.dtype
    ) -> Batch:
        """Build the tensors on the host and send them to the device."""
        # Cut from two elements: on a constant of one, FakeTensorMode works for real.
        past = torch.tensor((0, *lengths.past), dtype=torch.int32)[1:]
        positions = past.unsqueeze(-1) + torch.arange(lengths.chunk, dtype=torch.int32)
        tables = rotary(positions, lengths)
        write_index = last_index = None
        if lengths.ragged:
            write_index = tuple(_real_tokens(lengths).to(device).unbind())
            last_index = torch.tensor([max(new - 1, 0) for new in lengths.new]).to(device)
        return cls(
            lengths=lengths,
            past_lens=past.to(device),
            rotary={
                name: (cos.to(dtype).to(device), sin.to(dtype).to(device))
                for name, (cos, sin) in tables.items()
            },
            write_index=write_index,
            last_index=last_index,
        )

    def last_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Each row's last real token: x (B, T, N) -> (B, 1, N)."""
        if self.last_index is None:
            return x[:, -1:]
        rows = torch.arange(x.shape[0], device=x.device)
        return x[rows, self.last_index].unsqueeze(1)


def _real_tokens(lengths: Lengths) -> torch.Tensor:
    """``(row, token, position)`` of every token that isn't padding: int64 (3, N)."""
    columns = [
        torch.stack((torch.full((new,), row), torch.arange(new), torch.arange(past, past + new)))
        for row, (past, new) in enumerate(zip(lengths.past, lengths.new, strict=True))
    ]
    return torch.cat(columns, dim=1)
