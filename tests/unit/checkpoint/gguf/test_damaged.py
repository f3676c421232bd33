"""GGUF files with wrong bytes and values: a refusal, or a model that can be written; within bounds of time and memory."""

from __future__ import annotations

import random
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.checkpoint.gguf import files
from tpserve.checkpoint.gguf.convert import convert
from tpserve.settings import UserError

MEMORY_LIMIT_BYTES = 2 * 2**30
TOKENIZERS: dict[str, dict[str, Any]] = {
    "byte-level": {},
    "sentencepiece": dict(
        tokenizer__ggml__model="llama", tokenizer__ggml__scores=[-float(id_) for id_ in range(len(files.TOKENS))],
        tokenizer__ggml__merges=None, tokenizer__ggml__pre=None,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    """A damaged count that is believed ends this test, not the machine that it runs on."""
    taken = int(next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line).split()[1])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken * 1024 + MEMORY_LIMIT_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def is_refused(path: Path, folder: Path) -> bool:
    """Whether it is refused, as it should be if it is: by its path, and with nothing written of it."""
    folder.mkdir()
    reason = ""
    try:
        convert([path], folder)
    except UserError as error:
        reason = str(error)
    written = any(folder.iterdir())
    shutil.rmtree(folder)
    assert written == (not reason), reason
    assert written or str(path) in reason
    return not written


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of weights that are no numbers any more
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("seed", range(2))
def test_file_with_a_flipped_bit_is_refused_or_written(tmp_path: Path, tokenizer: str, seed: int) -> None:
    path = files.write(tmp_path / "x.gguf", **TOKENIZERS[tokenizer])
    content = bytearray(path.read_bytes())
    data_bytes = sum(tensor.nbytes for tensor in files.random_tensors().values())
    chance, refused, tries = random.Random(seed), 0, 150
    for _ in range(tries):
        place, bit = chance.randrange(8, len(content) - data_bytes), 1 << chance.randrange(8)
        content[place] ^= bit
        path.write_bytes(content)
        refused += is_refused(path, tmp_path / "model")
        content[place] ^= bit
    assert tries // 4 < refused < tries


@pytest.mark.parametrize("value", [0, 3, 2**31 - 1, 2**32 - 1])
@pytest.mark.parametrize(
    "key", ["block_count", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv"]
)
def test_size_that_is_not_the_tensors_is_refused(tmp_path: Path, key: str, value: int) -> None:
    path = files.write(tmp_path / "x.gguf", **{f"llama__{key.replace('.', '__')}": value})
    assert is_refused(path, tmp_path / "model")


@pytest.mark.parametrize("value", ["text", -1.5, True, [1], ["text"]], ids=repr)
@pytest.mark.parametrize(
    "key",
    [
        *files.KEYS, "tokenizer.chat_template", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id", "split.count",
        "general.type", "general.alignment", "llama.rope.scaling.type", "llama.attention.key_length",
    ],
)  # fmt: skip
def test_value_of_another_type_is_refused_or_written(tmp_path: Path, key: str, value: Any) -> None:
    path = files.write(tmp_path / "x.gguf", **{key.replace(".", "__"): value})
    is_refused(path, tmp_path / "model")


@pytest.mark.parametrize("name", list(files.random_tensors()))
@pytest.mark.parametrize("shape", [(3,), (1, 1), (64, 3), (2, 2, 2)])
def test_tensor_of_another_shape_is_refused_by_name_before_anything_is_written(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    path = files.write(tmp_path / "x.gguf", files.random_tensors() | {name: np.zeros(shape, np.float32)})
    assert is_refused(path, tmp_path / "model")
    if name != "token_embd.weight":  # which says how large the vocabulary is
        with pytest.raises(UserError, match=f"tensor {name} has shape"):
            convert([path], tmp_path)


def test_tensor_without_elements_is_refused_by_name(tmp_path: Path) -> None:
    path = files.write(tmp_path / "x.gguf", files.random_tensors() | {"output_norm.weight": np.zeros((0, 64), np.float32)})
    with pytest.raises(UserError, match=r"tensor output_norm\.weight has shape \[0, 64\]"):
        convert([path], tmp_path)


def test_more_layers_than_tensors_are_refused_with_both_numbers(tmp_path: Path) -> None:
    path = files.write(tmp_path / "x.gguf", llama__block_count=2**24)
    with pytest.raises(UserError, match=r"has 11 tensors for 16777216 layers"):
        convert([path], tmp_path)
