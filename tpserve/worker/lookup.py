"""Drafts by prompt lookup: what followed an answer's last ids where they stood before, may follow again.

A wrong draft costs time and nothing else: an id is sampled after each draft as it would be if that came by itself, and those
after the first wrong one are dropped.
"""

from __future__ import annotations

import numpy as np

from tpserve.messages import Row, StepPlan
from tpserve.worker.slots import Drafts, parts

_LONGEST, _SHORTEST = 3, 2  # ids that are looked up
_FIRST_DRAFTS = 2  # of a slot


class Lookup:
    """All ids of each slot, and how far it is worth to guess there. The same on all ranks, which draft alike without a word.

    Every operation but the look-up is over arrays; rows that are looked up are few (`coordinator/speculation.py`).
    """

    def __init__(self, slots: int, max_len: int):
        """Room for `max_len` ids of each."""
        self._ids = np.full((slots, max_len), -1, np.int32)  # touched, so that memory runs out now or never
        self._most = np.zeros(slots, np.int64)

    def admit(self, plan: StepPlan) -> None:
        """Take over the ids of the slots that the plan begins."""
        slots, begun = plan.slots[(plan.flags & Row.FIRST) != 0], plan.first_rows
        self._most[slots] = _FIRST_DRAFTS
        for slot, past in zip(slots.tolist(), parts(begun.past, begun.past_counts)):
            self._ids[slot, : len(past)] = past

    def draft(self, plan: StepPlan, lengths: np.ndarray) -> Drafts:
        """Drafts for its SPECULATE rows; `lengths` (slots,) are tokens with keys and values: all known ids but the last."""
        counts, found = np.zeros(len(plan.slots), np.int64), [np.empty(0, np.int64)]
        rows = np.flatnonzero(plan.flags & Row.SPECULATE)
        for row, most in zip(rows.tolist(), plan.most_drafts.tolist()):
            slot = int(plan.slots[row])
            ids = continuation(self._ids[slot, : lengths[slot] + 1], min(most, int(self._most[slot])))
            counts[row] = len(ids)
            found.append(ids)
        return Drafts(counts, np.concatenate(found))

    def add(self, slots: np.ndarray, positions: np.ndarray, ids: np.ndarray) -> None:
        """These ids came at these positions: (ids,)."""
        self._ids[slots, positions] = ids.clip(0)

    def learn(self, slots: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """So many of these slots' drafts were right. Where all were, twice as many come next, else one more than were right."""
        self._most[slots] = np.where(accepted == drafted, 2 * drafted, accepted + 1)


def continuation(ids: np.ndarray, most: int) -> np.ndarray:
    """Up to `most` ids, int64, that may follow these; none if their last `_SHORTEST` never stood before.

    What followed the latest of the longest matches follows again; it goes round if it reaches up to the end.
    """
    if len(ids) <= _SHORTEST:
        return np.empty(0, np.int64)
    ends = np.flatnonzero(ids[_SHORTEST - 1 : -1] == ids[-1]) + _SHORTEST - 1
    for back in range(1, _LONGEST):
        longer = ends[(ids[ends - back] == ids[-1 - back]) & (ends >= back)]
        if back < _SHORTEST or len(longer):
            ends = longer
    if not len(ends):
        return np.empty(0, np.int64)
    period = len(ids) - 1 - ends[-1]
    places = len(ids) - period + np.arange(most) % period
    return np.asarray(ids[places], np.int64)
