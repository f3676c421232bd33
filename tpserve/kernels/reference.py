"""Every operation of the decoder in plain torch: right on any device, and what faster backends are tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x / rms(x) * weight over the last axis (Zhang and Sennrich 2019); x and weight float32, the result `dtype`."""
    # torch's own rms_norm takes more passes on a CPU.
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    normed: Tensor = (x * scale).mul_(weight).to(dtype)
    return normed


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, for gate_up (tokens, 2 * columns) with the gate first (Shazeer 2020, SwiGLU)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (tokens, heads, head_dim) by its positions; halves are paired (Su et al. 2021, rotate-half form).

    `cos` and `sin` are (tokens, 1, head_dim / 2), float32; the product is float32, the result x's dtype.
    """
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def write_kv(pool: Tensor, slots: Tensor, values: Tensor) -> None:
    """Store values (tokens, kv_heads, head_dim) in pool (pages, page_size, kv_heads, head_dim) at flat token slots."""
    pool.view(-1, *pool.shape[2:]).index_copy_(0, slots, values.to(pool.dtype))


def clear_kv(pools: Tensor, slots: Tensor) -> None:
    """Zero the keys and values at flat token slots in all layers of pools (layers, 2, pages, page_size, ...)."""
    if len(slots):
        pools.flatten(2, 3).index_fill_(2, slots, 0)


def copy_pages(pools: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy whole pages of pools (layers, 2, pages, ...) in all layers; no target is a source."""
    pools.index_copy_(2, target, pools.index_select(2, source))
