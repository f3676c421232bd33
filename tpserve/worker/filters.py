"""Draws from what top-k, top-p and min-p leave of a vocabulary that is split between ranks: exactly, the same at every split.

Each filter keeps the ids whose logit is at least some threshold, ties included. Top-k's is found among the ranks' k greatest
logits (or, where k is large, by halving), min-p's by its definition. Top-p's need not be found: an arg max over all ids that
lies in a part of them is the arg max over the part. And whether an id lies in what top-p leaves shows the mass of the ids
above it: that is less than top_p of the whole. So the first draw is from all ids, and is mostly the last one; if it is outside,
the next is from the ids above it, which are fewer: the mass in play is halved, or better, as often as not.

What is compared are sums of integers, so they do not depend on the split.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from tpserve.parallel.collectives import Collectives
from tpserve.worker.gather import gather
from tpserve.worker.noise import RowNoise
from tpserve.worker.passes import MOST_TOP, Passes, logits_at
from tpserve.worker.sampling_rows import SamplingRows

_INFINITY = np.float32(np.inf)


class Filtered:
    """Some rows of a rank's slice of the logits, float32 (rows, columns), perhaps of no columns.

    `index`, int64 (n,), says which. The rest is (n,), of these rows: `greatest`, this rank's (value, column); `tops` float32,
    the greatest logit over all ranks, finite; how they are sampled, the same on all ranks.
    """

    def __init__(
        self, passes: Passes, collectives: Collectives, logits: Tensor, index: np.ndarray,
        greatest: tuple[np.ndarray, np.ndarray], tops: np.ndarray, rows: SamplingRows, noise: RowNoise,
    ):  # fmt: skip
        self._passes = passes
        self._collectives = collectives
        self._logits = logits
        self._index = index
        self._greatest = greatest
        self._tops = tops
        self._rows = rows
        self._noise = noise

    def draw(self) -> tuple[np.ndarray, np.ndarray]:
        """This rank's best (value, column) of each row, float32 and int64 (n,): see Passes.draw."""
        counted = self.top_k()
        least = np.maximum(counted, self.min_p())
        everything, at = np.arange(len(least)), np.flatnonzero(self._rows.top_ps < 1)
        values, columns = self._draw(everything, least)
        while len(at):
            drawn = self._winners(at, values[at], columns[at])
            outside = self.outside(at, drawn, counted[at])
            at, drawn = at[outside], drawn[outside]
            least[at] = np.nextafter(drawn, _INFINITY)
            if len(at):
                values[at], columns[at] = self._draw(at, least[at])
        return values, columns

    def top_k(self) -> np.ndarray:
        """The k-th greatest logit of each row, float32 (n,): -inf if top-k is off, or the row has not so many."""
        top_ks = self._rows.top_ks
        least = np.full(len(top_ks), -np.inf, np.float32)
        small, large = np.flatnonzero((top_ks > 0) & (top_ks <= MOST_TOP)), np.flatnonzero(top_ks > MOST_TOP)
        if len(small):
            least[small] = self._small_top_k(small)
        if len(large):
            least[large] = self._large_top_k(large)
        return least

    def min_p(self) -> np.ndarray:
        """The least float32 logit of each row with (logit - top) / temperature >= log(min_p)."""
        with np.errstate(divide="ignore"):
            logs = np.log(self._rows.min_ps.astype(np.float64))
        exact = self._tops.astype(np.float64) + self._rows.temperatures.astype(np.float64) * logs
        near = exact.astype(np.float32)
        return np.where(near < exact, np.nextafter(near, _INFINITY), near)

    def outside(self, at: np.ndarray, logits: np.ndarray, counted: np.ndarray) -> np.ndarray:
        """Whether each of these logits, of the rows `at`, is less than what top-p leaves of the logits from `counted` on."""
        tops, temperatures = self._tops[at], self._rows.temperatures[at]
        above = np.nextafter(logits, _INFINITY)
        mine = self._passes.mass(self._logits, self._index[at], tops, temperatures, counted, above)
        whole, above_it = self._gather(mine).sum(axis=0)
        wanted = np.ceil(self._rows.top_ps[at].astype(np.float64) * whole).clip(1)
        beyond: np.ndarray = above_it >= wanted
        return beyond

    def _winners(self, at: np.ndarray, values: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """The logits that were drawn, given this rank's draws: float32 (len(at),)."""
        own = logits_at(self._logits, self._index[at], columns)
        values_of, own_of = self._gather(np.stack((values, own))).swapaxes(0, 1)
        best = values_of.argmax(axis=0)  # the first rank's at a tie, whose ids are lower
        drawn: np.ndarray = own_of[best, np.arange(len(at))]
        return drawn

    def _small_top_k(self, at: np.ndarray) -> np.ndarray:
        top_ks = self._rows.top_ks[at]
        mine, _ = self._passes.top(self._logits, self._index[at], int(top_ks.max()))
        all_ranks = self._gather(mine).swapaxes(0, 1).reshape(len(at), -1)
        kth: np.ndarray = -np.sort(-all_ranks, axis=1)[np.arange(len(at)), top_ks - 1]
        return kth

    def _large_top_k(self, at: np.ndarray) -> np.ndarray:
        """Halves the floats that may be the least one which is reached by k logits or more."""
        low, high = _order(np.full(len(at), -np.inf, np.float32)), _order(self._tops[at]) + 1
        while (high - low > 1).any():
            middle = (low + high) // 2
            counts = self._gather(self._passes.count(self._logits, self._index[at], _float_at(middle))).sum(axis=0)
            reached = counts >= self._rows.top_ks[at]
            low, high = np.where(reached, middle, low), np.where(reached, high, middle)
        return _float_at(low)

    def _draw(self, at: np.ndarray, least: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values, columns = self._greatest
        return self._passes.draw(
            self._logits, self._index[at], (values[at], columns[at]), self._tops[at], self._rows.temperatures[at], least,
            self._noise.take(at),
        )  # fmt: skip

    def _gather(self, x: np.ndarray) -> np.ndarray:
        return gather(x, self._collectives, self._logits.device)


def _order(x: np.ndarray) -> np.ndarray:
    """int64 numbers that ascend with float32 ones, from one to the next without a gap."""
    bits = x.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(2**31) - 1 - bits, bits)


def _float_at(order: np.ndarray) -> np.ndarray:
    """The float32 numbers with these places in the order."""
    return np.where(order < 0, -(2**31) - 1 - order, order).astype(np.int32).view(np.float32)
