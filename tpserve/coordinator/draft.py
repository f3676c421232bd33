"""A step plan under construction."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tpserve.coordinator.sequence import Request, Sequence
from tpserve.messages import Row, StepPlan

_ONE = array("I", [1])
_DECODE = array("B", [Row.SAMPLE | Row.FROM_SLOT])
_MASKED = int(Row.MASKED)


class Scored(NamedTuple):
    """A row whose ids are to be scored."""

    request: Request
    num_targets: int
    num_known: int  # of them, how many were scored before; they come first


class Draft:
    """Collects a plan's rows in typed arrays, which become the message's fields as they are."""

    def __init__(self, step: int, budget: int):
        self.step = step
        self.budget = budget  # tokens that may still be added
        self.sampled: list[Sequence] = []  # of the rows that sample, in row order
        self.masked: list[Sequence] = []  # those of them under a grammar
        self.scored: list[Scored] = []  # in row order
        self.chunks: list[Sequence] = []  # of the rows that hold a chunk, in row order
        self._first: list[Sequence] = []
        self._slots, self._counts, self._flags = array("H"), array("I"), array("B")
        self._page_counts, self._pages, self._ids = array("I"), array("i"), array("i")
        self._starts, self._past_counts, self._past = array("I"), array("I"), array("i")
        self._target_counts, self._target_tops, self._targets = array("I"), array("I"), array("i")
        self._copy_from, self._copy_to = array("i"), array("i")

    def add_decodes(self, rows: list[Sequence], page_counts: list[int], pages: list[int]) -> None:
        """A row for each of these, the plan's first: its input is what its slot sampled last. `page_counts` is parallel."""
        self._slots.extend([row.slot for row in rows])  # type: ignore[misc]  # who runs has a slot
        self._counts += _ONE * len(rows)
        self._flags += _DECODE * len(rows)
        self._page_counts.extend(page_counts)
        self._pages.extend(pages)
        self.sampled += rows
        self.budget -= len(rows)
        for index in [index for index, row in enumerate(rows) if row.matcher is not None]:
            self._flags[index] |= _MASKED
            self.masked.append(rows[index])

    def add_chunk(self, row: Sequence, count: int, first: bool) -> None:
        """A row with the sequence's next `count` ids, and with its pages and parameters if it is its slot's first."""
        assert row.slot is not None
        end = row.num_computed + count
        samples = end == row.num_prefill
        is_masked = samples and row.matcher is not None
        scored = row.request.num_scored < min(end, row.request.num_targets)
        self._slots.append(row.slot)
        self._counts.append(count)
        self._flags.append(Row.FIRST * first | Row.SAMPLE * samples | Row.MASKED * is_masked | Row.SCORE * scored)
        self._page_counts.append(len(row.pages) * first)
        self._ids += row.ids[row.num_computed : end]
        self.chunks.append(row)
        self.budget -= count
        if samples:
            self.sampled.append(row)
        if is_masked:
            self.masked.append(row)
        if scored:
            self._add_targets(row, min(end, row.request.num_targets))
        if first:
            self._pages.extend(row.pages)
            self._add_first(row)

    def _add_targets(self, row: Sequence, end: int) -> None:
        begin = row.num_computed  # a prefill that is begun again comes by ids that are scored already
        self._targets += row.ids[begin + 1 : end + 1]
        self._target_counts.append(end - begin)
        self._target_tops.append(row.request.submit.prompt_logprobs)
        self.scored.append(Scored(row.request, end - begin, row.request.num_scored - begin))

    def _add_first(self, row: Sequence) -> None:
        # The workers see no ids of a prefix hit, and none of the last stay in a slot.
        past = row.ids if row.request.submit.sampling.looks_back else array("i")
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
        submits = [row.request.submit for row in self._first]
        min_lens = [len(submit.prompt) + submit.min_tokens if submit.min_tokens else 0 for submit in submits]
        stops = [submit.stop_ids if submit.min_tokens else submit.stop_ids[:0] for submit in submits]

        def parameter(name: str, dtype: type) -> np.ndarray:
            return np.array([getattr(submit.sampling, name) for submit in submits], dtype)

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
            prompt_counts=np.array([len(submit.prompt) for submit in submits], np.uint32),
            logprobs=np.array([submit.logprobs for submit in submits], np.int32),
            min_lens=np.array(min_lens, np.uint32),
            past_counts=np.asarray(self._past_counts),
            bias_counts=_lengths(submit.bias_ids for submit in submits),
            stop_counts=_lengths(stops),
            past=np.asarray(self._past),
            bias_ids=_flat([submit.bias_ids for submit in submits], np.int32),
            bias_values=_flat([submit.bias_values for submit in submits], np.float32),
            stop_ids=_flat(stops, np.int32),
            target_counts=np.asarray(self._target_counts),
            target_tops=np.asarray(self._target_tops),
            targets=np.asarray(self._targets),
            copy_from=np.asarray(self._copy_from),
            copy_to=np.asarray(self._copy_to),
        )


def _lengths(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.array([len(array) for array in arrays], np.uint32)


def _flat(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays])
