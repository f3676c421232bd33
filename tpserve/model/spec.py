"""What a decoder looks like, as plain data: the one description that loader, partition, memory and decoder read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer with pre-norm blocks: attention, then a gated MLP, each added to the residual.

    Sizes are of the whole model, not of a shard. `num_heads` is a multiple of `num_kv_heads`; query
    head h reads KV head h // (num_heads // num_kv_heads).
    """

    family: str  # module name under model/families
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope_theta: float
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    tied: bool  # the head is the embedding
    max_position: int  # tokens the model was made for

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads
