"""The host's free memory within the limits of control groups, as Docker, Kubernetes and systemd set
them."""

from __future__ import annotations

from pathlib import Path

import pytest

from exkv import devices, host_memory

TOTAL, FREE = 64 << 10, 40 << 10
UNLIMITED = 9223372036854771712  # version 1's word for it


@pytest.fixture
def root(tmp_path) -> Path:
    write(tmp_path / "proc/meminfo", "MemTotal: 64 kB\nMemFree: 1 kB\nMemAvailable: 40 kB\n")
    return tmp_path


def write(file: Path, text: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def runs_in(root: Path, *groups: str) -> None:
    """Lines of /proc/self/cgroup."""
    write(root / "proc/self/cgroup", "\n".join(groups))


def limit_v2(root: Path, group: str, limit: object, used: int, inactive: int = 0) -> None:
    folder = root / "sys/fs/cgroup" / group
    write(folder / "memory.max", limit)
    write(folder / "memory.current", used)
    write(folder / "memory.stat", f"anon 7\ninactive_file {inactive}\nactive_file 9")


def limit_v1(root: Path, group: str, limit: int, used: int, inactive: int = 0) -> None:
    folder = root / "sys/fs/cgroup/memory" / group
    write(folder / "memory.limit_in_bytes", limit)
    write(folder / "memory.usage_in_bytes", used)
    write(folder / "memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive}")


def found(root: Path) -> tuple[int, int]:
    return host_memory.total_and_free(root)


def test_without_control_groups_it_is_the_systems(root, tmp_path):
    assert found(root) == (TOTAL, FREE)
    runs_in(root, "0::/", "3:cpuset:/x")
    assert found(root) == (TOTAL, FREE)


def test_a_container_with_a_namespace_of_its_own(root):
    """Docker and Kubernetes with version 2: the container's group is the root that it sees."""
    runs_in(root, "0::/")
    limit_v2(root, "", 30_000, used=22_000, inactive=4_000)
    assert found(root) == (30_000, 30_000 - (22_000 - 4_000))
    limit_v2(root, "", 30_000, used=31_000)
    assert found(root) == (30_000, 0)
    limit_v2(root, "", 60_000, used=5_000)  # more than the system has free
    assert found(root) == (60_000, FREE)


def test_no_limit(root):
    runs_in(root, "0::/a", "4:memory:/a")
    limit_v2(root, "a", "max", used=5_000)
    limit_v1(root, "a", UNLIMITED, used=5_000)
    assert found(root) == (TOTAL, FREE)


def test_limits_of_all_groups_around_it_count(root):
    """Those around a group count what all groups in them use."""
    runs_in(root, "0::/kubepods.slice/pod/main")
    limit_v2(root, "kubepods.slice", 50_000, used=44_000)
    limit_v2(root, "kubepods.slice/pod", "max", used=9_000)
    limit_v2(root, "kubepods.slice/pod/main", 20_000, used=8_000)
    limit_v2(root, "kubepods.slice/pod/other", 2_000, used=1_500)
    limit_v2(root, "kubepods.slice/pod/main/inside", 2_000, used=1_500)
    assert found(root) == (20_000, 6_000)
    limit_v2(root, "kubepods.slice", 50_000, used=10_000)
    assert found(root) == (20_000, 12_000)


@pytest.mark.parametrize("group", ["a/b", ""])
def test_version_1(root, group):
    """A container sees its own group as the mount's root, under the host's path."""
    runs_in(root, "11:cpu,cpuacct:/x", "5:hugetlb,memory:/a/b", "1:name=systemd:/a/b")
    limit_v1(root, group, 30_000, used=22_000, inactive=4_000)
    limit_v1(root, "x", 1_000, used=900)
    assert found(root) == (30_000, 12_000)


def test_what_cant_be_read_is_no_limit_or_nothing_to_drop(root):
    runs_in(root, "0::/gone")
    assert found(root) == (TOTAL, FREE)
    limit_v2(root, "gone", 30_000, used=20_000, inactive=5_000)
    (root / "sys/fs/cgroup/gone/memory.stat").unlink()
    assert found(root) == (30_000, 10_000)
    (root / "sys/fs/cgroup/gone/memory.max").unlink()
    (root / "sys/fs/cgroup/gone/memory.max").mkdir()  # as unreadable to root as to others
    assert found(root) == (TOTAL, FREE)


def test_a_system_without_these_files_has_what_the_machine_has(tmp_path):
    total, free = found(tmp_path)
    assert total == free > 1 << 20


def test_devices_plan_within_it(monkeypatch):
    """Files that are mapped and read count as in use, although the system would drop them."""
    monkeypatch.setattr(host_memory, "total_and_free", lambda: (30_000, 12_000))
    monkeypatch.setattr(host_memory, "anonymous", lambda: 10_000)
    monkeypatch.setattr(devices, "_mapped", 2_000)
    memory = devices.memory(devices.CPU)
    assert (memory.capacity, memory.available) == (30_000, 10_000)
    assert (memory.in_use, memory.in_use_by_others) == (12_000, 8_000)
