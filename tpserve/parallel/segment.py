"""Layout of the memory in which the ranks of one host meet. Torch-free, so that the launcher can make it.

First one flag word per rank, each on its own cache lines; then, for even and for odd sequence numbers, one
data slot per rank. How they are used is in `shared_memory`.
"""

from __future__ import annotations

import mmap
import os

_PAGE_BYTES = 4096
FLAG_BYTES = 128  # x86 fetches cache lines of 64 bytes in pairs
_WORD_BYTES = 8

CAPACITY_BYTES = 1 << 20  # of a slot, unless told otherwise: about what a core's cache holds


def shared_memory_bytes(size: int, capacity_bytes: int) -> int:
    """Bytes for `size` ranks whose slots hold `capacity_bytes` each (rounded up to whole pages)."""
    return _flags_bytes(size) + 2 * size * _pages(capacity_bytes)


def create(size: int, capacity_bytes: int = CAPACITY_BYTES) -> int:
    """The descriptor of new anonymous memory for `size` ranks; it is gone with its last user."""
    fd = os.memfd_create("tpserve-collectives", os.MFD_CLOEXEC)
    os.ftruncate(fd, shared_memory_bytes(size, capacity_bytes))
    return fd


class Segment:
    """The memory mapped into a rank's process: `flags` by rank, and where each slot lies in `data`."""

    def __init__(self, fd: int, size: int):
        self._size = size
        self._slots_at = _flags_bytes(size)
        self.data = mmap.mmap(fd, os.fstat(fd).st_size)
        self.capacity_bytes = (len(self.data) - self._slots_at) // (2 * size)
        words = memoryview(self.data)[: size * FLAG_BYTES].cast("Q")
        self.flags = [words[i : i + 1] for i in range(0, len(words), FLAG_BYTES // _WORD_BYTES)]

    def slots(self, parity: int) -> slice:
        """The bytes of all slots for sequence numbers of this parity, in rank order."""
        start = self._slots_at + parity * self._size * self.capacity_bytes
        return slice(start, start + self._size * self.capacity_bytes)


def _flags_bytes(size: int) -> int:
    return _pages(size * FLAG_BYTES)


def _pages(count_bytes: int) -> int:
    return -(-count_bytes // _PAGE_BYTES) * _PAGE_BYTES
