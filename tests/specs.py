"""Model specs of any size, without a folder."""

from __future__ import annotations

from math import prod

from tpserve.model.families import held, llama, tensors
from tpserve.model.spec import ModelSpec
from tpserve.parallel.partition import Shard


def llama_spec(
    *, vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, intermediate: int,
    bias: bool = False, tie: bool = True, max_position: int = 64,
) -> ModelSpec:  # fmt: skip
    """A Llama of these sizes."""
    return llama.spec(
        {
            "vocab_size": vocab,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "intermediate_size": intermediate,
            "attention_bias": bias,
            "mlp_bias": bias,
            "tie_word_embeddings": tie,
            "max_position_embeddings": max_position,
        }
    )


def split_params(spec: ModelSpec, shard: Shard) -> int:
    """The rank's part of all parameters that are split: attention, MLP and head."""
    return sum(
        prod(param.shape) // param.shape[param.dim] * len(held(spec, shard, param, layer))
        for _, param, layer in tensors(spec)
        if param.split is not None
    )
