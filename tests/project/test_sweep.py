"""Samples of sweeps: how many, and always the same."""

from types import SimpleNamespace

import pytest
import sweep


class Item(SimpleNamespace):
    __hash__ = object.__hash__

    def get_closest_marker(self, name):
        assert name == "sweep"
        return None if self.few is None else SimpleNamespace(args=(self.few,))


ITEMS = [Item(nodeid=f"a.py::test[{case}]", few=3) for case in range(20)]
ITEMS += [Item(nodeid=f"a.py::whole[{case}]", few=None) for case in range(5)]
ITEMS += [Item(nodeid="a.py::later", few=0)]


@pytest.mark.parametrize("all_cases, left", [(False, 18), (True, 0)])
def test_so_many_cases_run_whatever_the_order(monkeypatch, all_cases, left):
    monkeypatch.setattr(sweep, "ALL", all_cases)
    out = sweep.left_out(ITEMS)
    assert len(out) == left and out == sweep.left_out(ITEMS[::-1])
    assert all(item.few is not None for item in out)


def test_a_case_that_is_asked_for_runs(monkeypatch):
    monkeypatch.setattr(sweep, "ALL", False)
    assert sweep.left_out(ITEMS[7:8]) == set()
