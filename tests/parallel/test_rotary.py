"""Rotary embeddings of every type through two real workers: logits below and beyond the length before scaling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.families import ORIGINAL, ROTARIES, spell_as_before, write_rotary
from tests.group import WorkerGroup
from tests.reference import chunk_rows, references
from tpserve.preflight import resolve
from tpserve.settings import Settings

PAGE = 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ROTARIES)
def test_logits_equal_hugging_face_in_both_spellings(name: str, tmp_path: Path) -> None:
    folder = write_rotary(name, tmp_path / "model")
    (case,) = references(folder, [(3 * ORIGINAL, 1)])
    logits = []
    for respell in (lambda _: None, spell_as_before):
        respell(folder)
        settings = Settings(
            model=str(folder), tp=2, dtype="float32", device="cpu", block_size=PAGE, kv_cache_memory=4 * 2**20,
            max_model_len=64, max_num_seqs=1, max_num_batched_tokens=64,
        )  # fmt: skip
        with WorkerGroup(resolve(settings)) as group:
            answers = [group.run([row]) for row in chunk_rows(0, case.prompt, list(range(12)), 20)]
        logits.append(np.concatenate([answer.logits[0] for answer in answers]))
        np.testing.assert_allclose(logits[-1], case.logits[: len(case.prompt)], atol=1e-4, rtol=0)
        assert answers[-1].result.ids.tolist() == case.continuation
    assert np.array_equal(*logits)
