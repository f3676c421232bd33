"""What a request may ask of its samples beside the model's own logits, by real workers at several sizes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.families import write_family
from tests.group import WorkerGroup, plan
from tests.reference import Reference, references
from tests.unit.worker.test_scores import check, definition, positions
from tpserve.messages import Row, Scores
from tpserve.preflight import resolve
from tpserve.settings import Settings

PAGE = 4
LONG, MORE = 21, 6
FIRST, DECODE = Row.FIRST | Row.SAMPLE, Row.SAMPLE | Row.FROM_SLOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def case(folder: Path) -> Reference:
    return references(folder, [(LONG, MORE)])[0]


@pytest.fixture(scope="module", params=[1, 2, 3])
def group(request: pytest.FixtureRequest, folder: Path) -> Iterator[WorkerGroup]:
    settings = Settings(
        model=str(folder), tp=request.param, dtype="float32", device="cpu", block_size=PAGE, kv_cache_memory=8 * 2**20,
        max_model_len=96, max_num_seqs=16, max_num_batched_tokens=64,
    )  # fmt: skip
    with WorkerGroup(resolve(settings), pages=40) as workers:
        yield workers


def whole_row(case: Reference, **more: Any) -> dict[str, Any]:
    """The prompt in one chunk."""
    return dict(slot=1, count=LONG, ids=case.prompt, pages=list(range(10)), flags=FIRST) | more


def near(found: Scores, case: Reference, ids: list[int], first: int, top: int) -> None:
    """Whether these are the scores of `ids`, which stand from position `first` on."""
    got = positions(found)
    assert len(got) == len(ids)
    for place, (id_, entries) in enumerate(zip(ids, got), first):
        wanted = definition(case.logits[place - 1], id_, top)
        assert [id_ for id_, _ in entries] == [id_ for id_, _ in wanted]
        np.testing.assert_allclose([x for _, x in entries], [x for _, x in wanted], atol=1e-4)


@pytest.mark.parametrize("chunk", [LONG, 5])
def test_logprobs_of_prompt_and_answer_are_those_of_a_plain_forward(group: WorkerGroup, case: Reference, chunk: int) -> None:
    for start in range(0, LONG, chunk):
        ids, is_last = case.prompt[start : start + chunk], start + chunk >= LONG
        flags = Row.SCORE | (Row.FIRST if start == 0 else 0) | (Row.SAMPLE if is_last else 0)
        targets = case.prompt[start + 1 : start + chunk + 1]
        pages = list(range(10)) if start == 0 else []
        row = dict(slot=1, count=len(ids), ids=ids, pages=pages, flags=flags, logprobs=3, targets=targets, target_top=2)
        result = group.run([row]).result
        near(result.target_scores, case, targets, start + 1, 2)
        assert len(result.scores.counts) == is_last
    near(result.scores, case, case.continuation[:1], LONG, 3)
    for place in range(1, MORE):
        result = group.run([dict(slot=1, flags=DECODE)]).result
        near(result.scores, case, case.continuation[place : place + 1], LONG + place, 3)


def test_logprobs_take_no_collective_of_their_own(group: WorkerGroup, case: Reference) -> None:
    counts = []
    for logprobs in (-1, 5):
        result = group.run([whole_row(case, logprobs=logprobs)]).result
        counts.append((result.all_reduces, result.all_gathers))
    assert counts[0] == counts[1]


def test_logprobs_are_those_before_bias_and_mask(group: WorkerGroup, case: Reference) -> None:
    row = whole_row(case, logprobs=1, bias_ids=[7], bias_values=[100.0], temperature=2.0, seed=5)
    result = group.run([row]).result
    assert result.ids.tolist() == [7]
    check(positions(result.scores)[0], definition(case.logits[LONG - 1], 7, 1), atol=1e-4)


def test_mask_that_comes_after_the_plan_decides_what_is_sampled(group: WorkerGroup, case: Reference) -> None:
    allowed = [150, 3, 77]
    step = group.send(plan(0, [whole_row(case, flags=FIRST | Row.MASKED), whole_row(case, slot=2, pages=list(range(10, 20)))]))
    group.send_masks(step, [allowed])
    result = group.receive(step).result
    best = max(allowed, key=lambda id_: case.logits[LONG - 1][id_])
    assert result.ids.tolist() == [best, case.continuation[0]]


def test_stop_id_is_not_sampled_before_the_least_length(group: WorkerGroup, case: Reference) -> None:
    best, second = np.argsort(-case.logits[LONG - 1])[:2].tolist()
    for min_len, wanted in ((LONG, best), (LONG + 1, second)):
        assert group.run([whole_row(case, min_len=min_len, stop_ids=[best])]).result.ids.tolist() == [wanted]
