"""The decoder: one forward pass over a step's tokens, on one rank's shard. No family has a name in here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tpserve.kernels import attention
from tpserve.kernels import reference as ops
from tpserve.kernels.linear import linear
from tpserve.model.rotary import RotaryTable
from tpserve.model.spec import ModelSpec, Rotary
from tpserve.parallel.collectives import Collectives
from tpserve.parallel.partition import Shard

Turns = Mapping[Rotary, tuple[Tensor, Tensor]]  # cosines and sines of a step's positions


@dataclass(frozen=True)
class Norm:
    """Float32, the same on all ranks."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class LayerWeights:
    """One layer's parameters on this rank; a part that it does not hold, or that the model does not have, is None.

    Products are (out, in) in the storage dtype as `linear.pack` leaves them. Whole biases are float32,
    biases of a product's columns in the compute dtype.
    """

    attn_norm: Norm
    wqkv: Tensor | None
    bqkv: Tensor | None
    qk_norm: Tensor | None  # (this rank's query and KV heads, head_dim) float32
    wo: Tensor | None
    bo: Tensor | None  # whole: added once, after the reduction
    attn_out_norm: Norm | None  # of what attention adds to the residual
    mlp_norm: Norm | None  # None: the MLP reads what attention reads
    w_up: Tensor | None  # gated: the gate's columns, then the others
    b_up: Tensor | None
    w_down: Tensor | None
    b_down: Tensor | None  # whole
    mlp_out_norm: Norm | None


