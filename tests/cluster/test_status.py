"""The status of a cluster's hosts, queried from outside."""

from __future__ import annotations

import threading

import pytest

from exkv.cli import main
from exkv.cluster import status
from exkv.cluster.errors import ClusterError
from exkv.cluster.rendezvous import (
    Admission,
    asking,
    beat,
    connect_store,
    join,
    listen,
    serve_store,
    set_group,
)
from exkv.cluster.status import announce, cluster_status, own_devices


def test_status_lists_present_silent_and_waiting_hosts(capsys, monkeypatch):
    assert "free" in own_devices()[0]
    monkeypatch.setattr(status, "own_devices", lambda: ("cuda:0: 1.00 GiB of 2.00 GiB free",))
    free = status.own_devices()
    listening = listen("127.0.0.1", 0)
    address = "{}:{}".format(*listening.getsockname())
    store = serve_store(listening)

    def connect():
        return connect_store("127.0.0.1", int(address.rpartition(":")[2]))

    admission = Admission(store, "")
    assert cluster_status(address) == []  # no host has joined yet
    for name in ("driver", "b", "late"):
        announce(store, name)
    set_group(store, 0, ["driver", "b", "silent"])
    beat(connect, "b")
    late = threading.Thread(target=join, args=(connect(), "late", ""), daemon=True)
    late.start()
    while not asking(store):
        pass
    statuses = {each.name: (each.state, each.devices) for each in cluster_status(address)}
    assert statuses == {
        "driver": ("there", free),
        "b": ("there", free),
        "silent": ("sends no heartbeat", ()),
        "late": ("waits for the next plan", free),
    }
    assert main(["cluster", "status", address]) == 0
    shown = capsys.readouterr().out
    assert f"b: there\n  {free[0]}\nsilent: sends no heartbeat\nlate: waits" in shown
    assert admission.admit(1, timeout=30) == ["late"]
    late.join()
    assert [each.name for each in cluster_status(address)] == ["driver", "b", "silent"]


def test_status_without_a_driver_is_an_error(monkeypatch):
    with pytest.raises(ValueError, match="HOST:PORT"):
        cluster_status("nowhere")
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ClusterError, match=f"no driver answers at 127.0.0.1:{port}"):
        cluster_status(f"127.0.0.1:{port}", patience=1)
