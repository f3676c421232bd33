"""What those that run will hold: by the answers before, and what follows for a pool that is full."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.coordinator.rig import capacity
from tests.unit.coordinator.simulation import Lengths, Simulation, linear
from tpserve.coordinator.forecast import Forecast


def after(*answers: int, times: int = 1) -> Forecast:
    forecast = Forecast()
    for answer in answers * times:
        forecast.ended(answer)
    return forecast


def lengths(forecast: Forecast, answers: list[int], allowed: list[int]) -> list[float]:
    found: list[float] = forecast.lengths(np.array(answers), np.array(allowed)).tolist()
    return found


def test_answers_are_as_long_as_allowed_until_some_have_ended() -> None:
    assert lengths(Forecast(), [0, 7], [100, 20]) == [100, 20]


def test_answer_is_as_long_as_those_before_that_were_longer_than_it_is_now() -> None:
    found = lengths(after(10, 20, 90, times=300), [0, 10, 19, 20, 90], [100] * 5)
    assert found == pytest.approx([40, 55, 55, 90, 100], abs=4)


def test_answer_is_no_longer_than_allowed() -> None:
    assert lengths(after(50, times=300), [0, 9], [10, 10]) == [10, 10]


def test_pages_that_did_not_last_make_it_cautious_until_more_have_ended() -> None:
    forecast = after(50, times=300)
    forecast.preempted()
    assert lengths(forecast, [0], [100]) == [100]
    forecast.ended(50)
    assert 50 < lengths(forecast, [0], [100])[0] < 100


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12))
def test_most_held_is_what_step_after_step_holds_at_most(rows: list[tuple[int, int, int]]) -> None:
    held = []
    for step in range(31):
        held.append(sum(prompt + answer + step for prompt, answer, left in rows if left >= step))
    prompts, answers, left = np.array(rows).T
    assert Forecast().most_held(prompts, answers, answers + left) == max(held)


def fixed(rng: random.Random) -> Lengths:
    return 200, 256, 1000


def mixed(rng: random.Random) -> Lengths:
    return 200, 512, rng.randrange(10, 200)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [fixed, mixed])
def test_full_pool_preempts_less_than_one_request_in_a_hundred(kind: Callable[[random.Random], Lengths]) -> None:
    preemptions = []
    for target_s in (None, 0.06):
        rng = random.Random(5)
        stream = iter([kind(rng) for _ in range(200)])
        sizes = {"page_size": 16, "max_model_len": 1024, "max_num_seqs": 64, "max_num_batched_tokens": 512}
        all_ = Simulation(capacity(num_pages=300, target_itl_s=target_s, **sizes), linear(8, 0.6, 0.1))
        for _ in range(32):
            all_.add(stream)
        all_.run()
        assert all_.num_ended == 200
        preemptions.append(all_.scheduler.stats.preemptions)
    assert preemptions[0] > 10  # the pool is too small
    assert preemptions[1] < 2
