"""Token spans: by which one arrangement hands its tokens to another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from exkv.ops.kv_quant import GROUP


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """``count`` consecutive positions of each row, on the host.

    Attributes:
        first: of each row; a multiple of :data:`GROUP`, counted from behind the sinks.
        oldest, lens: each row stores the positions from ``oldest`` to ``lens - 1``; of these, the
            span has those that lie in it.
        of_sinks: whether these are sinks.
    """

    first: tuple[int, ...]
    count: int
    oldest: tuple[int, ...]
    lens: tuple[int, ...]
    of_sinks: bool = False

    def positions(self) -> torch.Tensor:
        """int64 (B, count)."""
        return torch.tensor(self.first).unsqueeze(-1) + torch.arange(self.count)

    def ends(self) -> torch.Tensor:
        """int64 (B, 1)."""
        return torch.tensor(self.lens).unsqueeze(-1)

    def are_stored(self) -> torch.Tensor:
        """bool (B, count)."""
        at = self.positions()
        return (at >= torch.tensor(self.oldest).unsqueeze(-1)) & (at < self.ends())

    def nearest_stored(self) -> torch.Tensor:
        """For each position, the nearest one that the row stores; 0 where it stores none."""
        at = self.positions().maximum(torch.tensor(self.oldest).unsqueeze(-1))
        return at.minimum(self.ends() - 1).clamp(min=0)

    def counted_from(self, first: int) -> TokenSpan:
        """The same with other numbers for positions."""

        def moved(positions: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(position - first for position in positions)

        return replace(
            self, first=moved(self.first), oldest=moved(self.oldest), lens=moved(self.lens)
        )


def token_spans(*, sinks: int, window: int, lens: Sequence[int], step: int) -> Iterator[TokenSpan]:
    """Spans over all that is kept of rows with so many tokens.

    Args:
        sinks: how many first tokens are kept.
        window: how many of the last others; 0 for all.
        step: tokens of a row in a span at most, a multiple of :data:`GROUP`.
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
    stored: Mapping[str, torch.Tensor],
    values: Mapping[str, torch.Tensor],
    places: torch.Tensor,
    which: torch.Tensor,
) -> None:
    """Write those of the values (B, N, ...) to these places of their rows, on any device.

    Args:
        places: int64 (B, N), on the host.
        which: bool (B, N), the same.
    """
    start, count = int(places[0, 0]), places.shape[1]
    if which.all() and torch.equal(places, torch.arange(start, start + count).expand_as(places)):
        for name, value in values.items():  # one stretch: no index has to go to the device
            stored[name][:, start : start + count] = value.to(stored[name].device)
        return
    row, column = which.nonzero().unbind(1)
    place = places[row, column]
    for name, value in values.items():
        device = stored[name].device
        stored[name][row.to(device), place.to(device)] = value[row, column].to(device)
