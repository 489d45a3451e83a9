"""Token spans: the unit in which one arrangement reads tokens and another stores them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exkv.ops.kv_quant import GROUP


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """``count`` consecutive positions of each row, on the host.

    Attributes:
        first: first position of each row; a multiple of :data:`GROUP`, counted from after the
            sinks.
        oldest, lens: each row stores the positions ``oldest`` to ``lens - 1``; those within the
            span are meant.
        of_sinks: whether the positions are sinks.
    """

    first: tuple[int, ...]
    count: int
    oldest: tuple[int, ...]
    lens: tuple[int, ...]
    of_sinks: bool = False

    def positions(self) -> Tensor:
        """int64 (B, count)."""
        return torch.tensor(self.first).unsqueeze(-1) + torch.arange(self.count)

    def ends(self) -> Tensor:
        """int64 (B, 1)."""
        return torch.tensor(self.lens).unsqueeze(-1)

    def are_stored(self) -> Tensor:
        """bool (B, count)."""
        at = self.positions()
        return (at >= torch.tensor(self.oldest).unsqueeze(-1)) & (at < self.ends())

    def nearest_stored(self) -> Tensor:
        """Nearest stored position to each position; 0 if the row stores none."""
        at = self.positions().maximum(torch.tensor(self.oldest).unsqueeze(-1))
        return at.minimum(self.ends() - 1).clamp(min=0)

    def counted_from(self, first: int) -> TokenSpan:
        """The span with positions counted from ``first``."""

        def moved(positions: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(position - first for position in positions)

        return replace(
            self, first=moved(self.first), oldest=moved(self.oldest), lens=moved(self.lens)
        )


def token_spans(*, sinks: int, window: int, lens: Sequence[int], step: int) -> Iterator[TokenSpan]:
    """Spans over all stored tokens of rows of ``lens`` tokens.

    Args:
        sinks: how many first tokens are kept.
        window: how many of the last others; 0 for all.
        step: most tokens of a row in a span, a multiple of :data:`GROUP`.
    """
    none = (0,) * len(lens)
    if sinks and any(lens):
        first = tuple(min(length, sinks) for length in lens)
        yield TokenSpan(first=none, count=max(first), oldest=none, lens=first, of_sinks=True)
    others = [max(length - sinks, 0) for length in lens]
    oldest = [max(length - window, 0) if window else 0 for length in others]
    aligned = [position // GROUP * GROUP for position in oldest]
    longest = max(end - begin for begin, end in zip(aligned, others, strict=True))
    for start in range(0, longest, step):
        yield TokenSpan(
            first=tuple(position + start for position in aligned),
            count=min(step, longest - start),
            oldest=tuple(oldest),
            lens=tuple(others),
        ).counted_from(-sinks)


def put_at(
    stored: Mapping[str, Tensor], values: Mapping[str, Tensor], places: Tensor, which: Tensor
) -> None:
    """Write selected values (B, N, ...) to these places of their rows, on any device.

    Args:
        places: int64 (B, N), on the host.
        which: bool (B, N), on the host: the values to write.
    """
    start, count = int(places[0, 0]), places.shape[1]
    if which.all() and torch.equal(places, torch.arange(start, start + count).expand_as(places)):
        for name, value in values.items():  # contiguous: no index is copied to the device
            stored[name][:, start : start + count] = value.to(stored[name].device)
        return
    row, column = which.nonzero().unbind(1)
    place = places[row, column]
    for name, value in values.items():
        device = stored[name].device
        stored[name][row.to(device), place.to(device)] = value[row, column].to(device)
