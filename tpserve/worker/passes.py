"""What is done to the rows of a rank's slice of the logits: the interface of all forms, and the one in torch, for any device.

The native form for CPUs is `native_passes.py`; the sampler is the same over both.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tpserve.worker import draw
from tpserve.worker.noise import RowNoise

MASS_UNIT = 2**29  # mass of the likeliest id
MOST_TOP = 1024  # of the greatest logits that are looked for at once
WORD_BITS = 32  # of a mask

_GROUP_ROWS = 32  # drawn at once, to bound memory
# What each of eight ids' logits get added for a byte of bits. Adding takes a tenth of the time of torch's masked_fill.
_ADDED = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf)
_ADDED = _ADDED.astype(np.float32)


class Passes(Protocol):
    """`logits` is float32 (rows, columns), perhaps of no columns. `index`, int64 (n,), says which of its rows are meant.

    All else, results too, are arrays on the host: (n,) if nothing is said, float32, and int64 if they are columns or counts.
    """

    def greatest(self, logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """The greatest of every row, NaN if there is one, and its first column; -inf and 0 if there are no columns."""

    def draw(
        self, logits: Tensor, index: np.ndarray, greatest: tuple[np.ndarray, np.ndarray], tops: np.ndarray,
        temperatures: np.ndarray, least: np.ndarray, noise: RowNoise,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """The greatest (logit - top) / temperature + noise of the logits from `least` on, and its first column.

        -inf and any column where there are none. `greatest` is what that pass found for these rows.
        """

    def mass(
        self,
        logits: Tensor,
        index: np.ndarray,
        tops: np.ndarray,
        temperatures: np.ndarray,
        least: np.ndarray,
        above: np.ndarray,
    ) -> np.ndarray:
        """The whole of exp((logit - top) / temperature) of the logits from `least` on, and of those from `above` on (which is
        not less): int64 (2, n).

        Each is first rounded to a multiple of 1 / MASS_UNIT, so sums do not depend on how the vocabulary is split.
        """

    def count(self, logits: Tensor, index: np.ndarray, least: np.ndarray) -> np.ndarray:
        """How many logits are `least` or more."""

    def top(self, logits: Tensor, index: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """The `width` (at most MOST_TOP) greatest logits, descending, and their columns (int32): (n, width).

        -inf and any column where a row has not so many.
        """

    def log_sum_exp(self, logits: Tensor, index: np.ndarray) -> np.ndarray:
        """log(sum(exp(logit))); -inf if there are no columns."""

    def mask_(self, logits: Tensor, index: np.ndarray, words: np.ndarray) -> None:
        """Make logits minus infinity whose bits are 0: `words` is uint32 (n, ceil(columns / 32)), lowest bits first."""

    def penalize_(
        self, logits: Tensor, index: np.ndarray, columns: np.ndarray, counts: np.ndarray, sizes: np.ndarray,
        penalties: np.ndarray,
    ) -> None:  # fmt: skip
        """Penalize what occurred, as `penalties.py` says: row by row `sizes` (int64) columns with their counts (both int32).

        `penalties` is (3, n): repetition, presence and frequency.
        """


class TorchPasses:
    """See Passes."""

    def greatest(self, logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """See Passes."""
        values, columns = draw.greatest(logits)
        return values.cpu().numpy(), columns.cpu().numpy()

    def draw(
        self, logits: Tensor, index: np.ndarray, greatest: tuple[np.ndarray, np.ndarray], tops: np.ndarray,
        temperatures: np.ndarray, least: np.ndarray, noise: RowNoise,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """See Passes."""
        values, columns = (x.copy() for x in greatest)
        for first in range(0, len(index), _GROUP_ROWS):
            group = slice(first, first + _GROUP_ROWS)
            chosen = (x[group] for x in (index, tops, temperatures, least))
            rows, top, temperature, lowest = _tensors(logits, *chosen)
            best = draw.draw(logits[rows], top, temperature, lowest, noise.take(np.arange(len(index))[group]))
            values[group], columns[group] = (x.cpu().numpy() for x in best)
        return values, columns

    def mass(
        self,
        logits: Tensor,
        index: np.ndarray,
        tops: np.ndarray,
        temperatures: np.ndarray,
        least: np.ndarray,
        above: np.ndarray,
    ) -> np.ndarray:
        """See Passes."""
        rows, *limits = _tensors(logits, index, tops, temperatures, least, above)
        chosen = logits[rows]
        top, temperature, lowest, higher = (limit[:, None] for limit in limits)
        # Sums of integers are exact in float64 below 2**53, in any order.
        masses = chosen.double().sub_(top).div_(temperature).exp_().mul_(MASS_UNIT).round_().masked_fill_(chosen < lowest, 0)
        sums = torch.stack((masses.sum(1), masses.masked_fill_(chosen < higher, 0).sum(1)))
        whole: np.ndarray = sums.long().cpu().numpy()
        return whole

    def count(self, logits: Tensor, index: np.ndarray, least: np.ndarray) -> np.ndarray:
        """See Passes."""
        rows, lowest = _tensors(logits, index, least[:, None])
        counts: np.ndarray = (logits[rows] >= lowest).sum(1).cpu().numpy()
        return counts

    def top(self, logits: Tensor, index: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """See Passes."""
        values, columns = np.full((len(index), width), -np.inf, np.float32), np.zeros((len(index), width), np.int32)
        held = min(width, logits.shape[1])
        found = logits[_tensors(logits, index)[0]].topk(held)
        values[:, :held], columns[:, :held] = (x.cpu().numpy() for x in found)
        return values, columns

    def log_sum_exp(self, logits: Tensor, index: np.ndarray) -> np.ndarray:
        """See Passes."""
        sums: np.ndarray = logits[_tensors(logits, index)[0]].logsumexp(1).cpu().numpy()
        return sums

    def mask_(self, logits: Tensor, index: np.ndarray, words: np.ndarray) -> None:
        """See Passes."""
        added = _ADDED[words.view(np.uint8)].reshape(len(index), -1)[:, : logits.shape[1]]
        logits.index_add_(0, *_tensors(logits, index, added))

    def penalize_(
        self, logits: Tensor, index: np.ndarray, columns: np.ndarray, counts: np.ndarray, sizes: np.ndarray,
        penalties: np.ndarray,
    ) -> None:  # fmt: skip
        """See Passes."""
        places = tuple(_tensors(logits, index.repeat(sizes), columns.astype(np.int64)))
        count, repetition, presence, frequency = _tensors(logits, counts, *penalties.repeat(sizes, axis=1))
        x = logits[places]
        x = torch.where(x > 0, x / repetition, x * repetition)
        logits[places] = x - frequency * count - presence * (count > 0)


TORCH = TorchPasses()


def logits_at(logits: Tensor, index: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The logits at (index, columns), float32 (n,): -inf on a rank without columns."""
    if not logits.shape[1]:
        return np.full(len(index), -np.inf, np.float32)
    found: np.ndarray = logits[tuple(_tensors(logits, index, columns))].cpu().numpy()
    return found


def _tensors(like: Tensor, *arrays: np.ndarray) -> list[Tensor]:
    return [torch.from_numpy(array).to(like.device) for array in arrays]
