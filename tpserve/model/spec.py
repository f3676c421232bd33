"""What a decoder looks like, as plain data: the one description that loader, partition, memory and decoder read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Linear:
    """All frequencies divided by `factor` (Chen et al. 2023)."""

    factor: float
    original_length: int  # tokens
    kind: Literal["linear"] = "linear"


@dataclass(frozen=True)
class Dynamic:
    """Frequencies that would change once a text is longer than the model was made for; up to there, none does."""

    original_length: int  # tokens
    kind: Literal["dynamic"] = "dynamic"


@dataclass(frozen=True)
class Llama3:
    """Low frequencies divided by `factor`, high ones kept, with a smooth passage between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int  # tokens
    kind: Literal["llama3"] = "llama3"


@dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al. 2023): as Llama 3 by a linear ramp over the dimensions; cosine and sine are scaled as well."""

    factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool  # round the ends of the ramp to whole dimensions
    attention_factor: float  # of cosine and sine
    original_length: int  # tokens
    kind: Literal["yarn"] = "yarn"


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of the first `dims` dimensions of each head; the halves of these are paired."""

    dims: int
    theta: float
    scaling: Linear | Dynamic | Llama3 | Yarn | None = None


@dataclass(frozen=True)
class LayerSpec:
    """In what a layer may differ from the others."""

    rotary: Rotary
    window: int | None = None  # tokens that a query sees, its own included; None: all before it


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer with pre-norm blocks of attention and MLP.

    Sizes are of the whole model, not of a shard. `num_heads` is a multiple of `num_kv_heads`; query
    head h reads KV head h // (num_heads // num_kv_heads). Which norms and biases there are is said
    by the family's parameters.
    """

    family: str  # module name under model/families
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: Literal["silu", "gelu", "gelu_tanh"]
    gated_mlp: bool  # activation(gate) * up, instead of activation(up)
    parallel_residual: bool  # attention and MLP read the same residual, and are added to it together
    qk_norm: bool  # each query and key head is normed, before its rotation
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    attention_scale: float  # of the scores
    tied: bool  # the head is the embedding
    max_position: int  # tokens the model was made for
    embed_scale: float = 1.0
    logit_scale: float = 1.0

    @property
    def num_layers(self) -> int:
        """Decoder blocks."""
        return len(self.layers)

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads
