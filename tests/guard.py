"""Memory that ends where nothing may be read: what sanitizers do not see, like the loads of AMX, ends the process there."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

_PROT_NONE = 0


def guarded(tensor: Tensor) -> Tensor:
    """A copy whose last byte is followed by a page that can't be read or written."""
    size = max(1, -(-tensor.nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    copy = torch.frombuffer(memory, dtype=torch.uint8)[size - tensor.nbytes : size].view(tensor.dtype).view(tensor.shape)
    end = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + size
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), mmap.PAGESIZE, _PROT_NONE) == 0
    return copy.copy_(tensor)
