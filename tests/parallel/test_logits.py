"""Logits and greedy ids of real worker processes, driven by real plans, against Hugging Face: every family, every TP size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.families import FAMILIES, WINDOW, write_family
from tests.group import WorkerGroup
from tests.reference import Reference, chunk_rows, references
from tpserve.messages import Row
from tpserve.parallel.partition import partition
from tpserve.preflight import resolve
from tpserve.settings import Settings

PAGE = 4
PAGES = 160
CHUNK = 7
# Within, at and across borders of pages, chunks and windows; the last goes on for long.
SIZES = [*((length, 12) for length in (1, 3, 4, 5, WINDOW - 1, WINDOW, WINDOW + 1, 21)), (3 * WINDOW, 64)]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(request.param, tmp_path_factory.mktemp("tiny") / request.param)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Reference]:
    return references(folder, SIZES)


SLOW = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param((tp, "auto"), marks=() if tp == 2 else SLOW, id=f"{tp}") for tp in (1, 2, 3, 4)),
        *(pytest.param((tp, "torch"), marks=SLOW, id=f"{tp}-torch") for tp in (1, 3)),
    ],
)
def group(request: pytest.FixtureRequest, folder: Path) -> Iterator[WorkerGroup]:
    tp, kernels = request.param
    settings = Settings(
        model=str(folder), tp=tp, kernels=kernels, dtype="float32", device="cpu", block_size=PAGE, kv_cache_memory=8 * 2**20,
        max_model_len=96, max_num_seqs=16, max_num_batched_tokens=64,
    )  # fmt: skip
    with WorkerGroup(resolve(settings), pages=PAGES) as workers:
        yield workers


def test_every_rank_holds_something_and_shares_are_uneven(group: WorkerGroup) -> None:
    shards = partition(group.deployment.spec, group.size)
    assert all(layer.q_heads or layer.columns for shard in shards for layer in shard.layers)
    if group.size == 4:
        assert len({len(shard.vocab) for shard in shards}) > 1
        assert len({(len(layer.q_heads), len(layer.columns)) for shard in shards for layer in shard.layers}) > 1


def test_logits_of_chunked_prompts_equal_hugging_face(group: WorkerGroup, expected: list[Reference]) -> None:
    """One prompt after the other, in pages scattered over the pool."""
    pages = list(np.random.default_rng(5).permutation(PAGES))
    for case in expected:
        mine = [int(page) for page in pages[: -(-len(case.prompt) // PAGE)]]
        answers = [group.run([row]) for row in chunk_rows(2, case.prompt, mine, CHUNK)]
        logits = np.concatenate([answer.logits[0] for answer in answers])
        np.testing.assert_allclose(logits, case.logits[: len(case.prompt)], atol=1e-4, rtol=0)
        assert answers[-1].result.ids.tolist() == case.continuation[:1]


def test_decoding_together_gives_the_logits_and_greedy_ids_of_each_alone(group: WorkerGroup, expected: list[Reference]) -> None:
    """All prompts at once, their chunks beside rows that decode already, pages taken as they are needed."""
    free = [int(page) for page in np.random.default_rng(6).permutation(PAGES)]
    lengths: dict[int, int] = {}
    pending = {slot: chunk_rows(slot, case.prompt, [], CHUNK) for slot, case in enumerate(expected)}
    ids: dict[int, list[int]] = {slot: [] for slot in pending}
    while any(len(got) < len(expected[slot].continuation) for slot, got in ids.items()):
        rows: list[dict[str, Any]] = [
            dict(slot=slot, flags=Row.SAMPLE | Row.FROM_SLOT | Row.LOGITS)
            for slot, got in ids.items()
            if 0 < len(got) < len(expected[slot].continuation)
        ]
        rows += [pending[slot].pop(0) for slot in pending if pending[slot]]
        for row in rows:
            before = lengths.get(row["slot"], 0)
            lengths[row["slot"]] = before + row.get("count", 1)
            row["pages"] = [free.pop() for _ in range(-(-lengths[row["slot"]] // PAGE) - -(-before // PAGE))]
        answer = group.run(rows)
        for index, row in enumerate(rows):
            end = lengths[row["slot"]]
            logits = expected[row["slot"]].logits[end - row.get("count", 1) : end]
            np.testing.assert_allclose(answer.logits[index], logits, atol=1e-4, rtol=0)
        for row, token in zip([row for row in rows if row["flags"] & Row.SAMPLE], answer.result.ids.tolist(), strict=True):
            ids[row["slot"]].append(token)
    assert [ids[slot] for slot in sorted(ids)] == [case.continuation for case in expected]


def test_copied_page_continues_as_the_original(group: WorkerGroup, expected: list[Reference]) -> None:
    case = next(case for case in expected if len(case.prompt) == 21)
    whole, partial = divmod(len(case.prompt) - 1, PAGE)
    pages = list(range(whole + 1))
    for row in chunk_rows(0, case.prompt, pages, CHUNK):
        group.run([row])
    fork = dict(
        slot=1, ids=case.prompt[-1:], start=len(case.prompt) - 1, pages=[*pages[:whole], 90],
        flags=Row.FIRST | Row.SAMPLE | Row.LOGITS,
    )  # fmt: skip
    answer = group.run([fork], copies=[(whole, 90)] if partial else [])
    last = len(case.prompt) - 1
    np.testing.assert_allclose(answer.logits[0], case.logits[last : last + 1], atol=1e-4, rtol=0)


def test_collectives_of_a_step_are_two_a_layer_and_one_or_one_a_layer_and_one(group: WorkerGroup) -> None:
    """The one is the agreement on the ids; the others add up what attention and MLP give, a parallel residual's at once."""
    answer = group.run([dict(slot=5, ids=[1], pages=[0], flags=Row.FIRST | Row.SAMPLE)])
    spec = group.deployment.spec
    each = 1 if spec.parallel_residual else 2
    counted = (answer.result.all_reduces, answer.result.all_gathers)
    assert counted == ((each * spec.num_layers, 1) if group.size > 1 else (0, 0))
