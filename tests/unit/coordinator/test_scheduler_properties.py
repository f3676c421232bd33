"""Random arrivals, aborts and ends in pools from the smallest on: every choice says what it says alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.unit.coordinator.model_worker import VOCAB, Surroundings, expected, make_submit
from tpserve.coordinator.capacity import Capacity
from tpserve.memory import pages_for
from tpserve.messages import Finish, Refusal

DOCUMENT = [3, 1, 4, 1, 0, 2, 1, 3, 4, 4, 0, 2, 3, 1, 1, 2]  # prompts begin with parts of it


@st.composite
def capacities(draw: st.DrawFn) -> Capacity:
    page_size = draw(st.integers(1, 5))
    max_model_len = draw(st.integers(2, 28))
    max_num_seqs = draw(st.integers(1, 5))
    chunked = draw(st.booleans())
    least_tokens = max_num_seqs if chunked else max(max_num_seqs, max_model_len)
    return Capacity(
        num_pages=pages_for(max_model_len, page_size) + draw(st.integers(0, 12)),
        page_size=page_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=least_tokens + draw(st.integers(0, 12)),
        chunked_prefill=chunked,
        prefix_caching=draw(st.booleans()),
        by_priority=draw(st.booleans()),
        max_queue=draw(st.sampled_from([None, None, 0, 3])),
        speculative=draw(st.booleans()),
    )


# What few requests ask for, or what doesn't change what they say.
EXTRAS = st.fixed_dictionaries(
    {},
    optional={
        "min_tokens": st.integers(1, 3),
        "bias": st.just({1: -9.0}),
        "logprobs": st.integers(0, 2),
        "prompt_logprobs": st.integers(0, 2),
        "grammar": st.sampled_from(["3 9", "9 3", "1 1"]),
        "priority": st.integers(-2, 2),
        "max_wait_s": st.just(3.0),
        "cache_salt": st.sampled_from(["a", "b"]),
    },
)


class AnyLoad(RuleBasedStateMachine):
    @initialize(capacity=capacities(), window=st.sampled_from([1, 2, 2]), failing=st.booleans())
    def begin(self, capacity: Capacity, window: int, failing: bool) -> None:
        self.all = Surroundings(capacity, window, failing)
        self.requests = self.group = 0

    @rule(
        shared=st.integers(0, len(DOCUMENT)),
        own=st.lists(st.integers(0, VOCAB - 1), max_size=6),
        max_tokens=st.integers(0, 12),
        has=st.lists(st.integers(0, 3), min_size=1, max_size=3),
        stops=st.booleans(),
        joins=st.booleans(),
        extras=EXTRAS,
    )
    def submit(
        self, shared: int, own: list[int], max_tokens: int, has: list[int], stops: bool, joins: bool, extras: dict[str, Any]
    ) -> None:
        """`has[c]` is how many ids choice c already has, as after a resume. It `joins` the group of the one before."""
        self.requests += 1
        self.group += not joins
        extras = {**extras, "group": self.group}
        prompt, max_len = DOCUMENT[:shared] + own, self.all.capacity.max_model_len
        stop_ids = (0,) if stops else ()
        fresh = make_submit(self.requests, prompt, max_tokens, {c: [] for c in range(len(has))}, stop_ids, **extras)
        fits = 0 < len(prompt) < max_len and max_tokens > 0
        if fits:  # an answer that is over cannot be resumed
            says = [expected(fresh, choice, [], max_len, self.all.failing).ids for choice in range(len(has))]
            choices = {c: ids[: min(has[c], len(ids) - 1)] for c, ids in enumerate(says)}
            fresh = make_submit(self.requests, prompt, max_tokens, choices, stop_ids, **extras)
        assert self.all.submit(fresh) == fits

    @rule(back=st.integers(0, 4), choice=st.sampled_from([-1, 0, 1]))
    def abort(self, back: int, choice: int) -> None:
        self.all.abort(self.requests - back, choice)

    @rule()
    def plan(self) -> None:
        self.all.plan()

    @rule()
    def answer(self) -> None:
        self.all.answer()

    @rule(steps=st.integers(1, 6))
    def run(self, steps: int) -> None:
        self.all.run(steps)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "all"):
            self.all.check()

    def teardown(self) -> None:
        if hasattr(self, "all"):
            self.all.end()


AnyLoad.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestAnyLoad = AnyLoad.TestCase


def extras(rng: random.Random) -> dict[str, Any]:
    """What every request of a heavy load asks for besides."""
    wanted = {
        "min_tokens": rng.randrange(1, 4),
        "logprobs": rng.randrange(3),
        "prompt_logprobs": rng.randrange(3),
        "grammar": f"{rng.randrange(1, 30)} {rng.randrange(1, 30)}",
        "priority": rng.randrange(-2, 3),
        "max_wait_s": float(rng.randrange(5, 50)),
        "cache_salt": "a",
    }
    return {name: value for name, value in wanted.items() if rng.random() < 0.2}


def heavy_load(seed: int, chunked: bool, caching: bool, window: int, speculative: bool = False) -> Surroundings:
    """150 requests, mostly of several choices with common beginnings, through a pool far too small for them."""
    rng = random.Random(seed)
    page_size = rng.choice([2, 3, 4])
    capacity = Capacity(
        num_pages=pages_for(40, page_size) + rng.randrange(8),
        page_size=page_size,
        max_model_len=40,
        max_num_seqs=8,
        max_num_batched_tokens=10 if chunked else 40,
        chunked_prefill=chunked,
        prefix_caching=caching,
        by_priority=window == 2,
        max_queue=10,
        speculative=speculative,
    )
    everything = Surroundings(capacity, window, failing=True)
    for request in range(150):
        prompt = DOCUMENT[: rng.randrange(len(DOCUMENT))] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 5))]
        choices: dict[int, list[int]] = {choice: [] for choice in range(rng.choice([1, 1, 2, 4]))}
        stop_ids = rng.choice([(), (0,)])
        everything.submit(make_submit(request, prompt, rng.randrange(1, 24), choices, stop_ids, **extras(rng)))
        if rng.random() < 0.1:
            everything.abort(rng.randrange(request + 1), rng.choice([-1, 0, 1]))
        everything.run(rng.randrange(10))
    everything.end()
    return everything


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_heavy_load_is_served_right_and_exercises_every_mechanism(chunked: bool, caching: bool, window: int) -> None:
    everything = heavy_load(seed=3, chunked=chunked, caching=caching, window=window)
    stats = everything.scheduler.stats
    assert stats.preemptions > 0
    assert everything.worker.copies > 0
    assert stats.prefix_hit_tokens > 0
    assert (everything.ghosts > 0) == (window == 2)
    whole = [record for record in everything.choices.values() if len(record.received) == len(record.said.ids)]
    assert {record.said.finish for record in whole} == {*Finish} - {Finish.NONE}
    assert {*everything.refusals} == {Refusal.QUEUE_FULL, Refusal.WAITED}


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("chunked", [False, True])
def test_heavy_load_with_drafts_is_served_right(chunked: bool, window: int) -> None:
    everything = heavy_load(seed=4, chunked=chunked, caching=True, window=window, speculative=True)
    assert 0 < everything.accepted < everything.drafted
    assert everything.scheduler.stats.preemptions > 0
    whole = [record for record in everything.choices.values() if len(record.received) == len(record.said.ids)]
    assert {record.said.finish for record in whole} == {*Finish} - {Finish.NONE}
