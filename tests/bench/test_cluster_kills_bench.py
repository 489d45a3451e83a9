"""The bench of hosts that are killed: a short run of it, and what its table counts."""

from __future__ import annotations

import signal

import torch
from bench import cluster_kills
from bench.cluster_kills import Outcome, table
from bench.common import write_checkpoint
from cluster_hosts import cluster_of
from simproc import run_sim


def killed(folder: str) -> list[dict[str, object]]:
    write_checkpoint(cluster_kills.Path(folder), cluster_kills.SHAPE, torch.float32)
    want = cluster_kills.expected(folder)
    cluster = cluster_of("24M", "24M", "24M", timeout=5.0, spares=1)
    plan = [("kill -9", signal.SIGKILL, "host2")]
    with cluster_kills.loaded(folder, cluster) as model:
        (found,) = cluster_kills.signalled(model, want, plan)
    return [found.wrong, found.hung, found.off < 1e-4, found.back is not None, found.paused > 0]


def test_a_killed_host_changes_no_token_and_is_taken_in_again(tmp_path):
    assert run_sim(killed, "", args=[str(tmp_path)]) == [0, False, True, True, True]


def test_a_table_has_a_line_for_each_kind_of_event():
    common = {"what": "kill -9", "off": 1e-6, "hung": False}
    found = [
        Outcome(**common, host="host1", wrong=0, paused=0.5, back=1.0),
        Outcome(**common, host="host2", wrong=2, paused=1.5, back=3.0),
        Outcome(what="driver killed", host="driver", wrong=0, off=0.0, hung=True, paused=9.0),
    ]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(found).splitlines()]
    kills = ["kill -9", "2", "2", "1e-06", "0", "1.0 (0.5..1.5)", "2.0 (1.0..3.0)"]
    assert lines[2:] == [kills, ["driver killed", "1", "0", "0e+00", "1", "9.0 (9.0..9.0)", ""]]
