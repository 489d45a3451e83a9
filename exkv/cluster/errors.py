"""What goes wrong between hosts."""

from __future__ import annotations


class WireError(RuntimeError):
    """A message did not come or could not be sent: a host is gone, stopped or unreachable, or has
    let go of the group since something failed there."""


class ClusterError(RuntimeError):
    """The hosts that are left can't go on. Nothing is loaded on them any more; the message names
    the hosts that are gone, and says what was missing."""


class LeftOut(ClusterError):
    """The others took this host for dead and went on without it."""
