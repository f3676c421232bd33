"""Memory arithmetic, against sums done another way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import Tiny
from tpserve import memory
from tpserve.checkpoint import folder, headers
from tpserve.model.families import llama
from tpserve.model.spec import ModelSpec
from tpserve.parallel.partition import partition


@pytest.fixture(scope="module")
def spec(tiny_model: Path) -> ModelSpec:
    return llama.spec(folder.read_json(tiny_model / "config.json"))


def test_page_bytes_of_demo_like_sizes_are_those_of_its_tokens() -> None:
    config = {"vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9}
    spec = llama.spec(config | {"num_key_value_heads": 3, "intermediate_size": 1536, "head_dim": 64})
    assert memory.page_bytes(spec, partition(spec, 1)[0], "bfloat16", 16) == 16 * 23_040  # as published for the model
    assert memory.host_page_bytes(spec, partition(spec, 3), "float32", 1) == 2 * 23_040


def test_host_page_bytes_with_fewer_kv_heads_than_ranks_count_every_copy(spec: ModelSpec) -> None:
    one = memory.host_page_bytes(spec, partition(spec, 1), "float32", 16)
    assert memory.host_page_bytes(spec, partition(spec, 9), "float32", 16) == 3 * one


@given(st.integers(0, 10**6), st.integers(1, 1024))
def test_pages_for_tokens_are_just_enough(tokens: int, page_size: int) -> None:
    pages = memory.pages_for(tokens, page_size)
    assert pages * page_size >= tokens > (pages - 1) * page_size


@pytest.mark.parametrize("tie", [False, True])
def test_model_bytes_are_the_files_tensors(tiny_folder: Callable[[Tiny], Path], tie: bool) -> None:
    path = tiny_folder(Tiny(tie=tie))
    spec = llama.spec(folder.read_json(path / "config.json"))
    header_bytes = 8 + int.from_bytes((path / "model.safetensors").read_bytes()[:8], "little")
    assert memory.model_bytes(spec, "float32") == (path / "model.safetensors").stat().st_size - header_bytes
    assert memory.model_bytes(spec, "bfloat16") * 2 == memory.model_bytes(spec, "float32")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_weight_bytes_of_all_ranks_are_the_model_and_their_copies(tiny_model: Path, spec: ModelSpec, ranks: int) -> None:
    shared = ("embed_tokens", "norm", "o_proj.bias", "down_proj.bias")
    stored = headers.scan(tiny_model)
    assert sum(any(word in name for word in shared) for name in stored) == 2 + spec.num_layers * 4
    copied = sum(4 * _items(tensor.shape) for name, tensor in stored.items() if any(word in name for word in shared))
    total = sum(memory.weight_bytes(spec, shard, "float32") for shard in partition(spec, ranks))
    assert total == memory.model_bytes(spec, "float32") + (ranks - 1) * copied


def _items(shape: tuple[int, ...]) -> int:
    rows, *columns = shape
    return rows * columns[0] if columns else rows


def test_default_budget_is_a_quarter_of_what_is_there_but_2_gib_at_most() -> None:
    assert memory.default_kv_bytes(4 * 1024**3) == 1024**3
    assert memory.default_kv_bytes(64 * 1024**3) == 2 * 1024**3


def test_show_gives_both_units() -> None:
    assert memory.show(3 * 1024**3 // 2) == "1.50 GiB (1610612736 bytes)"
