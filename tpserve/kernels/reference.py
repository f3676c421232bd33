"""Every operation of the decoder in plain torch: right on any device, and what faster backends are tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tpserve.kernels.interface import Activation


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x / rms(x) * weight over the last axis (Zhang and Sennrich 2019); x and weight float32, the result `dtype`."""
    # torch's own rms_norm takes more passes on a CPU.
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    normed: Tensor = (x * scale).mul_(weight).to(dtype)
    return normed


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """(x - mean) / deviation * weight + bias over the last axis (Ba et al. 2016); all float32, the result `dtype`."""
    normed = F.layer_norm(x, x.shape[-1:], eps=eps).mul_(weight)
    return (normed if bias is None else normed.add_(bias)).to(dtype)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """The MLP's non-linearity, element by element. GELU is the exact one or its tanh form (Hendrycks and Gimpel 2016)."""
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="none" if activation == "gelu" else "tanh")


def activate_and_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up, for gate_up (tokens, 2 * columns) with the gate first (Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate, activation).mul_(up)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotate the first dimensions of x (tokens, heads, head_dim) by its positions; halves are paired (Su et al. 2021).

    `cos` and `sin` are (tokens, 1, dims / 2), float32; the product is float32, the result `dtype`. Dimensions
    from `dims` on are left as they are.
    """
    half = cos.shape[-1]
    x = x.float()
    low, high = x[..., :half], x[..., half : 2 * half]
    turned = (low * cos - high * sin, high * cos + low * sin)
    return torch.cat(turned if 2 * half == x.shape[-1] else (*turned, x[..., 2 * half :]), dim=-1).to(dtype)


def write_kv(pool: Tensor, slots: Tensor, values: Tensor) -> None:
    """Store values (tokens, kv_heads, head_dim) in pool (pages, kv_heads, page_size, head_dim) at flat token slots."""
    page_size = pool.shape[2]
    pool.transpose(1, 2).index_put_((slots // page_size, slots % page_size), values.to(pool.dtype))


def clear_kv(pools: Tensor, slots: Tensor) -> None:
    """Zero the keys and values at flat token slots in all layers of pools (layers, 2, pages, kv_heads, page_size, head_dim)."""
    if len(slots):
        page_size = pools.shape[4]
        pools.transpose(3, 4)[:, :, slots // page_size, slots % page_size] = 0


def copy_pages(pools: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy whole pages of pools (layers, 2, pages, ...) in all layers; no target is a source."""
    pools.index_copy_(2, target, pools.index_select(2, source))
