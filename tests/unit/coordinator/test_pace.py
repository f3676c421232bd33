"""The share of prompt tokens in a step, and how many run: what they are learnt from, and what they hold."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.coordinator.rig import capacity
from tests.unit.coordinator.simulation import Cost, Lengths, Simulation, linear
from tpserve.coordinator.pace import Pace, StepTimes

TARGET_S = 0.06
BUDGET = 512
LEAST = 16


def taught(cost: Cost, steps: Iterable[tuple[int, int]]) -> Pace:
    """A pace that has seen such steps, one after the other."""
    pace, now_s = Pace(TARGET_S, BUDGET), 0.0
    for rows, tokens in steps:
        pace.planned(rows, tokens, now_s)
        now_s += cost(rows, tokens)
        pace.done(now_s)
    return pace


MIXED = [(rows, tokens) for rows in range(1, 17) for tokens in (0, 40, 80, 160)]

# What is learnt


@given(
    seen=st.lists(st.tuples(st.integers(0, 256), st.integers(0, BUDGET), st.floats(1e-6, 1e3)), max_size=40),
    rows=st.integers(1, 256),
)
def test_share_stays_between_its_bounds_whatever_was_seen(seen: list[tuple[int, int, float]], rows: int) -> None:
    times = iter(seconds for _, _, seconds in seen)
    pace = taught(lambda rows, tokens: next(times), [(rows, tokens) for rows, tokens, _ in seen])
    assert LEAST <= pace.share(rows) <= BUDGET
    assert pace.share(0) == BUDGET
    assert pace.most_running >= 1


@settings(max_examples=30, deadline=None)
@given(base_ms=st.floats(0.1, 20), row_ms=st.floats(0.01, 2), token_ms=st.floats(0.005, 2))
def test_line_of_step_times_is_learnt(base_ms: float, row_ms: float, token_ms: float) -> None:
    times, cost = StepTimes(), linear(base_ms, row_ms, token_ms)
    for rows, tokens in MIXED * 4:
        times.learn(rows, tokens, cost(rows, tokens))
    assert times.predict(16, 100) == pytest.approx(cost(16, 100), rel=0.05)


def test_time_of_prompt_tokens_is_remembered_while_all_rows_decode() -> None:
    cost = linear(8, 0.6, 0.5)
    before = taught(cost, MIXED).share(16)
    assert taught(cost, MIXED + [(16, 0)] * 2000).share(16) == pytest.approx(before, rel=0.1)


def test_machine_that_becomes_slower_is_noticed() -> None:
    steps = iter([linear(8, 0.6, 0.5)] * 64 + [linear(16, 1.2, 1)] * 64)
    pace = taught(lambda rows, tokens: next(steps)(rows, tokens), MIXED * 2)
    assert pace.share(16) == pytest.approx(taught(linear(16, 1.2, 1), MIXED * 2).share(16), abs=8)


def test_one_step_that_took_far_too_long_changes_little() -> None:
    cost = linear(8, 0.6, 0.5)
    seconds = iter([*(cost(rows, tokens) for rows, tokens in MIXED), 2.0])
    before, after = taught(cost, MIXED), taught(lambda rows, tokens: next(seconds), [*MIXED, (16, 80)])
    assert after.share(16) > 0.7 * before.share(16)


def test_no_more_run_than_the_target_leaves_time_for() -> None:
    pace = taught(linear(8, 4, 0.5), MIXED)
    assert 6 <= pace.most_running <= (60 - 8 - LEAST * 0.5) / 4


# What is held


def served(target_s: float | None, cost: Cost, streams: int, requests: int, pages: int = 4000) -> tuple[Simulation, float]:
    """Two streams of 1,024 / 128 tokens, then so many; and the tokens per second from then on."""
    lengths: list[Lengths] = [(1024, 128, 1000)] * requests
    sizes = {"page_size": 16, "max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": BUDGET}
    all_ = Simulation(capacity(num_pages=pages, target_itl_s=target_s, **sizes), cost)
    for _ in range(2):
        all_.add(iter(lengths))
    all_.run(4.0)
    began_s, before = all_.now_s, all_.num_tokens
    for _ in range(streams - 2):
        all_.add(iter(lengths))
    all_.run()
    assert all_.num_ended == streams * requests, "the queue did not drain"
    return all_, (all_.num_tokens - before) / (all_.now_s - began_s)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    base_ms=st.floats(3, 6),
    row_ms=st.floats(0.1, 0.8),
    token_ms=st.floats(0.1, 0.5),
    noise=st.sampled_from([0.0, 0.05, 0.1]),
)
@example(base_ms=8, row_ms=0.6, token_ms=0.5, noise=0.1)  # about what two cores do with the demo model
def test_load_step_holds_the_target_at_nine_tenths_of_the_throughput(
    base_ms: float, row_ms: float, token_ms: float, noise: float
) -> None:
    free, most = served(None, linear(base_ms, row_ms, token_ms, noise), 16, 3)
    held, found = served(TARGET_S, linear(base_ms, row_ms, token_ms, noise), 16, 3)
    assert np.quantile(held.gaps_s, 0.95) <= TARGET_S
    assert np.quantile(free.gaps_s, 0.95) > min(TARGET_S, BUDGET * token_ms / 1000)
    assert found >= 0.9 * most


def test_target_that_cannot_be_held_still_serves_everyone() -> None:
    held, _ = served(0.001, linear(8, 0.6, 0.5), 4, 1)
    assert max(held.gaps_s) <= (8 + 0.6 + LEAST * 0.5 + 1e-6) / 1000  # one at a time, beside the least share


def test_rows_that_cost_much_wait_so_that_those_that_run_hold_the_target() -> None:
    held, _ = served(TARGET_S, linear(8, 5, 0.1), 16, 2)
    assert np.quantile(held.gaps_s, 0.95) <= TARGET_S
