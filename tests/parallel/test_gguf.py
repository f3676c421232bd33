"""GGUF files through two real workers: the logits of the folder that they were written from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.gguf_models import MODELS
from tests.group import WorkerGroup
from tests.reference import chunk_rows, references
from tpserve.checkpoint.gguf.convert import convert
from tpserve.preflight import resolve
from tpserve.settings import Settings

pytestmark = pytest.mark.slow

PAGE = 8


def check(model: Path, original: Path) -> None:
    (expected,) = references(original, [(40, 1)])
    settings = Settings(
        model=str(model), tp=2, dtype="float32", device="cpu", block_size=PAGE, kv_cache_memory=4 * 2**20,
        max_model_len=64, max_num_seqs=1, max_num_batched_tokens=64,
    )  # fmt: skip
    with WorkerGroup(resolve(settings)) as group:
        answers = [group.run([row]) for row in chunk_rows(0, expected.prompt, list(range(5)), chunk=30)]
    logits = np.concatenate([answer.logits[0] for answer in answers])
    np.testing.assert_allclose(logits, expected.logits[:40], atol=1e-4, rtol=0)
    assert answers[-1].result.ids.tolist() == expected.continuation


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_converted_file_are_those_of_its_folder(gguf_files: Path, name: str, tmp_path: Path) -> None:
    convert([gguf_files / f"{name}.gguf"], tmp_path)
    check(tmp_path, gguf_files / name)


def test_file_as_the_model_is_converted_first(gguf_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPSERVE_CACHE", str(tmp_path))
    check(gguf_files / "gemma3.gguf", gguf_files / "gemma3")
