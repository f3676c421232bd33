"""What a worker knows of each running sequence: a cache of what the plans said, as arrays over slots."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from tpserve.kernels.interface import StepTokens
from tpserve.messages import FirstRows, Row, StepPlan


class Drafts(NamedTuple):
    """Ids that a worker puts behind rows' own, which may be wrong."""

    counts: np.ndarray  # int64 (rows,)
    ids: np.ndarray  # int64, flat, in row order


_NONE = np.empty(0, np.int64)


class Slots:
    """State per slot. Every operation is over arrays: no Python per row."""

    def __init__(self, slots: int, pages: int, page_size: int, device: torch.device):
        """Room for `slots` sequences of up to `pages` pages of `page_size` tokens each."""
        self.page_size = page_size
        self.lengths = np.zeros(slots, np.int64)  # tokens with keys and values
        self.tables = np.zeros((slots, pages), np.int64)
        self.page_counts = np.zeros(slots, np.int64)
        self.temperatures = np.zeros(slots, np.float32)
        self.top_ks = np.zeros(slots, np.int64)
        self.top_ps = np.ones(slots, np.float32)
        self.min_ps = np.zeros(slots, np.float32)
        self.seeds = np.zeros(slots, np.uint64)
        self.choices = np.zeros(slots, np.int64)
        self.logprobs = np.full(slots, -1, np.int64)
        self.last_ids = torch.zeros(slots, dtype=torch.int64, device=device)

    def begin(self, plan: StepPlan, drafts: Drafts | None = None) -> StepTokens:
        """Take over what the plan says of its slots; returns its tokens, drafts included. `end` must follow."""
        slots, counts = plan.slots.astype(np.int64), plan.counts.astype(np.int64)
        if drafts is not None:
            counts += drafts.counts
        first = (plan.flags & Row.FIRST) != 0
        # Most steps only decode, within pages that rows have: what there is nothing of costs nothing.
        if len(plan.first_rows):
            self._admit(slots[first], plan.first_rows)
        if len(plan.pages):
            self._append_pages(slots, plan)
        starts = self.lengths[slots]
        stops = np.cumsum(counts)
        row, offset = ragged(counts)
        positions = starts[row] + offset
        page, place = np.divmod(positions, self.page_size)
        from_slot = (plan.flags & Row.FROM_SLOT) != 0
        ids = np.zeros(len(row), np.int64)
        ids[~from_slot[row]] = plan.ids
        if drafts is not None:
            ids[from_slot[row] & (offset > 0)] = drafts.ids
        return StepTokens(
            slots=slots,
            starts=starts,
            counts=counts,
            last=stops - 1,
            positions=positions,
            kv_slots=self.tables[slots[row], page] * self.page_size + place,
            ids=ids,
            fed=(stops - counts)[from_slot],
            fed_slots=slots[from_slot],
            tables=self.tables,
            tails=self._tails(slots, starts, starts + counts, first),
        )

    def end(self, tokens: StepTokens, num_wrong: np.ndarray | int = 0) -> None:
        """The tokens' keys and values are in the pool; of so many of each row's last ones they are of no use: (rows,)."""
        self.lengths[tokens.slots] += tokens.counts - num_wrong

    def _tails(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray, first: np.ndarray) -> np.ndarray:
        """The unused places of last pages that were another sequence's, or a copy, until now."""
        last_page = (ends - 1) // self.page_size
        entered = first | (starts <= last_page * self.page_size)
        if not entered.any():
            return _NONE
        row, offset = ragged(np.where(entered, (last_page + 1) * self.page_size - ends, 0))
        tails: np.ndarray = self.tables[slots[row], last_page[row]] * self.page_size + ends[row] % self.page_size + offset
        return tails

    def _admit(self, slots: np.ndarray, begun: FirstRows) -> None:
        self.lengths[slots] = begun.starts
        self.page_counts[slots] = 0
        self.temperatures[slots] = begun.temperatures
        self.top_ks[slots] = begun.top_ks
        self.top_ps[slots] = begun.top_ps
        self.min_ps[slots] = begun.min_ps
        self.seeds[slots] = begun.seeds
        self.choices[slots] = begun.choices
        self.logprobs[slots] = begun.logprobs

    def _append_pages(self, slots: np.ndarray, plan: StepPlan) -> None:
        counts = plan.page_counts.astype(np.int64)
        row, offset = ragged(counts)
        self.tables[slots[row], self.page_counts[slots[row]] + offset] = plan.pages
        self.page_counts[slots] += counts


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(row, offset) of each element when row r has `counts[r]` of them, in row order."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]


def parts(flat: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """A flat array cut into so many for each."""
    return np.split(flat, np.cumsum(counts)[:-1]) if len(counts) else []
