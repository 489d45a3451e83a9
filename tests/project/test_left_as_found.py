"""What an earlier test leaves is not in the way of a later one."""

import gc
from pathlib import Path

import pytest
from on_cpu import on_cpu
from tiny import llama, reference, save

from exkv.planning.budgets import LOADED


@pytest.fixture
def folder(tmp_path):
    return save(reference(llama()), tmp_path)


def test_a_model_left_to_the_garbage_collector_is_gone_when_the_next_test_starts(folder, request):
    path = Path(__file__).parents[1] / "conftest.py"
    conftest = request.config.pluginmanager.get_plugin(str(path))
    held = on_cpu(folder)
    before = len(LOADED)
    conftest.pytest_runtest_setup()
    gc.disable()  # until the end of this test
    left = on_cpu(folder)
    left.itself = left
    del left
    assert len(LOADED) == before + 1
    conftest.pytest_runtest_setup()
    assert len(LOADED) == before and held in LOADED
