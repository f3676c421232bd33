"""Logits and greedy ids of real worker processes, driven by real plans, against Hugging Face, at every TP size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.group import WorkerGroup
from tests.tiny import Tiny
from tpserve.messages import Row
from tpserve.parallel.partition import partition
from tpserve.preflight import resolve
from tpserve.settings import Settings

PAGE = 4
CHUNK = 7
NEW_TOKENS = 12
PROMPT_TOKENS = (1, 3, 4, 5, 7, 8, 21)  # within, at and across page and chunk borders

# Sizes at which ranks hold unequal parts: of 3 groups, 7 blocks and a short one, a prime vocabulary; one KV head
# for all ranks; one head, so that the other ranks hold nothing of attention.
MODELS = {
    "uneven": Tiny(heads=9, kv_heads=3, hidden=54, intermediate=7 * 32 + 5, vocab=211),
    "one-kv-head": Tiny(
        heads=4, kv_heads=1, hidden=40, intermediate=3 * 32 + 1, vocab=131, attention_bias=False, mlp_bias=False, tie=True
    ),
    "one-head": Tiny(heads=1, kv_heads=1, head_dim=16, hidden=48, intermediate=5 * 32 + 3, vocab=127, tie=True),
}


@pytest.fixture(scope="module", params=list(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param].write(tmp_path_factory.mktemp("tiny") / request.param)


@pytest.fixture(scope="module")
def reference(folder: Path) -> list[tuple[list[int], np.ndarray, list[int]]]:
    """(prompt, logits of its and its continuation's tokens, greedy continuation) by Hugging Face, for each prompt length."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rng = np.random.default_rng(3)
    out = []
    for length in PROMPT_TOKENS:
        ids = rng.integers(0, model.config.vocab_size, length).tolist()
        with torch.inference_mode():
            more = list(ids)
            for _ in range(NEW_TOKENS):
                more.append(int(model(torch.tensor([more])).logits[0, -1].argmax()))
            out.append((ids, model(torch.tensor([more])).logits[0].numpy(), more[length:]))
    return out


SLOW = pytest.mark.slow


@pytest.fixture(
    scope="module", params=[pytest.param(1, marks=SLOW), 2, pytest.param(3, marks=SLOW), pytest.param(4, marks=SLOW)]
)
def group(request: pytest.FixtureRequest, folder: Path) -> Iterator[WorkerGroup]:
    settings = Settings(
        model=str(folder), tp=request.param, dtype="float32", device="cpu", block_size=PAGE, kv_cache_memory=4 * 2**20,
        max_model_len=64, max_num_seqs=16, max_num_batched_tokens=64,
    )  # fmt: skip
    with WorkerGroup(resolve(settings), pages=96) as workers:
        yield workers


def chunk_rows(slot: int, prompt: list[int], pages: list[int]) -> list[dict[str, Any]]:
    """The prompt's chunks as rows, all of whose logits are asked for."""
    rows = []
    for start in range(0, len(prompt), CHUNK):
        ids = prompt[start : start + CHUNK]
        flags = Row.LOGITS | (Row.FIRST if start == 0 else 0) | (Row.SAMPLE if start + CHUNK >= len(prompt) else 0)
        rows.append(dict(slot=slot, count=len(ids), ids=ids, flags=flags, pages=pages if start == 0 else []))
    return rows


def test_every_rank_holds_something_and_shares_are_uneven(group: WorkerGroup) -> None:
    shards = partition(group.deployment.spec, group.size)
    assert all(layer.q_heads or layer.columns for shard in shards for layer in shard.layers)
    if group.size == 4:
        assert len({len(shard.vocab) for shard in shards}) > 1
        assert len({len(shard.layers[0].columns) for shard in shards}) > 1


def test_logits_of_chunked_prompts_equal_hugging_face(group: WorkerGroup, reference: Any) -> None:
    """One prompt after the other, in pages scattered over the pool."""
    pages = list(np.random.default_rng(5).permutation(96))
    for prompt, expected, continuation in reference:
        mine = [int(page) for page in pages[: -(-len(prompt) // PAGE)]]
        parts = []
        for row in chunk_rows(2, prompt, mine):
            answer = group.run([row])
            parts.append(answer.logits[0])
        np.testing.assert_allclose(np.concatenate(parts), expected[: len(prompt)], atol=1e-4, rtol=0)
        assert answer.result.ids.tolist() == continuation[:1]


def test_decoding_together_gives_the_logits_and_greedy_ids_of_each_alone(group: WorkerGroup, reference: Any) -> None:
    """All prompts at once, their chunks beside rows that decode already, pages taken as they are needed."""
    free = [int(page) for page in np.random.default_rng(6).permutation(96)]
    lengths: dict[int, int] = {}
    pending = {slot: chunk_rows(slot, prompt, []) for slot, (prompt, _, _) in enumerate(reference)}
    ids: dict[int, list[int]] = {slot: [] for slot in pending}
    while any(len(got) < NEW_TOKENS for got in ids.values()):
        rows: list[dict[str, Any]] = [
            dict(slot=slot, flags=Row.SAMPLE | Row.FROM_SLOT | Row.LOGITS)
            for slot, got in ids.items()
            if 0 < len(got) < NEW_TOKENS
        ]
        rows += [pending[slot].pop(0) for slot in pending if pending[slot]]
        for row in rows:
            before = lengths.get(row["slot"], 0)
            lengths[row["slot"]] = before + row.get("count", 1)
            row["pages"] = [free.pop() for _ in range(-(-lengths[row["slot"]] // PAGE) - -(-before // PAGE))]
        answer = group.run(rows)
        for index, row in enumerate(rows):
            end = lengths[row["slot"]]
            expected = reference[row["slot"]][1][end - row.get("count", 1) : end]
            np.testing.assert_allclose(answer.logits[index], expected, atol=1e-4, rtol=0)
        for row, token in zip([row for row in rows if row["flags"] & Row.SAMPLE], answer.result.ids.tolist(), strict=True):
            ids[row["slot"]].append(token)
    assert [ids[slot] for slot in sorted(ids)] == [continuation for _, _, continuation in reference]


def test_copied_page_continues_as_the_original(group: WorkerGroup, reference: Any) -> None:
    prompt, expected, _ = reference[-1]
    whole, partial = divmod(len(prompt) - 1, PAGE)
    pages = list(range(whole + 1))
    for row in chunk_rows(0, prompt, pages):
        group.run([row])
    fork = dict(
        slot=1, ids=prompt[-1:], start=len(prompt) - 1, pages=[*pages[:whole], 90], flags=Row.FIRST | Row.SAMPLE | Row.LOGITS
    )
    answer = group.run([fork], copies=[(whole, 90)] if partial else [])
    np.testing.assert_allclose(answer.logits[0], expected[len(prompt) - 1 : len(prompt)], atol=1e-4, rtol=0)


def test_collectives_of_a_step_are_two_a_layer_and_one(group: WorkerGroup) -> None:
    answer = group.run([dict(slot=5, ids=[1], pages=[0], flags=Row.FIRST | Row.SAMPLE)])
    layers = group.deployment.spec.num_layers
    expected = (2 * layers, 1) if group.size > 1 else (0, 0)
    assert (answer.result.all_reduces, answer.result.all_gathers) == expected
