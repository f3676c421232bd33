"""Qwen2 and Qwen2.5: biases on queries, keys and values, and a sliding window from a layer on, if it is used."""

from __future__ import annotations

from typing import Any

from tpserve.model.families import llama, rope
from tpserve.model.families.config import SILU, Config, Positive, Size, choose, read, windows
from tpserve.model.spec import LayerSpec, ModelSpec

ARCHITECTURES = ("Qwen2ForCausalLM",)

params, layer_params = llama.params, llama.layer_params


class QwenConfig(Config):
    """What Qwen2 and Qwen3 have in common."""

    num_key_value_heads: Size | None = 32
    rms_norm_eps: Positive = 1e-6
    hidden_act: str = "silu"
    max_position_embeddings: Size = 32_768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None

    def windows(self) -> list[int | None]:
        """Each layer's sliding window."""
        window = self.sliding_window if self.use_sliding_window else None
        first = self.num_hidden_layers if window is None else self.max_window_layers
        types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(self.num_hidden_layers)]
        return windows(self, types if self.layer_types is None else self.layer_types, window)


def spec(config: dict[str, Any]) -> ModelSpec:
    """The model that the config describes. Raises UserError for what is invalid or not built."""
    c = read(QwenConfig, config)
    rotary = rope.rotary(c, theta=10_000.0)
    return ModelSpec(
        family="qwen2",
        **c.sizes(),
        layers=tuple(LayerSpec(rotary, window) for window in c.windows()),
        norm="rms",
        norm_eps=c.rms_norm_eps,
        activation=choose("hidden_act", c.hidden_act, SILU),
        gated_mlp=True,
        parallel_residual=False,
        qk_norm=False,
        qkv_bias=True,
        attention_out_bias=False,
        mlp_bias=False,
        attention_scale=c.head_size**-0.5,
        max_position=rope.max_position(c, rotary),
    )
