"""Hosts of a generation are killed, stopped and cut off, and drivers killed, at random steps: do
tokens stay the same, and how long does it take to go on? ``python -m tests.bench cluster-kills``.

A tiny random model in float32 lies on this process and three more, each with simulated devices of
its own. Each generation decodes token by token. Pulled cables take network namespaces
(``tests/netns.py``): root on Linux; elsewhere those lines are left out, and why is printed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import netns
import torch
from cluster_hosts import Decoding

from exkv import Cache, Model, sim
from exkv.cluster import Cluster, ClusterError, ClusterModel
from exkv.cluster.launchers import Processes
from exkv.cluster.rendezvous import listen

from .harness import apart, markdown, setting, show, spread
from .shapes import Shape, write_checkpoint

SHAPE = Shape(vocab=512, hidden=128, intermediate=256, layers=8, heads=4, kv_heads=2)
PROMPT = torch.arange(3, 27)[None]
_MEMORY, _STEPS, _CUT = "24M", 24, 10.0
#: A recovered cache is computed in chunks of so many tokens, whose bits are those of single ones.
_CHUNK = 16
#: Seconds after which a step counts as hung.
HUNG = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a generation.

    Attributes:
        what: what was done, and to which host.
        wrong: how many tokens differ from one machine's.
        off: by which logits differ from one machine's at most; they are of the order of 1. Tokens
            that are computed again run in other chunks, whose sums are rounded otherwise.
        hung: it did not go on, or ended with an error.
        paused: seconds of its longest step.
        back: seconds to readmit the host, once it had asked.
    """

    what: str
    host: str
    wrong: int
    off: float
    hung: bool
    paused: float
    back: float | None = None


class Timed(Decoding):
    """A greedy generation, and how long each token took."""

    def __init__(self, model: Model) -> None:
        self.seconds: list[float] = []
        super().__init__(model, Cache(model, PROMPT.numel() + _STEPS + 1, 1), PROMPT)

    def _say(self, ids: torch.Tensor) -> None:
        started = time.monotonic()
        super()._say(ids)
        self.seconds.append(time.monotonic() - started)

    def off(self, other: Decoding) -> float:
        """The largest difference of logits."""
        pairs = zip(self.logits, other.logits, strict=True)
        return max(float((one - two).abs().max()) for one, two in pairs)


def expected(folder: Path) -> Timed:
    """The generation on one machine."""
    model = Model(folder, max_input_len=_CHUNK)
    model.load(devices=["cpu"])
    decoding = Timed(model)
    decoding.go(_STEPS)
    return decoding


