"""The search for a plan: ``placement`` is the entry point, and ``choose`` for units with
options."""
