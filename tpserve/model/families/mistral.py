"""Mistral: Llama's tensors, with a sliding window over all layers in the first models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tpserve.model.families import llama
from tpserve.model.families.config import Config, Size, read, refuse_set
from tpserve.model.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("MistralForCausalLM",)

params, layer_params = llama.params, llama.layer_params


class _Config(Config):
    num_key_value_heads: Size | None = 8
    max_position_embeddings: Size = 131_072
    sliding_window: Size | None = 4096


def spec(config: dict[str, Any]) -> ModelSpec:
    """The model that the config describes. Raises UserError for what is invalid or not built."""
    refuse_set(config, "layer_types", "attention_bias", "mlp_bias")
    c = read(_Config, config)
    as_llama = llama.spec(
        config | {"num_key_value_heads": c.num_key_value_heads, "max_position_embeddings": c.max_position_embeddings}
    )
    layers = (LayerSpec(as_llama.layers[0].rotary, c.sliding_window),) * c.num_hidden_layers
    return replace(as_llama, family="mistral", layers=layers)
