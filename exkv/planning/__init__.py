"""Place every layer, counting bytes, before a weight is read.

``plan`` has the values; ``scenario`` states what to place where, ``workspace`` what a forward call
needs beside it, ``budgets`` what devices offer. ``search.placement`` is the arithmetic that puts
them together, ``search.ranges`` finds the best split, ``solve`` searches for what would fit, and
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
