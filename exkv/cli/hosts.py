"""The hosts of ``--cluster`` and ``--hosts``."""

from __future__ import annotations

import argparse
import atexit
import functools
from collections.abc import Callable, Sequence
from functools import partial

from exkv.cluster import Cluster, ClusterError, ClusterModel
from exkv.model import Model
from exkv.planning.named_hosts import checked_name
from exkv.sizes import parse_sizes

#: Values of ``--cluster`` besides an address.
LOCAL, TORCHRUN, RAY = "local", "torchrun", "ray"


def model_kind(args: argparse.Namespace) -> Callable[..., Model]:
    """The constructor of a model on this machine, or over the hosts of the flags, which join during
    this call and are released when the process ends.

    Raises:
        ValueError: one flag without the other, or hosts joined that weren't named.
        OSError: the address is in use, or not this machine's.
        SystemExit: torchrun started this process as a host, and the driver has ended.
    """
    named = bool(args.hosts) or args.cluster == TORCHRUN or _is_ray(args.cluster)
    if bool(args.cluster) != named:
        raise ValueError("--cluster says where hosts join, --hosts says which: give both")
    if not args.cluster:
        return Model
    return partial(ClusterModel, cluster=_cluster(args.cluster, tuple(args.hosts or ())))


@functools.cache
def _cluster(address: str, pieces: tuple[str, ...]) -> Cluster:
    """One cluster for all models of this process."""
    hosts = _hosts(pieces)
    try:
        cluster = _gather(address, hosts)
    except (ClusterError, ImportError) as error:
        raise ValueError(error) from None
    atexit.register(cluster.close)
    if hosts and sorted(cluster.names[1:]) != sorted(hosts):
        joined = ", ".join(cluster.names[1:])
        raise ValueError(f"--hosts names {', '.join(hosts)}, but these joined: {joined}")
    return cluster


def _hosts(pieces: Sequence[str]) -> dict[str, str]:
    """Host -> its device sizes as text, "" for no limits."""
    pairs = [piece.partition("=")[::2] for piece in pieces]
    hosts = {checked_name(name): sizes for name, sizes in pairs}
    if len(hosts) < len(pairs):
        raise ValueError(f"--hosts {' '.join(pieces)}: a host is listed twice")
    return hosts


def _gather(address: str, hosts: dict[str, str]) -> Cluster:
    if address == LOCAL:
        return Cluster.local(list(hosts.values()), names=list(hosts))
    caps = {name: parse_sizes(sizes) for name, sizes in hosts.items() if sizes}
    if address == TORCHRUN:
        return Cluster.from_torchrun(caps=caps)
    if _is_ray(address):
        return Cluster.connect(None if address == RAY else address, caps=caps)
    return Cluster.listen(address, hosts=len(hosts), caps=caps)


def _is_ray(address: str | None) -> bool:
    return address is not None and (address == RAY or address.startswith(f"{RAY}://"))
