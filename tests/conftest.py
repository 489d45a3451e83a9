"""Fixtures and settings that all tests share."""

import os

# Tests that run many small processes share two cores with each other.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
