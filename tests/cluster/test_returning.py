"""Hosts that come back, and hosts without a copy of the checkpoint."""

from __future__ import annotations

import os
import signal

import pytest
from cluster_hosts import PROMPT, STEPS, Decoding, alone, cluster_of, decoded, wait_for
from simproc import run_sim
from tiny import llama, reference, save

from exkv import Cache
from exkv.cluster import ClusterModel
from exkv.cluster.errors import WireError
from exkv.cluster.wire import Wire


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = reference(llama(num_hidden_layers=6, hidden_size=64, intermediate_size=96))
    return str(save(model, tmp_path_factory.mktemp("model")))


# Scenarios ----------------------------------------------------------------------------------


def comes_back(folder: str) -> dict[str, object]:
    """A host is killed, restarted and readmitted in the middle of generations with a cache and its
    fork; the driver sends the weights of this host and another one."""
    expected = decoded(alone(folder))
    cluster = cluster_of("24M", "24M", "24M", timeout=5.0, streamed=["host1", "host2"], spares=1)
    model = ClusterModel(folder, cluster, max_input_len=16)
    cache = Cache(model, 64, 1)
    model.load_autosplit(cache, objective="balance")
    places = dict(model.host_map)
    measured = [row for host in model.measured for row in host]
    first = Decoding(model, cache, PROMPT)
    second = Decoding(model, cache.fork(1, 60), PROMPT[:, :3])
    first.go(2)
    os.kill(cluster.launcher.pids["host1"], signal.SIGKILL)
    second.go(3)
    result = {"without": "host1" not in model.host_map.values() and cluster.gone == ["host1"]}
    result["started"] = cluster.restore() == ["host1"]
    wait_for(model, "host1")
    result["taken"] = model.replan() == ["host1"] and cluster.waiting == []
    result["places"] = model.host_map == places
    first.go(STEPS - 2)
    second.go(STEPS - 3)
    result["same"] = first.is_like(expected[0]) and second.is_like(expected[1])
    result["measured"] = all(row["measured"] == row["predicted"] for row in measured)
    model.unload()
    result["clean"] = [list(each.values()) for each in cluster.ask("allocated")] == [[0], [0]]
    cluster.close()
    return result


def keeps_its_share(folder: str, way: str) -> dict[str, object]:
    """A readmitted host gets no more than its share: by a manual split, the driver's caps, or a
    reserve."""
    share = 400 << 10
    cluster = cluster_of("24M", "24M", "24M", timeout=5.0, spares=1)
    cluster._caps = {"host1": [share]} if way == "cap" else {}  # as Cluster.listen(caps=...)
    model = ClusterModel(folder, cluster, max_input_len=16)
    cache = Cache(model, 64, 1)
    if way == "split":
        model.load([1 / 1024, share / 2**30, 16 / 1024])
    else:
        model.load_autosplit(cache, reserve_vram=1 << 20 if way == "reserve" else None)

    def limits() -> dict[str, int]:
        budgets = [ledger.budget for ledger in model._whole.ledgers]
        return {each.host: each.limit for each in budgets if each.device.type != "cpu"}

    before, places = limits(), dict(model.host_map)
    os.kill(cluster.launcher.pids["host1"], signal.SIGKILL)
    model.forward(PROMPT, cache)
    result = {"without": "host1" not in model.host_map.values()}
    cluster.restore()
    wait_for(model, "host1")
    result["taken"] = model.replan() == ["host1"]
    result["limits"] = limits() == before and (way == "reserve" or before["host1"] <= share)
    result["places"] = model.host_map == places
    cluster.close()
    result["closed"] = set(model.host_map.values()) == {"driver"}
    return result


