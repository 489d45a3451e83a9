"""Fixtures and settings that all tests share."""

import gc
import os

import pytest
from native import BACKENDS, ops_of

# Tests that run many small processes share two cores with each other.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

try:
    from hypothesis import settings
except ImportError:  # on a borrowed machine (tests/gpu/check.sh) the files without it still run
    pass
else:
    # A slow example on a busy machine is no failure.
    settings.register_profile("exkv", deadline=None)
    settings.load_profile("exkv")


def pytest_collection_finish():
    """What was imported stays, a million objects: no collection needs to look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=BACKENDS)
def ops(request):
    """Every backend's ops; on the CPU the references, where kernels aren't built."""
    return ops_of(request.param, compiled=False)


@pytest.fixture(params=BACKENDS)
def kernels(request):
    """The ops of those backends that are compiled."""
    return ops_of(request.param)
