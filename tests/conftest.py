"""Fixtures and settings that all tests share."""

import contextlib
import gc
import os
import random
import sys
import weakref
from zlib import crc32

import pytest
import sweep
import torch
from native import BACKENDS, ops_of

from exkv.planning.budgets import LOADED

# Tests that run many small processes share two cores with each other.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# On a borrowed machine (tests/gpu/check.sh) the files without hypothesis still run.
with contextlib.suppress(ImportError):
    import chance  # noqa: F401


def pytest_configure():
    if sys.version_info < (3, 11):
        raise pytest.UsageError(
            "exkv runs on Python 3.10, but its tests need 3.11: transformers does"
        )


def pytest_collection_finish():
    """What was imported stays, a million objects: no collection needs to look at it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if out := sweep.left_out(items):
        config.hook.pytest_deselected(items=list(out))
        items[:] = [item for item in items if item not in out]


# Left as found ------------------------------------------------------------------------------------


def _seed(name: str) -> None:
    """What a test draws depends on its name alone: which worker runs it, and after which others,
    is another each time."""
    torch.default_generator.manual_seed(crc32(name.encode()))
    random.seed(name)


#: Loaded models that were still held after the last collection, by fixtures of a whole file.
_held = weakref.WeakSet()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """No plan counts a model that an earlier test left to the garbage collector."""
    if any(model not in _held for model in LOADED):
        gc.collect()
        _held.update(LOADED)


def pytest_fixture_post_finalizer(fixturedef):
    if fixturedef.scope != "function":
        _held.clear()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef):
    _seed(f"{fixturedef.baseid}::{fixturedef.argname}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    _seed(item.nodeid)


def pytest_runtest_teardown():
    """Commands that are over in a second switch the garbage collector off: not for all others."""
    gc.enable()


# Backends -----------------------------------------------------------------------------------------


@pytest.fixture(params=BACKENDS)
def ops(request):
    """Every backend's ops; on the CPU the references, where kernels aren't built."""
    return ops_of(request.param, compiled=False)


@pytest.fixture(params=BACKENDS)
def kernels(request):
    """The ops of those backends that are compiled."""
    return ops_of(request.param)
