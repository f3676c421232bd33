"""How the ids of a step are chosen, as arrays over the rows that are sampled."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

_GREEDY_BELOW = 1e-5  # temperature


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
        if not sampled.any():
            return _NONE, _NONE
        filtered = (self.top_ks > 0) | (self.top_ps < 1) | (self.min_ps > 0)
        return np.flatnonzero(sampled & ~filtered), np.flatnonzero(sampled & filtered)

    def take(self, index: np.ndarray) -> SamplingRows:
        """The rows at `index`."""
        return SamplingRows(*(getattr(self, field.name)[index] for field in fields(self)))


_NONE = np.empty(0, np.int64)
