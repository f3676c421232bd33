"""Llama, and models that are published as such (SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from typing import Any

from tpserve.model.families import Param, blocks, rope
from tpserve.model.families.config import SILU, Config, Positive, Size, choose, read
from tpserve.model.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("LlamaForCausalLM",)


class _Config(Config):
    rms_norm_eps: Positive = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    max_position_embeddings: Size = 2048


def spec(config: dict[str, Any]) -> ModelSpec:
    """The model that the config describes. Raises UserError for what is invalid or not built."""
    c = read(_Config, config)
    rotary = rope.rotary(c, theta=10_000.0)
    return ModelSpec(
        family="llama",
        **c.sizes(),
        layers=(LayerSpec(rotary),) * c.num_hidden_layers,
        norm="rms",
        norm_eps=c.rms_norm_eps,
        activation=choose("hidden_act", c.hidden_act, SILU),
        gated_mlp=True,
        parallel_residual=False,
        qk_norm=False,
        qkv_bias=c.attention_bias,
        attention_out_bias=c.attention_bias,
        mlp_bias=c.mlp_bias,
        attention_scale=c.head_size**-0.5,
        max_position=rope.max_position(c, rotary),
    )


def params(spec: ModelSpec) -> list[Param]:
    """Embedding, last norm and head."""
    return [*blocks.embedding_and_head(spec), blocks.norm(spec, "norm", "model.norm.weight")]


def layer_params(spec: ModelSpec) -> list[Param]:
    """Weights are (out, in), as in the checkpoint."""
    return [
        blocks.norm(spec, "attn_norm", f"{blocks.LAYER}.input_layernorm.weight"),
        *blocks.attention(spec),
        blocks.norm(spec, "mlp_norm", f"{blocks.LAYER}.post_attention_layernorm.weight"),
        *blocks.gated_mlp(spec),
    ]
