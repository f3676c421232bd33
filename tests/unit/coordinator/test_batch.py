"""What the arrays over slots say of single sequences."""

from __future__ import annotations

import pytest

from tests.unit.coordinator.model_worker import make_submit
from tests.unit.coordinator.rig import answer, planned, received, rows, scheduler
from tpserve.coordinator.scheduler import Scheduler
from tpserve.messages import Finish, Row


def decoding(*stop_ids: tuple[int, ...], page_size: int = 4) -> Scheduler:
    """A choice for each of these, all amid their answers with nothing in flight."""
    submits = (make_submit(2 * n, [1, 2, 3], 40, stop_ids=ids) for n, ids in enumerate(stop_ids, 1))
    made = scheduler(*submits, page_size=page_size, num_pages=64)
    answer(made, planned(made), *[9] * len(stop_ids))
    return made


def test_id_ends_only_the_choices_that_stop_at_it() -> None:
    made = decoding((5, 6), (), (6,))
    finishes = [finish for *_, finish in received(answer(made, planned(made), 6, 6, 7))]
    assert finishes == [Finish.STOP, Finish.NONE, Finish.NONE]
    assert [finish for *_, finish in received(answer(made, planned(made), 5, 6))] == [Finish.NONE, Finish.STOP]


@pytest.mark.parametrize("unknown", [-7, 32, 2**31 - 1])
def test_stop_id_outside_the_vocabulary_ends_nothing(unknown: int) -> None:
    made = decoding((unknown,))
    assert received(answer(made, planned(made), 31)) == [(2, 0, 31, Finish.NONE)]


@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_all_ids_of_an_answer_are_known_when_it_is_computed_again(page_size: int) -> None:
    made = scheduler(
        make_submit(2, [1, 2, 3], 8), make_submit(4, [3, 2, 1], 12), page_size=page_size,
        num_pages=-(-16 // page_size), max_model_len=16, prefix_caching=False,
    )  # fmt: skip
    step, again = 0, None
    while again is None:
        plan = planned(made)
        if step and plan.flags[-1] & Row.FIRST:
            again = plan
        answer(made, plan, *range(10 + step, 10 + step + int((plan.flags & Row.SAMPLE > 0).sum())))
        step += 1
    told = again.ids.tolist()
    assert made.stats.preemptions > 0
    assert told[:3] == [3, 2, 1]
    assert told[3:] == list(range(11, 11 + len(told) - 3))  # its row came second, so each id is the step's second


def test_slot_of_a_preempted_choice_is_free_only_when_its_ids_are_in() -> None:
    made = scheduler(
        make_submit(2, [1] * 11, 9), make_submit(4, [2] * 11, 9), num_pages=7, max_model_len=28,
        max_num_batched_tokens=32, max_num_seqs=2, prefix_caching=False,
    )  # fmt: skip
    first, second = planned(made), planned(made)
    answer(made, first, 5, 6)
    third = planned(made)
    assert [slot for slot, *_ in rows(third)] == [0]
    assert made.stats.preemptions == 1
    assert received(answer(made, second, 7, 8))[1] == (4, 0, 8, Finish.NONE)
    made.abort(2, -1)
    again = planned(made)
    assert (again.ids.tolist()[-2:], again.first_rows.starts.tolist()) == ([6, 8], [0])
