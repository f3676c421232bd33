"""Llama, and models that are published as such (SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tpserve.model.families import Param
from tpserve.model.spec import ModelSpec
from tpserve.settings import UserError, explain

ARCHITECTURES = ("LlamaForCausalLM",)

_DEFAULT_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}  # what rotary without scaling may say

_Size = Annotated[int, Field(ge=1, lt=2**31)]
_Positive = Annotated[float, Field(gt=0)]


class _Config(BaseModel):
    """The part of a config.json that says how to compute. Defaults are those of transformers."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    vocab_size: _Size
    hidden_size: _Size
    num_hidden_layers: Annotated[int, Field(ge=1, le=10_000)]
    num_attention_heads: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    intermediate_size: _Size
    rms_norm_eps: _Positive = 1e-6
    rope_theta: _Positive = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None  # since transformers 5, in place of the two above
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: _Size = 2048
    # Not built: only the values that mean "not used" are taken.
    hidden_act: str = "silu"
    partial_rotary_factor: float = 1.0
    sliding_window: int | None = None
    use_sliding_window: bool = True
    layer_types: list[str] | None = None


def spec(config: dict[str, Any]) -> ModelSpec:
    """The model that the config describes. Raises UserError for what is invalid or not built."""
    c = _read(config)
    _check_built(c)
    kv_heads = c.num_key_value_heads or c.num_attention_heads
    if c.num_attention_heads % kv_heads:
        raise UserError(
            f"config.json: {c.num_attention_heads} attention heads are not a multiple of {kv_heads} key-value heads"
        )
    return ModelSpec(
        family="llama",
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_layers=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(c),
        intermediate_size=c.intermediate_size,
        norm_eps=c.rms_norm_eps,
        rope_theta=c.rope_theta,
        qkv_bias=c.attention_bias,
        attention_out_bias=c.attention_bias,
        mlp_bias=c.mlp_bias,
        tied=c.tie_word_embeddings,
        max_position=c.max_position_embeddings,
    )


def params(spec: ModelSpec) -> list[Param]:
    """Embedding, last norm and head; a tied head is a slice of the embedding's tensor."""
    embed = "model.embed_tokens.weight"
    return [
        Param("embed", embed, (spec.vocab_size, spec.hidden_size), None),
        Param("norm", "model.norm.weight", (spec.hidden_size,), None),
        Param("head", embed if spec.tied else "lm_head.weight", (spec.vocab_size, spec.hidden_size), "vocab"),
    ]


def layer_params(spec: ModelSpec) -> list[Param]:
    """Weights are (out, in), as in the checkpoint."""
    hidden, width = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention, mlp = "model.layers.{layer}.self_attn", "model.layers.{layer}.mlp"
    found = [
        Param("attn_norm", "model.layers.{layer}.input_layernorm.weight", (hidden,), None),
        Param("wq", f"{attention}.q_proj.weight", (queries, hidden), "q_heads"),
        Param("wk", f"{attention}.k_proj.weight", (keys, hidden), "kv_heads"),
        Param("wv", f"{attention}.v_proj.weight", (keys, hidden), "kv_heads"),
        Param("wo", f"{attention}.o_proj.weight", (hidden, queries), "q_heads", dim=1),
        Param("mlp_norm", "model.layers.{layer}.post_attention_layernorm.weight", (hidden,), None),
        Param("w_gate", f"{mlp}.gate_proj.weight", (width, hidden), "columns"),
        Param("w_up", f"{mlp}.up_proj.weight", (width, hidden), "columns"),
        Param("w_down", f"{mlp}.down_proj.weight", (hidden, width), "columns", dim=1),
    ]
    if spec.qkv_bias:
        found += [
            Param("bq", f"{attention}.q_proj.bias", (queries,), "q_heads"),
            Param("bk", f"{attention}.k_proj.bias", (keys,), "kv_heads"),
            Param("bv", f"{attention}.v_proj.bias", (keys,), "kv_heads"),
        ]
    if spec.attention_out_bias:
        found += [Param("bo", f"{attention}.o_proj.bias", (hidden,), None)]
    if spec.mlp_bias:
        found += [
            Param("b_gate", f"{mlp}.gate_proj.bias", (width,), "columns"),
            Param("b_up", f"{mlp}.up_proj.bias", (width,), "columns"),
            Param("b_down", f"{mlp}.down_proj.bias", (hidden,), None),
        ]
    return found


def _read(config: dict[str, Any]) -> _Config:
    rope = config.get("rope_parameters")
    moved = ("rope_theta", "partial_rotary_factor")
    inner = {name: rope[name] for name in moved if name in rope} if isinstance(rope, dict) else {}
    merged = config | inner
    try:
        return _Config.model_validate(merged)
    except ValidationError as error:
        field, wants = explain(error)
        found = f"{field} {merged[field]!r}: {wants}" if field in merged else f"{field} is missing"
        raise UserError(f"config.json: {found}") from None


def _check_built(c: _Config) -> None:
    for name, rope in (("rope_scaling", c.rope_scaling), ("rope_parameters", c.rope_parameters)):
        kind = (rope or {}).get("rope_type", (rope or {}).get("type", "default"))
        if kind != "default" or any(isinstance(value, dict) for value in (rope or {}).values()):
            raise UserError(f"config.json: {name} of type {kind!r} is not supported yet, only the default one")
        if unknown := sorted(set(rope or ()) - _DEFAULT_ROPE):
            raise UserError(f"config.json: {name} has {unknown[0]!r} but no type that uses it; name its rope_type")
    not_built = {
        f"hidden_act {c.hidden_act!r} (only 'silu')": c.hidden_act not in ("silu", "swish"),
        f"partial_rotary_factor {c.partial_rotary_factor}": c.partial_rotary_factor != 1,
        f"sliding_window {c.sliding_window}": c.sliding_window is not None and c.use_sliding_window,
        f"layer_types {c.layer_types}": set(c.layer_types or ()) - {"full_attention"},
    }
    for what, is_used in not_built.items():
        if is_used:
            raise UserError(f"config.json: {what} is not supported yet")


def _head_dim(c: _Config) -> int:
    if c.head_dim is None and c.hidden_size % c.num_attention_heads:
        raise UserError(
            f"config.json: hidden_size {c.hidden_size} is not a multiple of {c.num_attention_heads} attention heads"
        )
    head_dim = c.head_dim or c.hidden_size // c.num_attention_heads
    if head_dim % 2:
        raise UserError(f"config.json: head_dim {head_dim} is odd; rotary position embedding needs pairs")
    return head_dim
