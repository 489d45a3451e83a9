"""Where every layer goes, in bytes, before a weight is read.

``plan`` has the values; ``scenario`` says what is to be placed where, ``workspace`` what a forward
call takes beside it, ``budgets`` what devices offer. ``placement`` is the arithmetic that puts
them together, with ``partition`` for the best split, ``solve`` searches for what would fit, and
``place`` is what users call.
"""

from .budgets import make_budgets, with_measured_bandwidths
from .plan import Budget, Ledger, Link, Place, Plan, UnitCost
from .scenario import Scenario, Workload
from .workspace import CacheShape

__all__ = [
    "Budget",
    "CacheShape",
    "Ledger",
    "Link",
    "Place",
    "Plan",
    "Scenario",
    "UnitCost",
    "Workload",
    "make_budgets",
    "with_measured_bandwidths",
]
