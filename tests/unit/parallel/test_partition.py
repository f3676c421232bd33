"""Who holds what, for any model and any number of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.specs import llama_spec, split_params
from tpserve.model.spec import ModelSpec
from tpserve.parallel.partition import MLP_BLOCK, ImpossibleSize, Shard, Span, largest_size, partition

DEMO = llama_spec(vocab=49152, hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536)
BLOCK_PARAMS = MLP_BLOCK * 3 * DEMO.hidden_size


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelSpec, int]:
    """A model and a number of ranks that is possible for it."""
    kv_heads = draw(st.integers(1, 6))
    spec = replace(
        DEMO,
        num_kv_heads=kv_heads,
        num_heads=kv_heads * draw(st.integers(1, 5)),
        intermediate_size=draw(st.integers(1, 600)),
        vocab_size=draw(st.integers(1, 1000)),
        head_dim=draw(st.sampled_from([2, 16, 64])),
        hidden_size=draw(st.sampled_from([8, 96, 576])),
        layers=DEMO.layers[: draw(st.integers(1, 4))],
    )
    return spec, draw(st.integers(1, min(largest_size(spec), 40)))


def tiles(spans: list[Span], total: int) -> bool:
    """Whether the spans, in order, cover [0, total) without gap or overlap."""
    edges = [0, *(span.stop for span in spans)]
    return [span.start for span in spans] == edges[:-1] and edges[-1] == total and all(s.start <= s.stop for s in spans)


@given(cases())
def test_spans_tile_heads_columns_and_vocabulary(case: tuple[ModelSpec, int]) -> None:
    spec, ranks = case
    shards = partition(spec, ranks)
    assert [shard.rank for shard in shards] == list(range(ranks))
    assert tiles([shard.vocab for shard in shards], spec.vocab_size)
    for layer in range(spec.num_layers):
        assert tiles([shard.layers[layer].columns for shard in shards], spec.intermediate_size)
        heads = [shard.layers[layer].q_heads for shard in shards]
        assert tiles([span for span in heads if span], spec.num_heads)


@given(cases())
def test_query_heads_read_kv_heads_of_their_own_rank(case: tuple[ModelSpec, int]) -> None:
    spec, ranks = case
    for shard in partition(spec, ranks):
        for layer in shard.layers:
            read = {head // spec.group_size for head in range(layer.q_heads.start, layer.q_heads.stop)}
            assert read == set(range(layer.kv_heads.start, layer.kv_heads.stop))


@given(cases())
def test_every_rank_holds_something_of_every_layer(case: tuple[ModelSpec, int]) -> None:
    spec, ranks = case
    assert all(layer.q_heads or layer.columns for shard in partition(spec, ranks) for layer in shard.layers)


@given(cases())
def test_splits_fall_between_blocks_only(case: tuple[ModelSpec, int]) -> None:
    spec, ranks = case
    for shard in partition(spec, ranks):
        for layer in shard.layers:
            assert layer.columns.stop % MLP_BLOCK == 0 or layer.columns.stop == spec.intermediate_size


@given(cases())
def test_rank_that_got_a_block_by_choice_is_at_most_one_block_ahead(case: tuple[ModelSpec, int]) -> None:
    spec, ranks = case
    shards = partition(spec, ranks)
    held = [split_params(spec, shard) for shard in shards]
    block = MLP_BLOCK * 3 * spec.hidden_size
    short = -spec.intermediate_size % MLP_BLOCK * 3 * spec.hidden_size * spec.num_layers  # what the last blocks lack
    for shard, params in zip(shards, held):
        last = shard.layers[-1]
        if len(last.columns) > (0 if last.q_heads else MLP_BLOCK):  # more than what a rank without heads must get
            assert params - block <= min(held) + short


@given(cases(), st.integers(1, 3))
def test_larger_sizes_are_refused_with_the_sizes_that_work(case: tuple[ModelSpec, int], beyond: int) -> None:
    spec, _ = case
    largest = largest_size(spec)
    with pytest.raises(ImpossibleSize, match=rf"--tp {largest + beyond} .*: 1 to {largest}$"):
        partition(spec, largest + beyond)


def test_one_head_and_one_block_go_to_two_ranks_at_most() -> None:
    spec = replace(DEMO, num_heads=1, num_kv_heads=1, intermediate_size=MLP_BLOCK, layers=DEMO.layers[:2])
    assert [bool(shard.layers[0].q_heads) for shard in partition(spec, 2)] == [True, False]
    with pytest.raises(ImpossibleSize, match="1 to 2"):
        partition(spec, 8)


def heads(shards: tuple[Shard, ...]) -> list[tuple[int, int]]:
    return [(len(shard.layers[0].q_heads), len(shard.layers[0].kv_heads)) for shard in shards]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (1, [(9, 3)]),
        (2, [(6, 2), (3, 1)]),
        (3, [(3, 1)] * 3),
        (4, [(2, 1), (1, 1), (3, 1), (3, 1)]),
        (9, [(1, 1)] * 9),
        (10, [(1, 1)] * 3 + [(0, 0)] + [(1, 1)] * 6),
    ],
)
def test_demo_heads_are_split_by_groups_then_inside_them(ranks: int, expected: list[tuple[int, int]]) -> None:
    assert heads(partition(DEMO, ranks)) == expected


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_demo_ranks_are_within_one_block_of_even(ranks: int) -> None:
    held = [split_params(DEMO, shard) for shard in partition(DEMO, ranks)]
    assert max(held) - min(held) <= BLOCK_PARAMS


def test_demo_mlp_makes_up_for_uneven_heads() -> None:
    first, second = partition(DEMO, 2)
    columns = [sum(len(layer.columns) for layer in shard.layers) / DEMO.num_layers for shard in (first, second)]
    assert columns == pytest.approx([683, 853], abs=MLP_BLOCK)
