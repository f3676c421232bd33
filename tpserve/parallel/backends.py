"""Which backend carries the collectives: chosen by value, in this one place."""

from __future__ import annotations

import logging
import platform
from typing import Literal

from tpserve.parallel.collectives import Alone, Collectives

Kind = Literal["native", "shared_memory", "gloo", "nccl"]

_log = logging.getLogger("tpserve")


def open_collectives(
    kind: Kind, rank: int, size: int, *, limit_s: float, store_path: str, memory_fd: int | None = None
) -> Collectives:
    """Join the group of `size` ranks as `rank`; a call that takes longer than `limit_s` seconds raises RankMissing.

    `memory_fd` is the memory made by `segment.create`, which native and shared_memory use; the other kinds meet at the
    file `store_path`, which is new for each group. Where shared memory cannot be used, gloo takes its place: the same on
    all ranks, which are on one host.
    """
    if size == 1:
        return Alone()
    # The backends are imported when chosen: torch.distributed is slow to import and not in every build of torch.
    if kind == "native" and memory_fd is not None:
        from tpserve.parallel.shared_memory_native import NativeSharedMemory

        return NativeSharedMemory(rank, size, memory_fd, limit_s)
    if kind == "native" or kind == "shared_memory":
        machine = platform.machine()
        if memory_fd is not None and machine == "x86_64":
            from tpserve.parallel.shared_memory import SharedMemory

            return SharedMemory(rank, size, memory_fd, limit_s)
        unordered = f"on {machine} other ranks may see a rank's stores out of order"
        reason = "no memory was made for it" if memory_fd is None else unordered
        _log.warning("collectives go through gloo, not shared memory: %s", reason)
        kind = "gloo"
    from tpserve.parallel.distributed import TorchDistributed

    return TorchDistributed(kind, rank, size, store_path, limit_s)
