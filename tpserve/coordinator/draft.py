"""A step plan under construction."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tpserve.coordinator.batch import Decodes
from tpserve.coordinator.sequence import Request, Sequence
from tpserve.messages import NO_FIRST_ROWS, FirstRows, Row, StepPlan


class Scored(NamedTuple):
    """A row whose ids are to be scored."""

    request: Request
    num_targets: int
    num_known: int  # of them, how many were scored before; they come first


class Draft:
    """Collects a plan's rows: those that decode as arrays, which become the message's fields as they are; then chunks."""

    def __init__(self, step: int, budget: int, now_s: float, decodes: Decodes):
        """`decodes` are the plan's first rows: the input of each is what its slot sampled last."""
        self.step = step
        self.now_s = now_s
        self.num_decodes = len(decodes.slots)
        self.num_columns = self.num_decodes + sum(decodes.most_drafts.tolist())
        self.budget = budget - self.num_columns  # tokens that may still be added
        self.masked = decodes.masked  # of the rows under a grammar that sample
        self.scored: list[Scored] = []  # in row order
        self.chunks: list[Sequence] = []  # of the rows that hold a chunk, in row order
        self._decodes = decodes
        self._sampled: list[int] = []  # slots of the chunks' rows that sample
        self._first: list[Sequence] = []
        self._slots: list[int] = []
        self._counts: list[int] = []
        self._flags: list[int] = []
        self._page_counts: list[int] = []
        self._pages = decodes.pages
        self._ids, self._targets = array("i"), array("i")
        self._starts: list[int] = []
        self._target_tops: list[int] = []
        self._copies: list[tuple[int, int]] = []

    def add_chunk(self, row: Sequence, count: int, first: bool) -> None:
        """A row with the sequence's next `count` ids, and with its pages and parameters if it is its slot's first."""
        assert row.slot is not None
        end = row.num_prefilled + count
        samples = end == row.num_prefill
        is_masked = samples and row.matcher is not None
        scored = row.request.num_scored < min(end, row.request.num_targets)
        self._slots.append(row.slot)
        self._counts.append(count)
        self._flags.append(Row.FIRST * first | Row.SAMPLE * samples | Row.MASKED * is_masked | Row.SCORE * scored)
        self._page_counts.append(len(row.pages) * first)
        self._ids += row.ids[row.num_prefilled : end]
        self.chunks.append(row)
        self.budget -= count
        if samples:
            self._sampled.append(row.slot)
        if is_masked:
            self.masked.append(row)
        if scored:
            self._add_targets(row, min(end, row.request.num_targets))
        if first:
            self._pages.extend(row.pages)
            self._starts.append(row.num_prefilled)
            self._first.append(row)

    def _add_targets(self, row: Sequence, end: int) -> None:
        begin = row.num_prefilled  # a prefill that is begun again comes by ids that are scored already
        self._targets += row.ids[begin + 1 : end + 1]
        self._target_tops.append(row.request.submit.prompt_logprobs)
        self.scored.append(Scored(row.request, end - begin, row.request.num_scored - begin))

    def add_copy(self, source: int, target: int) -> None:
        """Page `target` begins as a copy of page `source`."""
        self._copies.append((source, target))

    @property
    def sampled(self) -> np.ndarray:
        """Slots of the rows that sample, in row order: intp."""
        return _joined(self._decodes.slots, self._sampled)

    @property
    def most_ids(self) -> np.ndarray | None:
        """How many ids each of these may bring, int64; None if one each."""
        most = self._decodes.most_ids
        return None if most is None else _joined(most, [1] * len(self._sampled))

    def finish(self) -> StepPlan | None:
        """The plan, or None when it has no rows."""
        decodes = self._decodes
        if not (self.num_decodes or self._slots):
            return None
        return StepPlan(
            step=self.step,
            slots=_joined(decodes.slots.astype(np.uint16), self._slots),
            counts=_joined(np.ones(self.num_decodes, np.uint32), self._counts),
            flags=_joined(decodes.flags, self._flags),
            page_counts=_joined(decodes.page_counts, self._page_counts),
            pages=np.array(self._pages, np.int32),
            ids=np.asarray(self._ids),
            first_rows=_first_rows(self._first, self._starts) if self._first else NO_FIRST_ROWS,
            target_counts=np.array([row.num_targets for row in self.scored], np.uint32),
            target_tops=np.array(self._target_tops, np.uint32),
            targets=np.asarray(self._targets),
            most_drafts=decodes.most_drafts,
            copy_from=np.array([source for source, _ in self._copies], np.int32),
            copy_to=np.array([target for _, target in self._copies], np.int32),
        )


def _joined(values: np.ndarray, more: list[int]) -> np.ndarray:
    return np.append(values, np.array(more, values.dtype)) if more else values


def _first_rows(rows: list[Sequence], starts: list[int]) -> FirstRows:
    """What a plan says of slots with these new sequences."""
    submits = [row.request.submit for row in rows]
    min_lens = [len(submit.prompt) + submit.min_tokens if submit.min_tokens else 0 for submit in submits]
    stops = [submit.stop_ids if submit.min_tokens else submit.stop_ids[:0] for submit in submits]
    # The workers see no ids of a prefix hit, and none of the last stay in a slot.
    pasts = [np.array(row.ids if row.looks_back else [], np.int32) for row in rows]

    def parameter(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(submit.sampling, name) for submit in submits], dtype)

    return FirstRows(
        starts=np.array(starts, np.uint32),
        seeds=parameter("seed", np.uint64),
        choices=np.array([row.choice for row in rows], np.uint16),
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
        past_counts=_lengths(pasts),
        bias_counts=_lengths(submit.bias_ids for submit in submits),
        stop_counts=_lengths(stops),
        past=_flat(pasts, np.int32),
        bias_ids=_flat([submit.bias_ids for submit in submits], np.int32),
        bias_values=_flat([submit.bias_values for submit in submits], np.float32),
        stop_ids=_flat(stops, np.int32),
    )


def _lengths(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.array([len(array) for array in arrays], np.uint32)


def _flat(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays])
