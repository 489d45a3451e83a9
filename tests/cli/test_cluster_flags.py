"""``--cluster`` and ``--hosts``: what is refused before anybody is waited for."""

from __future__ import annotations

import argparse
import socket
from types import SimpleNamespace

import pytest

from exkv.cli import hosts, main


def refusal(capsys, *flags: str) -> str:
    assert main(["serve", "examples/demo-model", *flags]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") <= 4
    return said


@pytest.fixture(autouse=True)
def _no_secret(monkeypatch):
    monkeypatch.delenv("EXKV_CLUSTER_SECRET", raising=False)
    hosts._cluster.cache_clear()
    yield
    hosts._cluster.cache_clear()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--cluster", "127.0.0.1:1"], "give both"),
        (["--hosts", "b"], "give both"),
        (["--cluster", "local", "--hosts", "b", "b=3M"], "a host is listed twice"),
        (["--cluster", "local", "--hosts", "b/c"], "'b/c' is no name"),
        (["--cluster", "here", "--hosts", "b"], "give HOST:PORT"),
        (["--cluster", "0.0.0.0:29500", "--hosts", "b"], "listens on one interface"),
        (["--cluster", "192.0.2.1:29500", "--hosts", "b"], "set EXKV_CLUSTER_SECRET"),
        (["--cluster", "127.0.0.1:29500", "--hosts", "b=3X"], "3X"),
        (["--cluster", "torchrun"], "MASTER_ADDR not set: start this process with torchrun"),
    ],
)
def test_what_makes_no_sense_is_refused_before_hosts_are_waited_for(capsys, flags, said):
    assert said in refusal(capsys, *flags)


def test_without_ray_the_way_to_it_is_said(capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    assert "exkv[ray]" in refusal(capsys, "--cluster", "ray")


def test_an_address_that_is_in_use_is_named(capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        assert "Address already in use" in refusal(capsys, "--cluster", address, "--hosts", "b")


def test_hosts_that_are_not_those_that_joined_are_named(monkeypatch):
    came = SimpleNamespace(names=["driver", "c"], close=lambda: None)
    monkeypatch.setattr(hosts, "_gathered", lambda address, named: came)
    args = argparse.Namespace(cluster="127.0.0.1:1", hosts=["b"])
    with pytest.raises(ValueError, match="--hosts names b, and these have joined: c"):
        hosts.model_kind(args)
