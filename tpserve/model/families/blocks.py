"""The tensors that most families name alike: a Llama-shaped block's attention, MLP, embedding and head."""

from __future__ import annotations

from tpserve.model.families import Layout, Param
from tpserve.model.spec import ModelSpec

LAYER = "model.layers.{layer}"


def embedding_and_head(spec: ModelSpec) -> list[Param]:
    """A tied head is a slice of the embedding's tensor."""
    embed = "model.embed_tokens.weight"
    return [
        Param("embed", embed, (spec.vocab_size, spec.hidden_size), None),
        Param("head", embed if spec.tied else "lm_head.weight", (spec.vocab_size, spec.hidden_size), "vocab"),
    ]


def norm(spec: ModelSpec, name: str, tensor: str, offset: float = 0.0) -> Param:
    """A norm's weight over the hidden size."""
    return Param(name, tensor, (spec.hidden_size,), None, offset=offset)


def attention(spec: ModelSpec, layout: Layout = "plain") -> list[Param]:
    """Projections (out, in) and their biases; `layout` is that of queries and keys."""
    hidden, queries, keys = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    prefix = f"{LAYER}.self_attn"
    found = [
        Param("wq", f"{prefix}.q_proj.weight", (queries, hidden), "q_heads", layout=layout),
        Param("wk", f"{prefix}.k_proj.weight", (keys, hidden), "kv_heads", layout=layout),
        Param("wv", f"{prefix}.v_proj.weight", (keys, hidden), "kv_heads"),
        Param("wo", f"{prefix}.o_proj.weight", (hidden, queries), "q_heads", dim=1),
    ]
    if spec.qkv_bias:
        found += [
            Param("bq", f"{prefix}.q_proj.bias", (queries,), "q_heads", layout=layout),
            Param("bk", f"{prefix}.k_proj.bias", (keys,), "kv_heads", layout=layout),
            Param("bv", f"{prefix}.v_proj.bias", (keys,), "kv_heads"),
        ]
    if spec.attention_out_bias:
        found += [Param("bo", f"{prefix}.o_proj.bias", (hidden,), None)]
    return found


def qk_norm(spec: ModelSpec, offset: float = 0.0) -> list[Param]:
    """One weight for all query heads and one for all key heads."""
    prefix = f"{LAYER}.self_attn"
    return [
        Param("q_norm", f"{prefix}.q_norm.weight", (spec.head_dim,), None, offset=offset),
        Param("k_norm", f"{prefix}.k_norm.weight", (spec.head_dim,), None, offset=offset),
    ]


def gated_mlp(spec: ModelSpec) -> list[Param]:
    """Projections (out, in) and their biases."""
    hidden, width = spec.hidden_size, spec.intermediate_size
    prefix = f"{LAYER}.mlp"
    found = [
        Param("w_gate", f"{prefix}.gate_proj.weight", (width, hidden), "columns"),
        Param("w_up", f"{prefix}.up_proj.weight", (width, hidden), "columns"),
        Param("w_down", f"{prefix}.down_proj.weight", (hidden, width), "columns", dim=1),
    ]
    if spec.mlp_bias:
        found += [
            Param("b_gate", f"{prefix}.gate_proj.bias", (width,), "columns"),
            Param("b_up", f"{prefix}.up_proj.bias", (width,), "columns"),
            Param("b_down", f"{prefix}.down_proj.bias", (hidden,), None),
        ]
    return found
