"""Collectives of ranks on one x86-64 host, through memory that all of them have mapped.

A call has a sequence number s, the same on all ranks. A rank copies its data into its slot, stores s in its
flag, waits until every flag is at least s, and reads all slots.

- Flag after data: x86-64 makes a processor's stores visible in program order (total store order), keeps loads in
  order, and stores after loads. So who sees the flag sees the data. Other machines would need fences, which Python
  has not.
- Two sets of slots, used in turn, suffice. A rank writes to the set of s again in s + 2, after it saw every flag
  at s + 1; a rank raises its flag to s + 1 only when it has read the slots of s. So no reader is left in them.
- Each rank adds all slots by itself, in rank order: the same bits on every rank in every run.
"""

from __future__ import annotations

import functools
import os
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from tpserve.parallel.collectives import Counted, RankMissing
from tpserve.parallel.segment import Segment
from tpserve.parallel.yields import Yields

# A rank is usually late by less than a time slice. First look often; then let others have the core between looks,
# which costs little when nobody wants it; a rank that is later than that is busy with something long.
_SPINS = 300  # about 20 us
_LATE_S = 0.02
_SLEEP_S = 0.0002  # of who waits for one that is late
_NAP_S = 0.00005  # where yields are dear; Linux makes it about twice as long


@dataclass(frozen=True, slots=True)
class _Views:
    """The slots of one parity, seen as tensors of one shape and dtype."""

    own: Tensor
    ranks: tuple[Tensor, ...]
    stacked: Tensor


class SharedMemory(Counted):
    """The group whose memory is `fd`, made by `segment.create` and inherited by every rank."""

    def __init__(self, rank: int, size: int, fd: int, limit_s: float):
        super().__init__(rank, size)
        segment = Segment(fd, size)
        self._capacity_bytes = segment.capacity_bytes
        self._flag = segment.flags[rank]
        self._others = [flag for other, flag in enumerate(segment.flags) if other != rank]
        self._flags = segment.flags
        self._limit_s = limit_s
        self._sequence = 0
        self._yields = Yields()
        data = torch.frombuffer(segment.data, dtype=torch.uint8)
        self._slots = tuple(data[segment.slots(parity)].view(size, -1) for parity in (0, 1))
        self._views = functools.lru_cache(maxsize=1024)(self._make_views)  # shapes come back: batches of few sizes

    def _sum_(self, x: Tensor) -> None:
        if x.nbytes > self._capacity_bytes:
            for piece in x.view(-1).split(self._capacity_bytes // x.itemsize):
                self._sum_(piece)
            return
        slots = self._exchange(x).ranks
        torch.add(slots[0], slots[1], out=x)
        for slot in slots[2:]:
            x.add_(slot)

    def _stack(self, x: Tensor) -> Tensor:
        if x.nbytes <= self._capacity_bytes:
            return self._exchange(x).stacked.clone()
        pieces = x.view(-1).split(self._capacity_bytes // x.itemsize)
        gathered = [self._exchange(piece).stacked.clone() for piece in pieces]
        return torch.cat(gathered, dim=1).view(self.size, *x.shape)

    def _exchange(self, x: Tensor) -> _Views:
        """Everybody's `x`, of at most a slot's capacity: valid until the next call."""
        self._sequence = sequence = self._sequence + 1
        views = self._views(x.shape, x.dtype)[sequence & 1]
        views.own.copy_(x)
        self._flag[0] = sequence
        for flag in self._others:
            if flag[0] < sequence:
                self._wait(flag, sequence)
        return views

    def _wait(self, flag: memoryview, sequence: int) -> None:
        for _ in range(_SPINS):
            if flag[0] >= sequence:
                return
        begin = now = time.monotonic()
        while flag[0] < sequence:
            waited_s = now - begin
            if waited_s > self._limit_s:
                missing = [rank for rank, reached in enumerate(self._flags) if reached[0] < sequence]
                raise RankMissing(missing, sequence, self._limit_s)
            is_late = waited_s > _LATE_S
            if is_late or self._yields.are_dear(now):
                time.sleep(_SLEEP_S if is_late else _NAP_S)
                now = time.monotonic()
            else:
                os.sched_yield()
                yielded, now = now, time.monotonic()
                self._yields.took(yielded, now)

    def _make_views(self, shape: torch.Size, dtype: torch.dtype) -> tuple[_Views, _Views]:
        even, odd = (self._see(slots, shape, dtype) for slots in self._slots)
        return even, odd

    def _see(self, slots: Tensor, shape: torch.Size, dtype: torch.dtype) -> _Views:
        stacked = slots[:, : shape.numel() * dtype.itemsize].view(dtype).view(self.size, *shape)
        ranks = stacked.unbind()
        return _Views(ranks[self.rank], ranks, stacked)
