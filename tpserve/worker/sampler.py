"""From each rank's slice of the logits to the same ids on every rank.

Every row comes down to one (value, id) per rank, its best: of the logits for a greedy row, of logit / temperature
+ noise over the ids that the filters leave for a sampled one. One gather takes all ranks' bests to all ranks,
together with the digests by which they check one another.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tpserve.messages import NO_SCORES, Scores
from tpserve.parallel.collectives import Collectives
from tpserve.worker import scores
from tpserve.worker.agreement import DIGEST_BYTES, Agreement
from tpserve.worker.filters import Filtered
from tpserve.worker.gather import gather
from tpserve.worker.noise import RowNoise
from tpserve.worker.passes import TORCH, Passes
from tpserve.worker.sampling_rows import SamplingRows as SamplingRows

NOT_FINITE = -1  # the id of a row with a NaN or plus infinity among its logits, or with nothing above minus infinity

_DIGEST_WORDS = DIGEST_BYTES // 4
_MINUS_INFINITY = np.array(-np.inf, np.float32).view(np.int32)
_NO_MEASURES = np.empty((0, 0), np.int32)


class Sampler:
    """Samples on one rank, which holds the vocabulary's ids from `first_id` (a multiple of 4) on.

    `corrupt`, for tests: (rank, step); that rank then takes wrong ids for the step's.
    """

    def __init__(self, collectives: Collectives, first_id: int, corrupt: tuple[int, int] | None = None, passes: Passes = TORCH):
        self._collectives = collectives
        self._first_id = first_id
        self._corrupt = corrupt
        self._passes = passes
        self._agreement = Agreement()

    def sample(self, logits: Tensor, rows: SamplingRows, step: int, plan: bytes, raw: Tensor) -> tuple[Tensor, Scores]:
        """An id per row, int64 (rows,), the same on all ranks; NOT_FINITE where the logits are not. And their scores.

        `logits` is this rank's slice, float32 (rows, columns), perhaps of no columns; `plan` is the step's plan as it
        came, with all that came for it. `raw` are the logits of the rows that want logprobs, as the model made them.
        Raises Disagreement, on all ranks, if their plans or ids differed in an earlier step.
        """
        values, columns = self._passes.greatest(logits)
        finite = values < np.inf  # false for NaN
        unfiltered, filtered = rows.kinds()
        if len(unfiltered):
            values[unfiltered], columns[unfiltered] = self._draw(logits, unfiltered, values, columns, rows.take(unfiltered))
        if len(filtered):
            tops = self._gather(values[filtered], logits.device).max(axis=0)
            # Without a finite top there is no order to filter by; such a row ends with NOT_FINITE anyway.
            sound = np.isfinite(tops)
            at = filtered[sound]
            values[at], columns[at] = self._draw(logits, at, values, columns, rows.take(at), tops[sound])
        ids = np.where(finite, columns + self._first_id, NOT_FINITE)
        ids, found = self._agree(values, ids, self._measure(raw, rows, columns), rows, logits.device)
        if self._corrupt == (self._collectives.rank, step):
            ids = np.where(ids == 0, 1, 0)
        self._agreement.update(step, plan, ids)
        return torch.from_numpy(ids).to(logits.device), found

    def _draw(
        self, logits: Tensor, index: np.ndarray, values: np.ndarray, columns: np.ndarray, rows: SamplingRows,
        tops: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """This rank's best (value, column) for the sampled rows at `index`; they are filtered if `tops` are given.

        `values` and `columns` are the greatest logits of all rows.
        """
        greatest = values[index], columns[index]
        noise = RowNoise(rows.seeds, rows.choices, rows.positions, self._first_id)
        if tops is not None:
            return Filtered(self._passes, self._collectives, logits, index, greatest, tops, rows, noise).draw()
        nothing, zeros = np.full(len(index), -np.inf, np.float32), np.zeros(len(index), np.float32)
        return self._passes.draw(logits, index, greatest, zeros, rows.temperatures, nothing, noise)

    def _measure(self, raw: Tensor, rows: SamplingRows, columns: np.ndarray) -> np.ndarray:
        """This rank's measures for the rows that want logprobs, were its best ids the ones that are sampled."""
        if not len(raw):
            return _NO_MEASURES
        wanted = columns[rows.logprobs >= 0]
        return scores.measure(raw, wanted, int(rows.logprobs.max()), self._first_id, self._passes)

    def _agree(
        self, values: np.ndarray, ids: np.ndarray, measures: np.ndarray, rows: SamplingRows, device: torch.device
    ) -> tuple[np.ndarray, Scores]:
        """Gather every rank's best (value, id) of each row: the ids that won, int64, and scores. Raises Disagreement."""
        digest = np.frombuffer(self._agreement.digest, np.int32)
        parts = digest, values.view(np.int32), ids.astype(np.int32), measures.reshape(-1)
        gathered = self._gather(np.concatenate(parts), device)
        begin, end = _DIGEST_WORDS, _DIGEST_WORDS + len(ids)
        self._agreement.check([words.tobytes() for words in gathered[:, :begin]])
        values_of, ids_of = gathered[:, begin:end].view(np.float32), gathered[:, end : end + len(ids)]
        winners = _winners(values_of, ids_of)
        if not measures.size:
            return winners, NO_SCORES
        measures_of = gathered[:, end + len(ids) :].reshape(len(gathered), *measures.shape)
        return winners, _scores(winners, ids_of, measures_of, rows.logprobs)

    def _gather(self, x: np.ndarray, device: torch.device) -> np.ndarray:
        return gather(x, self._collectives, device)


def _scores(winners: np.ndarray, ids_of: np.ndarray, measures: np.ndarray, logprobs: np.ndarray) -> Scores:
    """A position for every row. Where the logits are not finite, or nothing is wanted, there is no entry."""
    wanted = np.flatnonzero(logprobs >= 0)
    lost = ids_of[:, wanted] != winners[wanted]  # whose own logit is of another id than the one that won
    measures[:, :, 0][lost] = _MINUS_INFINITY
    tops = np.where(winners[wanted] == NOT_FINITE, -1, logprobs[wanted])
    found = scores.merge(measures, winners[wanted], tops)
    counts = np.zeros(len(winners), "<u2")
    counts[wanted] = found.counts
    return Scores(counts, found.ids, found.logprobs)


def _winners(values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Of each rank's best (rank, row) the id with the greatest value, the lowest at a tie; NOT_FINITE if any is."""
    best = values.max(axis=0)
    winners = np.where(values == best, ids, np.iinfo(np.int32).max).min(axis=0)
    sound = (ids != NOT_FINITE).all(axis=0) & (best > -np.inf)
    return np.where(sound, winners, NOT_FINITE).astype(np.int64)
