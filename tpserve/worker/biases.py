"""What is added to the logits of some ids of a slot, and the stop ids that it must not sample yet."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tpserve.messages import Row, StepPlan
from tpserve.parallel.partition import Span
from tpserve.worker.slots import parts


class Biases:
    """One rank's part of each slot's biases and banned ids. Slots without any cost a look-up in an array."""

    def __init__(self, slots: int, vocab: Span, device: torch.device):
        """`vocab` are the ids whose logits this rank has."""
        self._vocab = vocab
        self._device = device
        self._has_bias = np.zeros(slots, bool)
        self._min_lens = np.zeros(slots, np.int64)
        self._biases: dict[int, tuple[Tensor, Tensor]] = {}  # columns and values of such slots
        self._banned: dict[int, Tensor] = {}  # columns of slots with a least length

    def admit(self, plan: StepPlan) -> None:
        """Take over what the plan says of the slots that it begins."""
        slots = plan.slots[(plan.flags & Row.FIRST) != 0].astype(np.int64)
        self._has_bias[slots] = plan.bias_counts > 0
        self._min_lens[slots] = plan.min_lens
        for slot, ids, values in zip(
            slots.tolist(), parts(plan.bias_ids, plan.bias_counts), parts(plan.bias_values, plan.bias_counts)
        ):
            self._biases.pop(slot, None)
            if len(ids):
                mine = self._vocab.holds(ids)
                self._biases[slot] = self._columns(ids[mine]), torch.tensor(values[mine], device=self._device)
        for slot, ids in zip(slots.tolist(), parts(plan.stop_ids, plan.stop_counts)):
            self._banned.pop(slot, None)
            if len(ids):
                self._banned[slot] = self._columns(ids[self._vocab.holds(ids)])

    def apply_(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> None:
        """Change in place: `logits` is float32 (rows, columns), a row for each of the slots, int64 (rows,).

        `positions` are where the ids to be sampled will stand.
        """
        for row in np.flatnonzero(self._has_bias[slots]).tolist():
            columns, values = self._biases[int(slots[row])]
            logits[row].index_add_(0, columns, values)
        for row in np.flatnonzero(self._min_lens[slots] > positions).tolist():
            banned = self._banned.get(int(slots[row]))
            if banned is not None:
                logits[row].index_fill_(0, banned, -torch.inf)

    def _columns(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids.astype(np.int64) - self._vocab.start).to(self._device)
