"""Memory of a CPU that is read as fast as it goes: on huge pages, where the kernel gives them.

A step reads all weights, and every sequence's keys and values. On pages of 4 KiB it waits for address translation at each;
under virtual machines that halves the speed, or worse.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_CHUNK_BYTES = 64 << 20
_TOUCHED_BYTES = 32 << 20  # in one go by a thread
_ALIGN_BYTES = 64  # a cache line
_HUGE_BYTES = 2 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGE_BYTES = 128 << 10  # as glibc has it at first
_SPARE_BYTES = 2 << 20  # kept at the end of the heap


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros in memory of its own, which is only taken when it is touched."""
    items = math.prod(shape)
    if not items:
        return torch.zeros(shape, dtype=dtype)
    # The mapping may begin within a huge page: one more is asked for, and the tensor begins at the next.
    mapped = mmap.mmap(-1, items * dtype.itemsize + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    begin = -whole.data_ptr() % _HUGE_BYTES
    return whole[begin : begin + items * dtype.itemsize].view(dtype).view(shape)


def give_back_large_ones() -> None:
    """From now on, what is large gets memory of its own from malloc, which goes back when it is freed.

    Else the C library learns from the first large one to take them from its heap, and keeps what was the most at once.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _SPARE_BYTES)


def touch(zeroed: Tensor, cores: Set[int]) -> Tensor:
    """Take all of the tensor's memory now: what does not fit fails now, not in mid-stream. It is zeroed once more.

    By a thread for each of these cores: ranks hold unequal parts, and one that is done leaves its core to the others.
    """

    def zero(begin: int) -> None:  # not by torch, of which each thread would start more; this, too, releases the GIL
        ctypes.memset(zeroed.data_ptr() + begin, 0, min(_TOUCHED_BYTES, zeroed.nbytes - begin))

    with ThreadPoolExecutor(len(cores), initializer=os.sched_setaffinity, initargs=(0, cores)) as threads:
        list(threads.map(zero, range(0, zeroed.nbytes, _TOUCHED_BYTES)))
    return zeroed


class Arena:
    """Many tensors beside one another, so that small ones share huge pages. What is taken is never given back."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros."""
        size_bytes = math.prod(shape) * dtype.itemsize
        if self._used + size_bytes > len(self._chunk):
            self._chunk, self._used = zeros((max(size_bytes, _CHUNK_BYTES),), torch.uint8), 0
        begin = self._used
        self._used += -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return self._chunk[begin : begin + size_bytes].view(dtype).view(shape)
