"""The two operations in which ranks meet, whatever carries them.

Every rank calls the same operations in the same order with the same shapes. At one rank there are none.
"""

from __future__ import annotations

import logging
import platform
from abc import ABC, abstractmethod
from collections.abc import Sequence
from time import perf_counter
from typing import Literal

from torch import Tensor

Kind = Literal["shared_memory", "gloo", "nccl"]

_log = logging.getLogger("tpserve")


class RankMissing(RuntimeError):
    """Some ranks did not arrive in time at the collective with this sequence number. The group is of no more use."""

    def __init__(self, ranks: Sequence[int], sequence: int, limit_s: float):
        self.ranks = tuple(ranks)
        self.sequence = sequence
        subject = "rank " if len(self.ranks) == 1 else "ranks "
        names = " and ".join(map(str, self.ranks))
        super().__init__(f"{subject}{names} did not arrive at collective {sequence} within {limit_s:g} s")


class Collectives(ABC):
    """A group of `size` ranks, of which this process is `rank`.

    `all_reduces` and `all_gathers` count the calls; `seconds` is the time spent in them, waiting included (on a
    GPU the time to enqueue them). A call raises RankMissing when a rank does not arrive within the group's limit.
    """

    def __init__(self, rank: int, size: int):
        self.rank = rank
        self.size = size
        self.all_reduces = 0
        self.all_gathers = 0
        self.seconds = 0.0

    @abstractmethod
    def all_reduce_(self, x: Tensor) -> None:
        """Replace `x` (float32, contiguous, same shape on all ranks) by its sum over the ranks, same bits on all."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' `x` (contiguous, any dtype, same shape and dtype on all ranks), stacked: (size, *x.shape)."""


class Alone(Collectives):
    """A group of one: nothing is communicated, counted or timed."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def all_reduce_(self, x: Tensor) -> None:
        """Nothing: the sum over one rank is `x`."""

    def all_gather(self, x: Tensor) -> Tensor:
        """A view of `x`."""
        return x.unsqueeze(0)


class Counted(Collectives):
    """What the backends share: they fill in `_sum_` and `_stack`, whose calls are counted and timed."""

    def all_reduce_(self, x: Tensor) -> None:
        """See Collectives."""
        begin = perf_counter()
        self._sum_(x)
        self.all_reduces += 1
        self.seconds += perf_counter() - begin

    def all_gather(self, x: Tensor) -> Tensor:
        """See Collectives."""
        begin = perf_counter()
        stacked = self._stack(x)
        self.all_gathers += 1
        self.seconds += perf_counter() - begin
        return stacked

    @abstractmethod
    def _sum_(self, x: Tensor) -> None: ...

    @abstractmethod
    def _stack(self, x: Tensor) -> Tensor: ...


def open_collectives(
    kind: Kind, rank: int, size: int, *, limit_s: float, store_path: str, memory_fd: int | None = None
) -> Collectives:
    """Join the group of `size` ranks as `rank`; a call that takes longer than `limit_s` seconds raises RankMissing.

    `memory_fd` is the memory made by `segment.create`, for shared memory; the other kinds meet at the file
    `store_path`, which is new for each group. Where shared memory cannot be used, gloo takes its place: the same on
    all ranks, which are on one host.
    """
    if size == 1:
        return Alone()
    # The backends are imported when chosen: torch.distributed is slow to import and not in every build of torch.
    if kind == "shared_memory":
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