def stops_and_goes_on(folder: str) -> dict[str, object]:
    """A host that counts as dead, and that the driver can't end, asks to join again."""
    expected = decoded(alone(folder))[0]
    cluster = cluster_of(*["24M"] * 2, timeout=1.0)
    model = ClusterModel(folder, cluster, max_input_len=16)
    cache = Cache(model, 64, 1)
    model.load_autosplit(cache, objective="balance")
    pid, cluster.launcher.end = cluster.launcher.pids["host1"], lambda name: None
    decoding = Decoding(model, cache, PROMPT)
    os.kill(pid, signal.SIGSTOP)
    decoding.go(3)
    result = {"without": set(model.host_map.values()) == {"driver"}}
    os.kill(pid, signal.SIGCONT)
    wait_for(model, "host1")
    result["taken"] = model.replan() == ["host1"] and "host1" in model.host_map.values()
    decoding.go(STEPS - 3)
    result["same"] = decoding.is_like(expected)
    cluster.close()
    return result


def dies_while_others_recover(folder: str) -> dict[str, object]:
    """A second host dies while caches are recomputed, or units moved, because of the first."""
    result = {}
    expected = decoded(alone(folder))[0]
    for during in ("_rebuild", "_send_parts"):
        model = ClusterModel(folder, cluster_of(*["24M"] * 4, timeout=30.0), max_input_len=16)
        pids, original = model.cluster.launcher.pids, getattr(model, during)
        cache = Cache(model, 64, 1)
        model.load_autosplit(cache, objective="balance")
        decoding = Decoding(model, cache, PROMPT)
        decoding.go(3)

        def dies(*args, _pids=pids, _original=original):
            if "host2" in _pids:
                os.kill(_pids["host2"], signal.SIGKILL)
            return _original(*args)

        setattr(model, during, dies)
        os.kill(pids["host1"], signal.SIGKILL)
        decoding.go(STEPS - 3)
        result[during] = decoding.is_like(expected)
        result[f"{during} gone"] = sorted(model.cluster.gone) == ["host1", "host2"]
        model.cluster.close()
    return result


def does_not_reach_all(folder: str) -> dict[str, object]:
    """A host can't connect to another one of a new group, which the driver reaches."""
    expected, held = decoded(alone(folder))[0], []
    connect = Wire.__init__

    def half_connected(self, store, rank, size, *args):
        connect(self, store, rank, size, *args)
        if (rank, size) == (2, 3) and not held:
            held.append(self._group)  # the driver's connection stays open
            raise WireError("the hosts did not find each other")

    Wire.__init__ = half_connected
    model = ClusterModel(folder, cluster_of(*["24M"] * 4, timeout=30.0), max_input_len=16)
    cache = Cache(model, 64, 1)
    model.load_autosplit(cache, objective="balance")
    decoding = Decoding(model, cache, PROMPT)
    decoding.go(3)
    os.kill(model.cluster.launcher.pids["host1"], signal.SIGKILL)
    decoding.go(STEPS - 3)
    result = {"same": decoding.is_like(expected), "gone": model.cluster.gone == ["host1"]}
    model.cluster.close()
    return result


# Tests --------------------------------------------------------------------------------------


def test_returning_host_is_readmitted_and_generations_keep_their_tokens(folder):
    found = run_sim(comes_back, "", args=[folder])
    assert found == dict.fromkeys(found, True)


@pytest.mark.parametrize("way", ["split", "cap", "reserve"])
def test_returning_host_gets_no_more_than_its_share(folder, way):
    found = run_sim(keeps_its_share, "", args=[folder, way])
    assert found == dict.fromkeys(found, True)


def test_host_presumed_dead_asks_to_join_again(folder):
    found = run_sim(stops_and_goes_on, "", args=[folder])
    assert found == dict.fromkeys(found, True)


def test_host_that_dies_during_a_recovery_changes_no_token(folder):
    found = run_sim(dies_while_others_recover, "", args=[folder])
    assert found == dict.fromkeys(found, True)


def test_host_that_cannot_reach_all_members_joins_the_next_group(folder):
    found = run_sim(does_not_reach_all, "", args=[folder], timeout=100)
    assert found == dict.fromkeys(found, True)
