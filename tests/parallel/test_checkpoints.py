"""One model in the many forms that checkpoints take, through real workers: always Hugging Face's logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.group import WorkerGroup
from tests.reference import Reference, chunk_rows, references
from tests.tiny import Tiny
from tpserve.preflight import resolve
from tpserve.settings import Settings

FILE, HEAD, EMBED = "model.safetensors", "lm_head.weight", "model.embed_tokens.weight"
UNTIED, TIED = Tiny(), Tiny(tie=True)
PAGE = 16


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(folder / FILE)), folder / FILE, {"format": "pt"})


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def split_into_three(folder: Path) -> None:
    """An index of three files, with the tensors in another order."""
    tensors = list(load_file(folder / FILE).items())[::-1]
    (folder / FILE).unlink()
    where = {}
    for part in range(3):
        name = f"model-{part + 1:05}-of-00003.safetensors"
        save_file(dict(tensors[part::3]), folder / name, {"format": "pt"})
        where |= dict.fromkeys(dict(tensors[part::3]), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def plain(folder: Path) -> None:
    pass


def with_equal_head(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors | {HEAD: tensors[EMBED].clone()})


def with_another_head(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors | {HEAD: tensors[EMBED].flip(0).contiguous()})


def in_dtype(dtype: torch.dtype) -> Callable[[Path], None]:
    def convert(folder: Path) -> None:
        change_tensors(folder, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
        change_config(folder, dtype=str(dtype).removeprefix("torch."))

    return convert


def with_unused_tensors(folder: Path) -> None:
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    change_tensors(folder, lambda tensors: tensors | extra)


FORMS: dict[str, tuple[Tiny, Callable[[Path], None]]] = {
    "tied, no head": (TIED, plain),
    "tied, an equal head": (TIED, with_equal_head),
    "tied, another head": (TIED, with_another_head),
    "untied, its head": (UNTIED, plain),
    "three files": (UNTIED, split_into_three),
    "bfloat16": (UNTIED, in_dtype(torch.bfloat16)),
    "float16": (UNTIED, in_dtype(torch.float16)),
    "unused tensors": (UNTIED, with_unused_tensors),
}


@pytest.fixture(scope="module", params=FORMS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny, change = FORMS[request.param]
    folder = tiny.write(tmp_path_factory.mktemp("form") / "model")
    change(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> Reference:
    return references(folder, [(40, 1)])[0]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_logits_equal_hugging_face(folder: Path, expected: Reference, ranks: int) -> None:
    settings = Settings(
        model=str(folder), tp=ranks, dtype="float32", device="cpu", block_size=PAGE, kv_cache_memory=4 * 2**20,
        max_model_len=64, max_num_seqs=1, max_num_batched_tokens=64,
    )  # fmt: skip
    with WorkerGroup(resolve(settings)) as group:
        (row,) = chunk_rows(0, expected.prompt, [0, 1, 2], chunk=40)
        answer = group.run([row])
    np.testing.assert_allclose(answer.logits[0], expected.logits[:40], atol=1e-4, rtol=0)
    assert answer.result.ids.tolist() == expected.continuation
