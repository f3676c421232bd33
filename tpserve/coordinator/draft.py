"""A step plan under construction."""

from __future__ import annotations

from array import array

import numpy as np

from tpserve.coordinator.sequence import Sequence
from tpserve.messages import Row, StepPlan

_ONE = array("I", [1])
_DECODE = array("B", [Row.SAMPLE | Row.FROM_SLOT])


class Draft:
    """Collects a plan's rows in typed arrays, which become the message's fields as they are."""

    def __init__(self, step: int, budget: int):
        self.step = step
        self.budget = budget  # tokens that may still be added
        self.sampled: list[Sequence] = []  # of the rows that sample, in row order
        self.chunks: list[Sequence] = []  # of the rows that hold a chunk, in row order
        self._first: list[Sequence] = []
        self._slots, self._counts, self._flags = array("H"), array("I"), array("B")
        self._page_counts, self._pages, self._ids = array("I"), array("i"), array("i")
        self._starts, self._past_counts, self._past = array("I"), array("I"), array("i")
        self._copy_from, self._copy_to = array("i"), array("i")

    def add_decodes(self, rows: list[Sequence], page_counts: list[int], pages: list[int]) -> None:
        """A row for each of these: its input is what its slot sampled last. `page_counts` is parallel to `rows`."""
        self._slots.extend([row.slot for row in rows])  # type: ignore[misc]  # who runs has a slot
        self._counts += _ONE * len(rows)
        self._flags += _DECODE * len(rows)
        self._page_counts.extend(page_counts)
        self._pages.extend(pages)
        self.sampled += rows
        self.budget -= len(rows)

    def add_chunk(self, row: Sequence, count: int, first: bool) -> None:
        """A row with the sequence's next `count` ids, and with its pages and parameters if it is its slot's first."""
        assert row.slot is not None
        end = row.num_computed + count
        samples = end == row.num_prefill
        self._slots.append(row.slot)
        self._counts.append(count)
        self._flags.append(Row.FIRST * first | Row.SAMPLE * samples)
        self._page_counts.append(len(row.pages) * first)
        self._ids += row.ids[row.num_computed : end]
        self.chunks.append(row)
        self.budget -= count
        if samples:
            self.sampled.append(row)
        if first:
            self._pages.extend(row.pages)
            self._add_first(row)

    def _add_first(self, row: Sequence) -> None:
        # The workers see no ids of a prefix hit, and none of the last stay in a slot.
        past = row.ids if row.sampling.looks_back else array("i")
        self._past += past
        self._past_counts.append(len(past))
        self._starts.append(row.num_computed)
        self._first.append(row)

    def add_copy(self, source: int, target: int) -> None:
        """Page `target` begins as a copy of page `source`."""
        self._copy_from.append(source)
        self._copy_to.append(target)

    def finish(self) -> StepPlan | None:
        """The plan, or None when it has no rows."""
        if not self._slots:
            return None

        def parameter(name: str, dtype: type) -> np.ndarray:
            return np.array([getattr(row.sampling, name) for row in self._first], dtype)

        return StepPlan(
            step=self.step,
            slots=np.asarray(self._slots),
            counts=np.asarray(self._counts),
            flags=np.asarray(self._flags),
            page_counts=np.asarray(self._page_counts),
            pages=np.asarray(self._pages),
            ids=np.asarray(self._ids),
            starts=np.asarray(self._starts),
            seeds=parameter("seed", np.uint64),
            choices=np.array([row.choice for row in self._first], np.uint16),
            temperatures=parameter("temperature", np.float32),
            top_ks=parameter("top_k", np.uint32),
            top_ps=parameter("top_p", np.float32),
            min_ps=parameter("min_p", np.float32),
            repetition_penalties=parameter("repetition_penalty", np.float32),
            presence_penalties=parameter("presence_penalty", np.float32),
            frequency_penalties=parameter("frequency_penalty", np.float32),
            prompt_counts=np.array([row.num_prompt for row in self._first], np.uint32),
            past_counts=np.asarray(self._past_counts),
            past=np.asarray(self._past),
            copy_from=np.asarray(self._copy_from),
            copy_to=np.asarray(self._copy_to),
        )
