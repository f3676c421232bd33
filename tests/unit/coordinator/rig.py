"""A small scheduler, and short forms of what goes in and comes out."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.unit.coordinator.model_worker import matchers_of
from tpserve.coordinator.capacity import Capacity
from tpserve.coordinator.scheduler import Scheduler
from tpserve.messages import NO_SCORES, STEP_PARTS, Row, Scores, StepPlan, StepResult, Submit, Tokens

VOCAB = 32  # one word of a mask
DECODE = Row.SAMPLE | Row.FROM_SLOT
WHOLE = Row.FIRST | Row.SAMPLE


def capacity(**changes: Any) -> Capacity:
    sizes: dict[str, Any] = {
        "num_pages": 32,
        "page_size": 4,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "chunked_prefill": True,
        "prefix_caching": True,
        "by_priority": False,
        "max_queue": None,
    }
    return Capacity(**{**sizes, **changes})


def scheduler(*submits: Submit, **changes: Any) -> Scheduler:
    made = Scheduler(capacity(**changes), b"secret", VOCAB)
    for submit in submits:
        assert made.submit(submit, 0.0, matchers_of(submit)) is None
    return made


def planned(made: Scheduler) -> StepPlan:
    plan = made.plan()
    assert plan is not None
    made.check()
    return plan


def rows(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(slot, count, flags) of each row."""
    return list(zip(plan.slots.tolist(), plan.counts.tolist(), plan.flags.tolist(), strict=True))


def answer(made: Scheduler, plan: StepPlan, *ids: int) -> Tokens:
    outcome = made.result(result_of(plan.step, *ids))
    made.check()
    return outcome.tokens


def result_of(step: int, *ids: int, scores: Scores = NO_SCORES, target_scores: Scores = NO_SCORES) -> StepResult:
    return StepResult(
        step,
        np.array(ids, np.int32),
        np.empty(0, np.uint8),
        0,
        scores,
        target_scores,
        np.zeros(len(STEP_PARTS), np.float32),
        0,
        0,
    )


def received(tokens: Tokens) -> list[tuple[int, int, int, int]]:
    """(request, choice, id, finish) of each entry."""
    columns = (tokens.requests, tokens.choices, tokens.ids, tokens.finishes)
    return list(zip(*(column.tolist() for column in columns), strict=True))
