"""Reading a config.json: what all families have in common. Defaults are those of transformers."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tpserve.settings import UserError, explain

MOST_TOKENS = 2**31 - 1  # positions are int32
Size = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Layers = Annotated[int, Field(ge=1, le=10_000)]
# The bounds are beyond all that a model has, and within what float32 can compute with.
Positive = Annotated[float, Field(gt=0, le=1e6)]
Theta = Annotated[float, Field(gt=1, le=1e15)]
Share = Annotated[float, Field(gt=0, le=1)]

SILU = {"silu": "silu", "swish": "silu"}
TANH_GELU = {"gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


class Config(BaseModel):
    """The part of a config.json that says how to compute."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    intermediate_size: Size
    rope_theta: Theta | None = None
    rope_scaling: dict[str, Any] | None = None
    partial_rotary_factor: Share | None = None
    rope_parameters: dict[str, Any] | None = None  # since transformers 5, in place of the three above
    tie_word_embeddings: bool = False
    max_position_embeddings: Size

    @property
    def kv_heads(self) -> int:
        """Key-value heads. Raises UserError if the query heads cannot be shared among them evenly."""
        heads = self.num_key_value_heads or self.num_attention_heads
        if self.num_attention_heads % heads:
            raise UserError(
                f"config.json: {self.num_attention_heads} attention heads are not a multiple of {heads} key-value heads"
            )
        return heads

    @property
    def head_size(self) -> int:
        """Dimensions of a head, as given or as the heads share the hidden size."""
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"config.json: hidden_size {self.hidden_size} is not a multiple of {self.num_attention_heads} attention heads"
            )
        size = self.head_dim or self.hidden_size // self.num_attention_heads
        if size % 2:
            raise UserError(f"config.json: head_dim {size} is odd; rotary position embedding needs pairs")
        return size

    def sizes(self) -> dict[str, Any]:
        """The fields of `ModelSpec` that all families take from their config alike."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_heads": self.num_attention_heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.intermediate_size,
            "tied": self.tie_word_embeddings,
        }


C = TypeVar("C", bound=Config)


def read(kind: type[C], config: dict[str, Any]) -> C:
    """The config as a family's kind of it. Raises UserError that names the field."""
    try:
        return kind.model_validate(config)
    except ValidationError as error:
        field, wants = explain(error)
        found = f"{field} {config[field]!r}: {wants}" if field in config else f"{field} is missing"
        raise UserError(f"config.json: {found}") from None


def choose(field: str, value: str, known: dict[str, str]) -> Any:
    """What a name of the config is called here. Raises UserError for one that is not built."""
    if value not in known:
        raise UserError(f"config.json: {field} {value!r} is not supported yet, only {', '.join(known)}")
    return known[value]


def refuse_set(config: dict[str, Any], *fields: str) -> None:
    """Raise UserError if one of these fields, which would change the model, is set."""
    for field in fields:
        if config.get(field):
            raise UserError(f"config.json: {field} {config[field]!r} is not supported yet")


def windows(c: Config, layer_types: list[str], window: int | None) -> list[int | None]:
    """Each layer's window, where `layer_types` names full and sliding attention.

    Raises UserError for other types, and for a window that a layer uses and that is none.
    """
    if len(layer_types) != c.num_hidden_layers:
        raise UserError(f"config.json: {len(layer_types)} layer_types for {c.num_hidden_layers} layers")
    if unknown := sorted(set(layer_types) - {"full_attention", "sliding_attention"}):
        raise UserError(f"config.json: layer_types has {unknown[0]!r}, which is not supported yet")
    if "sliding_attention" in layer_types:
        if window is None:
            raise UserError("config.json: layer_types has 'sliding_attention', but there is no sliding_window")
        if not 1 <= window <= MOST_TOKENS:
            raise UserError(f"config.json: sliding_window {window} must be 1 to {MOST_TOKENS}, or null for none")
    return [window if kind == "sliding_attention" else None for kind in layer_types]
