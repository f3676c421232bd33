"""Memory arithmetic, against sums done another way."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpserve import memory
from tpserve.checkpoint import folder, headers
from tpserve.deployment import RankMemory
from tpserve.kernels.native.buffers import buffers
from tpserve.limits import Limits
from tpserve.model.families import llama
from tpserve.model.spec import ModelSpec
from tpserve.parallel.partition import partition
from tpserve.parallel.segment import CAPACITY_BYTES, shared_memory_bytes
from tpserve.settings import Settings


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


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_weight_bytes_of_all_ranks_are_the_model_and_their_copies(tiny_model: Path, spec: ModelSpec, ranks: int) -> None:
    shared = ("embed_tokens", "norm", "o_proj.bias", "down_proj.bias")
    stored = headers.scan(tiny_model)
    assert sum(any(word in name for word in shared) for name in stored) == 2 + spec.num_layers * 4
    copied = sum(4 * _items(tensor.shape) for name, tensor in stored.items() if any(word in name for word in shared))
    total = sum(memory.weight_bytes(spec, shard, "float32") for shard in partition(spec, ranks))
    assert total == sum(4 * _items(tensor.shape) for tensor in stored.values()) + (ranks - 1) * copied


def _items(shape: tuple[int, ...]) -> int:
    rows, *columns = shape
    return rows * columns[0] if columns else rows


SIZES = Limits(max_model_len=100, max_num_seqs=4, max_num_batched_tokens=64, notes=())


def rank_memory(spec: ModelSpec, ranks: int, table: str | None) -> tuple[RankMemory, ...]:
    return memory.rank_memory(spec, partition(spec, ranks), "bfloat16", SIZES, Settings(), pages=10, table=table)


@pytest.mark.parametrize("ranks", [1, 3])
def test_rank_memory_has_a_part_of_what_ranks_share_and_all_of_what_they_do_not(spec: ModelSpec, ranks: int) -> None:
    own, mapped, wide = (rank_memory(spec, ranks, table) for table in (None, "bfloat16", "float32"))
    table_bytes = 2 * spec.vocab_size * spec.hidden_size
    for rank, shard in enumerate(partition(spec, ranks)):
        assert own[rank].weights == memory.weight_bytes(spec, shard, "bfloat16")
        assert own[rank].pool == 10 * memory.page_bytes(spec, shard, "bfloat16", 16)
        assert own[rank].weights - mapped[rank].weights == table_bytes - table_bytes // ranks
        assert own[rank].weights - wide[rank].weights == table_bytes - 2 * table_bytes // ranks
        made = buffers(spec, shard, 2, 64, 4, ranks == 1)
        tables, segment = 4 * 7 * 8, shared_memory_bytes(ranks, CAPACITY_BYTES) // ranks if ranks > 1 else 0
        assert own[rank].buffers == sum(buffer.size_bytes for buffer in made.values()) + tables + segment


def test_host_memory_is_the_sum_of_the_ranks() -> None:
    ranks = (RankMemory(weights=1, pool=20, buffers=300), RankMemory(weights=2, pool=30, buffers=400))
    assert memory.host_memory(ranks) == RankMemory(weights=3, pool=50, buffers=700)
    assert memory.host_memory(ranks).total == 753


def test_default_budget_is_a_quarter_of_what_is_there_but_2_gib_at_most() -> None:
    assert memory.default_kv_bytes(4 * 1024**3) == 1024**3
    assert memory.default_kv_bytes(64 * 1024**3) == 2 * 1024**3


def test_show_gives_both_units() -> None:
    assert memory.show(3 * 1024**3 // 2) == "1.50 GiB (1610612736 bytes)"
