"""The version of exkv, in the only place that says it: packaging and ``--version`` read it here."""

from __future__ import annotations

__version__ = "0.1.0"
