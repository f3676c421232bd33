"""The two operations in which ranks meet, whatever carries them.

Every rank calls the same operations in the same order with the same shapes. At one rank there are none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from time import perf_counter

from torch import Tensor


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
