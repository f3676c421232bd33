"""From each rank's slice of the logits to the same ids on every rank.

Every row comes down to one (value, id) per rank, its best: of the logits for a greedy row, of logit / temperature
+ noise over the ids that the filters leave for a sampled one. One gather takes all ranks' bests to all ranks,
together with the digests by which they check one another.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tpserve.parallel.collectives import Collectives
from tpserve.worker.agreement import DIGEST_BYTES, Agreement
from tpserve.worker.filters import least_logits
from tpserve.worker.noise import HIGHEST, LANES, gumbel, philox_keys, philox_words

NOT_FINITE = -1  # the id of a row with a NaN or plus infinity among its logits, or with nothing above minus infinity

_GREEDY_BELOW = 1e-5  # temperature
_GROUP_ROWS = 32  # sampled rows worked on at once: bounds memory. No rank's own affair, for filters meet in each group
_CHUNK_BLOCKS = 8192  # noise drawn at once: its intermediate results stay in a core's cache
_NEAR = 4.0  # what is this near to a row's greatest scaled logit is drawn first; any value gives the same ids
_LOWEST = torch.finfo(torch.float32).min
_DIGEST_WORDS = DIGEST_BYTES // 4


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

    def kinds(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows that are sampled from all ids, and those sampled from fewer; the rest are greedy."""
        sampled = self.temperatures >= _GREEDY_BELOW
        filtered = (self.top_ks > 0) | (self.top_ps < 1) | (self.min_ps > 0)
        return np.flatnonzero(sampled & ~filtered), np.flatnonzero(sampled & filtered)

    def take(self, index: np.ndarray) -> SamplingRows:
        """The rows at `index`."""
        return SamplingRows(*(getattr(self, field.name)[index] for field in fields(self)))


class Sampler:
    """Samples on one rank, which holds the vocabulary's ids from `first_id` (a multiple of LANES) on.

    `corrupt`, for tests: (rank, step); that rank then takes wrong ids for the step's.
    """

    def __init__(self, collectives: Collectives, first_id: int, corrupt: tuple[int, int] | None = None):
        self._collectives = collectives
        self._first_id = first_id
        self._corrupt = corrupt
        self._agreement = Agreement()

    def sample(self, logits: Tensor, rows: SamplingRows, step: int, plan: bytes) -> Tensor:
        """An id per row, int64 (rows,), the same on all ranks; NOT_FINITE where the logits are not.

        `logits` is this rank's slice, float32 (rows, columns), perhaps of no columns; `plan` is the step's plan as it
        came. Raises Disagreement, on all ranks, if their plans or ids differed in an earlier step.
        """
        values, columns = _best(logits)
        finite = values < torch.inf  # false for NaN
        unfiltered, filtered = rows.kinds()
        for index in _groups(unfiltered):
            zeros = logits.new_zeros(len(index))
            self._draw(logits, rows, index, zeros, zeros - torch.inf, values, columns)
        ids = self._agree(values, torch.where(finite, columns + self._first_id, NOT_FINITE))
        if self._corrupt == (self._collectives.rank, step):
            ids = np.where(ids == 0, 1, 0)
        self._agreement.update(step, plan, ids)
        return torch.from_numpy(ids).to(logits.device)

    def _agree(self, values: Tensor, ids: Tensor) -> np.ndarray:
        """Gather every rank's best (value, id) of each row: the ids that won, int64. Raises Disagreement."""
        digest = torch.frombuffer(bytearray(self._agreement.digest), dtype=torch.int32).to(ids.device)
        bests = torch.cat((digest, values.view(torch.int32), ids.int()))
        gathered = self._collectives.all_gather(bests).cpu().numpy()
        digests, values_of, ids_of = np.split(gathered, (_DIGEST_WORDS, _DIGEST_WORDS + len(ids)), axis=1)
        self._agreement.check([digest.tobytes() for digest in digests])
        return _winners(values_of.view(np.float32), ids_of)


def _best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest of each row, NaN if there is one, and its first column; -inf and 0 if there are no columns."""
    if not logits.shape[1]:
        return logits.new_full((len(logits),), -torch.inf), logits.new_zeros(len(logits), dtype=torch.int64)
    values, columns = logits.max(dim=1)
    return values, columns


def _winners(values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Of each rank's best (rank, row) the id with the greatest value, the lowest at a tie; NOT_FINITE if any is."""
    greatest = values.max(axis=0)
    winners = np.where(values == greatest, ids, np.iinfo(np.int32).max).min(axis=0)
    sound = (ids != NOT_FINITE).all(axis=0) & (greatest > -np.inf)
    return np.where(sound, winners, NOT_FINITE).astype(np.int64)


def _groups(index: np.ndarray) -> list[np.ndarray]:
    return [index[i : i + _GROUP_ROWS] for i in range(0, len(index), _GROUP_ROWS)]
