"""What this machine has, as far as it can be known without torch."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # number of the system call, which the C library does not offer
_TURN_NS = 100_000  # the least that the kernel takes


def available_bytes(root: Path = _ROOT) -> int:
    """Memory that this process can still get: the system's, or what its control groups leave if that is less."""
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    system = int(fields["MemAvailable"].split()[0]) * 1024
    return max(0, min([system, *_group_bytes(root)]))


def cores(root: Path = _ROOT) -> int:
    """Cores that this process may use: its affinity, or its control groups' share of time if that is less."""
    return max(1, min([len(os.sched_getaffinity(0)), *_group_cores(root)]))


def near(core: int, root: Path = _ROOT) -> frozenset[int]:
    """The cores of this one's NUMA node; all that there can be where no node is told."""
    for node in (root / "sys/devices/system/node").glob("node*/cpulist"):
        spans = [span.partition("-") for span in _read(node).split(",") if span]
        cores = frozenset(core for first, _, last in spans for core in range(int(first), int(last or first) + 1))
        if core in cores:
            return cores
    return frozenset({core, *range(os.cpu_count() or 1)})  # numbers may have gaps


def has_nvidia_driver() -> bool:
    """Whether an NVIDIA driver is loaded."""
    if any(map(os.path.exists, ("/dev/nvidiactl", "/proc/driver/nvidia/version"))):
        return True
    if shutil.which("nvidia-smi") is None:  # which may also be there without a driver
        return False
    return not subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=10, check=False).returncode


def take_short_turns() -> None:
    """Ask the kernel (Linux 6.12 and newer) for short turns on a core, in exchange for getting one at once when woken.

    For processes that do little at a time beside ones that compute without pause; these would otherwise keep the core
    until the next tick, some milliseconds.
    """
    call = _SCHED_SETATTR.get(platform.machine())
    if call is not None:
        attributes = struct.pack("=IIQiIQQQ", 48, 0, 0, os.getpriority(os.PRIO_PROCESS, 0), 0, _TURN_NS, 0, 0)
        ctypes.CDLL(None).syscall(call, 0, attributes, 0)  # an older kernel ignores it


def _group_bytes(root: Path) -> Iterator[int]:
    """Bytes left in each control group that has a limit; page cache that the kernel can drop counts as left."""
    versions = (
        ("sys/fs/cgroup", "", "memory.max", "memory.current", "inactive_file"),
        ("sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for place, controller, limit, usage, droppable in versions:
        for group in _groups(root, place, controller):
            if _read(group / limit).isdigit():  # else "max", or no such file
                stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
                yield int(_read(group / limit)) - int(_read(group / usage)) + int(stat.get(droppable, 0))


def _group_cores(root: Path) -> Iterator[int]:
    """Whole cores' worth of time of each control group that has a limit; may be 0."""
    quotas = [_read(group / "cpu.max") for group in _groups(root, "sys/fs/cgroup", "")]
    for group in _groups(root, "sys/fs/cgroup/cpu", "cpu"):
        quotas.append(_read(group / "cpu.cfs_quota_us") + " " + _read(group / "cpu.cfs_period_us"))
    for quota in quotas:
        used, _, period = quota.partition(" ")
        if used.isdigit():  # else "max", -1, or no such file
            yield int(used) // int(period)


def _groups(root: Path, place: str, controller: str) -> Iterator[Path]:
    """This process's control group and its ancestors, as far as they can be seen under `place`."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = root / place / path.lstrip("/")
            yield from (parent for parent in (group, *group.parents) if parent.is_relative_to(root / place))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
