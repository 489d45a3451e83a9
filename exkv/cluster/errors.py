"""Errors between hosts."""

from __future__ import annotations

import torch


class WireError(RuntimeError):
    """A message did not arrive or could not be sent: a host is dead, stopped or unreachable, or has
    left the group after a failure."""


class ClusterError(RuntimeError):
    """The remaining hosts can't continue. Nothing is loaded on them any more; the message names the
    hosts that are gone, and what was missing."""


def raise_failures(failed: dict[str, str]) -> None:
    """Raise one error for the failures on hosts, given by name; do nothing if there are none."""
    if not failed:
        return
    kind = "out of memory: "
    text = "; ".join(f"{name}: {reason.removeprefix(kind)}" for name, reason in failed.items())
    if any(reason.startswith(kind) for reason in failed.values()):
        raise torch.OutOfMemoryError(text)
    raise ClusterError(text)


class LeftOut(ClusterError):
    """The group presumed this host dead and went on without it."""
