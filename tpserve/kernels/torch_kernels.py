"""The operations of a decoder in plain torch, on any device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tpserve.kernels import linear as products
from tpserve.kernels import reference as ops
from tpserve.kernels.attention import Arrangement, arrange, attend
from tpserve.kernels.interface import Activation, Forward, Heads, Kernels, Norm, StepTokens
from tpserve.model.rotary import RotaryTable
from tpserve.model.spec import ModelSpec, Rotary
from tpserve.parallel.collectives import Collectives


@dataclass(frozen=True)
class Tokens:
    """The tokens of one step as tensors on the device, tokens of a row adjacent, rows in plan order.

    `ids` and `kv_slots` are (tokens,) int64. `rows` has the rows as attention through each window of the model's layers takes
    them, `turns` the cosines and sines of the positions.
    """

    ids: Tensor
    kv_slots: Tensor
    rows: Mapping[int | None, Arrangement]
    turns: Mapping[Rotary, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Matrix:
    """A packed weight."""

    weight: Tensor
    gated: bool


class TorchKernels(Kernels):
    """Eager. Products are in `compute`."""

    def __init__(self, spec: ModelSpec, collectives: Collectives, compute: torch.dtype, device: torch.device, page_size: int):
        self.spec = spec
        self.collectives = collectives
        self.compute = compute
        self.device = device
        self.page_size = page_size
        self.windows = {layer.window for layer in spec.layers}
        self.rotaries = {layer.rotary: RotaryTable(layer.rotary, device) for layer in spec.layers}

    def pack(self, *parts: Tensor, gated: bool = False) -> Matrix:
        """See Kernels."""
        return Matrix(products.pack(torch.cat(parts) if len(parts) > 1 else parts[0]), gated)

    def embed(self, tokens: Tokens, table: Tensor, scale: float) -> Tensor:
        """See Kernels."""
        x = table.index_select(0, tokens.ids).float()
        return x if scale == 1 else x.mul_(scale)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """See Kernels."""
        return self._norm(x, norm, self.compute)

    def linear(self, hidden: Tensor, weight: Matrix, bias: Tensor | None, activation: Activation | None = None) -> Tensor:
        """See Kernels."""
        product = products.linear(hidden, weight.weight, None if bias is None else bias.to(self.compute))
        if activation is None:
            return product
        return (ops.activate_and_mul if weight.gated else ops.activate)(product, activation)

    def attention(
        self, tokens: Tokens, qkv: Tensor, qk_norm: Tensor | None, keys: Tensor, values: Tensor,
        heads: Heads, rotary: Rotary, window: int | None,
    ) -> Tensor:  # fmt: skip
        """See Kernels."""
        both = heads.heads + heads.kv_heads
        qkv = qkv.view(len(qkv), both + heads.kv_heads, heads.head_dim)
        queries_keys = qkv[:, :both]
        if qk_norm is not None:
            queries_keys = self._norm(queries_keys.float(), Norm(qk_norm, None), torch.float32)
        rotated = ops.rotary(queries_keys, *tokens.turns[rotary], self.compute)
        ops.write_kv(keys, tokens.kv_slots, rotated[:, heads.heads :])
        ops.write_kv(values, tokens.kv_slots, qkv[:, both:])
        queries = rotated[:, : heads.heads].contiguous()
        return attend(queries, keys, values, tokens.rows[window], self.spec.attention_scale).flatten(1)

    def reduce_add_(
        self, x: Tensor, products_: Sequence[tuple[Tensor, Matrix]], biases: Sequence[Tensor], norm: Norm | None
    ) -> None:
        """See Kernels."""
        mine = [products.linear(hidden, matrix.weight).float() for hidden, matrix in products_]
        total = sum(mine[1:], mine[0]) if mine else torch.zeros_like(x)
        self.collectives.all_reduce_(total)
        for bias in biases:
            total.add_(bias)
        x.add_(total if norm is None else self._norm(total, norm, torch.float32))

    def logits(self, hidden: Tensor, head: Matrix, scale: float) -> Tensor:
        """See Kernels."""
        logits = products.linear(hidden, head.weight).float()
        return logits if scale == 1 else logits.mul_(scale)

    def capture(self, forward: Callable[[Tokens, Tensor], Tensor], pools: Tensor) -> Forward:
        """See Kernels."""

        def run(tokens: StepTokens, last_ids: Tensor) -> Tensor:
            # Masked places still enter the products, and what a page held before may be NaN: 0 * NaN is not 0.
            ops.clear_kv(pools, self._index(tokens.tails))
            return forward(self._tokens(tokens, last_ids), pools)

        return run

    def _norm(self, x: Tensor, norm: Norm, dtype: torch.dtype) -> Tensor:
        if self.spec.norm == "rms":
            return ops.rms_norm(x, norm.weight, self.spec.norm_eps, dtype)
        return ops.layer_norm(x, norm.weight, norm.bias, self.spec.norm_eps, dtype)

    def _tokens(self, tokens: StepTokens, last_ids: Tensor) -> Tokens:
        ids, positions = self._index(tokens.ids), self._index(tokens.positions)
        if len(tokens.fed):
            ids.index_copy_(0, self._index(tokens.fed), last_ids.index_select(0, self._index(tokens.fed_slots)))
        turns = {rotary: table.at(positions) for rotary, table in self.rotaries.items()}
        return Tokens(ids, self._index(tokens.kv_slots), self._rows(tokens), turns)

    def _rows(self, tokens: StepTokens) -> dict[int | None, Arrangement]:
        """By window; one that reaches over every row of this step is no window."""
        longest = int((tokens.starts + tokens.counts).max())
        tables = tokens.tables[tokens.slots, : -(-longest // self.page_size)]

        def arranged_by(window: int | None) -> Arrangement:
            return arrange(tokens.starts, tokens.counts, tables, self.page_size, window, self.device, self.compute)

        effective = {window: None if window is None or window >= longest else window for window in self.windows}
        arranged = {window: arranged_by(window) for window in set(effective.values())}
        return {window: arranged[effective[window]] for window in self.windows}

    def _index(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64, copy=True)).to(self.device)
