"""``exkv cluster up ADDRESS`` makes this machine a host of a cluster; ``exkv cluster status`` lists
its hosts' devices, or this machine's."""

from __future__ import annotations

import argparse
import logging
import socket
from pathlib import Path
from typing import Any

from exkv.cluster.host import SECRET, serve
from exkv.cluster.status import cluster_status, own_devices


def add_to(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "cluster",
        help="make this machine a host of a model that spans several",
        description="Every host runs `exkv cluster up` with the driver's address; the driver is a "
        f"program that calls exkv.cluster.Cluster.listen. {SECRET} holds the shared secret. "
        "Traffic between hosts is not encrypted: see docs/cluster.md.",
    )
    doing = parser.add_subparsers(dest="doing", required=True, metavar="up | status")
    up = doing.add_parser("up", help="join a driver and run units for it until it ends")
    up.add_argument("address", metavar="HOST:PORT", help="where the driver listens")
    up.add_argument("--name", default=socket.gethostname(), help="this host's name (the machine's)")
    up.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="this host's copy (the driver's path; without a copy, the driver sends the weights)",
    )
    up.add_argument(
        "--stream", action="store_true", help="let the driver send weights even if there is a copy"
    )
    up.set_defaults(run=_up, lasts=True)
    status = doing.add_parser("status", help="list the hosts' devices")
    status.add_argument(
        "address",
        metavar="HOST:PORT",
        nargs="?",
        help="where the driver listens; without it, list this machine's devices",
    )
    status.set_defaults(run=_status)


def _up(args: argparse.Namespace) -> int:
    logging.basicConfig(format="exkv cluster: %(message)s")
    try:
        serve(args.address, args.name, folder=args.model, stream=args.stream)
    except RuntimeError as error:
        raise ValueError(error) from None
    except KeyboardInterrupt:
        return 130
    return 0


def _status(args: argparse.Namespace) -> int:
    if args.address is None:
        print(*own_devices(), sep="\n")
        return 0
    try:
        hosts = cluster_status(args.address)
    except RuntimeError as error:
        raise ValueError(error) from None
    for host in hosts:
        print(f"{host.name}: {host.state}")
        for device in host.devices:
            print(f"  {device}")
    return 0
