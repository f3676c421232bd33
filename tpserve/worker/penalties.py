"""Repetition, presence and frequency penalties over a vocabulary that is split between ranks.

Of a logit x whose id has occurred, c times of those among the ids sampled so far, they make

    (x / repetition if x > 0 else x * repetition) - frequency * c - presence * (c > 0)

and leave the logits of other ids alone. Repetition is as Keskar et al. 2019 (CTRL, section 4.1) have it but for the
sign, presence and frequency are as in OpenAI's API.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tpserve.messages import Row, StepPlan
from tpserve.parallel.partition import Span
from tpserve.worker.slots import parts


class _Past:
    """Which columns of a rank's logits have occurred in one slot, ascending, and how often each was sampled."""

    def __init__(self, prompt: np.ndarray, sampled: np.ndarray):
        self.columns, places = np.unique(np.concatenate((prompt, sampled)), return_inverse=True)
        self.counts = np.bincount(places[len(prompt) :], minlength=len(self.columns))

    def add(self, column: int) -> None:
        place = np.searchsorted(self.columns, column)
        if place == len(self.columns) or self.columns[place] != column:
            self.columns = np.insert(self.columns, place, column)
            self.counts = np.insert(self.counts, place, 0)
        self.counts[place] += 1


class Penalties:
    """One rank's part of the past of each slot that has penalties. Other slots cost a look-up in an array.

    What plans say of a slot stands at its beginning; from then on the ids are counted here as they are sampled, since
    the coordinator plans ahead of them.
    """

    def __init__(self, slots: int, vocab: Span, device: torch.device):
        """`vocab` are the ids whose logits this rank has."""
        self._vocab = vocab
        self._device = device
        self._has_past = np.zeros(slots, bool)
        self._pasts: dict[int, _Past] = {}  # of such slots
        self._repetition = np.ones(slots, np.float32)
        self._presence = np.zeros(slots, np.float32)
        self._frequency = np.zeros(slots, np.float32)

    def admit(self, plan: StepPlan) -> None:
        """Take over what the plan says of the slots that it begins."""
        slots = plan.slots[(plan.flags & Row.FIRST) != 0].astype(np.int64)
        if not len(slots):
            return
        self._has_past[slots] = plan.past_counts > 0
        self._repetition[slots] = plan.repetition_penalties
        self._presence[slots] = plan.presence_penalties
        self._frequency[slots] = plan.frequency_penalties
        for slot, past, prompt_count in zip(slots.tolist(), parts(plan.past, plan.past_counts), plan.prompt_counts.tolist()):
            self._pasts.pop(slot, None)
            if len(past):
                self._pasts[slot] = _Past(self._columns(past[:prompt_count]), self._columns(past[prompt_count:]))

    def apply_(self, logits: Tensor, slots: np.ndarray) -> None:
        """Penalize in place: `logits` is float32 (rows, columns), a row for each of the slots, int64 (rows,)."""
        rows = np.flatnonzero(self._has_past[slots])
        if not len(rows):
            return
        slots = slots[rows]
        pasts = [self._pasts[slot] for slot in slots.tolist()]
        sizes = [len(past.columns) for past in pasts]
        places = self._tensor(np.repeat(rows, sizes)), self._tensor(np.concatenate([past.columns for past in pasts]))
        counts = self._tensor(np.concatenate([past.counts for past in pasts]))
        repetition, presence, frequency = (
            self._tensor(np.repeat(penalty[slots], sizes)) for penalty in (self._repetition, self._presence, self._frequency)
        )
        x = logits[places]
        x = torch.where(x > 0, x / repetition, x * repetition)
        logits[places] = x - frequency * counts - presence * (counts > 0)

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

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)
