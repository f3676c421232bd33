"""The board: counters in anonymous shared memory, by which every process shows that it moves.

The launcher makes it and hands its descriptor to every child. A record has one writer, its process.
Readers never lock: each field is one aligned 8-byte word.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass

_WORDS = 8  # of 8 bytes: one cache line per record
_PID, _STEP, _BEAT_NS = range(3)


@dataclass(frozen=True)
class Beat:
    """What a process last showed. `age_s` is None before its first beat."""

    pid: int
    last_step: int
    age_s: float | None


def create(ranks: int) -> int:
    """The descriptor of a new board: one record for the coordinator, one per rank."""
    fd = os.memfd_create("tpserve-board", os.MFD_CLOEXEC)
    os.ftruncate(fd, (ranks + 1) * _WORDS * 8)
    return fd


class Board:
    """A board mapped into this process. Record 0 is the coordinator's, record r + 1 rank r's."""

    def __init__(self, fd: int):
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self._words = memoryview(self._map).cast("Q")

    @property
    def ranks(self) -> int:
        """How many ranks the board has records for."""
        return len(self._words) // _WORDS - 1

    def writer(self, record: int) -> Writer:
        """The only writer of this record."""
        return Writer(self._words[record * _WORDS : (record + 1) * _WORDS])

    def read(self, record: int) -> Beat:
        """What the record's process last showed."""
        words = self._words[record * _WORDS : (record + 1) * _WORDS]
        beat_ns = words[_BEAT_NS]
        age_s = (time.monotonic_ns() - beat_ns) / 1e9 if beat_ns else None
        return Beat(words[_PID], words[_STEP], age_s)


class Writer:
    """Writes one record."""

    def __init__(self, words: memoryview):
        self._words = words
        self._words[_PID] = os.getpid()
        self.beat()

    def beat(self) -> None:
        """Show that the process is alive: at least twice a second while idle."""
        self._words[_BEAT_NS] = time.monotonic_ns()

    @property
    def last_step(self) -> int:
        """The step shown last."""
        return self._words[_STEP]

    def step(self, step: int) -> None:
        """Show the step that is under way or was done last, and beat."""
        self._words[_STEP] = step
        self.beat()