@dataclass(frozen=True)
class Weights:
    """All parameters on this rank. `embed` is the whole table, `head` the rank's rows of the vocabulary."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Norm
    head: Tensor


@dataclass(frozen=True)
class StepInputs:
    """The tokens of one step as tensors on the device; tokens of a row are adjacent, rows in plan order.

    `ids`, `positions` and `kv_slots` (flat place in the pool: page * page_size + offset) are (tokens,) int64.
    `rows` has the rows as attention through each window of the model's layers takes them.
    """

    ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    rows: Mapping[int | None, attention.Arrangement]


class Decoder:
    """Computes hidden states and this rank's slice of the logits.

    The residual stream is float32 and the same on all ranks; products are in `compute`. Partial sums of
    row-parallel layers are reduced in float32: two all-reduces a layer, one where the residual is parallel.
    """

    def __init__(self, spec: ModelSpec, shard: Shard, weights: Weights, collectives: Collectives, compute: torch.dtype):
        self.spec = spec
        self.shard = shard
        self.weights = weights
        self.collectives = collectives
        self.compute = compute
        # In the compute dtype, as models with a scaled embedding were trained.
        self.embed_scale = torch.tensor(spec.embed_scale).to(compute).item()
        device = weights.norm.weight.device
        self.rotaries = {layer.rotary: RotaryTable(layer.rotary, device) for layer in spec.layers}

    def forward(self, step: StepInputs, pools: Tensor) -> Tensor:
        """Final hidden states (tokens, hidden) in `compute`, the same on all ranks.

        `pools` (layers, 2, pages, page_size, kv_heads, head_dim) gets the step's keys and values.
        """
        x = self.weights.embed.index_select(0, step.ids).float()
        if self.embed_scale != 1:
            x.mul_(self.embed_scale)
        turns = {rotary: table.at(step.positions) for rotary, table in self.rotaries.items()}
        block = self._parallel_block if self.spec.parallel_residual else self._sequential_block
        for layer in range(self.spec.num_layers):
            block(layer, x, step, turns, pools)
        return self._norm(x, self.weights.norm, self.compute)

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's columns of the logits (rows, columns), float32, for final hidden states (rows, hidden)."""
        logits = linear(hidden, self.weights.head).float()
        return logits if self.spec.logit_scale == 1 else logits.mul_(self.spec.logit_scale)

    def _sequential_block(self, layer: int, x: Tensor, step: StepInputs, turns: Turns, pools: Tensor) -> None:
        weights = self.weights.layers[layer]
        assert weights.mlp_norm is not None, f"the family {self.spec.family} declares no mlp_norm"
        hidden = self._norm(x, weights.attn_norm, self.compute)
        mixed = self._reduced(x, self._attention(layer, hidden, step, turns, pools))
        self._add(x, mixed, weights.bo, weights.attn_out_norm)
        hidden = self._norm(x, weights.mlp_norm, self.compute)
        self._add(x, self._reduced(x, self._mlp(weights, hidden)), weights.b_down, weights.mlp_out_norm)

    def _parallel_block(self, layer: int, x: Tensor, step: StepInputs, turns: Turns, pools: Tensor) -> None:
        """Both partial sums are added before they are reduced."""
        weights = self.weights.layers[layer]
        hidden = self._norm(x, weights.attn_norm, self.compute)
        mixed = self._attention(layer, hidden, step, turns, pools)
        if weights.mlp_norm is not None:
            hidden = self._norm(x, weights.mlp_norm, self.compute)
        total = self._reduced(x, mixed, self._mlp(weights, hidden))
        self._add(x, total, weights.bo)
        if weights.b_down is not None:
            x.add_(weights.b_down)

    def _reduced(self, x: Tensor, *partials: Tensor | None) -> Tensor:
        """The sum of partial sums over the ranks, of x's shape, float32; None stands for zeros."""
        mine = [partial.float() for partial in partials if partial is not None]
        total = sum(mine[1:], mine[0]) if mine else torch.zeros_like(x)
        self.collectives.all_reduce_(total)
        return total

    def _add(self, x: Tensor, total: Tensor, bias: Tensor | None, norm: Norm | None = None) -> None:
        """Add a row-parallel layer's output to the residual."""
        if bias is not None:
            total.add_(bias)
        x.add_(total if norm is None else self._norm(total, norm, torch.float32))

    def _attention(self, layer: int, hidden: Tensor, step: StepInputs, turns: Turns, pools: Tensor) -> Tensor | None:
        """This rank's partial sum (tokens, hidden), or None if it holds no heads."""
        spec, weights, held = self.spec.layers[layer], self.weights.layers[layer], self.shard.layers[layer]
        if weights.wqkv is None or weights.wo is None:
            return None
        heads, kv_heads = len(held.q_heads), len(held.kv_heads)
        qkv = linear(hidden, weights.wqkv, weights.bqkv).view(len(hidden), heads + 2 * kv_heads, -1)
        queries_keys = qkv[:, : heads + kv_heads]
        if weights.qk_norm is not None:
            queries_keys = self._norm(queries_keys.float(), Norm(weights.qk_norm, None), torch.float32)
        rotated = ops.rotary(queries_keys, *turns[spec.rotary], self.compute)
        keys, values = pools[layer, 0], pools[layer, 1]
        ops.write_kv(keys, step.kv_slots, rotated[:, heads:])
        ops.write_kv(values, step.kv_slots, qkv[:, heads + kv_heads :])
        queries = rotated[:, :heads].contiguous()
        mixed = attention.attend(queries, keys, values, step.rows[spec.window], self.spec.attention_scale)
        return linear(mixed.view(len(hidden), -1), weights.wo)

    def _mlp(self, weights: LayerWeights, hidden: Tensor) -> Tensor | None:
        """This rank's partial sum (tokens, hidden), or None if it holds no columns."""
        if weights.w_up is None or weights.w_down is None:
            return None
        activate = ops.activate_and_mul if self.spec.gated_mlp else ops.activate
        return linear(activate(linear(hidden, weights.w_up, weights.b_up), self.spec.activation), weights.w_down)

    def _norm(self, x: Tensor, norm: Norm, dtype: torch.dtype) -> Tensor:
        if self.spec.norm == "rms":
            return ops.rms_norm(x, norm.weight, self.spec.norm_eps, dtype)
        return ops.layer_norm(x, norm.weight, norm.bias, self.spec.norm_eps, dtype)
