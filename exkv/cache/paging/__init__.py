"""Paged caches: ``growth`` is the property that a layer has, ``pool`` says which pages hold which
tokens, ``host_tiers`` and ``swap`` are copies of pages in host memory."""
