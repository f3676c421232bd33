"""What a plan says of its slots' parameters, and of ids to be scored."""

from __future__ import annotations

from tests.unit.coordinator.model_worker import make_submit
from tests.unit.coordinator.rig import DECODE, WHOLE, answer, planned, rows, scheduler
from tpserve.messages import Row


def test_parameters_of_a_slot_come_with_its_first_row() -> None:
    plain = make_submit(2, [4], stop_ids=(3,))
    full = make_submit(4, [1, 2], stop_ids=(3, 4), bias={0: 2.5, 1: -1.0}, logprobs=2, min_tokens=3)
    made = scheduler(plain, full)
    plan = planned(made)
    assert plan.first_rows.logprobs.tolist() == [-1, 2]
    assert plan.first_rows.min_lens.tolist() == [0, 5]  # counted from the prompt's end
    assert (plan.first_rows.stop_counts.tolist(), plan.first_rows.stop_ids.tolist()) == ([0, 2], [3, 4])
    assert (plan.first_rows.bias_counts.tolist(), plan.first_rows.bias_ids.tolist(), plan.first_rows.bias_values.tolist()) == (
        [0, 2],
        [0, 1],
        [2.5, -1.0],
    )
    decode = planned(made)
    assert rows(decode) == [(0, 1, DECODE), (1, 1, DECODE)]
    assert len(decode.first_rows.logprobs) + len(decode.first_rows.stop_ids) + len(decode.first_rows.bias_ids) == 0


def test_only_rows_that_sample_under_a_grammar_are_masked() -> None:
    made = scheduler(make_submit(2, [1]), make_submit(4, [1] * 20, grammar="9 9"))
    flags = [[int(flags) for _, _, flags in rows(planned(made))]]
    made.masks()
    flags.append([int(flags) for _, _, flags in rows(planned(made))])
    assert flags == [[WHOLE, Row.FIRST], [DECODE, Row.SAMPLE | Row.MASKED]]


def test_prompt_is_scored_by_chunks_up_to_its_last_id() -> None:
    made = scheduler(make_submit(2, list(range(20)), prompt_logprobs=3))
    first, second = planned(made), planned(made)
    assert rows(first) == [(0, 16, Row.FIRST | Row.SCORE)]
    assert first.targets.tolist() == list(range(1, 17))
    assert rows(second) == [(0, 4, Row.SAMPLE | Row.SCORE)]
    assert second.targets.tolist() == [17, 18, 19]
    assert (second.target_counts.tolist(), second.target_tops.tolist()) == ([3], [3])


def test_generated_ids_of_a_resumed_choice_are_no_targets() -> None:
    plan = planned(scheduler(make_submit(2, [5, 6, 7], choices={0: [8, 9]}, max_tokens=9, prompt_logprobs=0)))
    assert (plan.targets.tolist(), plan.target_counts.tolist()) == ([6, 7], [2])


def test_prompt_of_one_id_has_nothing_to_score() -> None:
    assert rows(planned(scheduler(make_submit(2, [5], prompt_logprobs=0)))) == [(0, 1, WHOLE)]


def test_prompt_that_is_scored_uses_no_prefix_but_offers_its_own() -> None:
    prompt = list(range(9))
    made = scheduler(make_submit(2, prompt), max_num_batched_tokens=32)
    first = planned(made)
    made.submit(make_submit(4, prompt, prompt_logprobs=0, choices={0: [], 1: []}))
    scored = planned(made)
    assert (scored.first_rows.starts.tolist(), len(scored.targets)) == ([0], 8)
    answer(made, first, 0)
    sibling = planned(made)
    assert (sibling.first_rows.starts.tolist(), len(sibling.targets)) == ([8], 0)
