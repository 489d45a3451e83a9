"""Carries a plan out: ``loader`` stages unit by unit and rolls back, with ``plan_checks`` before
and after and ``route`` for what goes on elsewhere; ``options`` says how, ``report`` holds what was
measured beside what was predicted."""

from .loader import load_units
from .report import DeviceReport, LoadReport

__all__ = ["DeviceReport", "LoadReport", "load_units"]
