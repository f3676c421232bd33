"""Rows that may bring several ids."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from tests.unit.coordinator.model_worker import make_submit
from tests.unit.coordinator.rig import DECODE, planned, received, result_of, rows, scheduler
from tpserve.coordinator.flight import ProtocolError
from tpserve.coordinator.scheduler import Scheduler
from tpserve.coordinator.speculation import most_drafts
from tpserve.messages import Finish, Row, StepPlan, Submit

SPECULATE = DECODE | Row.SPECULATE


def decoding(*submits: Submit, **changes: int) -> Scheduler:
    """These amid their answers, with nothing in flight."""
    made = scheduler(*submits, speculative=True, **{"max_num_batched_tokens": 32, **changes})
    made.result(result_of(planned(made).step, *[9] * len(submits)))
    return made


def answer(made: Scheduler, plan: StepPlan, *ids: list[int]) -> list[tuple[int, int, int, int]]:
    """What comes of so many ids of each row."""
    counts = np.array([*map(len, ids)] if len(plan.most_drafts) else [], np.uint8)
    told = made.result(replace(result_of(plan.step, *chain.from_iterable(ids)), id_counts=counts))
    made.check()
    return received(told.tokens)


@pytest.mark.parametrize(
    ("rows", "tokens", "drafts"),
    [(1, 512, 15), (2, 512, 7), (4, 512, 3), (8, 512, 1), (9, 512, 0), (0, 512, 0), (2, 16, 3), (1, 1, 0)],
)
def test_drafts_become_fewer_with_rows_and_stop(rows: int, tokens: int, drafts: int) -> None:
    assert most_drafts(rows, tokens) == drafts


def test_pages_are_kept_for_the_bound_and_ids_come_after_wrong_drafts() -> None:
    made = decoding(make_submit(2, [1, 2, 3], 40))
    first, second = planned(made), planned(made)
    assert rows(first) == rows(second) == [(0, 1, SPECULATE)]
    assert [plan.most_drafts.tolist() for plan in (first, second)] == [[15], [11]]
    assert [len(plan.pages) for plan in (first, second)] == [4, 3]  # 19 tokens, then 31
    assert answer(made, first, [5, 6, 7]) == [(2, 0, id_, Finish.NONE) for id_ in (5, 6, 7)]
    third = planned(made)
    assert len(third.pages) == 0  # what is there is enough


def test_ids_behind_an_end_are_dropped() -> None:
    made = decoding(make_submit(2, [1, 2, 3], 40, stop_ids=(6,)), make_submit(4, [1, 2, 3], 40))
    plan = planned(made)
    ghost = planned(made)
    told = answer(made, plan, [5, 6, 7], [8, 6])
    assert told == [(2, 0, 5, Finish.NONE), (2, 0, 6, Finish.STOP), (4, 0, 8, Finish.NONE), (4, 0, 6, Finish.NONE)]
    assert answer(made, ghost, [7, 7], [1]) == [(4, 0, 1, Finish.NONE)]


def test_answer_pauses_while_all_it_may_have_is_planned() -> None:
    made = decoding(make_submit(2, [1, 2, 3], 4))
    first, second = planned(made), planned(made)
    assert [plan.most_drafts.tolist() for plan in (first, second)] == [[1], []]  # one of three ids, then the last one
    assert made.plan() is None
    assert answer(made, first, [5]) == [(2, 0, 5, Finish.NONE)]
    third = planned(made)
    assert rows(third) == [(0, 1, DECODE)]
    assert answer(made, second, [6]) == [(2, 0, 6, Finish.NONE)]
    assert answer(made, third, [7]) == [(2, 0, 7, Finish.LENGTH)]


@pytest.mark.parametrize("more", [{"logprobs": 0}, {"grammar": "9 9"}])
def test_choices_with_logprobs_or_a_grammar_have_no_drafts(more: dict[str, object]) -> None:
    made = scheduler(make_submit(2, [1], 40, **more), make_submit(4, [1], 40), speculative=True)
    first = planned(made)
    assert first.first_rows.past_counts.tolist() == [0, 1]
    made.masks()
    made.result(result_of(first.step, 1, 1))
    plan = planned(made)
    assert [bool(flags & Row.SPECULATE) for *_, flags in rows(plan)] == [False, True]


def test_drafts_take_no_page_that_others_will_want() -> None:
    made = decoding(make_submit(2, [1] * 11, 20), make_submit(4, [2] * 11, 20), num_pages=16, prefix_caching=False)
    assert len(planned(made).most_drafts) == 2
    made = decoding(make_submit(2, [1] * 11, 20), make_submit(4, [2] * 11, 20), num_pages=9, max_model_len=36)
    assert len(planned(made).most_drafts) == 0


@pytest.mark.parametrize("counts", [[17], [1, 1], [0]])
def test_result_with_more_ids_than_a_row_may_bring_is_a_fault(counts: list[int]) -> None:
    made = decoding(make_submit(2, [1, 2, 3], 40))
    plan = planned(made)
    with pytest.raises(ProtocolError, match="ids"):
        answer(made, plan, *([5] * count for count in counts))
