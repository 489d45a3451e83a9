"""Fixtures and settings that all tests share."""

import os

from hypothesis import settings

# Tests that run many small processes share two cores with each other.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A slow example on a busy machine is no failure.
settings.register_profile("exkv", deadline=None)
settings.load_profile("exkv")
