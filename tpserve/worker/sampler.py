"""From each rank's slice of the logits to the same ids on every rank.

Every row comes down to one (value, id) per rank, its best: of the logits for a greedy row, of logit / temperature
+ noise over the ids that the filters leave for a sampled one. One gather takes all ranks' bests to all ranks,
together with the digests by which they check one another.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from tpserve.messages import NO_SCORES, Scores
from tpserve.parallel.collectives import Collectives
from tpserve.worker import scores
from tpserve.worker.agreement import DIGEST_BYTES, Agreement
from tpserve.worker.draw import draw, greatest, least_that_can_win
from tpserve.worker.filters import least_logits
from tpserve.worker.noise import RowNoise

NOT_FINITE = -1  # the id of a row with a NaN or plus infinity among its logits, or with nothing above minus infinity

_GREEDY_BELOW = 1e-5  # temperature
_GROUP_ROWS = 32  # sampled rows worked on at once, to bound memory; the same on all ranks, which meet in filtered groups
_DIGEST_WORDS = DIGEST_BYTES // 4
_MINUS_INFINITY = np.array(-np.inf, np.float32).view(np.int32)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row's id is chosen, and where it will stand: arrays of one entry per row, the same on all ranks."""

    temperatures: np.ndarray  # float32; 0 is greedy
    top_ks: np.ndarray  # int64; 0 is off
    top_ps: np.ndarray  # float32; 1 is off
    min_ps: np.ndarray  # float32; 0 is off
    seeds: np.ndarray  # uint64
    choices: np.ndarray  # int64
    positions: np.ndarray  # int64; index in prompt + output of the id being sampled
    logprobs: np.ndarray  # int64; of how many likeliest ids beside the sampled one's; -1 is none at all

    def kinds(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows that are sampled from all ids, and those sampled from fewer; the rest are greedy."""
        sampled = self.temperatures >= _GREEDY_BELOW
        filtered = (self.top_ks > 0) | (self.top_ps < 1) | (self.min_ps > 0)
        return np.flatnonzero(sampled & ~filtered), np.flatnonzero(sampled & filtered)

    def take(self, index: np.ndarray) -> SamplingRows:
        """The rows at `index`."""
        return SamplingRows(*(getattr(self, field.name)[index] for field in fields(self)))


class Sampler:
    """Samples on one rank, which holds the vocabulary's ids from `first_id` (a multiple of 4) on.

    `corrupt`, for tests: (rank, step); that rank then takes wrong ids for the step's.
    """

    def __init__(self, collectives: Collectives, first_id: int, corrupt: tuple[int, int] | None = None):
        self._collectives = collectives
        self._first_id = first_id
        self._corrupt = corrupt
        self._agreement = Agreement()

    def sample(self, logits: Tensor, rows: SamplingRows, step: int, plan: bytes, raw: Tensor) -> tuple[Tensor, Scores]:
        """An id per row, int64 (rows,), the same on all ranks; NOT_FINITE where the logits are not. And their scores.

        `logits` is this rank's slice, float32 (rows, columns), perhaps of no columns; `plan` is the step's plan as it
        came, with all that came for it. `raw` are the logits of the rows that want logprobs, as the model made them.
        Raises Disagreement, on all ranks, if their plans or ids differed in an earlier step.
        """
        values, columns = greatest(logits)
        finite = values < torch.inf  # false for NaN
        unfiltered, filtered = rows.kinds()
        for index, tops in [(index, None) for index in _groups(unfiltered)] + self._with_tops(filtered, values):
            (at,) = _tensors(logits.device, index)
            values[at], columns[at] = self._draw(logits[at], tops, rows.take(index))
        measures = self._measure(raw, rows, columns)
        ids, found = self._agree(values, torch.where(finite, columns + self._first_id, NOT_FINITE), measures, rows)
        if self._corrupt == (self._collectives.rank, step):
            ids = np.where(ids == 0, 1, 0)
        self._agreement.update(step, plan, ids)
        return torch.from_numpy(ids).to(logits.device), found

    def _measure(self, raw: Tensor, rows: SamplingRows, columns: Tensor) -> Tensor:
        """This rank's measures for the rows that want logprobs, were its best ids the ones that are sampled."""
        wanted = np.flatnonzero(rows.logprobs >= 0)
        if not len(wanted):
            return torch.empty((0, 0), dtype=torch.int32, device=raw.device)
        (at,) = _tensors(raw.device, wanted)
        own = raw.gather(1, columns[at][:, None]).squeeze(1) if raw.shape[1] else raw.new_full((len(wanted),), -torch.inf)
        return scores.measure(raw, own, int(rows.logprobs.max()), self._first_id)

    def _with_tops(self, filtered: np.ndarray, best: Tensor) -> list[tuple[np.ndarray, Tensor | None]]:
        """The rows at `filtered` in groups, each with its rows' greatest logits over all ranks, given this rank's."""
        if not len(filtered):
            return []
        (at,) = _tensors(best.device, filtered)
        tops = self._collectives.all_gather(best[at]).amax(0)
        # Without a finite top there is no order to filter by; such a row ends with NOT_FINITE anyway.
        groups = _groups(np.flatnonzero(tops.isfinite().cpu().numpy()))
        return [(filtered[group], tops[torch.from_numpy(group)]) for group in groups]

    def _draw(self, logits: Tensor, tops: Tensor | None, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        """This rank's best (value, column) for sampled rows; they are filtered if `tops` are given."""
        (temperatures,) = _tensors(logits.device, rows.temperatures)
        noise = RowNoise(rows.seeds, rows.choices, rows.positions, self._first_id, logits.device)
        if tops is None:
            tops, least = torch.zeros_like(temperatures), least_that_can_win(logits, temperatures, noise)
        else:
            top_ks, top_ps, min_ps = _tensors(logits.device, rows.top_ks, rows.top_ps, rows.min_ps)
            least = least_logits(logits, tops, temperatures, top_ks, top_ps, min_ps, self._collectives)
        return draw(logits, tops, temperatures, least, noise)

    def _agree(self, values: Tensor, ids: Tensor, measures: Tensor, rows: SamplingRows) -> tuple[np.ndarray, Scores]:
        """Gather every rank's best (value, id) of each row: the ids that won, int64, and scores. Raises Disagreement."""
        digest = torch.frombuffer(bytearray(self._agreement.digest), dtype=torch.int32).to(ids.device)
        bests = torch.cat((digest, values.view(torch.int32), ids.int(), measures.view(-1)))
        gathered = self._collectives.all_gather(bests).cpu().numpy()
        ends = np.cumsum((_DIGEST_WORDS, len(ids), len(ids)))
        digests, values_of, ids_of, measures_of = np.split(gathered, ends, axis=1)
        self._agreement.check([digest.tobytes() for digest in digests])
        winners = _winners(values_of.view(np.float32), ids_of)
        return winners, _scores(winners, ids_of, measures_of.reshape(len(gathered), *measures.shape), rows.logprobs)


def _scores(winners: np.ndarray, ids_of: np.ndarray, measures: np.ndarray, logprobs: np.ndarray) -> Scores:
    """A position for every row, or none if no row wants logprobs. Where the logits are not finite there is no entry."""
    wanted = np.flatnonzero(logprobs >= 0)
    if not len(wanted):
        return NO_SCORES
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


def _groups(index: np.ndarray) -> list[np.ndarray]:
    return [index[i : i + _GROUP_ROWS] for i in range(0, len(index), _GROUP_ROWS)]


def _tensors(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    return [torch.from_numpy(array).to(device) for array in arrays]
