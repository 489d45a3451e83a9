"""How often each expert is chosen: counted by routers, read rarely.

``exkv.loading.usage`` gathers it from a text and saves it; ``exkv.models.exchange`` acts on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from weakref import WeakValueDictionary

import torch
from torch import nn

from exkv import epochs
from exkv.devices import CPU
from exkv.layers.mlp import Experts, mixtures


@dataclass(frozen=True, slots=True)
class ExpertUsage:
    """How many of a unit's tokens chose each of its experts.

    Attributes:
        tokens: that passed through the router.
        counts: for each expert.
    """

    tokens: float
    counts: tuple[float, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of tokens that choose each expert."""
        return tuple(count / self.tokens for count in self.counts)

    def shares_with_prior(self, tokens: float) -> tuple[float, ...]:
        """The shares if ``tokens`` more tokens had chosen all experts equally often: an expert that
        few tokens didn't choose may still be chosen."""
        equal = sum(self.counts) / (self.tokens * len(self.counts))
        return tuple((count + tokens * equal) / (self.tokens + tokens) for count in self.counts)

    def after(self, older: ExpertUsage, kept: float) -> ExpertUsage:
        """These counts plus older ones, weighted by ``kept``."""
        pairs = zip(self.counts, older.counts, strict=True)
        counts = tuple(new + kept * old for new, old in pairs)
        return ExpertUsage(self.tokens + kept * older.tokens, counts)


class UsageCounter(AbstractContextManager["UsageCounter"]):
    """Count what modules of units choose until the context is left. Padding counts like tokens.

    The counts lie beside each router, 8 bytes per expert, where a call adds to them; or in host
    memory if some experts do, as calls bring the choice there anyway.

    Args:
        modules: unit name -> its module; those without experts are ignored.
    """

    def __init__(self, modules: Mapping[str, nn.Module] = MappingProxyType({})) -> None:
        #: By unit; unloaded ones disappear by themselves.
        self.experts: WeakValueDictionary[str, Experts] = WeakValueDictionary()
        for name, module in modules.items():
            self.watch(name, module)

    def watch(self, name: str, module: nn.Module) -> None:
        """Count in this module, too, in place of an earlier one with the same name."""
        for experts in mixtures(module):
            outputs = experts.gate.size[0]
            device = CPU if experts.on_host else experts.gate.get_parameter("weight").device
            experts.counts = torch.zeros(outputs, dtype=torch.int64, device=device)
            self.experts[name] = experts
        epochs.advance()  # bound runs don't count

    def __exit__(self, *error: object) -> None:
        for experts in self.experts.values():
            experts.counts = None
        epochs.advance()

    def take(self) -> dict[str, ExpertUsage]:
        """Counts since the last time, for units that got tokens; the host waits for the devices."""
        found = {}
        for name, experts in self.experts.items():
            assert experts.counts is not None, "nobody counts"
            counts = experts.counts.tolist()
            experts.counts.zero_()
            if tokens := sum(counts) / experts.router.top_k:
                found[name] = ExpertUsage(tokens, tuple(map(float, counts[: len(experts.experts)])))
        return found
