"""The memory of the collectives: nothing in it overlaps, and its size is what was asked for."""

from __future__ import annotations

import os

import pytest

from tpserve.parallel import segment
from tpserve.parallel.segment import Segment, shared_memory_bytes


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("capacity_bytes", [1, 4096, 100_000])
def test_segment_flags_and_slots_are_apart_and_fill_the_memory(size: int, capacity_bytes: int) -> None:
    fd = segment.create(size, capacity_bytes)
    try:
        made = Segment(fd, size)
        assert os.fstat(fd).st_size == len(made.data) == shared_memory_bytes(size, capacity_bytes)
    finally:
        os.close(fd)
    assert capacity_bytes <= made.capacity_bytes < capacity_bytes + 4096
    even, odd = made.slots(0), made.slots(1)
    assert even.stop - even.start == odd.stop - odd.start == size * made.capacity_bytes
    assert (even.stop, odd.stop) == (odd.start, len(made.data))
    for rank, flag in enumerate(made.flags):
        flag[0] = rank + 1
    assert [flag[0] for flag in made.flags] == [*range(1, size + 1)]
    assert not any(made.data[even.start :]), "a flag lies in the slots"


def test_segment_of_two_processes_is_one_memory() -> None:
    fd = segment.create(2, 64)
    one, other = Segment(fd, 2), Segment(fd, 2)
    os.close(fd)
    one.flags[1][0] = 2**64 - 1
    assert [flag[0] for flag in other.flags] == [0, 2**64 - 1]
