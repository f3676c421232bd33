"""What is sampled of a step: an id after each row's last token, and after those before it that may be wrong drafts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tpserve.kernels.interface import StepTokens
from tpserve.messages import Row, StepPlan
from tpserve.worker.slots import Drafts, ragged


@dataclass(frozen=True)
class Samples:
    """Of each id that is sampled the place of the token before it and the plan's row: int64 (ids,), in row order.

    `counts` are the ids of each row that samples, int64 (sampling rows,); None if all have one.
    """

    places: np.ndarray
    rows: np.ndarray
    counts: np.ndarray | None

    @classmethod
    def of(cls, plan: StepPlan, tokens: StepTokens, drafts: Drafts | None) -> Samples:
        """Those of a plan."""
        rows = np.flatnonzero(plan.flags & Row.SAMPLE)
        if drafts is None:
            return cls(tokens.last[rows], rows, None)
        counts = 1 + drafts.counts[rows]
        row, offset = ragged(counts)
        return cls(tokens.last[rows][row] + 1 - counts[row] + offset, rows[row], counts)

    def drafts_before(self, tokens: StepTokens) -> dict[int, np.ndarray]:
        """The drafts of its row that precede an id, by the id's place among these."""
        if self.counts is None:
            return {}
        _, offset = ragged(self.counts)
        ends = self.places + 1
        return {int(i): tokens.ids[ends[i] - offset[i] : ends[i]] for i in np.flatnonzero(offset)}


def num_right(ids: np.ndarray, inputs: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """How many ids of each row stand, int64 (rows,): those up to the first that is not what was drafted in its place.

    Row r has `counts[r]` of the `ids` that were sampled and of the `inputs` before them, both flat in row order.
    """
    _, offset = ragged(counts)
    last = np.cumsum(counts) - 1
    goes_on = np.append(ids[:-1] == inputs[1:], False)
    goes_on[last] = False
    stops: np.ndarray = np.minimum.reduceat(np.where(goes_on, len(ids), offset), last + 1 - counts)
    return stops + 1
