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

    def __init__(self, slots: int, vocab: Span):
        """`vocab` are the ids whose logits this rank has."""
        self._vocab = vocab
        self._has_bias = np.zeros(slots, bool)
        self._min_lens = np.zeros(slots, np.int64)
        self._biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # columns and values of such slots
        self._banned: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # columns of slots with stop ids, and -inf for each

    def admit(self, plan: StepPlan) -> None:
        """Take over what the plan says of the slots that it begins."""
        if not len(plan.first_rows):
            return
        slots = plan.slots[(plan.flags & Row.FIRST) != 0].astype(np.int64)
        begun = plan.first_rows
        self._has_bias[slots] = begun.bias_counts > 0
        self._min_lens[slots] = begun.min_lens
        self._take_over(self._biases, slots, begun.bias_counts, begun.bias_ids, begun.bias_values)
        never = np.full(len(begun.stop_ids), -np.inf, np.float32)
        self._take_over(self._banned, slots, begun.stop_counts, begun.stop_ids, never)

    def apply_(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> None:
        """Change in place: `logits` is float32 (rows, columns), a row for each of the slots, int64 (rows,).

        `positions` are where the ids to be sampled will stand.
        """
        added = [(row, self._biases[int(slots[row])]) for row in np.flatnonzero(self._has_bias[slots]).tolist()]
        young = np.flatnonzero(self._min_lens[slots] > positions).tolist()
        added += [(row, self._banned[int(slots[row])]) for row in young if int(slots[row]) in self._banned]
        if not added:
            return
        rows = np.repeat([row for row, _ in added], [len(columns) for _, (columns, _) in added])
        columns, values = (np.concatenate(each) for each in zip(*(what for _, what in added)))
        places, amounts = (rows, columns), torch.from_numpy(values)
        where = tuple(torch.from_numpy(each).to(logits.device) for each in places)
        logits.index_put_(where, amounts.to(logits.device), accumulate=True)

    def _take_over(
        self, held: dict[int, tuple[np.ndarray, np.ndarray]], slots: np.ndarray, counts: np.ndarray, ids: np.ndarray,
        values: np.ndarray,
    ) -> None:  # fmt: skip
        """Put this rank's part of what is new of each slot in the place of what was held."""
        for slot, its_ids, its_values in zip(slots.tolist(), parts(ids, counts), parts(values, counts)):
            held.pop(slot, None)
            if len(its_ids):
                mine = self._vocab.holds(its_ids)
                held[slot] = its_ids[mine].astype(np.int64) - self._vocab.start, its_values[mine].astype(np.float32)
