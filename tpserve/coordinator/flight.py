"""Plans whose results are not in: what their rows are of, and what belongs to whom of a result's scores."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tpserve.coordinator.draft import Scored
from tpserve.coordinator.sequence import Sequence
from tpserve.messages import NO_SCORES, PromptScores, SampleMasks, Scores, StepResult, Tokens


class ProtocolError(ValueError):
    """Another process sent what it must not send in this state."""


class Outcome(NamedTuple):
    """What a result brings for the frontend, in the order in which it is to be told."""

    prompt_scores: list[PromptScores]
    tokens: Tokens


class Flight(NamedTuple):
    """One plan in flight. By the time its result comes, a row's slot may have another sequence: its stay is over."""

    step: int
    slots: np.ndarray  # intp: of the rows that sample
    stays: np.ndarray  # of these slots, as in `Batch`
    scored: list[Scored]
    masked: list[Sequence]  # emptied when their masks are made
    most_ids: np.ndarray | None  # int64: of these rows; None if one each

    def check(self, result: StepResult) -> None:
        """Raise ProtocolError unless the result has what the plan asks for."""
        num_rows, num_targets = len(self.slots), sum(row.num_targets for row in self.scored)
        num_ids = len(result.ids)
        if not self._allows(result.id_counts, num_ids):
            counts = f", {result.id_counts.tolist()} each," if len(result.id_counts) else ""
            raise ProtocolError(f"result of step {self.step} has {num_ids} ids{counts} for {num_rows} rows")
        if len(result.scores.counts) not in (0, num_ids):
            raise ProtocolError(f"result of step {self.step} has scores of {len(result.scores.counts)} ids, not of {num_ids}")
        if len(result.target_scores.counts) != num_targets:
            found = len(result.target_scores.counts)
            raise ProtocolError(f"result of step {self.step} has scores of {found} targets for {num_targets}")

    def _allows(self, id_counts: np.ndarray, num_ids: int) -> bool:
        if self.most_ids is None:
            return num_ids == len(self.slots) and not len(id_counts)
        return len(id_counts) == len(self.slots) and bool(((id_counts > 0) & (id_counts <= self.most_ids)).all())

    def columns(self, id_counts: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Of each id its row; and the places of the rows' first ids, of their second ones, and so on: intp."""
        rows = np.repeat(np.arange(len(id_counts)), id_counts)
        offsets = np.arange(len(rows)) - (np.cumsum(id_counts, dtype=np.intp) - id_counts)[rows]
        return rows, [np.flatnonzero(offsets == column) for column in range(int(id_counts.max(initial=0)))]

    def masks(self, num_words: int) -> SampleMasks | None:
        """The masks of its rows, once; None when there are none. All that came before is known to their matchers."""
        if not self.masked:
            return None
        words = np.full((len(self.masked), num_words), 0xFFFFFFFF, np.uint32)
        for row, sequence in zip(words, self.masked, strict=True):
            if not sequence.ended:  # else it is a ghost row, which may sample anything
                assert sequence.matcher is not None
                sequence.matcher.fill(row)
        self.masked.clear()
        return SampleMasks(self.step, words.reshape(-1))

    def token_scores(self, found: Scores, live: np.ndarray) -> Scores:
        """Those of the `live` ids, whose stays are not over; none at all if none of these has any."""
        if not len(found.ids):
            return NO_SCORES
        entries = np.repeat(live, found.counts)
        if not entries.any():
            return NO_SCORES
        return Scores(found.counts[live], found.ids[entries], found.logprobs[entries])

    def prompt_scores(self, found: Scores) -> list[PromptScores]:
        """What of the prompts was not scored before, for requests that are still open."""
        if not self.scored:
            return []
        bounds, told, position = np.append(0, np.cumsum(found.counts, dtype=np.int64)), [], 0
        for request, num_targets, num_known in self.scored:
            first, position = position + num_known, position + num_targets
            entries = slice(bounds[first], bounds[position])
            part = Scores(found.counts[first:position], found.ids[entries], found.logprobs[entries])
            if request.choices:
                told.append(PromptScores(request.submit.request, part))
        return told
