"""The decoder: one forward pass over a step's tokens, on one rank's shard. No family has a name in here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tpserve.kernels.interface import Forward, Heads, Kernels, Lines, Matrix, Norm, Tokens
from tpserve.model.spec import ModelSpec
from tpserve.parallel.partition import Shard


@dataclass(frozen=True)
class LayerWeights:
    """One layer's parameters on this rank; a part that it does not hold, or that the model does not have, is None.

    Products are (out, in) in the storage dtype as the kernels' `pack` leaves them; biases are float32.
    """

    attn_norm: Norm
    wqkv: Matrix | None
    bqkv: Tensor | None
    qk_norm: Tensor | None  # (this rank's query and KV heads, head_dim) float32
    wo: Matrix | None
    bo: Tensor | None  # whole: added once, after the reduction
    attn_out_norm: Norm | None  # of what attention adds to the residual
    mlp_norm: Norm | None  # None: the MLP reads what attention reads
    w_up: Matrix | None  # gated: the gate's columns, then the others
    b_up: Tensor | None
    w_down: Matrix | None
    b_down: Tensor | None  # whole
    mlp_out_norm: Norm | None


@dataclass(frozen=True)
class Weights:
    """All parameters on this rank. `embed` is the whole table, `head` the rank's rows of the vocabulary."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Norm
    head: Matrix


class Decoder:
    """Computes hidden states and this rank's slice of the logits, by the kernels' operations.

    There are two reductions over the ranks in a layer, one where the residual is parallel.
    """

    def __init__(self, spec: ModelSpec, shard: Shard, weights: Weights, kernels: Kernels, compute: torch.dtype):
        self.spec = spec
        self.shard = shard
        self.weights = weights
        self.kernels = kernels
        # In the compute dtype, as models with a scaled embedding were trained.
        self.embed_scale = torch.tensor(spec.embed_scale).to(compute).item()

    def capture(self, pools: Tensor) -> Forward:
        """The forward pass on pools (layers, 2, pages, kv_heads, page_size, head_dim), which get each step's keys and values.

        It gives final hidden states (tokens, hidden) in the compute dtype, the same on all ranks, valid until the next step.
        """
        return self.kernels.capture(self._forward, pools)

    @property
    def seconds(self) -> Sequence[float]:
        """What was spent in each of the kernels' KINDS since the start."""
        return self.kernels.seconds

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's columns of the logits (rows, columns), float32, for final hidden states (rows, hidden).

        Valid until the next call.
        """
        return self.kernels.logits(hidden, self.weights.head, self.spec.logit_scale)

    def _forward(self, tokens: Tokens, pools: Tensor) -> Lines:
        x = self.kernels.embed(tokens, self.weights.embed, self.embed_scale)
        block = self._parallel_block if self.spec.parallel_residual else self._sequential_block
        for layer in range(self.spec.num_layers):
            block(layer, x, tokens, pools)
        return self.kernels.norm(x, self.weights.norm)

    def _sequential_block(self, layer: int, x: Lines, tokens: Tokens, pools: Tensor) -> None:
        weights, kernels = self.weights.layers[layer], self.kernels
        assert weights.mlp_norm is not None, f"the family {self.spec.family} declares no mlp_norm"
        mixed = self._attention(layer, kernels.norm(x, weights.attn_norm), tokens, pools)
        kernels.reduce_add_(x, mixed, _given(weights.bo), weights.attn_out_norm)
        up = self._mlp(weights, kernels.norm(x, weights.mlp_norm))
        kernels.reduce_add_(x, up, _given(weights.b_down), weights.mlp_out_norm)

    def _parallel_block(self, layer: int, x: Lines, tokens: Tokens, pools: Tensor) -> None:
        """Both partial sums are added before they are reduced."""
        weights, kernels = self.weights.layers[layer], self.kernels
        hidden = kernels.norm(x, weights.attn_norm)
        mixed = self._attention(layer, hidden, tokens, pools)
        if weights.mlp_norm is not None:
            hidden = kernels.norm(x, weights.mlp_norm)
        up = self._mlp(weights, hidden)
        kernels.reduce_add_(x, mixed + up, _given(weights.bo, weights.b_down), None)

    def _attention(self, layer: int, hidden: Lines, tokens: Tokens, pools: Tensor) -> list[tuple[Lines, Matrix]]:
        """What attention's output is the product of; nothing if this rank holds no heads."""
        spec, weights, held = self.spec.layers[layer], self.weights.layers[layer], self.shard.layers[layer]
        if weights.wqkv is None or weights.wo is None:
            return []
        heads = Heads(len(held.q_heads), len(held.kv_heads), self.spec.head_dim)
        qkv = self.kernels.linear(hidden, weights.wqkv, weights.bqkv)
        keys, values = pools[layer, 0], pools[layer, 1]
        mixed = self.kernels.attention(tokens, qkv, weights.qk_norm, keys, values, heads, spec.rotary, spec.window)
        return [(mixed, weights.wo)]

    def _mlp(self, weights: LayerWeights, hidden: Lines) -> list[tuple[Lines, Matrix]]:
        """What the MLP's output is the product of; nothing if this rank holds no columns."""
        if weights.w_up is None or weights.w_down is None:
            return []
        return [(self.kernels.linear(hidden, weights.w_up, weights.b_up, self.spec.activation), weights.w_down)]


def _given(*biases: Tensor | None) -> list[Tensor]:
    return [bias for bias in biases if bias is not None]
