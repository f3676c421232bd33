"""Answers with drafts are those without, by a real scheduler and real workers in float32."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.group import WorkerGroup
from tests.unit.coordinator.model_worker import make_submit
from tpserve.coordinator.process import capacity
from tpserve.coordinator.scheduler import WINDOW, Scheduler
from tpserve.messages import Finish, Sampling, StepPlan, Submit
from tpserve.preflight import resolve
from tpserve.settings import Settings

PAGES, MOST = 60, 96
PATTERN = [17, 5, 99, 23, 42, 8, 61]
FEW = dict.fromkeys((17, 5, 99), 30.0)  # so likely that all others are out of the question


@dataclass
class Found:
    """What came of a load: of each request the ids and how it ended; drafts, how many were right; preemptions."""

    answers: dict[int, tuple[list[int], Finish]]
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0


@pytest.fixture(scope="module", params=[(1, "auto"), (2, "auto"), pytest.param((2, "torch"), marks=pytest.mark.slow)], ids=str)
def group(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[WorkerGroup]:
    tp, kernels = request.param
    settings = Settings(
        model=str(tiny_model), tp=tp, kernels=kernels, dtype="float32", device="cpu", block_size=4, kv_cache_memory=8 * 2**20,
        max_model_len=MOST, max_num_seqs=8, max_num_batched_tokens=64, speculative="ngram",
    )  # fmt: skip
    with WorkerGroup(resolve(settings), pages=PAGES) as workers:
        yield workers


def ask(request: int, prompt: list[int], max_tokens: int = 40, stop_ids: tuple[int, ...] = (), **more: Any) -> Submit:
    """Greedy if nothing is said."""
    sampling: dict[str, Any] = {
        "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "seed": request,
    }  # fmt: skip
    sampling |= {name: more.pop(name) for name in [*more] if name in sampling}
    return make_submit(request, prompt, max_tokens, stop_ids=stop_ids, sampling=Sampling(**sampling), **more)


REQUESTS = [
    ask(1, PATTERN * 3, min_tokens=12, stop_ids=(*range(0, 256, 2),)),
    ask(2, PATTERN * 4, temperature=1.0, bias=FEW),
    ask(3, PATTERN * 2, temperature=0.8, top_p=0.9, bias=FEW, repetition_penalty=1.2, frequency_penalty=1.5),
    ask(4, PATTERN * 3, presence_penalty=0.6, repetition_penalty=0.7),
    ask(5, PATTERN, temperature=1.0, bias=FEW, logprobs=2),  # has no drafts
    ask(6, PATTERN * 5, max_tokens=61),
]


def run(group: WorkerGroup, submits: list[Submit], speculative: bool, pages: int = PAGES) -> Found:
    """All requests from the beginning to their ends."""
    settings = group.deployment.settings.model_copy(update={"speculative": "ngram" if speculative else "off"})
    scheduler = Scheduler(capacity(group.deployment.model_copy(update={"settings": settings}), pages), b"secret", 257)
    for submit in submits:
        assert scheduler.submit(submit) is None
    found = Found({submit.request: ([], Finish.NONE) for submit in submits})
    first, in_flight = group.next_step - 1, deque[StepPlan]()
    while not scheduler.idle:
        while len(in_flight) < WINDOW and (plan := scheduler.plan()) is not None:
            group.send(plan)
            in_flight.append(plan)
        result = group.receive(first + in_flight.popleft().step).result
        found.drafted += result.drafted
        found.accepted += int(result.id_counts.sum()) - len(result.id_counts)
        tokens = scheduler.result(replace(result, step=result.step - first)).tokens
        scheduler.check()
        for request, id_, finish in zip(tokens.requests.tolist(), tokens.ids.tolist(), tokens.finishes.tolist()):
            ids, ended = found.answers[request]
            assert ended is Finish.NONE
            found.answers[request] = ([*ids, id_], Finish(finish))
    found.preemptions = scheduler.stats.preemptions
    return found


def test_answers_with_drafts_are_those_without(group: WorkerGroup) -> None:
    plain, found = (run(group, REQUESTS, speculative) for speculative in (False, True))
    assert found.answers == plain.answers
    assert plain.drafted == 0
    assert 0 < found.accepted < found.drafted


@pytest.mark.parametrize("submit", REQUESTS[:4], ids=["greedy", "sampled", "filtered with penalties", "penalties"])
def test_answer_with_many_drafts_is_that_without(group: WorkerGroup, submit: Submit) -> None:
    plain, found = (run(group, [submit], speculative) for speculative in (False, True))
    assert found.answers == plain.answers
    assert found.accepted > 0


def test_answer_ends_at_the_same_id_among_drafts(group: WorkerGroup) -> None:
    request = ask(2, PATTERN * 4, temperature=1.0, bias=FEW)
    whole, _ = run(group, [request], speculative=False).answers[2]
    end = max(set(whole), key=whole.index)  # of the three ids the one that comes last, which the prompt has as well
    found = run(group, [replace(request, stop_ids=np.array([end], np.int32))], speculative=True)
    assert found.answers == {2: (whole[: whole.index(end) + 1], Finish.STOP)}
    assert found.drafted > 0


def test_answers_in_a_pool_that_is_too_small_are_the_same(group: WorkerGroup) -> None:
    submits = [ask(number, PATTERN * 3, 50, temperature=1.0, bias=FEW) for number in range(1, 5)]
    plain, found = run(group, submits, False), run(group, submits, True, pages=MOST // 4 + 8)
    assert found.answers == plain.answers
    assert found.preemptions > 0
    assert found.accepted > 0
