"""Logprobs by their definition, over any split of the vocabulary, whatever was done to the logits afterwards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests import ranks as jobs
from tests.passes import FORMS, passes
from tests.ranks import Ranks
from tests.unit.worker.test_sampler import even_starts, make_logits, make_rows
from tpserve.messages import Scores
from tpserve.parallel.collectives import Alone
from tpserve.worker.sampler import NOT_FINITE, Sampler

COLUMNS = 203


def positions(scores: Scores) -> list[list[tuple[int, float]]]:
    """Each position's entries."""
    entries = list(zip(scores.ids.tolist(), scores.logprobs.tolist()))
    ends = np.cumsum(scores.counts).tolist()
    return [entries[end - count : end] for end, count in zip(ends, scores.counts.tolist())]


def definition(logits: np.ndarray, id_: int, top: int) -> list[tuple[int, float]]:
    """The entries of one position, in float64."""
    logprobs = torch.from_numpy(logits).double().log_softmax(0).numpy()
    order = np.lexsort((np.arange(len(logits)), -logits))[:top].tolist()
    return [(place, logprobs[place]) for place in (id_, *order)]


def check(found: list[tuple[int, float]], wanted: list[tuple[int, float]], atol: float = 1e-5) -> None:
    assert [id_ for id_, _ in found] == [id_ for id_, _ in wanted]
    np.testing.assert_allclose([x for _, x in found], [x for _, x in wanted], atol=atol)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_scores_of_sampled_ids_are_those_of_the_raw_logits_at_every_size(ranks: Ranks, size: int, form: str) -> None:
    raw = make_logits(12, COLUMNS)
    tops = np.array([-1, 0, 1, 5, 20, 3] * 2)
    rows = replace(make_rows(12, temperature=1.5), logprobs=tops)
    changed = np.where(np.arange(COLUMNS) % 2, raw * 0.5 - 3, -np.inf).astype(np.float32)
    ranks.open(size)
    starts = even_starts(size, COLUMNS)
    results = ranks.run(jobs.score, changed, raw, rows, starts, form)
    for ids, scores in results:
        assert all(ids % 2)
        assert positions(scores)[0] == positions(scores)[6] == []
        for row in np.flatnonzero(tops >= 0):
            check(positions(scores)[row], definition(raw[row], ids[row], tops[row]))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_scores_of_targets_take_one_gather_whatever_their_number(ranks: Ranks, size: int) -> None:
    logits = make_logits(150, COLUMNS)
    targets, tops = np.random.default_rng(1).integers(0, COLUMNS, 150), np.arange(150) % 7
    ranks.open(size)
    for scores, gathers in ranks.run(jobs.score_targets, logits, targets, tops, even_starts(size, COLUMNS)):
        assert gathers == (size > 1)
        for row, found in enumerate(positions(scores)):
            check(found, definition(logits[row], targets[row], tops[row]))


def test_more_likeliest_ids_than_a_rank_has_come_from_the_others(ranks: Ranks) -> None:
    logits = make_logits(3, 40)
    ranks.open(2)
    for scores, _ in ranks.run(jobs.score_targets, logits, np.array([0, 39, 20]), np.full(3, 20), (0, 32)):
        for row, found in enumerate(positions(scores)):
            check(found, definition(logits[row], [0, 39, 20][row], 20))


def test_rank_without_a_column_changes_nothing(ranks: Ranks) -> None:
    logits = make_logits(2, 32)
    rows = replace(make_rows(2, 0.0), logprobs=np.array([2, 2]))
    ranks.open(2)
    for ids, scores in ranks.run(jobs.score, logits, logits, rows, (0, 32)):
        for row, found in enumerate(positions(scores)):
            check(found, definition(logits[row], ids[row], 2))


@pytest.mark.parametrize("form", FORMS)
def test_equal_logits_are_listed_by_id(form: str) -> None:
    whole = torch.zeros(1, 9)
    rows = replace(make_rows(1, 0.0), logprobs=np.array([9]))
    _, scores = Sampler(Alone(), 0, passes=passes(form)).sample(whole, rows, 1, b"", whole)
    assert scores.ids.tolist() == [0, *range(9)]


def test_row_without_finite_logits_has_no_entry_and_others_keep_theirs() -> None:
    logits = make_logits(2, 50)
    logits[0, 3] = np.nan
    whole, rows = torch.from_numpy(logits), replace(make_rows(2, 0.0), logprobs=np.array([1, 1]))
    ids, scores = Sampler(Alone(), 0).sample(whole, rows, 1, b"", whole)
    assert ids[0] == NOT_FINITE
    assert scores.counts.tolist() == [0, 2]
    check(positions(scores)[1], definition(logits[1], int(ids[1]), 1))


def test_rows_that_want_none_make_no_scores() -> None:
    whole = torch.from_numpy(make_logits(3, 50))
    _, scores = Sampler(Alone(), 0).sample(whole, make_rows(3), 1, b"", whole[:0])
    assert not len(scores.counts)
