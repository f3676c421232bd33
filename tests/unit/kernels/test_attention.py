from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpserve.kernels.attention import arrange, attend

HEAD_DIM = 8
SCALE = 0.3
CPU = torch.device("cpu")


def naive(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> torch.Tensor:
    """Causal attention of the last len(query) tokens of a context; (tokens, heads, head_dim) each, in float64."""
    group = query.shape[1] // keys.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), k) * SCALE
    count, length = len(query), len(keys)
    behind = torch.arange(length - count, length)[:, None] - torch.arange(length)
    mask = (behind >= 0) & (behind < (window or length))
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


rows = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 9)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    rows=rows,
    page_size=st.integers(1, 17),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    window=st.none() | st.integers(1, 40),
    seed=st.integers(0, 9),
)
def test_attend_over_scattered_pages_equals_attention_over_each_row(
    rows: list[tuple[int, int]], page_size: int, kv_heads: int, group: int, window: int | None, seed: int
) -> None:
    torch.manual_seed(seed)
    starts, counts = np.array(rows, np.int64).T
    most = int((-(-(starts + counts) // page_size)).max())
    pages = torch.randperm(len(rows) * most)
    tables = pages.reshape(len(rows), most).numpy()
    # NaN wherever no row has a page, large values behind a row's tokens: one that is read with any weight shows.
    pools = torch.full((2, len(pages) * page_size, kv_heads, HEAD_DIM), torch.nan)
    expected, queries = [], []
    for table, start, count in zip(tables, starts, counts):
        length = int(start + count)
        places = torch.tensor([int(table[i // page_size]) * page_size + i % page_size for i in range(length)])
        kv = torch.randn(2, length, kv_heads, HEAD_DIM)
        last = int(table[(length - 1) // page_size]) * page_size
        pools[:, last : last + page_size] = 1e4
        pools[:, places] = kv
        query = torch.randn(int(count), kv_heads * group, HEAD_DIM)
        queries.append(query)
        expected.append(naive(query, kv[0], kv[1], window))
    keys, values = pools.view(2, len(pages), page_size, kv_heads, HEAD_DIM).transpose(2, 3).contiguous()
    arranged = arrange(starts, counts, tables, page_size, window, CPU, torch.float32)
    out = attend(torch.cat(queries), keys, values, arranged, SCALE)
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=2e-5, rtol=1e-5)


def test_arrange_with_one_long_row_does_not_pad_the_short_ones() -> None:
    starts, counts = np.array([5, 4000, 7, 9]), np.array([1, 1, 1, 1])
    arranged = arrange(starts, counts, np.zeros((4, 300), np.int64), 16, None, CPU, torch.float32)
    widths = sorted(single.mask.shape[-1] for single in arranged.singles)
    assert widths == [16, 4016]
    assert sum(len(single.tokens) for single in arranged.singles) == 4


def test_arrange_with_a_window_gathers_only_the_pages_that_are_seen() -> None:
    starts, counts = np.array([4000, 500, 10]), np.array([1, 40, 1])
    arranged = arrange(starts, counts, np.arange(900).reshape(3, 300), 16, 32, CPU, torch.float32)
    assert sorted(len(single.pages) // len(single.tokens) for single in arranged.singles) == [1, 3]
    (chunk,) = arranged.chunks
    assert chunk.pages.tolist() == list(range(300 + (500 + 1 - 32) // 16, 300 + -(-540 // 16)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attend_in_each_dtype_keeps_the_dtype(dtype: torch.dtype) -> None:
    arranged = arrange(np.array([0, 3]), np.array([4, 1]), np.array([[0], [1]]), 8, None, CPU, dtype)
    query = torch.randn(5, 2, HEAD_DIM).to(dtype)
    pool = torch.randn(2, 1, 8, HEAD_DIM).to(dtype)
    out = attend(query, pool, pool, arranged, SCALE)
    assert out.dtype == dtype
    assert out.shape == query.shape
