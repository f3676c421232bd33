"""The collectives of `shared_memory`, by the native library: the same memory, the same meetings, some microseconds each.

Its stores and loads are ordered on any machine, not on x86-64 alone.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from tpserve.kernels.native.abi import Group
from tpserve.kernels.native.library import library
from tpserve.parallel.collectives import Counted, RankMissing
from tpserve.parallel.segment import FLAG_BYTES, Segment


class NativeSharedMemory(Counted):
    """The group whose memory is `fd`, made by `segment.create` and inherited by every rank.

    `group` is what native programs meet by; they share its sequence numbers.
    """

    def __init__(self, rank: int, size: int, fd: int, limit_s: float):
        super().__init__(rank, size)
        self._segment = segment = Segment(fd, size)
        self._lib = library()
        self._limit_s = limit_s
        flags = ctypes.addressof(ctypes.c_char.from_buffer(segment.data))
        self.group = Group(
            flags, flags + segment.slots(0).start, FLAG_BYTES, segment.capacity_bytes, int(limit_s * 1e9), 0, rank, size
        )  # fmt: skip

    def missing(self) -> RankMissing:
        """Who did not arrive at the last meeting."""
        sequence = self.group.sequence
        ranks = [rank for rank, reached in enumerate(self._segment.flags) if reached[0] < sequence]
        return RankMissing(ranks, sequence, self._limit_s)

    def _sum_(self, x: Tensor) -> None:
        if not self._lib.call.tps_reduce(self.group, x.data_ptr(), x.numel()):
            raise self.missing()

    def _stack(self, x: Tensor) -> Tensor:
        out = torch.empty((self.size, *x.shape), dtype=x.dtype)
        if not self._lib.call.tps_gather(self.group, x.data_ptr(), x.nbytes, out.data_ptr()):
            raise self.missing()
        return out
