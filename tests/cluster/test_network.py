"""Hosts in network namespaces behind slow and lossy links, one of which goes down for a while."""

from __future__ import annotations

import threading

import netns
import pytest
from cluster_hosts import PROMPT, STEPS, Decoding, alone, cluster_of, decoded
from simproc import run_sim
from tiny import llama, reference, save

from exkv import Cache
from exkv.cluster import ClusterModel


def across(folder: str) -> dict[str, object]:
    expected = decoded(alone(folder))[0]
    link = netns.Link(delay=0.002, loss=0.01)
    with netns.network(link, link) as network:
        cluster = cluster_of("24M", "24M", "24M", timeout=30.0, network=network)
        model = ClusterModel(folder, cluster, max_input_len=16)
        cache = Cache(model, 64, 1)
        model.load_autosplit(cache, objective="balance")
        result = {"spread": sorted(set(model.host_map.values())) == ["driver", "host1", "host2"]}
        decoding = Decoding(model, cache, PROMPT)
        decoding.go(3)
        network.cut(2)
        threading.Timer(1.0, network.mend, [2]).start()
        decoding.go(STEPS - 3)
        result["same"] = decoding.is_like(expected)
        result["nobody is gone"] = cluster.gone == []
        cluster.close()
    return result


def test_tokens_are_the_same_over_slow_lossy_and_broken_links(tmp_path):
    if why := netns.why_not():
        pytest.skip(why)
    model = reference(llama(num_hidden_layers=6, hidden_size=64, intermediate_size=96))
    found = run_sim(across, "", args=[str(save(model, tmp_path))])
    assert found == dict.fromkeys(found, True)
