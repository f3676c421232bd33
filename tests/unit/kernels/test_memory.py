from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tpserve.kernels.memory import Arena, zeros


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(0, 4), (1,), (3, 5), (1 << 20, 3)], ids=str)
def test_zeros_of_any_shape_are_zero_and_may_be_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = zeros(shape, dtype)
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert not tensor.any()
    assert (tensor.fill_(1) == 1).all()


def test_arena_tensors_lie_apart_on_cache_lines_and_outlive_it() -> None:
    arena = Arena()
    tensors = [arena.zeros((size,), torch.float32) for size in (1, 7, 1000, 40 << 20, 3)]
    del arena
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)


_TOUCHES = """
import mmap, os
from pathlib import Path

import torch

from tpserve.kernels.memory import touch, zeros


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


cores = os.sched_getaffinity(0)
os.sched_setaffinity(0, {min(cores)})
tensor = zeros((100 << 20, 3), torch.uint8)
before = resident_bytes()
touch(zeros((0, 4), torch.float32), cores)
touch(tensor, cores)
print(resident_bytes() - before, len(os.sched_getaffinity(0)), int(tensor.any()))
"""


def test_touched_memory_is_taken_and_the_caller_keeps_its_core() -> None:
    done = subprocess.run([sys.executable, "-c", _TOUCHES], check=True, capture_output=True, text=True, timeout=100)
    taken, cores, any_set = map(int, done.stdout.split())
    assert taken >= 300 << 20
    assert (cores, any_set) == (1, 0)


_TAKES_AND_FREES = """
import mmap
from pathlib import Path

import torch

from tpserve.kernels.memory import give_back_large_ones


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


give_back_large_ones()
torch.ones(3 << 20)  # from the first the C library would learn
before = resident_bytes()
tensor = torch.ones(3 << 20)
taken = resident_bytes() - before
del tensor
print(taken, resident_bytes() - before)
"""


def test_large_memory_goes_back_to_the_system_when_it_is_freed() -> None:
    # In a process of its own, as a worker is: here the heap has room that others freed.
    done = subprocess.run([sys.executable, "-c", _TAKES_AND_FREES], check=True, capture_output=True, text=True, timeout=100)
    taken, kept = map(int, done.stdout.split())
    assert taken > 6 << 20
    assert kept < 4 << 20
