"""What is drafted, and how many ids of a row stand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.group import plan
from tpserve.messages import Row
from tpserve.worker.lookup import Lookup, continuation
from tpserve.worker.samples import Samples, num_right
from tpserve.worker.slots import Drafts, Slots

SPECULATE = Row.SAMPLE | Row.FROM_SLOT | Row.SPECULATE


@pytest.mark.parametrize(
    ("ids", "most", "expected"),
    [
        ([1, 2, 3, 4, 9, 2, 3], 2, [4, 9]),
        ([1, 2, 3, 4, 9, 2, 3], 9, [4, 9, 2, 3, 4, 9, 2, 3, 4]),  # it goes round
        ([2, 3, 4, 2, 3, 5, 2, 3], 1, [5]),  # the latest
        ([1, 2, 3, 4, 8, 2, 3, 5, 1, 2, 3], 1, [4]),  # the longest
        ([7, 7, 7], 3, [7, 7, 7]),
        ([2, 3, 4, 3], 3, []),  # one id is too little
        ([3, 4, 5, 3], 3, []),
        ([1, 2], 3, []),
        ([1], 3, []),
    ],
)
def test_continuation_is_what_followed_the_latest_longest_match(ids: list[int], most: int, expected: list[int]) -> None:
    assert continuation(np.array(ids, np.int32), most).tolist() == expected


def test_ids_that_stand_end_with_the_first_that_was_not_drafted() -> None:
    ids = [5, 6, 7, 1, 9, 9, 3, 4]
    inputs = [0, 5, 6, 0, 2, 9, 0, 0]  # rows of 3, of 3, of 1 and of 1
    assert num_right(np.array(ids), np.array(inputs), np.array([3, 3, 1, 1])).tolist() == [3, 1, 1, 1]


def test_lookup_drafts_of_its_past_and_of_what_came_since_and_learns_how_far() -> None:
    lookup, lengths = Lookup(3, 40), np.zeros(3, np.int64)
    past = [4, 1, 2, 3, 5, 6, 7, 8, 1]
    lookup.admit(plan(1, [dict(slot=1, count=9, ids=past, pages=[0], flags=Row.FIRST | Row.SAMPLE, past=past, prompt_count=9)]))
    lookup.add(np.array([1]), np.array([9]), np.array([2]))
    lengths[1] = 9

    def drafted(most: int) -> list[int]:
        drafts = lookup.draft(plan(2, [dict(slot=1, flags=SPECULATE, most_drafts=most)]), lengths)
        assert drafts.counts.tolist() == [len(drafts.ids)]
        return drafts.ids.tolist()

    assert drafted(9) == [3, 5]
    assert drafted(1) == [3]
    for right, wanted in ((2, [3, 5, 6, 7]), (1, [3, 5]), (0, [3])):
        lookup.learn(np.array([1]), np.array([2]), np.array([right]))
        assert drafted(9) == wanted


def test_drafts_stand_behind_their_rows_own_ids_and_wrong_ones_are_overwritten() -> None:
    slots = Slots(4, 5, 4, torch.device("cpu"))
    first = Row.FIRST | Row.SAMPLE
    begun = plan(1, [dict(slot=s, count=3, ids=[1, 2, 3], pages=[s, s + 4], flags=first) for s in (0, 1, 2)])
    slots.end(slots.begin(begun))
    rows = [
        dict(slot=0, flags=SPECULATE, most_drafts=4),
        dict(slot=1, flags=SPECULATE, most_drafts=4),
        dict(slot=2, flags=Row.SAMPLE | Row.FROM_SLOT),
        dict(slot=3, count=2, ids=[8, 9], pages=[9], flags=Row.FIRST),
    ]
    drafts = Drafts(np.array([2, 0, 0, 0]), np.array([6, 7]))
    tokens = slots.begin(plan(2, rows), drafts)
    assert tokens.ids.tolist() == [0, 6, 7, 0, 0, 8, 9]
    assert tokens.fed.tolist() == [0, 3, 4]
    assert tokens.positions.tolist() == [3, 4, 5, 3, 3, 0, 1]
    samples = Samples.of(plan(2, rows), tokens, drafts)
    assert samples.places.tolist() == [0, 1, 2, 3, 4]
    assert samples.rows.tolist() == [0, 0, 0, 1, 2]
    assert {place: ids.tolist() for place, ids in samples.drafts_before(tokens).items()} == {1: [6], 2: [6, 7]}
    slots.end(tokens, np.array([2, 0, 0, 0]))
    assert slots.lengths.tolist() == [4, 4, 4, 2]
