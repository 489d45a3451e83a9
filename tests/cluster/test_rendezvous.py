"""Which hosts are admitted, where a cluster listens, and what messages may carry."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from cluster_hosts import use
from simproc import run_sim

from exkv import Cache8bit, sim
from exkv.cache import Dynamic, Storage
from exkv.cluster import Cluster, ClusterError, rendezvous
from exkv.cluster.errors import WireError
from exkv.cluster.rendezvous import (
    Admission,
    asking,
    connect_store,
    join,
    listen,
    own_build,
    parse_address,
    serve_store,
    while_alive,
)
from exkv.cluster.values import dumps, loads
from exkv.cluster.wire import form_group
from exkv.planning import Budget, Plan

DEMO = Path(__file__).parents[2] / "examples" / "demo-model"


@pytest.fixture
def listening():
    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    return serve_store(listening), port


def test_only_hosts_that_know_the_secret_are_admitted(listening):
    store, port = listening
    admission, said = Admission(store, "open sesame"), []

    def come(name: str, secret: str) -> None:
        try:
            join(connect_store("127.0.0.1", port), name, secret)
            said.append(f"{name} is in")
        except ClusterError as error:
            said.append(str(error))

    def all_come() -> None:
        for name, secret in (("a", "sesame"), ("driver", "open sesame"), ("b", "open sesame")):
            come(name, secret)
        come("b", "open sesame")
        come("c", "open sesame")

    thread = threading.Thread(target=all_come)
    thread.start()
    assert admission.admit(2, timeout=30) == ["b", "c"]
    thread.join()
    assert "differs" in said[0] and "already" in said[1] and "already" in said[3]
    assert [said[2], said[4]] == ["b is in", "c is in"]
    with pytest.raises(ClusterError, match="1 hosts were expected to .* 0.1 s; joined: none"):
        admission.admit(1, timeout=0.1)


@pytest.mark.parametrize(
    "text", ["not json", "[1]", '{"name": "x"}', '{"name": 1, "nonce": "a", "proof": "b"}', "\xff"]
)
def test_malformed_request_keeps_no_host_out(listening, text):
    store, port = listening
    admission = Admission(store, "x")
    store.set(f"join/{store.add('joined', 1)}", text)
    store.add("joined", 1)  # a host that died before its request
    assert admission.waiting() == [] and asking(store) == {}
    joined = []
    ask = lambda: joined.append(join(connect_store("127.0.0.1", port), "a", "x"))  # noqa: E731
    thread = threading.Thread(target=ask)
    thread.start()
    assert admission.admit(1, timeout=30) == ["a"]
    thread.join()
    assert joined == [0] and b"can't be read" in store.get("welcome/1")


def test_malformed_request_does_not_end_the_wait_for_returning_hosts(listening):
    store, _ = listening
    admission = Admission(store, "x")
    store.set(f"join/{store.add('joined', 1)}", "[1]")
    assert admission.admit_waiting(["a"], epoch=3) == []
    assert admission.admit_waiting(["a"], epoch=3) == []


@pytest.mark.parametrize(
    ("what", "refused"), [("exkv", True), ("torch", False), ("kernels", False)]
)
def test_hosts_with_other_versions_are_refused_or_warned_of(
    listening, monkeypatch, caplog, what, refused
):
    store, port = listening
    admission, own, said = Admission(store, "x"), own_build(), []

    def come() -> None:
        try:
            join(connect_store("127.0.0.1", port), "a", "x")
            said.append("in")
        except ClusterError as error:
            said.append(str(error))

    builds = iter([own | {what: "0.9"}, own])  # the host's, then the driver's
    monkeypatch.setattr("exkv.cluster.rendezvous.own_build", lambda: next(builds))
    thread = threading.Thread(target=come)
    thread.start()
    if refused:
        with pytest.raises(ClusterError, match="joined: none"):
            admission.admit(1, timeout=2)
    else:
        assert admission.admit(1, timeout=30) == ["a"]
    thread.join()
    if refused:
        assert f"it runs exkv 0.9, and the driver {own['exkv']}" in said[0]
    else:
        assert said == ["in"] and f"host a has {what} 0.9" in caplog.text


def test_torchrun_over_several_machines_asks_for_a_secret(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.delenv("EXKV_CLUSTER_SECRET", raising=False)
    with pytest.raises(ValueError, match="set EXKV_CLUSTER_SECRET to the same secret"):
        Cluster.from_torchrun()


def test_host_refuses_a_driver_without_the_secret(listening):
    store, port = listening
    Admission(store, "x")
    store.set("welcome/1", '{"proof": "made up"}')
    with pytest.raises(ClusterError, match="it is not the driver"):
        join(connect_store("127.0.0.1", port), "a", "x")


def test_store_listens_on_its_own_address_only(listening):
    _, port = listening
    with socket.socket() as other:
        other.bind(("127.0.0.2", port))  # would be taken by one on all interfaces
    for text in ("0.0.0.0:29500", "[::]:29500", "*:1"):
        with pytest.raises(ValueError, match="one interface"):
            parse_address(text)
    for text in ("here", "here:", ":1", "a:b", "a:70000"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            parse_address(text)
    with pytest.raises(ValueError, match="EXKV_CLUSTER_SECRET"):
        Cluster.listen("192.0.2.1:29500", hosts=1, secret="")


def test_messages_carry_plain_values_only():
    spec = Cache8bit.compose
    budget = Budget(device=torch.device("cuda", 1), capacity=5, host="b")
    plan = Plan(objective="pack", order="any", units=(), ledgers=())
    values = [1, None, "text", budget, plan, Storage(keys="int8", values="int4"), Dynamic(64)]
    assert loads(dumps(values)) == tuple(values)
    assert loads(dumps({"a": torch.tensor([1, 2])})) == {"a": (1, 2)}
    for strange in (object(), spec, {1, 2}):
        with pytest.raises(TypeError, match="can't be sent"):
            dumps(strange)
    for text in (b'{"!": "Popen", "args": "x"}', b'{"!": "Dynamic", "nothing": 1}', b"\xff", b"["):
        with pytest.raises(ValueError):
            loads(text)


def launched(size: int) -> bool:
    """Start processes as torchrun does, rank 0 last; whether all succeed."""
    port = listen("127.0.0.1", 0)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.getsockname()[1])}
    os.environ |= {"WORLD_SIZE": str(size)}
    port.close()
    children = []
    for rank in range(1, size):
        if not (pid := os.fork()):
            status = 1
            try:
                os.environ["RANK"] = str(rank)
                use("16M")
                Cluster.from_torchrun()
            except SystemExit as end:
                status = end.code
            finally:
                os._exit(status)
        children.append(pid)
    os.environ["RANK"] = "0"
    use("16M")
    with Cluster.from_torchrun(timeout=20) as cluster:
        offers = [host[0].capacity for host in cluster.ask("offer")]
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    return offers == [16 << 20] * (size - 1) and ended == [0] * (size - 1)


def test_torchrun_processes_form_a_cluster():
    assert run_sim(launched, "", args=[3])
    with pytest.raises(ValueError, match="torchrun"):
        Cluster.from_torchrun()


def test_command_line_runs_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "exkv", "chat", str(DEMO), "--cluster", "torchrun"]
    done = subprocess.run(
        [*command, "--temperature", "0"],
        env={**os.environ, "EXKV_SIM_DEVICES": "1500K"},  # holds half of the model
        input="The key is in the kitchen. Where is the key?\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "The key is in the kitchen." in done.stdout


def test_simulated_hosts_need_a_driver_with_simulated_devices(monkeypatch):
    monkeypatch.setattr(sim, "enabled", lambda: False)
    cluster = object.__new__(Cluster)
    cluster._simulated = True
    with pytest.raises(ValueError, match="EXKV_SIM_DEVICES=16M"):
        cluster.offers([])


@pytest.mark.parametrize("notices", ["the driver", "a host"])
def test_connecting_does_not_wait_for_a_host_that_dies(listening, monkeypatch, notices):
    """The wire's own time-out is longer than the test may take."""
    monkeypatch.setattr(rendezvous, "_PATIENCE", 0.3)
    store, _ = listening
    died = (lambda name: True) if notices == "the driver" else (lambda name: False)
    with pytest.raises(WireError, match="b died while the hosts connected"):
        form_group(store, 1, ["driver", "b"], "driver", "127.0.0.1", 600.0, died)
    assert store.add("beat/b", 1) == 1  # and the store answers


def test_errors_while_hosts_connect_are_raised_unchanged(listening):
    def fails():
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        while_alive(listening[0], [], lambda name: False, fails)


def test_program_exit_waits_for_a_heartbeat_in_progress():
    """The process aborts if the interpreter ends while a thread is in native code."""
    program = (
        "import threading, time\n"
        "from exkv.cluster.rendezvous import beat\n"
        "begun = threading.Event()\n"
        "class Store:\n"
        "    def add(self, key, by):\n"
        "        begun.set(); time.sleep(0.5); print(key, flush=True)\n"
        "beat(Store, 'me')\n"
        "begun.wait()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "beat/me\n"), done.stderr
