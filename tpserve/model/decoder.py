"""The decoder: one forward pass over a step's tokens, on one rank's shard. No family has a name in here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpserve.kernels import attention
from tpserve.kernels import reference as ops
from tpserve.kernels.linear import linear
from tpserve.model.rotary import RotaryTable
from tpserve.model.spec import ModelSpec
from tpserve.parallel.collectives import Collectives
from tpserve.parallel.partition import Shard


@dataclass(frozen=True)
class LayerWeights:
    """One layer's parameters on this rank; a part that it does not hold is None.

    Products are (out, in) in the storage dtype as `linear.pack` leaves them. Norms and whole biases are
    float32, biases of a product's columns in the compute dtype.
    """

    attn_norm: Tensor
    wqkv: Tensor | None
    bqkv: Tensor | None
    wo: Tensor | None
    bo: Tensor | None  # whole: added once, after the reduction
    mlp_norm: Tensor
    w_gate_up: Tensor | None
    b_gate_up: Tensor | None
    w_down: Tensor | None
    b_down: Tensor | None  # whole


@dataclass(frozen=True)
class Weights:
    """All parameters on this rank. `embed` is the whole table, `head` the rank's rows of the vocabulary."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


@dataclass(frozen=True)
class StepInputs:
    """The tokens of one step as tensors on the device; tokens of a row are adjacent, rows in plan order.

    `ids`, `positions` and `kv_slots` (flat place in the pool: page * page_size + offset) are (tokens,) int64.
    """

    ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    rows: attention.Arrangement


class Decoder:
    """Computes hidden states and this rank's slice of the logits.

    The residual stream is float32 and the same on all ranks; products are in `compute`. Partial sums of
    row-parallel layers are reduced in float32: two all-reduces a layer.
    """

    def __init__(self, spec: ModelSpec, shard: Shard, weights: Weights, collectives: Collectives, compute: torch.dtype):
        self.spec = spec
        self.shard = shard
        self.weights = weights
        self.collectives = collectives
        self.compute = compute
        self.rotary = RotaryTable(spec, weights.norm.device)

    def forward(self, step: StepInputs, pools: Tensor) -> Tensor:
        """Final hidden states (tokens, hidden) in `compute`, the same on all ranks.

        `pools` (layers, 2, pages, page_size, kv_heads, head_dim) gets the step's keys and values.
        """
        x = self.weights.embed.index_select(0, step.ids).float()
        cos, sin = self.rotary.at(step.positions)
        for layer, weights in enumerate(self.weights.layers):
            hidden = ops.rms_norm(x, weights.attn_norm, self.spec.norm_eps, self.compute)
            self._add(x, self._attention(layer, hidden, step, cos, sin, pools), weights.bo)
            hidden = ops.rms_norm(x, weights.mlp_norm, self.spec.norm_eps, self.compute)
            self._add(x, self._mlp(weights, hidden), weights.b_down)
        return ops.rms_norm(x, self.weights.norm, self.spec.norm_eps, self.compute)

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's columns of the logits (rows, columns), float32, for final hidden states (rows, hidden)."""
        return linear(hidden, self.weights.head).float()

    def _add(self, x: Tensor, partial: Tensor | None, bias: Tensor | None) -> None:
        """Reduce a row-parallel layer's partial sums over the ranks and add them to the residual."""
        total = torch.zeros_like(x) if partial is None else partial.float()
        self.collectives.all_reduce_(total)
        x.add_(total)
        if bias is not None:
            x.add_(bias)

    def _attention(
        self, layer: int, hidden: Tensor, step: StepInputs, cos: Tensor, sin: Tensor, pools: Tensor
    ) -> Tensor | None:
        weights, held = self.weights.layers[layer], self.shard.layers[layer]
        if weights.wqkv is None or weights.wo is None:
            return None
        heads, kv_heads = len(held.q_heads), len(held.kv_heads)
        qkv = linear(hidden, weights.wqkv, weights.bqkv).view(len(hidden), heads + 2 * kv_heads, -1)
        rotated = ops.rotary(qkv[:, : heads + kv_heads], cos, sin)
        keys, values = pools[layer, 0], pools[layer, 1]
        ops.write_kv(keys, step.kv_slots, rotated[:, heads:])
        ops.write_kv(values, step.kv_slots, qkv[:, heads + kv_heads :])
        mixed = attention.attend(rotated[:, :heads].contiguous(), keys, values, step.rows)
        return linear(mixed.view(len(hidden), -1), weights.wo)

    def _mlp(self, weights: LayerWeights, hidden: Tensor) -> Tensor | None:
        if weights.w_gate_up is None or weights.w_down is None:
            return None
        return linear(ops.silu_and_mul(linear(hidden, weights.w_gate_up, weights.b_gate_up)), weights.w_down)
