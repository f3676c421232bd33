"""What the machine has, read from made-up /proc and /sys trees of both kinds of control groups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tpserve import machine

MIB = 1024**2


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 999 kB\nMemAvailable:   102400 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_available_without_control_groups_is_the_systems(tmp_path: Path) -> None:
    assert machine.available_bytes(tree(tmp_path, {})) == 100 * MIB


V2 = "sys/fs/cgroup/a"
V1 = "sys/fs/cgroup/memory/a"


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/a/b\n",
            f"{V2}/b/memory.max": "max",
            f"{V2}/memory.max": str(50 * MIB),
            f"{V2}/memory.current": str(30 * MIB),
            f"{V2}/memory.stat": f"anon 7\ninactive_file {10 * MIB}\n",
        },
        {
            "proc/self/cgroup": "4:memory:/a\n0::/\n",
            f"{V1}/memory.limit_in_bytes": str(50 * MIB),
            f"{V1}/memory.usage_in_bytes": str(30 * MIB),
            f"{V1}/memory.stat": f"inactive_file 1\ntotal_inactive_file {10 * MIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5",
        },
    ],
    ids=["v2", "v1"],
)
def test_available_in_a_group_with_a_limit_is_what_it_leaves(tmp_path: Path, files: dict[str, str]) -> None:
    assert machine.available_bytes(tree(tmp_path, files)) == 30 * MIB  # limit - usage + page cache


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/a\n", f"{V2}/cpu.max": "150000 100000"},
        {
            "proc/self/cgroup": "1:cpu,cpuacct:/a\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
        },
        {"proc/self/cgroup": "0::/a\n", f"{V2}/cpu.max": "20000 100000"},
    ],
    ids=["v2", "v1", "less than one"],
)
def test_cores_in_a_group_with_a_quota_are_whole_ones(tmp_path: Path, files: dict[str, str]) -> None:
    assert machine.cores(tree(tmp_path, files)) == 1


def test_cores_without_a_quota_are_those_of_the_affinity(tmp_path: Path) -> None:
    unlimited = {
        "proc/self/cgroup": "1:cpu:/\n0::/a\n", f"{V2}/cpu.max": "max 100000", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"
    }  # fmt: skip
    assert machine.cores(tree(tmp_path, unlimited)) == len(os.sched_getaffinity(0))


def test_short_turns_leave_nice_value_and_policy_alone() -> None:
    code = (
        "import os; from tpserve.machine import take_short_turns; os.nice(3); take_short_turns();"
        "print(os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0) == os.SCHED_OTHER)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == ["3", "True"]


def test_near_cores_are_those_of_the_same_node(tmp_path: Path) -> None:
    node = "sys/devices/system/node/node"
    root = tree(tmp_path, {f"{node}0/cpulist": "0-2,8\n", f"{node}1/cpulist": "3-5,7\n", f"{node}2/cpulist": "\n"})
    assert machine.near(8, root) == {0, 1, 2, 8}
    assert machine.near(4, root) == {3, 4, 5, 7}


def test_near_cores_without_nodes_are_all(tmp_path: Path) -> None:
    assert machine.near(0, tree(tmp_path, {})) == set(range(os.cpu_count() or 1))
    assert 9999 in machine.near(9999, tree(tmp_path, {}))
