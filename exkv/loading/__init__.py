"""Carries out a plan: ``loader`` stages unit by unit and rolls back, ``plan_checks`` checks devices
before and after, and ``route`` replans behind a full device; ``options`` are the load's settings,
``report`` compares measured with predicted bytes."""

from .loader import load_units
from .report import DeviceReport, LoadReport

__all__ = ["DeviceReport", "LoadReport", "load_units"]
