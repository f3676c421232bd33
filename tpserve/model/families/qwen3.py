"""Qwen3, dense: as Qwen2, but each query and key head is normed, and heads have a size of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tpserve.model.families import Param, blocks, llama, qwen2
from tpserve.model.families.config import Size, read
from tpserve.model.spec import ModelSpec

ARCHITECTURES = ("Qwen3ForCausalLM",)

params = llama.params


class _Config(qwen2.QwenConfig):
    head_dim: Size | None = 128
    attention_bias: bool = False


def spec(config: dict[str, Any]) -> ModelSpec:
    """The model that the config describes. Raises UserError for what is invalid or not built."""
    c = read(_Config, config)
    return replace(
        qwen2.spec(config | {"head_dim": c.head_dim}),
        family="qwen3",
        qk_norm=True,
        qkv_bias=c.attention_bias,
        attention_out_bias=c.attention_bias,
    )


def layer_params(spec: ModelSpec) -> list[Param]:
    """Llama's, and a norm for each kind of head."""
    return [*llama.layer_params(spec), *blocks.qk_norm(spec)]
