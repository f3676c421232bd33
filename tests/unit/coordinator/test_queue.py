"""Who waits, for how long, and who is turned away."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.coordinator.model_worker import make_submit
from tests.unit.coordinator.rig import answer, planned, rows, scheduler
from tpserve.coordinator.queue import AGEING_S, Queue
from tpserve.coordinator.scheduler import Scheduler
from tpserve.messages import Refusal, Row


def submit(made: Scheduler, request: int, at_s: float = 0.0, **others: Any) -> None:
    assert made.submit(make_submit(request, [request], max_tokens=1, **others), at_s) is None


def served(made: Scheduler, steps: int = 100) -> list[int]:
    """The requests in the order in which they are admitted, one a step."""
    order = []
    while len(order) < steps and (plan := made.plan()) is not None:
        order += plan.ids.tolist()
        answer(made, plan, *[0] * len(plan.slots))
    return order


def refused(made: Scheduler) -> list[tuple[int, int]]:
    made.check()
    return [(message.request, message.kind) for message in made.take_refused()]


# Order


def test_priority_decides_among_those_that_came_together() -> None:
    made = scheduler(by_priority=True, max_num_seqs=1)
    for request, priority in ((1, 0), (2, 3), (3, -1), (4, 0)):
        submit(made, request, priority=priority)
    assert served(made) == [3, 1, 4, 2]


def test_priority_is_not_heeded_by_order_of_arrival() -> None:
    made = scheduler(max_num_seqs=1)
    for request, priority in ((1, 0), (2, 3), (3, -1)):
        submit(made, request, at_s=float(request), priority=priority)
    assert served(made) == [1, 2, 3]


def test_request_that_waited_for_its_grammar_keeps_its_place() -> None:
    made = scheduler(max_num_seqs=1)
    for request, at_s in ((1, 1.0), (2, 3.0), (3, 2.0)):
        submit(made, request, at_s=at_s)
    assert served(made) == [1, 3, 2]


def test_waiting_makes_up_for_priority() -> None:
    made = scheduler(by_priority=True, max_num_seqs=1)
    submit(made, 1, at_s=0.0, priority=2)
    submit(made, 2, at_s=2 * AGEING_S - 1.0, priority=0)
    submit(made, 3, at_s=2 * AGEING_S + 1.0, priority=0)
    assert served(made) == [2, 1, 3]


def test_nobody_starves_under_a_stream_of_better_priorities() -> None:
    made = scheduler(by_priority=True, max_num_seqs=1)
    submit(made, 1, at_s=0.0, priority=5)
    for request in range(2, 200):  # two come each second, one is served
        submit(made, request, at_s=request / 2)
        if request % 2:
            continue
        if served(made, steps=1) == [1]:
            break
    assert request / 2 == pytest.approx(2 * 5 * AGEING_S, abs=2)  # the backlog of earlier ones doubles the wait


def test_last_in_order_is_preempted_when_pages_run_out() -> None:
    made = scheduler(num_pages=7, max_model_len=28, max_num_batched_tokens=32, prefix_caching=False, by_priority=True)
    made.submit(make_submit(1, [1] * 11, max_tokens=9, priority=1))
    made.submit(make_submit(2, [2] * 11, max_tokens=9, priority=0))
    first, _ = planned(made), planned(made)
    answer(made, first, 5, 6)
    third = planned(made)
    assert rows(third)[0][0] == first.slots[first.ids.tolist().index(2) // 11]  # the other came first
    assert made.stats.preemptions == 1


# Limits


def test_burst_that_fits_is_not_refused() -> None:
    made = scheduler(max_num_seqs=4, max_queue=0)
    for request in range(1, 5):
        submit(made, request)
    assert len(planned(made).slots) == 4
    made.plan()
    assert refused(made) == []


def test_burst_is_not_refused_while_only_the_step_is_full() -> None:
    made = scheduler(max_num_seqs=4, max_queue=0)
    for request in range(1, 5):
        made.submit(make_submit(request, [request] * 15, max_tokens=9))
    answer(made, planned(made), 0)
    assert made.stats.waiting == 2
    while made.stats.waiting:
        plan = planned(made)
        answer(made, plan, *[0] * sum(flags & Row.SAMPLE for flags in plan.flags.tolist()))
    assert refused(made) == []


def test_last_in_order_beyond_the_most_are_refused_when_no_slot_is_free() -> None:
    made = scheduler(max_num_seqs=1, max_queue=2, by_priority=True)
    for request, priority in ((1, -9), (2, 2), (3, 0), (4, 1), (5, 0)):
        submit(made, request, priority=priority)
    first = planned(made)
    assert made.plan() is None
    messages = made.take_refused()
    assert [(message.request, message.kind) for message in messages] == [(2, Refusal.QUEUE_FULL), (4, Refusal.QUEUE_FULL)]
    assert messages[0].reason == "the queue is full: 2 requests wait in it (--max-queue)"
    answer(made, first, 0)
    assert served(made) == [3, 5]


def test_last_in_order_are_refused_when_pages_are_wanted() -> None:
    made = scheduler(num_pages=4, max_model_len=16, max_queue=1)
    made.submit(make_submit(1, [1] * 12, max_tokens=3))
    submit(made, 2)
    submit(made, 3)
    planned(made)
    assert refused(made) == [(3, Refusal.QUEUE_FULL)]


def test_group_is_refused_as_a_whole_and_counts_as_one() -> None:
    made = scheduler(max_num_seqs=1, max_queue=1)
    submit(made, 1)
    planned(made)
    for request in (2, 3):
        submit(made, request, group=7, choices={0: [], 1: []})
    made.plan()
    assert refused(made) == []
    for request in (4, 5):
        submit(made, request, group=8, choices={0: [], 1: []})
    made.plan()
    assert refused(made) == [(4, Refusal.QUEUE_FULL), (5, Refusal.QUEUE_FULL)]
    assert made.stats.waiting == 4


def test_group_of_which_a_part_was_admitted_is_not_queued_any_more() -> None:
    made = scheduler(max_num_seqs=1, max_queue=1)
    submit(made, 1, group=7, max_wait_s=5.0)
    submit(made, 2, group=7, max_wait_s=5.0)
    planned(made)
    submit(made, 3, group=7, max_wait_s=5.0)  # a late part of it
    submit(made, 4)
    made.plan()
    made.expire(100.0)
    assert refused(made) == []
    assert made.stats.waiting == 3


# Deadlines


def test_who_waits_longer_than_it_may_is_refused_and_nobody_else() -> None:
    made = scheduler(max_num_seqs=1)
    submit(made, 1, max_wait_s=1.0)
    first = planned(made)
    submit(made, 2, at_s=1.0, max_wait_s=5.0)
    submit(made, 3, at_s=2.0, max_wait_s=2.5)
    submit(made, 4, at_s=2.0)
    made.expire(4.0)
    assert refused(made) == []
    made.expire(4.5)
    messages = made.take_refused()
    assert [(message.request, message.kind) for message in messages] == [(3, Refusal.WAITED)]
    assert messages[0].reason == "the request waited 2.5 s in the queue, the longest it may"
    made.abort(2, -1)
    made.expire(100.0)
    assert refused(made) == []
    answer(made, first, 0)
    assert served(made) == [4]


def test_deadlines_of_those_that_left_the_queue_are_forgotten() -> None:
    queue = Queue(by_priority=False, most=None)
    for number in range(100):
        request = queue.open(make_submit(number, [1], max_wait_s=1000.0), b"", 0.0)
        queue.close(request)
        queue.check([], [])  # which counts them