def struck(
    model: ClusterModel, want: Decoding, what: str, host: str, strike: Callable[[], object]
) -> Outcome:
    """A generation during which something happens at a random step; the host is readmitted."""
    cluster, step = model.cluster, random.randint(0, _STEPS - 2)
    decoding, back = Timed(model), None
    try:
        decoding.go(step)
        strike()
        decoding.go((_STEPS - step) // 2)
        if host not in cluster.names:
            back = _take_in(model, host)
        decoding.go(_STEPS - len(decoding.tokens) + 1)
    except (ClusterError, TimeoutError) as error:
        print(f"{what} {host}: {error}", file=sys.stderr)
        return Outcome(what=what, host=host, wrong=0, off=0.0, hung=True, paused=0.0)
    paused = max(decoding.seconds)
    return Outcome(
        what=what,
        host=host,
        wrong=sum(a != b for a, b in zip(decoding.tokens, want.tokens, strict=True)),
        off=decoding.off(want),
        hung=paused > HUNG,
        paused=paused,
        back=back,
    )


def _take_in(model: ClusterModel, host: str) -> float:
    """Seconds to readmit a host that asks by itself or is started again."""
    model.cluster.restore()
    deadline = time.monotonic() + HUNG
    while host not in model.cluster.waiting:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{host} did not come back within {HUNG:.0f} s")
        time.sleep(0.05)
    started = time.monotonic()
    model.replan()
    return time.monotonic() - started


def signalled(
    model: ClusterModel, want: Decoding, plan: Sequence[tuple[str, int, str]]
) -> Iterator[Outcome]:
    """Generations during which a host's process gets a signal; of each what it is called, its
    number, and the host."""
    for what, number, host in plan:
        launcher = model.cluster.launcher
        assert isinstance(launcher, Processes)
        yield struck(model, want, what, host, partial(_signal, launcher, host, number))


def _signal(launcher: Processes, host: str, number: int) -> None:
    os.kill(launcher.pids[host], number)


@contextlib.contextmanager
def loaded(folder: Path, cluster: Cluster) -> Iterator[ClusterModel]:
    """The model, spread over all hosts of a cluster."""
    with cluster:
        model = ClusterModel(folder, cluster, max_input_len=_CHUNK)
        model.load_autosplit(Cache(model, PROMPT.numel() + _STEPS + 1, 1), objective="balance")
        if set(model.host_map.values()) != set(cluster.names):
            raise AssertionError(f"the model isn't on all hosts: {model.host_map}")
        yield model


# Cut cables ---------------------------------------------------------------------------------


class Apart(Processes):
    """Hosts in network namespaces, which the driver can't end: they may only be out of reach."""

    def end(self, name: str) -> None:
        """Whoever runs it there does."""

    def close(self, told: Sequence[str] = ()) -> None:
        for name in list(self.pids):
            super().end(name)


def cut_off(
    folder: Path, want: Decoding, times: int, timeout: float, link: netns.Link
) -> list[Outcome]:
    """Generations during which each host in turn is cut off for some seconds."""
    what = f"cable pulled for {_CUT:.0f} s, messages may take {timeout:g} s"
    with netns.network(link, link) as network:
        listening = listen(network.driver, 0)
        address, secret = f"{network.driver}:{listening.getsockname()[1]}", "of the bench"

        def start(*told: str) -> int:
            return os.fork() or _live_in(network, *told)

        launcher = Apart(address, {"host1": _MEMORY, "host2": _MEMORY}, secret, start)
        cluster = Cluster._launched(listening, secret, timeout, launcher)
        sim.enable(_MEMORY)
        with loaded(folder, cluster) as model:
            found = []
            for number in range(times):
                one = 1 + number % 2
                mended: list[int] = []

                def strike(one: int = one, mended: list[int] = mended) -> None:
                    network.cut(one)
                    if not (pid := os.fork()):
                        time.sleep(_CUT)
                        network.mend(one)
                        os._exit(0)
                    mended.append(pid)

                found.append(struck(model, want, what, f"host{one}", strike))
                os.waitpid(mended[0], 0)
        return found


def _live_in(network: netns.Network, address: str, name: str, devices: str, secret: str) -> int:
    network.enter(int(name.removeprefix("host")))
    os.environ |= {"EXKV_SIM_DEVICES": devices, "EXKV_CLUSTER_SECRET": secret}
    command = ["-m", "exkv", "cluster", "up", address, "--name", name]
    os.execv(sys.executable, [sys.executable, *command])


# Killed drivers -----------------------------------------------------------------------------


def drive(folder: Path) -> None:
    """Be a driver that says which hosts it has, and generates until it is killed."""
    sim.enable(_MEMORY)
    with loaded(folder, Cluster.local([_MEMORY] * 2, timeout=10.0)) as model:
        launcher = model.cluster.launcher
        assert isinstance(launcher, Processes)
        print(*launcher.pids.values(), flush=True)
        while True:
            Timed(model).go(_STEPS)


def driver_killed(folder: Path) -> Outcome:
    """Seconds until hosts end after their driver is killed in the middle of a generation."""
    command = [sys.executable, "-m", "tests.bench", "cluster-kills", "--drive", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        hosts = list(map(int, driver.stdout.readline().split()))
        time.sleep(random.random())
        driver.kill()
        killed = time.monotonic()
        while (left := list(filter(_lives, hosts))) and time.monotonic() < killed + HUNG:
            time.sleep(0.02)
    ended = time.monotonic() - killed
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return Outcome(
        what="driver killed, until its hosts had ended",
        host="driver",
        wrong=0,
        off=0.0,
        hung=bool(left) or len(hosts) != 2,
        paused=ended,
    )


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# The table ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is done."""

    kills: int = setting(50, "generations with a killed host")
    others: int = setting(5, "of each other kind")
    seed: int = 1
    drive: Path | None = setting(None, "only be a driver that generates until it is killed")


def measure(settings: Settings) -> dict[str, Any]:
    """Every generation's outcome."""
    if settings.drive is not None:
        drive(settings.drive)
    random.seed(settings.seed)
    torch.set_num_threads(1)
    others = settings.others
    plan = [("kill -9", signal.SIGKILL, f"host{1 + n % 3}") for n in range(settings.kills)]
    plan += [("SIGSTOP", signal.SIGSTOP, f"host{1 + n % 3}") for n in range(others)]
    with tempfile.TemporaryDirectory() as top:
        folder = write_checkpoint(Path(top), SHAPE, torch.float32)
        want = expected(folder)
        found = [driver_killed(folder) for _ in range(others)]
        if why := netns.why_not():
            print(f"no cable is pulled: {why}", file=sys.stderr)
        else:
            for timeout in (4.0, 30.0):
                found += _apart(cut_off, folder, want, others, timeout, netns.Link())
        found += _apart(_signalled, folder, want, plan)
    return {"outcomes": [asdict(each) for each in found]}


def _signalled(folder: Path, want: Decoding, plan: Sequence[tuple[str, int, str]]) -> list[Outcome]:
    sim.enable(_MEMORY)
    with loaded(folder, Cluster.local([_MEMORY] * 3, timeout=10.0)) as model:
        return list(signalled(model, want, plan))


def _apart(function: Callable[..., list[Outcome]], *args: object) -> list[Outcome]:
    """A function's result in a process of its own."""
    found = apart(lambda: [asdict(each) for each in function(*args)])
    return [Outcome(**each) for each in found or []]


def report(result: dict[str, Any]) -> list[str]:
    """A line for each kind of event."""
    outcomes, rows = result["outcomes"], []
    for what in dict.fromkeys(each["what"] for each in outcomes):
        them = [each for each in outcomes if each["what"] == what]
        off, hung = max(each["off"] for each in them), sum(each["hung"] for each in them)
        seconds = [[e[key] for e in them if e[key] is not None] for key in ("paused", "back")]
        rows.append(
            [what, len(them), sum(each["wrong"] for each in them), f"{off:.0e}", hung]
            + [show(spread(each), 1) if each else "" for each in seconds]
        )
    headings = ["what happens", "times", "wrong tokens", "logits off by", "hangs", "s to go on"]
    return [markdown([*headings, "s to take it in again"], rows)]


def wrong(result: dict[str, Any]) -> list[str]:
    bad = [each for each in result["outcomes"] if each["wrong"] or each["hung"]]
    return [f"{each['what']}, {each['host']}: hung or wrong" for each in bad]


QUICK = {"kills": 1, "others": 0}
