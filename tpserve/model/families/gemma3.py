"""Gemma 3, text only: local and global layers, each with its rotary base; norms also behind attention and MLP.

A norm's weight is kept as its difference from 1. The embedding is scaled by the root of its width.
"""

from __future__ import annotations

from typing import Any

from tpserve.model.families import Param, blocks, rope
from tpserve.model.families.config import (
    TANH_GELU,
    Config,
    Layers,
    Positive,
    Size,
    Theta,
    choose,
    read,
    refuse_set,
    windows,
)
from tpserve.model.spec import LayerSpec, ModelSpec, Rotary
from tpserve.settings import UserError

ARCHITECTURES = ("Gemma3ForCausalLM",)

_FULL, _LOCAL = "full_attention", "sliding_attention"
_OFFSET = 1.0


class _Config(Config):
    vocab_size: Size = 262_208
    hidden_size: Size = 2304
    intermediate_size: Size = 9216
    num_hidden_layers: Layers = 26
    num_attention_heads: Size = 8
    num_key_value_heads: Size | None = 4
    head_dim: Size | None = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: Size = 131_072
    rms_norm_eps: Positive = 1e-6
    rope_local_base_freq: Theta = 10_000.0
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_pre_attn_scalar: Positive = 256
    sliding_window: int | None = 4096
    sliding_window_pattern: Size = 6
    layer_types: list[str] | None = None

    @property
    def types(self) -> list[str]:
        """Each layer's kind of attention; by default every `sliding_window_pattern`th is global."""
        if self.layer_types is not None:
            return self.layer_types
        return [_LOCAL if (layer + 1) % self.sliding_window_pattern else _FULL for layer in range(self.num_hidden_layers)]


def spec(config: dict[str, Any]) -> ModelSpec:
    """The model that the config describes. Raises UserError for what is invalid or not built."""
    refuse_set(config, "final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention")
    c = read(_Config, config)
    rotaries = _rotaries(c)
    return ModelSpec(
        family="gemma3",
        **c.sizes(),
        layers=tuple(LayerSpec(rotaries[kind], window) for kind, window in zip(c.types, windows(c, c.types, c.sliding_window))),
        norm="rms",
        norm_eps=c.rms_norm_eps,
        activation=choose("hidden_activation", c.hidden_activation, TANH_GELU),
        gated_mlp=True,
        parallel_residual=False,
        qk_norm=True,
        qkv_bias=c.attention_bias,
        attention_out_bias=c.attention_bias,
        mlp_bias=False,
        attention_scale=c.query_pre_attn_scalar**-0.5,
        # scaled already where there is scaling
        max_position=min(rope.max_position(c, rotary, c.max_position_embeddings) for rotary in rotaries.values()),
        embed_scale=c.hidden_size**0.5,
    )


def _rotaries(c: _Config) -> dict[str, Rotary]:
    """By kind of layer: `rope_parameters` has one of each; `rope_scaling` adds to that of the global layers."""
    given = c.rope_parameters or {}
    if unknown := sorted(given.keys() - {_FULL, _LOCAL}):
        raise UserError(f"config.json: rope_parameters has {unknown[0]!r}, but must have {_FULL!r} and {_LOCAL!r} only")
    for kind, of_kind in given.items():
        if not isinstance(of_kind, dict | None):
            raise UserError(f"config.json: rope_parameters: {kind} {of_kind!r}: must be an object")
    full, local, scaling = given.get(_FULL) or {}, given.get(_LOCAL) or {}, c.rope_scaling or {}
    place = "rope_scaling" if scaling else f"rope_parameters: {_FULL}"
    return {
        _FULL: rope.read(c, place, full | scaling, c.rope_theta or 1_000_000.0),
        _LOCAL: rope.read(c, f"rope_parameters: {_LOCAL}", local, c.rope_local_base_freq),
    }


def params(spec: ModelSpec) -> list[Param]:
    """Embedding, last norm and head."""
    return [*blocks.embedding_and_head(spec), blocks.norm(spec, "norm", "model.norm.weight", _OFFSET)]


def layer_params(spec: ModelSpec) -> list[Param]:
    """Weights are (out, in), as in the checkpoint."""
    norms = {
        "attn_norm": "input_layernorm",
        "attn_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    }
    return [
        *(blocks.norm(spec, name, f"{blocks.LAYER}.{tensor}.weight", _OFFSET) for name, tensor in norms.items()),
        *blocks.attention(spec),
        *blocks.qk_norm(spec, _OFFSET),
        *blocks.gated_mlp(spec),
    ]
