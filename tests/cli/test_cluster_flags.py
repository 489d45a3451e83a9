"""``--cluster`` and ``--hosts``: errors that are found before waiting for hosts."""

from __future__ import annotations

import argparse
import socket
from types import SimpleNamespace

import pytest

from exkv.cli import hosts, main


def refusal(capsys, *flags: str) -> str:
    assert main(["serve", "examples/demo-model", *flags]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") <= 4
    return message


@pytest.fixture(autouse=True)
def _no_secret(monkeypatch):
    monkeypatch.delenv("EXKV_CLUSTER_SECRET", raising=False)
    hosts._cluster.cache_clear()
    yield
    hosts._cluster.cache_clear()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--cluster", "127.0.0.1:1"], "give both"),
        (["--hosts", "b"], "give both"),
        (["--cluster", "local", "--hosts", "b", "b=3M"], "a host is listed twice"),
        (["--cluster", "local", "--hosts", "b/c"], "'b/c' is not a name"),
        (["--cluster", "here", "--hosts", "b"], "give HOST:PORT"),
        (["--cluster", "0.0.0.0:29500", "--hosts", "b"], "listens on one interface"),
        (["--cluster", "192.0.2.1:29500", "--hosts", "b"], "set EXKV_CLUSTER_SECRET"),
        (["--cluster", "127.0.0.1:29500", "--hosts", "b=3X"], "3X"),
        (["--cluster", "torchrun"], "MASTER_ADDR not set: start this process with torchrun"),
    ],
)
def test_invalid_flags_are_refused_before_waiting_for_hosts(capsys, flags, reason):
    assert reason in refusal(capsys, *flags)


def test_missing_ray_names_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    assert "exkv[ray]" in refusal(capsys, "--cluster", "ray")


def test_address_in_use_is_reported(capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        assert "Address already in use" in refusal(capsys, "--cluster", address, "--hosts", "b")


def test_other_hosts_than_named_are_reported(monkeypatch):
    joined = SimpleNamespace(names=["driver", "c"], close=lambda: None)
    monkeypatch.setattr(hosts, "_gather", lambda address, named: joined)
    args = argparse.Namespace(cluster="127.0.0.1:1", hosts=["b"])
    with pytest.raises(ValueError, match="--hosts names b, but these joined: c"):
        hosts.model_kind(args)
