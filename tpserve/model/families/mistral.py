"""Mistral: Llama's tensors, with a sliding window over all layers in the first models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tpserve.model.families import llama
from tpserve.model.families.config import Config, Size, read, refuse_set, windows
from tpserve.model.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("MistralForCausalLM",)

params, layer_params = llama.params, llama.layer_params


class _Config(Config):
    num_key_value_heads: Size | None = 8
    max_position_embeddings: Size = 131_072
    sliding_window: int | None = 4096


def spec(config: dict[str, Any]) -> ModelSpec:
    """The model that the config describes. Raises UserError for what is invalid or not built."""
    refuse_set(config, "layer_types", "attention_bias", "mlp_bias")
    c = read(_Config, config)
    as_llama = llama.spec(
        config | {"num_key_value_heads": c.num_key_value_heads, "max_position_embeddings": c.max_position_embeddings}
    )
    types = ["full_attention" if c.sliding_window is None else "sliding_attention"] * c.num_hidden_layers
    layers = [LayerSpec(as_llama.layers[0].rotary, window) for window in windows(c, types, c.sliding_window)]
    return replace(as_llama, family="mistral", layers=tuple(layers))
