"""Attention over paged keys and values in plain torch: gather the pages, then scaled dot-product attention.

How the rows of a step are grouped does not depend on the layer, so it is worked out once a step
(`arrange`) and used by every layer (`attend`). Rows of one token are batched by length: rows in a
batch have at most twice the pages of its shortest, so that one long row does not pad all others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_MOST_GATHERED = 1 << 16  # tokens copied out of the pool at once: bounds memory, whatever the batch


@dataclass(frozen=True)
class SingleRows:
    """Rows of one token each, with n pages that they see.

    `tokens` (rows,), `pages` (rows * n,) flat, `mask` (rows, 1, 1, n * page_size).
    """

    tokens: Tensor
    pages: Tensor
    mask: Tensor


@dataclass(frozen=True)
class ChunkRow:
    """One row of several tokens [first, stop) of the batch. `mask` is (count, length), or None where causal says it."""

    first: int
    stop: int
    pages: Tensor
    length: int  # tokens of context from its first page on, the row's own included
    mask: Tensor | None


@dataclass(frozen=True)
class Arrangement:
    """The rows of a step, grouped for attention."""

    singles: tuple[SingleRows, ...]
    chunks: tuple[ChunkRow, ...]


def arrange(
    starts: np.ndarray,
    counts: np.ndarray,
    tables: np.ndarray,
    page_size: int,
    window: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Arrangement:
    """Group rows; row r has `counts[r]` tokens from position `starts[r]` and its pages in `tables[r]` (rows, pages).

    A token sees the last `window` tokens up to itself; pages that no token of the row sees are left out.
    The places of a row's last page behind its tokens must hold finite values.
    """
    starts = starts.astype(np.int64)
    oldest = np.zeros_like(starts) if window is None else np.maximum(0, starts + 1 - window)  # position that a row sees
    unseen = oldest // page_size  # pages
    # From here on, places count from a row's first page that is seen.
    oldest, starts = oldest - unseen * page_size, starts - unseen * page_size
    lengths = starts + counts
    pages = -(-lengths // page_size)
    first = np.cumsum(counts, dtype=np.int64) - counts

    def single(rows: np.ndarray) -> SingleRows:
        most = int(pages[rows].max())
        # Padding repeats the row's own first page: a foreign one could hold NaN, which no mask keeps out.
        places = unseen[rows, None] + np.where(np.arange(most) < pages[rows, None], np.arange(most), 0)
        table = np.take_along_axis(tables[rows], places, axis=1)
        place = np.arange(most * page_size)
        seen = (place >= oldest[rows, None]) & (place < lengths[rows, None])
        mask = np.where(seen, np.float32(0), np.float32(-np.inf))
        return SingleRows(
            torch.from_numpy(first[rows]).to(device),
            torch.from_numpy(table.reshape(-1)).to(device),
            torch.from_numpy(mask).to(device, dtype)[:, None, None, :],
        )

    def chunk(row: int) -> ChunkRow:
        start, count, length = int(starts[row]), int(counts[row]), int(lengths[row])
        mask = None
        if start or (window is not None and window < length):
            ahead = torch.arange(length, device=device) - torch.arange(start, start + count, device=device)[:, None]
            hidden = ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)
            mask = torch.zeros((count, length), dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
        ids = torch.from_numpy(tables[row, unseen[row] : unseen[row] + pages[row]]).to(device)
        return ChunkRow(int(first[row]), int(first[row]) + count, ids, length, mask)

    ones = np.flatnonzero(counts == 1)
    ones = ones[np.argsort(pages[ones], kind="stable")]
    return Arrangement(
        tuple(single(rows) for rows in _batches(ones, pages, page_size)),
        tuple(chunk(int(row)) for row in np.flatnonzero(counts > 1)),
    )


def attend(query: Tensor, keys: Tensor, values: Tensor, rows: Arrangement, scale: float) -> Tensor:
    """Attention output (tokens, heads, head_dim) for query of that shape (Vaswani et al. 2017).

    `keys` and `values` are one layer's pools (pages, kv_heads, page_size, head_dim), this step's
    tokens included. Query head h reads KV head h // (heads // kv_heads). Scores are multiplied by `scale`.
    """
    out = torch.empty_like(query)
    for single in rows.singles:
        out.index_copy_(0, single.tokens, _singles(query.index_select(0, single.tokens), keys, values, single, scale))
    for chunk in rows.chunks:
        out[chunk.first : chunk.stop] = _chunk(query[chunk.first : chunk.stop], keys, values, chunk, scale)
    return out


def _batches(rows: np.ndarray, pages: np.ndarray, page_size: int) -> list[np.ndarray]:
    """Cut rows, sorted by pages, where the number of pages passes the next power of two or the batch becomes too large."""
    if not len(rows):
        return []
    classes = np.ceil(np.log2(pages[rows]))
    out = []
    for alike in np.split(rows, np.flatnonzero(np.diff(classes)) + 1):
        most = max(1, _MOST_GATHERED // int(pages[alike[-1]] * page_size))
        out += [alike[i : i + most] for i in range(0, len(alike), most)]
    return out


def _gather(pool: Tensor, pages: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """(rows, kv_heads, tokens, head_dim) of the given pages, in `dtype`."""
    _, kv_heads, page_size, head_dim = pool.shape
    heads = torch.arange(kv_heads, device=pages.device)
    places = pages.view(rows, 1, -1) * kv_heads + heads[:, None]  # of (pages * kv_heads, page_size, head_dim)
    found = pool.flatten(0, 1).index_select(0, places.flatten()).to(dtype)
    return found.view(rows, kv_heads, places.shape[2] * page_size, head_dim)


def _singles(query: Tensor, keys: Tensor, values: Tensor, single: SingleRows, scale: float) -> Tensor:
    """One token per row: the query heads of a group take the place of query positions."""
    rows, heads, head_dim = query.shape
    k, v = (_gather(pool, single.pages, rows, query.dtype) for pool in (keys, values))
    grouped = query.view(rows, k.shape[1], -1, head_dim)
    mask = single.mask.expand(rows, 1, grouped.shape[2], single.mask.shape[-1])
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale).reshape(rows, heads, head_dim)


def _chunk(query: Tensor, keys: Tensor, values: Tensor, chunk: ChunkRow, scale: float) -> Tensor:
    """Many tokens of one row: KV heads take the place of the batch, and a group shares its keys without a copy."""
    count, heads, head_dim = query.shape
    k, v = (_gather(pool, chunk.pages, 1, query.dtype)[0, :, None, : chunk.length] for pool in (keys, values))
    kv_heads, group = k.shape[0], heads // k.shape[0]
    grouped = query.view(count, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    k, v = (x.expand(kv_heads, group, chunk.length, head_dim) for x in (k, v))
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=chunk.mask, is_causal=chunk.mask is None, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(count, heads, head_dim)
