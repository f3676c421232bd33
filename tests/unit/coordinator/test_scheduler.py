"""Single rules of the scheduler, each by a small example."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.coordinator.model_worker import Surroundings, make_submit
from tests.unit.coordinator.rig import DECODE, WHOLE, answer, capacity, planned, received, result_of, rows, scheduler
from tpserve.coordinator.flight import ProtocolError
from tpserve.coordinator.scheduler import Scheduler
from tpserve.messages import Finish, Row, StepPlan, Submit, encode

# Rows and budget


def test_prompt_that_fits_the_budget_is_one_row_that_samples() -> None:
    plan = planned(scheduler(make_submit(7, [1, 2, 3, 4, 5], seed=9)))
    assert rows(plan) == [(0, 5, WHOLE)]
    assert plan.ids.tolist() == [1, 2, 3, 4, 5]
    assert (plan.page_counts.tolist(), len(plan.pages)) == ([2], 2)
    assert (plan.step, plan.first_rows.starts.tolist(), plan.first_rows.seeds.tolist(), plan.first_rows.choices.tolist()) == (
        1,
        [0],
        [9],
        [0],
    )


def test_prompt_over_the_budget_is_computed_in_chunks_and_only_the_last_samples() -> None:
    made = scheduler(make_submit(1, list(range(40))), max_num_batched_tokens=16)
    first = planned(made)
    assert rows(first) == [(0, 16, Row.FIRST)]
    assert len(first.pages) == 10
    second = planned(made)
    assert rows(second) == [(0, 16, 0)]
    assert (len(second.pages), len(second.first_rows.starts)) == (0, 0)
    answer(made, first)
    answer(made, second)
    last = planned(made)
    assert rows(last) == [(0, 8, Row.SAMPLE)]
    assert last.ids.tolist() == list(range(32, 40))


def test_decode_rows_come_first_then_the_running_chunk_then_admissions_within_the_budget() -> None:
    made = scheduler(make_submit(1, [1, 2]), make_submit(2, list(range(20))), make_submit(3, [4, 5, 6]))
    assert rows(planned(made)) == [(0, 2, WHOLE), (1, 14, Row.FIRST)]
    assert rows(planned(made)) == [(0, 1, DECODE), (1, 6, Row.SAMPLE), (2, 3, WHOLE)]


def test_prompt_waits_for_room_in_one_step_when_chunked_prefill_is_off() -> None:
    made = scheduler(
        make_submit(1, [1] * 10, max_tokens=2),
        make_submit(2, [2] * 16, max_tokens=1),
        make_submit(3, [3], max_tokens=1),
        chunked_prefill=False,
        max_model_len=16 + 1,
        max_num_batched_tokens=17,
    )
    first = planned(made)
    assert rows(first) == [(0, 10, WHOLE)]  # and who came last doesn't overtake
    second = planned(made)
    assert rows(second) == [(0, 1, DECODE), (1, 16, WHOLE)]
    answer(made, first, 5)
    answer(made, second, 5, 5)
    assert rows(planned(made)) == [(1, 1, WHOLE)]


def test_more_sequences_than_slots_wait_in_order_of_arrival() -> None:
    made = scheduler(*(make_submit(request, [request], max_tokens=1) for request in range(1, 7)), max_num_seqs=2)
    first = planned(made)
    assert first.ids.tolist() == [1, 2]
    assert made.plan() is None  # nothing can advance
    assert (made.stats.running, made.stats.waiting) == (2, 4)
    answer(made, first, 0, 0)
    assert planned(made).ids.tolist() == [3, 4]


def test_decode_row_appends_a_page_when_its_position_begins_one() -> None:
    made = scheduler(make_submit(1, [1, 2, 3], max_tokens=8))
    appended = []
    for _ in range(7):
        plan = planned(made)
        appended.append(plan.page_counts.tolist())
        answer(made, plan, 9)
    assert appended == [[1], [0], [1], [0], [0], [0], [1]]


def test_decode_plan_is_within_its_bound_of_bytes() -> None:
    count = 256
    submits = (make_submit(2**40 + request, [1, 2, 3, 4], max_tokens=30) for request in range(count))
    made = scheduler(*submits, num_pages=4096, max_num_seqs=count, max_num_batched_tokens=4 * count)
    answer(made, planned(made), *[3] * count)
    plan = planned(made)
    assert plan.page_counts.tolist() == [1] * count
    assert len(encode(plan, 2**32)) <= 128 + 16 * count


# The window


def test_no_third_plan_is_made_while_two_are_in_flight() -> None:
    made = scheduler(make_submit(1, [1], max_tokens=9))
    first = planned(made)
    planned(made)
    assert made.plan() is None
    answer(made, first, 2)
    assert planned(made).step == 3


def test_sequence_is_not_planned_beyond_its_length() -> None:
    made = scheduler(make_submit(1, [1], max_tokens=2))
    first, second = planned(made), planned(made)
    assert received(answer(made, first, 8)) == [(1, 0, 8, Finish.NONE)]
    assert made.plan() is None
    assert received(answer(made, second, 9)) == [(1, 0, 9, Finish.LENGTH)]
    assert made.idle


def test_max_tokens_is_clamped_to_the_model_length() -> None:
    made = scheduler(make_submit(1, [1, 2], max_tokens=100), max_model_len=4)
    first, second = planned(made), planned(made)
    answer(made, first, 8)
    assert received(answer(made, second, 9)) == [(1, 0, 9, Finish.LENGTH)]


def test_stop_id_ends_the_choice_and_drops_its_ghost_row() -> None:
    made = scheduler(make_submit(1, [1], max_tokens=9, stop_ids=(5, 6)))
    first, ghost = planned(made), planned(made)
    assert received(answer(made, first, 6)) == [(1, 0, 6, Finish.STOP)]
    assert not made.idle
    assert made.stats.pages_used == 0
    assert received(answer(made, ghost, 7)) == []
    assert made.idle


def test_slot_of_an_ended_sequence_is_given_away_while_its_ghost_is_in_flight() -> None:
    made = scheduler(make_submit(1, [1], max_tokens=9, stop_ids=(5,)), make_submit(2, [2]), max_num_seqs=1)
    first, ghost = planned(made), planned(made)
    answer(made, first, 5)
    second = planned(made)
    assert rows(second) == [(0, 1, WHOLE)]
    assert received(answer(made, ghost, 3)) == []
    assert received(answer(made, second, 4)) == [(2, 0, 4, Finish.NONE)]


def test_logits_that_are_not_finite_end_that_choice_alone_and_leave_nothing_in_the_prefix_cache() -> None:
    made = scheduler(make_submit(1, [1] * 9, max_tokens=9), make_submit(2, [2] * 6, max_tokens=9))
    first, ghosted = planned(made), planned(made)
    assert received(answer(made, first, -1, 3)) == [(1, 0, -1, Finish.ERROR), (2, 0, 3, Finish.NONE)]
    assert received(answer(made, ghosted, -1, 4)) == [(2, 0, 4, Finish.NONE)]
    made.submit(make_submit(3, [1] * 9))
    assert planned(made).first_rows.starts.tolist() == [0]


@pytest.mark.parametrize(("step", "ids"), [(2, [1]), (0, [1]), (1, []), (1, [1, 2])])
def test_result_that_is_not_the_oldest_plans_is_a_fault(step: int, ids: list[int]) -> None:
    made = scheduler(make_submit(1, [1]))
    planned(made)
    with pytest.raises(ProtocolError, match=f"result of step {step}"):
        made.result(result_of(step, *ids))


# Arrival and abort


def test_request_that_can_never_fit_is_refused_and_leaves_nothing() -> None:
    made = scheduler()
    refused = made.submit(make_submit(1, [1] * 64))
    assert refused is not None
    assert (refused.request, "64" in refused.reason) == (1, True)
    assert made.idle


@pytest.mark.parametrize("submit", [make_submit(1, [1]), make_submit(2, [1], choices={})])
def test_reused_request_number_or_request_without_choices_is_a_fault(submit: Submit) -> None:
    made = scheduler(make_submit(1, [1]))
    empty = replace(submit, choices=submit.choices[:0], generated=[])
    with pytest.raises(ProtocolError, match=f"request {submit.request}"):
        made.submit(empty if submit.request == 2 else submit)


def test_abort_frees_slot_and_pages_at_once_and_drops_outstanding_results() -> None:
    made = scheduler(make_submit(1, [1] * 5), make_submit(2, [2]), max_num_seqs=1)
    first = planned(made)
    made.abort(1, -1)
    assert (made.stats.pages_used, made.stats.waiting) == (0, 1)
    second = planned(made)
    assert rows(second) == [(0, 1, WHOLE)]
    assert received(answer(made, first, 9)) == []
    assert received(answer(made, second, 9)) == [(2, 0, 9, Finish.NONE)]


def test_abort_of_one_choice_leaves_the_others() -> None:
    made = scheduler(make_submit(1, [1, 2], choices={0: [], 1: []}))
    made.abort(1, 0)
    plan = planned(made)
    assert plan.first_rows.choices.tolist() == [1]
    assert received(answer(made, plan, 4)) == [(1, 1, 4, Finish.NONE)]


def test_abort_of_what_is_over_or_unknown_is_ignored() -> None:
    made = scheduler(make_submit(1, [1], max_tokens=1))
    made.abort(2, -1)
    made.abort(1, 5)
    answer(made, planned(made), 4)
    made.abort(1, -1)
    assert made.idle


def test_resumed_choice_is_prefilled_over_prompt_and_generated_ids_and_counts_from_the_prompt() -> None:
    made = scheduler(make_submit(1, [1, 2, 3], max_tokens=4, choices={2: [7, 8, 9]}))
    plan = planned(made)
    assert rows(plan) == [(0, 6, WHOLE)]
    assert (plan.ids.tolist(), plan.first_rows.choices.tolist()) == ([1, 2, 3, 7, 8, 9], [2])
    assert received(answer(made, plan, 5)) == [(1, 2, 5, Finish.LENGTH)]


# The prefix cache


def test_ids_that_a_worker_may_not_see_come_with_the_first_chunk_of_a_slot_with_penalties() -> None:
    prompt = [7] * 9
    penalized = make_submit(1, prompt, max_tokens=9, choices={0: [1, 2], 1: []})
    made = scheduler(make_submit(0, prompt), penalized, max_num_batched_tokens=9)
    plain = planned(made)
    assert (plain.first_rows.past_counts.tolist(), plain.first_rows.past.tolist()) == ([0], [])
    second = planned(made)
    assert second.first_rows.starts.tolist() == [8]  # of the prompt it is told the last id alone
    assert second.first_rows.past.tolist() == [*prompt, 1, 2]
    assert (second.first_rows.past_counts.tolist(), second.first_rows.prompt_counts.tolist()) == ([11], [9])
    answer(made, plain, 5)
    third = planned(made)
    assert (third.first_rows.past.tolist(), third.first_rows.prompt_counts.tolist()) == (prompt, [9])


def test_prompt_pages_are_hit_by_the_next_plan_and_not_by_the_same() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    made = scheduler(make_submit(1, prompt), make_submit(2, prompt), max_num_batched_tokens=32)
    first = planned(made)
    assert first.first_rows.starts.tolist() == [0, 0]
    made.submit(make_submit(3, prompt))
    second = planned(made)
    assert second.first_rows.starts.tolist() == [8]
    assert second.ids.tolist() == [9]
    assert second.pages.tolist()[:2] == first.pages.tolist()[:2]
    assert answer(made, first, 0, 0).cached.tolist() == [0, 0]
    assert answer(made, second, 0, 0, 0).cached.tolist() == [0, 0, 8]
    assert made.stats.prefix_hit_tokens == 8


def test_hit_leaves_the_last_known_id_to_be_computed() -> None:
    made = scheduler(make_submit(1, [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=1))
    answer(made, planned(made), 0)
    made.submit(make_submit(2, [1, 2, 3, 4, 5, 6, 7, 8]))
    plan = planned(made)
    assert plan.first_rows.starts.tolist() == [4]
    assert plan.ids.tolist() == [5, 6, 7, 8]


def test_pages_of_generated_ids_are_hit_when_they_are_full_and_known() -> None:
    made = scheduler(make_submit(1, [1, 2, 3], max_tokens=3))
    for token in (4, 5, 6):
        answer(made, planned(made), token)
    made.submit(make_submit(2, [1, 2, 3, 4, 5, 6, 7]))
    assert planned(made).first_rows.starts.tolist() == [4]


def test_nothing_is_hit_with_prefix_caching_off() -> None:
    prompt = [1, 2, 3, 4, 5]
    made = scheduler(make_submit(1, prompt, max_tokens=1), prefix_caching=False)
    answer(made, planned(made), 0)
    made.submit(make_submit(2, prompt))
    assert planned(made).first_rows.starts.tolist() == [0]


# Several choices


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(("num_prompt", "num_shared"), [(9, 2), (8, 1), (6, 1), (1, 0)])
def test_siblings_share_full_prompt_pages_and_copy_the_partial_one(caching: bool, num_prompt: int, num_shared: int) -> None:
    prompt = list(range(num_prompt))
    made = scheduler(make_submit(1, prompt, choices={0: [], 1: [], 2: []}), prefix_caching=caching)
    first = planned(made)
    assert first.first_rows.choices.tolist() == [0]
    second = planned(made)
    assert rows(second) == [(0, 1, DECODE), (1, 1, WHOLE), (2, 1, WHOLE)]
    assert second.ids.tolist() == [num_prompt - 1] * 2
    assert second.first_rows.starts.tolist() == [num_prompt - 1] * 2
    appended = int(second.page_counts[0])
    table, tables = first.pages.tolist(), np.split(second.pages[appended:], 2)
    assert all(other.tolist()[:num_shared] == table[:num_shared] for other in tables)
    partial = (num_prompt - 1) % 4 > 0
    assert second.copy_from.tolist() == [table[num_shared]] * 2 * partial
    assert second.copy_to.tolist() == [int(other[num_shared]) for other in tables] * partial
    answer(made, first, 5)
    assert answer(made, second, 5, 5, 5).cached.tolist() == [0, num_prompt - 1, num_prompt - 1]


def test_siblings_wait_for_their_leaders_prompt_without_blocking_who_came_later() -> None:
    made = scheduler(make_submit(1, [1] * 20, choices={0: [], 1: []}), make_submit(2, [2, 2]))
    assert rows(planned(made)) == [(0, 16, Row.FIRST)]
    second = planned(made)
    assert rows(second) == [(0, 4, Row.SAMPLE), (1, 2, WHOLE)]
    assert second.ids.tolist() == [1, 1, 1, 1, 2, 2]


def test_sibling_whose_leader_is_gone_is_computed_by_itself() -> None:
    made = scheduler(make_submit(1, [1] * 20, choices={0: [], 1: []}), prefix_caching=False)
    planned(made)
    made.abort(1, 0)
    plan = planned(made)
    assert rows(plan) == [(0, 16, Row.FIRST)]
    assert (plan.first_rows.choices.tolist(), plan.copy_from.tolist()) == ([1], [])


def test_resumed_sibling_computes_its_generated_ids_only() -> None:
    made = scheduler(make_submit(1, [1, 2, 3, 4, 5, 6], choices={0: [7], 1: [8, 9]}), prefix_caching=False)
    planned(made)
    plan = planned(made)
    assert plan.first_rows.starts.tolist() == [6]
    assert plan.ids.tolist() == [8, 9]
    assert len(plan.copy_from) == 1


# Preemption


def filled_pool() -> tuple[Scheduler, list[StepPlan]]:
    """Two sequences with 3 of 7 pages each, which both begin a page in the third plan; two plans are in flight."""
    made = scheduler(
        make_submit(1, [1] * 11, max_tokens=9),
        make_submit(2, [2] * 11, max_tokens=9),
        num_pages=7,
        max_model_len=28,
        max_num_batched_tokens=32,
        prefix_caching=False,
    )
    return made, [planned(made), planned(made)]


def test_youngest_is_preempted_when_pages_run_out_and_the_oldest_advances() -> None:
    made, (first, second) = filled_pool()
    answer(made, first, 5, 6)
    third = planned(made)
    assert rows(third) == [(0, 1, DECODE)]
    assert third.page_counts.tolist() == [1]
    assert (made.stats.running, made.stats.waiting, made.stats.preemptions) == (1, 1, 1)
    assert received(answer(made, second, 7, 8)) == [(1, 0, 7, Finish.NONE), (2, 0, 8, Finish.NONE)]


def test_preempted_sequence_returns_with_all_its_ids_after_its_results_are_in() -> None:
    made = scheduler(
        make_submit(1, [1] * 12, max_tokens=2),
        make_submit(2, [2] * 11, max_tokens=9),
        num_pages=7,
        max_model_len=28,
        max_num_batched_tokens=32,
        prefix_caching=False,
    )
    first, second = planned(made), planned(made)
    answer(made, first, 5, 6)
    assert made.plan() is None  # the first has all it wants, the second found no page
    assert (made.stats.running, made.stats.waiting, made.stats.preemptions) == (1, 1, 1)
    made.abort(1, -1)
    assert made.plan() is None  # all pages are free, but an id is not known yet
    assert received(answer(made, second, 7, 8)) == [(2, 0, 8, Finish.NONE)]
    plan = planned(made)
    assert rows(plan) == [(1, 13, WHOLE)]
    assert plan.ids.tolist() == [2] * 11 + [6, 8]


def test_preempted_sequence_may_end_by_an_outstanding_result() -> None:
    made, (first, second) = filled_pool()
    made.submit(make_submit(3, [3]))
    answer(made, first, 5, 6)
    planned(made)
    made.abort(1, -1)
    assert received(answer(made, second, 7, -1)) == [(2, 0, -1, Finish.ERROR)]
    assert planned(made).ids.tolist() == [3]


def test_newcomer_does_not_overtake_a_preempted_sequence() -> None:
    made, (first, second) = filled_pool()
    made.submit(make_submit(3, [3]))
    answer(made, first, 5, 6)
    assert rows(planned(made)) == [(0, 1, DECODE)]
    answer(made, second, 7, 8)
    assert rows(planned(made)) == [(0, 1, DECODE)]


def test_preempted_sequence_hits_its_own_pages_in_the_prefix_cache() -> None:
    everything = Surroundings(capacity(num_pages=7, max_model_len=28, max_num_batched_tokens=32))
    everything.submit(make_submit(1, [1] * 11, max_tokens=3))
    everything.submit(make_submit(2, [2] * 11, max_tokens=9))
    starts = []
    while not everything.scheduler.idle:
        while plan := everything.plan():
            starts += plan.first_rows.starts.tolist()
        everything.answer()
    assert starts == [0, 0, 12]
    stats = everything.scheduler.stats
    assert (stats.preemptions, stats.prefix_hit_tokens) == (1, 0)  # what is computed again is no hit of a prompt
    everything.end()


def test_admission_leaves_a_reserve_of_pages_to_those_that_run() -> None:
    made = scheduler(make_submit(1, [1] * 4), make_submit(2, [2] * 4), num_pages=2, max_model_len=8, prefix_caching=False)
    assert rows(planned(made)) == [(0, 4, WHOLE)]


def test_single_sequence_of_the_greatest_length_runs_to_its_end_in_the_smallest_pool() -> None:
    everything = Surroundings(capacity(num_pages=4, max_model_len=16))
    everything.submit(make_submit(1, [1, 2, 3], max_tokens=13))
    everything.end()
    assert len(everything.choices[1, 0].received) == 13
    assert everything.scheduler.stats.preemptions == 0


def test_tokens_in_pages_are_those_planned_and_of_shared_pages_count_once() -> None:
    prompt = list(range(9))
    made = scheduler(make_submit(1, prompt, max_tokens=9), max_num_batched_tokens=6)
    assert made.stats.kv_tokens == 0
    answer(made, planned(made))
    assert made.stats.kv_tokens == 6
    answer(made, planned(made), 1)
    assert made.stats.kv_tokens == 9
    planned(made)
    assert made.stats.kv_tokens == 10  # the sampled id's too
    made.submit(make_submit(2, prompt, max_tokens=9))
    planned(made)
    assert made.stats.kv_tokens == 11 + 1  # two pages of four are shared
    assert made.stats.pages_used == 3 + 1
    made.abort(1, 0)
    assert made.stats.kv_tokens == 9
