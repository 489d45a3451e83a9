"""The hosts that ``--cluster`` and ``--hosts`` gather."""

from __future__ import annotations

import argparse
import atexit
from collections.abc import Callable
from functools import partial

from exkv.cluster import Cluster, ClusterError, ClusterModel
from exkv.model import Model
from exkv.planning.hosts import checked_name
from exkv.sizes import parse_sizes


def model_kind(args: argparse.Namespace) -> Callable[..., Model]:
    """What makes the model that the flags ask for: on this machine, or over the hosts that have
    joined by the end of this call; they are let go when the process ends.

    Raises:
        ValueError: one flag without the other, or hosts that are not those that joined.
        OSError: the address is in use, or not this machine's.
    """
    if bool(args.cluster) != bool(args.hosts):
        raise ValueError("--cluster says where hosts join, and --hosts which: give both")
    if not args.cluster:
        return Model
    if getattr(args, "draft", None):
        raise ValueError("--draft is for a model on one machine: leave it out, or --cluster")
    hosts = _hosts(args.hosts)
    try:
        cluster = _gathered(args.cluster, hosts)
    except ClusterError as error:
        raise ValueError(error) from None
    atexit.register(cluster.close)
    if sorted(cluster.names[1:]) != sorted(hosts):
        came = ", ".join(cluster.names[1:])
        raise ValueError(f"--hosts names {', '.join(hosts)}, and these have joined: {came}")
    return partial(ClusterModel, cluster=cluster)


def _hosts(pieces: list[str]) -> dict[str, str]:
    """Name -> sizes, "" where none are given."""
    pairs = [piece.partition("=")[::2] for piece in pieces]
    hosts = {checked_name(name): sizes for name, sizes in pairs}
    if len(hosts) < len(pairs):
        raise ValueError(f"--hosts {' '.join(pieces)}: a host is listed twice")
    return hosts


def _gathered(address: str, hosts: dict[str, str]) -> Cluster:
    if address == "local":
        return Cluster.local(list(hosts.values()), names=list(hosts))
    caps = {name: parse_sizes(sizes) for name, sizes in hosts.items() if sizes}
    return Cluster.listen(address, hosts=len(hosts), caps=caps)
