"""The search for a plan: ``placement`` is the way in, ``choose`` the one for units with options."""
