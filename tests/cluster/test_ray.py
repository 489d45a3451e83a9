"""Hosts that Ray starts, and restarts when one is killed; needs the extra ``ray``."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest
from cluster_hosts import PROMPT, STEPS, Decoding, alone, decoded, use, wait_for
from simproc import run_sim
from tiny import llama, reference, save

from exkv import Cache
from exkv.cluster import Cluster, ClusterModel

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="hosts on Ray need the package ray (80 MB): `make ray` installs it and runs this",
)


def on_ray(folder: str) -> dict[str, object]:
    expected = decoded(alone(folder))[0]
    cluster = Cluster.connect(devices=["24M", "24M"], timeout=5.0)
    use("24M")
    model = ClusterModel(folder, cluster, max_input_len=16)
    cache = Cache(model, 64, 1)
    model.load_autosplit(cache, objective="balance")
    result = {"spread": sorted(set(model.host_map.values())) == ["driver", "host1", "host2"]}
    decoding = Decoding(model, cache, PROMPT)
    decoding.go(3)
    ray = cluster.launcher._ray
    pid = ray.get(cluster.launcher._actors["host1"].pid.remote())
    os.kill(pid, signal.SIGKILL)
    decoding.go(3)
    result["gone"] = cluster.gone == ["host1"] and "host1" not in model.host_map.values()
    wait_for(model, "host1")  # Ray has restarted it
    result["back"] = model.replan() == ["host1"] and "host1" in model.host_map.values()
    decoding.go(STEPS - 6)
    result["same"] = decoding.is_like(expected)
    cluster.close()
    result["ended"] = not ray.is_initialized()
    return result


@needs_ray
def test_ray_starts_a_host_and_restarts_it_when_killed(tmp_path):
    model = reference(llama(num_hidden_layers=6, hidden_size=64, intermediate_size=96))
    found = run_sim(on_ray, "", args=[str(save(model, tmp_path))])
    assert found == dict.fromkeys(found, True)


def test_error_without_ray_names_the_extra_and_the_alternative(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ImportError, match=r"exkv\[ray\].*exkv cluster up"):
        Cluster.connect()
