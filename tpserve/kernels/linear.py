"""Products with weights, which are kept in the layout that is read fastest."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pack(weight: Tensor) -> Tensor:
    """A weight (out, in) as `linear` takes it; use it in place of the original, which is then not needed.

    On a CPU that knows bfloat16, oneDNN would reorder a plain weight into blocks again at every product.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not weight.numel():
        return weight
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (tokens, in) times weight (out, in), plus bias (out), in x's dtype.

    A weight stored in another dtype is converted for the product (float16 weights on a CPU).
    """
    if weight.is_mkldnn:
        if not len(x):
            return x.new_empty(0, weight.shape[0])
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    if weight.dtype != x.dtype:
        weight = weight.to(x.dtype)
    return F.linear(x, weight, bias)
