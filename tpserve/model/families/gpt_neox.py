"""GPT-NeoX (Pythia, ...): a plain MLP, layer norms and biases, a share of each head rotates; both kinds of residual.

Queries, keys and values are one tensor, head by head.
"""

from __future__ import annotations

from typing import Any

from tpserve.model.families import Param, rope
from tpserve.model.families.config import TANH_GELU, Config, Positive, Share, Size, Theta, choose, read
from tpserve.model.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("GPTNeoXForCausalLM",)

# What this family has no use for, as it has none or another name for it; transformers does not read them either.
_NOT_READ = ("num_key_value_heads", "head_dim", "rope_theta", "partial_rotary_factor")

_LAYER = "gpt_neox.layers.{layer}"


class _Config(Config):
    hidden_act: str = "gelu"
    layer_norm_eps: Positive = 1e-5
    max_position_embeddings: Size = 2048
    rotary_pct: Share = 0.25
    rotary_emb_base: Theta = 10_000.0
    use_parallel_residual: bool = True
    attention_bias: bool = True


def spec(config: dict[str, Any]) -> ModelSpec:
    """The model that the config describes. Raises UserError for what is invalid or not built."""
    c = read(_Config, config | dict.fromkeys(_NOT_READ))
    rotary = rope.rotary(c, theta=c.rotary_emb_base, partial=c.rotary_pct)
    return ModelSpec(
        family="gpt_neox",
        **c.sizes(),
        layers=(LayerSpec(rotary),) * c.num_hidden_layers,
        norm="layer",
        norm_eps=c.layer_norm_eps,
        activation=choose("hidden_act", c.hidden_act, {"gelu": "gelu", **TANH_GELU}),
        gated_mlp=False,
        parallel_residual=c.use_parallel_residual,
        qk_norm=False,
        qkv_bias=c.attention_bias,
        attention_out_bias=c.attention_bias,
        mlp_bias=True,
        attention_scale=c.head_size**-0.5,
        max_position=rope.max_position(c, rotary),
    )


def params(spec: ModelSpec) -> list[Param]:
    """Embedding, last norm and head."""
    embed, table = "gpt_neox.embed_in.weight", (spec.vocab_size, spec.hidden_size)
    return [
        Param("embed", embed, table, None),
        Param("head", embed if spec.tied else "embed_out.weight", table, "vocab"),
        *_norm(spec, "norm", "gpt_neox.final_layer_norm"),
    ]


def layer_params(spec: ModelSpec) -> list[Param]:
    """Weights are (out, in), as in the checkpoint."""
    hidden, width = spec.hidden_size, spec.intermediate_size
    attention, mlp = f"{_LAYER}.attention", f"{_LAYER}.mlp"
    found = [
        *_norm(spec, "attn_norm", f"{_LAYER}.input_layernorm"),
        Param("wqkv", f"{attention}.query_key_value.weight", (3 * hidden, hidden), "q_heads", layout="qkv_by_head"),
        Param("wo", f"{attention}.dense.weight", (hidden, hidden), "q_heads", dim=1),
        *_norm(spec, "mlp_norm", f"{_LAYER}.post_attention_layernorm"),
        Param("w_up", f"{mlp}.dense_h_to_4h.weight", (width, hidden), "columns"),
        Param("b_up", f"{mlp}.dense_h_to_4h.bias", (width,), "columns"),
        Param("w_down", f"{mlp}.dense_4h_to_h.weight", (hidden, width), "columns", dim=1),
        Param("b_down", f"{mlp}.dense_4h_to_h.bias", (hidden,), None),
    ]
    if spec.qkv_bias:
        found += [Param("bqkv", f"{attention}.query_key_value.bias", (3 * hidden,), "q_heads", layout="qkv_by_head")]
    if spec.attention_out_bias:
        found += [Param("bo", f"{attention}.dense.bias", (hidden,), None)]
    return found


def _norm(spec: ModelSpec, name: str, tensor: str) -> list[Param]:
    shape = (spec.hidden_size,)
    return [Param(name, f"{tensor}.weight", shape, None), Param(f"{name}_bias", f"{tensor}.bias", shape, None)]
