"""What goes wrong between hosts."""

from __future__ import annotations

import torch


class WireError(RuntimeError):
    """A message did not come or could not be sent: a host is gone, stopped or unreachable, or has
    let go of the group since something failed there."""


class ClusterError(RuntimeError):
    """The hosts that are left can't go on. Nothing is loaded on them any more; the message names
    the hosts that are gone, and says what was missing."""


def raise_failures(failed: dict[str, str]) -> None:
    """One error for what failed on hosts, by name; none where nothing did."""
    if not failed:
        return
    kind = "out of memory: "
    text = "; ".join(f"{name}: {reason.removeprefix(kind)}" for name, reason in failed.items())
    if any(reason.startswith(kind) for reason in failed.values()):
        raise torch.OutOfMemoryError(text)
    raise ClusterError(text)


class LeftOut(ClusterError):
    """The others took this host for dead and went on without it."""
