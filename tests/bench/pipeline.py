"""What many hosts in a row can give: tokens a second of a model whose units are spread over them.

Arithmetic on what data sheets say, for questions like "do two hosts pay?"; a plan says what fits
where. Each host works on one group of sequences at a time, then hands its hidden states on. With m
groups under way a round of one group takes at least the sum of all times, and each host and each
link at least its own, so that

    rounds a second = min(m / total, 1 / busiest),

which is exact where times don't vary: the least cycle mean of a marked graph (Ramamoorthy and Ho,
IEEE TSE 6(5), 1980; as bounds in Denning and Buzen, Computing Surveys 10(3), 1978). A prompt's
chunks fill and drain the row once, as in GPipe (Huang et al., 2019). A decode step reads weights
and cache once and multiplies each weight by every row (Pope et al., 2022).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from exkv.planning.plan import Link


@dataclass(frozen=True, slots=True)
class Round:
    """One trip of a group of sequences through all hosts and back.

    Attributes:
        total: seconds when nothing else is under way.
        busiest: seconds for which it occupies the busiest host or link.
    """

    total: float
    busiest: float

    @classmethod
    def of(cls, busy: Sequence[float], idle: Sequence[float]) -> Round:
        """Of what each host and link in turn does for a group, and of times in which none does."""
        return cls(total=sum(busy) + sum(idle), busiest=max(busy))

    def per_second(self, groups: int) -> float:
        """Rounds a second of all groups together."""
        return min(groups / self.total, 1 / self.busiest)

    def prefill_seconds(self, chunks: int) -> float:
        """Seconds until the last of a prompt's consecutive chunks is done."""
        return self.total + (chunks - 1) * self.busiest


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A host's card.

    Attributes:
        memory: bytes for weights and caches.
        bandwidth: bytes a second at which it reads them.
        flops: floating point operations a second.
        beside: bytes a second at which it reads the rest from host memory.
    """

    memory: float
    bandwidth: float
    flops: float
    beside: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A model of equal units, and its sequences.

    Attributes:
        units: that can be placed on different hosts.
        weights: bytes.
        parameters: weights, each multiplied and added once a token.
        cache: bytes of a sequence at its full length.
        hidden: bytes of a token's hidden state.
    """

    units: int
    weights: float
    parameters: float
    cache: float
    hidden: float

    def most_rows(self, card: Card, hosts: int) -> int:
        """Sequences whose caches fit beside the weights; 0 if the weights don't fit."""
        largest = -(-self.units // hosts)
        return max(int((card.memory * self.units / largest - self.weights) // self.cache), 0)


def decode_round(work: Work, card: Card, link: Link, hosts: int, rows: int) -> Round:
    """Of a group of so many sequences, a token each, over hosts in a row.

    Raises:
        ValueError: more hosts than units.
    """
    if not 1 <= hosts <= work.units:
        raise ValueError(f"{hosts} hosts for {work.units} units: each needs one at least")
    each, more = divmod(work.units, hosts)
    busy = [_seconds(work, card, each + (host < more), rows) for host in range(hosts)]
    if hosts == 1:
        return Round.of(busy, [])
    sent = rows * work.hidden / link.bandwidth
    # Hidden states from host to host, and the tokens, a few bytes, back to the first.
    return Round.of([*busy, *[sent] * (hosts - 1)], [link.latency] * hosts)


def _seconds(work: Work, card: Card, units: int, rows: int) -> float:
    """Seconds of a decode step on one host: the longer of reading and multiplying."""
    share = units / work.units
    held = share * (work.weights + rows * work.cache)
    over = max(held - card.memory, 0)
    reading = (held - over) / card.bandwidth + over / card.beside
    return max(reading, 2 * share * work.parameters * rows / card.flops)


def one_sequence(work: Work, card: Card, link: Link, hosts: int) -> float:
    """Tokens a second of one sequence over ``hosts`` hosts; hosts beyond the units are idle."""
    return decode_round(work, card, link, min(hosts, work.units), 1).per_second(1)


def many_sequences(work: Work, card: Card, link: Link, hosts: int) -> float:
    """Tokens a second of as many sequences as there is room for: the best over all lengths of the
    row, of which there may be copies, and all numbers of groups."""
    rates = (
        (hosts // row) * rate
        for row in range(1, min(hosts, work.units) + 1)
        for rate in _rates(work, card, link, row)
    )
    return max(rates, default=0.0) or one_sequence(work, card, link, hosts)


def _rates(work: Work, card: Card, link: Link, hosts: int) -> Iterator[float]:
    """Tokens a second of one row of hosts, by the number of groups."""
    most = work.most_rows(card, hosts)
    for groups in sorted({n for n in (1, hosts, 2 * hosts, 4 * hosts) if n <= most}):
        rows = most // groups
        yield rows * decode_round(work, card, link, hosts, rows).per_second(groups)
