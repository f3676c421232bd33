"""What a result's scores and a plan's masks are of."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.coordinator.model_worker import Surroundings, allowed, make_submit, packed, unpacked
from tests.unit.coordinator.rig import answer, capacity, planned, received, result_of, scheduler
from tpserve.coordinator.flight import ProtocolError
from tpserve.messages import Finish, SampleMasks

ONES = 0xFFFFFFFF


def words(masks: SampleMasks | None) -> list[int]:
    assert masks is not None
    return masks.words.tolist()  # type: ignore[no-any-return]


def bits(ids: list[int]) -> int:
    return sum(1 << id_ for id_ in ids)


# Scores


def test_scores_of_ended_choices_are_dropped() -> None:
    made = scheduler(*(make_submit(request, [request], logprobs=1) for request in (2, 4, 6)))
    plan = planned(made)
    made.abort(4, -1)
    found = [[(1, -0.5), (2, -0.25)], [(3, -1.0), (2, -2.0)], [(0, -3.0)]]
    tokens = made.result(result_of(plan.step, 1, 3, 0, scores=packed(found))).tokens
    assert unpacked(tokens.scores) == [found[0], found[2]]


def test_scores_are_empty_when_only_ended_choices_have_any() -> None:
    made = scheduler(make_submit(2, [2], logprobs=0), make_submit(4, [4]))
    plan = planned(made)
    made.abort(2, -1)
    tokens = made.result(result_of(plan.step, 1, 3, scores=packed([[(1, -0.5)], []]))).tokens
    assert (len(tokens.ids), len(tokens.scores.counts)) == (1, 0)


def test_scores_of_a_chunk_that_does_not_sample_are_told() -> None:
    made = scheduler(make_submit(2, [3] * 17, prompt_logprobs=0))
    plan = planned(made)
    found = [[(3, -float(position))] for position in range(16)]
    outcome = made.result(result_of(plan.step, target_scores=packed(found)))
    assert [(message.request, unpacked(message.scores)) for message in outcome.prompt_scores] == [(2, found)]
    assert len(outcome.tokens.ids) == 0


def test_prompt_scores_of_an_aborted_request_are_dropped_and_those_beside_it_kept() -> None:
    made = scheduler(make_submit(2, [1, 2, 3], prompt_logprobs=0), make_submit(4, [1, 2], prompt_logprobs=0))
    plan = planned(made)
    made.abort(2, -1)
    found = packed([[(2, -1.0)], [(3, -2.0)], [(2, -3.0)]])
    outcome = made.result(result_of(plan.step, 0, 0, target_scores=found))
    assert [(message.request, unpacked(message.scores)) for message in outcome.prompt_scores] == [(4, [[(2, -3.0)]])]


@pytest.mark.parametrize(
    ("caching", "asked"),
    [(False, [3, 9, 11, 2]), (True, [3, 9, 11, 1])],  # of eleven the first was scored before; or its page is there still
)
def test_preemption_amid_a_scored_prefill_tells_every_score_once(caching: bool, asked: list[int]) -> None:
    everything = Surroundings(capacity(num_pages=11, max_model_len=40, max_num_batched_tokens=12, prefix_caching=caching))
    for request, max_tokens in ((2, 13), (4, 5), (6, 5)):
        everything.submit(make_submit(request, [1, 2, 3], max_tokens))
    everything.submit(make_submit(8, [1, 2, 3, 4] * 6 + [0], max_tokens=3, prompt_logprobs=1))
    targets = []
    while not everything.scheduler.idle:
        plan = everything.plan()
        targets += plan.target_counts.tolist() if plan else []
        everything.answer()
    assert everything.scheduler.stats.preemptions == 1
    assert targets == asked
    everything.end()


@pytest.mark.parametrize(
    ("scores", "targets", "says"),
    [(2, 2, "scores of 2 ids, not of 1"), (1, 1, "scores of 1 targets for 2"), (0, 3, "scores of 3 targets for 2")],
)
def test_result_without_the_scores_that_were_asked_for_is_a_fault(scores: int, targets: int, says: str) -> None:
    made = scheduler(make_submit(2, [1, 2, 3], logprobs=0, prompt_logprobs=0))
    planned(made)
    with pytest.raises(ProtocolError, match=says):
        made.result(result_of(1, 4, scores=packed([[(1, 0.0)]] * scores), target_scores=packed([[(1, 0.0)]] * targets)))


# Masks


def test_masks_of_a_step_are_made_once_and_when_all_earlier_results_are_in() -> None:
    made = scheduler(make_submit(2, [1], grammar="9 9"))
    assert made.masks() is None
    first = planned(made)
    masks = made.masks()
    assert (masks and masks.step, words(masks)) == (1, [bits(allowed("9 9", []))])
    second = planned(made)
    assert made.masks() is None  # of the second they depend on the first's result
    token = allowed("9 9", [])[0]
    answer(made, first, token)
    masks = made.masks()
    assert (masks and masks.step, words(masks)) == (second.step, [bits(allowed("9 9", [token]))])
    assert made.masks() is None


def test_only_rows_under_a_grammar_have_masks() -> None:
    made = scheduler(make_submit(2, [1]), make_submit(4, [1], grammar="9 9"), make_submit(6, [1]))
    planned(made)
    assert words(made.masks()) == [bits(allowed("9 9", []))]
    plain = scheduler(make_submit(2, [1]))
    planned(plain)
    assert plain.masks() is None


def test_row_of_an_ended_choice_may_sample_anything() -> None:
    made = scheduler(make_submit(2, [1], grammar="1 9"), make_submit(4, [1], grammar="9 9"))
    first = planned(made)
    made.masks()
    planned(made)
    token = allowed("1 9", [])[0]
    assert received(answer(made, first, token, token))[0] == (2, 0, token, Finish.COMPLETE)
    assert words(made.masks()) == [ONES, bits(allowed("9 9", [token]))]


# Ends


@pytest.mark.parametrize(
    ("grammar", "stop_ids", "max_tokens", "finish"),
    [
        ("1 9", (), 9, Finish.COMPLETE),
        ("1 9", (), 1, Finish.COMPLETE),  # rather than that it reached its length
        ("1 9", tuple(range(5)), 9, Finish.STOP),
        ("9 1", (), 9, Finish.TOO_COMPLEX),
        ("9 9", (), 1, Finish.LENGTH),
    ],
)
def test_end_of_a_grammar_ends_the_choice(grammar: str, stop_ids: tuple[int, ...], max_tokens: int, finish: Finish) -> None:
    made = scheduler(make_submit(2, [1], max_tokens, stop_ids=stop_ids, grammar=grammar))
    plan = planned(made)
    made.masks()
    token = allowed(grammar, [])[0]
    assert received(answer(made, plan, token)) == [(2, 0, token, finish)]
    assert made.stats.running == 0


def test_end_id_that_the_grammar_takes_is_a_stop_although_the_request_has_no_stop_ids() -> None:
    class Ends:
        def accept(self, token: int) -> Finish:
            return Finish.STOP

        def fill(self, words: np.ndarray) -> None:
            words[:] = 1

    made = scheduler()
    made.submit(make_submit(2, [1], grammar="any"), 0.0, [Ends()])
    plan = planned(made)
    assert words(made.masks()) == [1]
    assert received(answer(made, plan, 0)) == [(2, 0, 0, Finish.STOP)]
