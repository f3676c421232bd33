"""Cohere (Command-R): attention and MLP read one norm and are added to the residual together; logits are scaled.

Dimensions that rotate together are neighbours. With `use_qk_norm` each head has a norm weight of its own.
"""

from __future__ import annotations

from typing import Any

from tpserve.model.families import Param, blocks, rope
from tpserve.model.families.config import SILU, Config, Positive, Size, choose, read
from tpserve.model.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("CohereForCausalLM",)


class _Config(Config):
    layer_norm_eps: Positive = 1e-5
    logit_scale: Positive = 0.0625
    hidden_act: str = "silu"
    max_position_embeddings: Size = 8192
    model_max_length: Size | None = None  # where it is given, what the model was made for
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    use_qk_norm: bool = False


def spec(config: dict[str, Any]) -> ModelSpec:
    """The model that the config describes. Raises UserError for what is invalid or not built."""
    c = read(_Config, config)
    rotary = rope.rotary(c, theta=500_000.0)
    return ModelSpec(
        family="cohere",
        **c.sizes(),
        layers=(LayerSpec(rotary),) * c.num_hidden_layers,
        norm="layer",
        norm_eps=c.layer_norm_eps,
        activation=choose("hidden_act", c.hidden_act, SILU),
        gated_mlp=True,
        parallel_residual=True,
        qk_norm=c.use_qk_norm,
        qkv_bias=c.attention_bias,
        attention_out_bias=c.attention_bias,
        mlp_bias=False,
        attention_scale=c.head_size**-0.5,
        max_position=rope.max_position(c, rotary, c.model_max_length),
        logit_scale=c.logit_scale,
    )


def params(spec: ModelSpec) -> list[Param]:
    """Embedding, last norm and head."""
    return [*blocks.embedding_and_head(spec), blocks.norm(spec, "norm", "model.norm.weight")]


def layer_params(spec: ModelSpec) -> list[Param]:
    """Weights are (out, in), as in the checkpoint."""
    found = [
        blocks.norm(spec, "attn_norm", f"{blocks.LAYER}.input_layernorm.weight"),
        *blocks.attention(spec, layout="pairs"),
        *blocks.gated_mlp(spec),
    ]
    if spec.qk_norm:
        for name, heads, split in (("q_norm", spec.num_heads, "q_heads"), ("k_norm", spec.num_kv_heads, "kv_heads")):
            tensor = f"{blocks.LAYER}.self_attn.{name}.weight"
            found.append(Param(name, tensor, (heads, spec.head_dim), split, layout="norm_pairs"))  # type: ignore[arg-type]
    return found
