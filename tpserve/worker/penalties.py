"""Repetition, presence and frequency penalties over a vocabulary that is split between ranks.

Of a logit x whose id has occurred, c times of those among the ids sampled so far, they make

    (x / repetition if x > 0 else x * repetition) - frequency * c - presence * (c > 0)

and leave the logits of other ids alone. Repetition is as Keskar et al. 2019 (CTRL, section 4.1) have it but for the
sign, presence and frequency are as in OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy

import numpy as np
from torch import Tensor

from tpserve.messages import Row, StepPlan
from tpserve.parallel.partition import Span
from tpserve.worker.passes import TORCH, Passes
from tpserve.worker.slots import parts

_ROOM = 256  # ids by which a past is made larger
_NONE = np.empty(0, np.int64)
_NEUTRAL = np.array([[1], [0], [0]], np.float32)


class _Past:
    """Which columns of a rank's logits have occurred in one slot, and how often each was sampled: the first `size` entries."""

    def __init__(self, prompt: np.ndarray, sampled: np.ndarray):
        columns, places = np.unique(np.concatenate((prompt, sampled)), return_inverse=True)
        self.columns = columns.astype(np.int32)
        self.counts = np.bincount(places[len(prompt) :], minlength=len(columns)).astype(np.int32)
        self.size = len(columns)

    def after(self, columns: list[int]) -> _Past:
        """What it is when these were sampled as well."""
        past = copy(self)
        past.columns, past.counts = self.columns.copy(), self.counts.copy()
        for column in columns:
            past.add(column)
        return past

    def add(self, column: int) -> None:
        found = np.flatnonzero(self.columns[: self.size] == column)
        if len(found):
            self.counts[found[0]] += 1
            return
        if self.size == len(self.columns):
            room = self.size + _ROOM
            self.columns, self.counts = (np.resize(x, room) for x in (self.columns, self.counts))
        self.columns[self.size], self.counts[self.size] = column, 1
        self.size += 1


class Penalties:
    """One rank's part of the past of each slot that has penalties. Other slots cost a look-up in an array.

    What plans say of a slot stands at its beginning; from then on the ids are counted here as they are sampled, since
    the coordinator plans ahead of them.
    """

    def __init__(self, slots: int, vocab: Span, passes: Passes = TORCH):
        """`vocab` are the ids whose logits this rank has."""
        self._vocab = vocab
        self._passes = passes
        self._has_past = np.zeros(slots, bool)
        self._pasts: dict[int, _Past] = {}  # of such slots
        self._penalties = np.zeros((3, slots), np.float32)  # repetition, presence, frequency

    def admit(self, plan: StepPlan) -> None:
        """Take over what the plan says of the slots that it begins."""
        if not len(plan.first_rows):
            return
        slots = plan.slots[(plan.flags & Row.FIRST) != 0].astype(np.int64)
        begun = plan.first_rows
        penalties = np.stack((begun.repetition_penalties, begun.presence_penalties, begun.frequency_penalties))
        self._penalties[:, slots] = penalties
        self._has_past[slots] = (penalties != _NEUTRAL).any(axis=0)  # drafts want the past as well
        pasts = parts(begun.past, begun.past_counts)
        for slot, past, prompt_count in zip(slots.tolist(), pasts, begun.prompt_counts.tolist()):
            self._pasts.pop(slot, None)
            if self._has_past[slot]:
                self._pasts[slot] = _Past(self._columns(past[:prompt_count]), self._columns(past[prompt_count:]))

    def apply_(self, logits: Tensor, slots: np.ndarray, drafts: Callable[[], Mapping[int, np.ndarray]] = dict) -> None:
        """Penalize in place: `logits` is float32 (rows, columns), a row for each of the slots, int64 (rows,).

        `drafts` tells the ids that come before a row's beside those that were sampled; it is asked where there are penalties.
        """
        rows = np.flatnonzero(self._has_past[slots])
        if not len(rows):
            return
        slots = slots[rows]
        pasts = [self._pasts[slot] for slot in slots.tolist()]
        if before := drafts():
            ahead = [self._columns(before[row]) if row in before else _NONE for row in rows.tolist()]
            pasts = [past.after(columns.tolist()) for past, columns in zip(pasts, ahead)]
        columns = np.concatenate([past.columns[: past.size] for past in pasts])
        counts = np.concatenate([past.counts[: past.size] for past in pasts])
        sizes = np.array([past.size for past in pasts])
        self._passes.penalize_(logits, rows, columns, counts, sizes, self._penalties.take(slots, axis=1))

    def count(self, slots: np.ndarray, ids: np.ndarray) -> None:
        """These ids, int64, were sampled for these slots; a negative one is none."""
        for row in np.flatnonzero(self._has_past[slots]).tolist():
            id_ = int(ids[row])
            if self._vocab.start <= id_ < self._vocab.stop:
                self._pasts[int(slots[row])].add(id_ - self._vocab.start)

    def _columns(self, ids: np.ndarray) -> np.ndarray:
        """The columns, int64, of those that are of this rank."""
        mine: np.ndarray = ids[self._vocab.holds(ids)].astype(np.int64)
        return mine - self._vocab.start
