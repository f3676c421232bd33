"""Rotary position embedding as config.json has it, in either of its two spellings.

`rope_theta` and `rope_scaling` stand beside the sizes; since transformers 5 both are in `rope_parameters`.
The type is called `type` or `rope_type`. Formulas and defaults are those of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tpserve.model.families.config import MOST_TOKENS, Config, Share, Size, Theta
from tpserve.model.spec import Dynamic, Linear, Llama3, Rotary, Yarn
from tpserve.settings import UserError, explain

_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_TYPES: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor", "original_max_position_embeddings"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate", "finetuned",
    },
}  # fmt: skip

_Factor = Annotated[float, Field(ge=0.001, le=10_000)]  # beyond all that a model has, within what can be computed with
_Weight = Annotated[float, Field(ge=0, le=10_000)]


class _Rope(BaseModel):
    """All that a type may say."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    rope_theta: Theta | None = None
    partial_rotary_factor: Share | None = None
    factor: _Factor | None = None
    original_max_position_embeddings: Size | None = None
    low_freq_factor: _Factor | None = None
    high_freq_factor: _Factor | None = None
    attention_factor: _Factor | None = None
    beta_fast: _Factor | None = None
    beta_slow: _Factor | None = None
    mscale: _Weight | None = None
    mscale_all_dim: _Weight | None = None
    truncate: bool = True
    finetuned: bool = False  # says how the model was made, not how it computes


def rotary(c: Config, theta: float, partial: float | None = None) -> Rotary:
    """The one rotary embedding of all layers; `theta` is the family's default base.

    `partial` is the family's default share of a head that rotates, for families that can rotate a share. Raises
    UserError for what is invalid or not built.
    """
    place, given = _given(c)
    return read(c, place, given, c.rope_theta or theta, partial)


def _given(c: Config) -> tuple[str, dict[str, Any]]:
    if c.rope_scaling:  # an empty one says nothing
        return "rope_scaling", c.rope_scaling
    return "rope_parameters", c.rope_parameters or {}


def read(c: Config, place: str, given: Mapping[str, Any], theta: float, partial: float | None = None) -> Rotary:
    """The rotary embedding that `given`, which is config.json's `place`, describes."""
    kind = given.get("rope_type") or given.get("type") or "default"
    if not isinstance(kind, str) or kind not in _TYPES:
        raise UserError(f"config.json: {place} of type {kind!r} is not supported yet, only {', '.join(_TYPES)}")
    rope = _validate(place, given)
    if unknown := sorted(set(given) - _COMMON - _TYPES[kind]):
        raise UserError(f"config.json: {place} has {unknown[0]!r}, which is not known for type {kind!r}; correct its rope_type")
    dims = _dims(c, rope.partial_rotary_factor or c.partial_rotary_factor or partial or 1.0, partial is not None)
    return Rotary(dims, rope.rope_theta or theta, _scaling(c, place, kind, rope))


def _validate(place: str, given: Mapping[str, Any]) -> _Rope:
    try:
        return _Rope.model_validate(given)
    except ValidationError as error:
        field, wants = explain(error)
        raise UserError(f"config.json: {place}: {field} {given[field]!r}: {wants}") from None


def _dims(c: Config, share: float, can_share: bool) -> int:
    if share != 1 and not can_share:
        raise UserError(f"config.json: partial_rotary_factor {share} is not supported yet for this family")
    dims = int(c.head_size * share)
    if dims % 2 or not dims:
        raise UserError(f"config.json: {dims} of {c.head_size} dimensions of a head would rotate; it must be an even number")
    return dims


def _scaling(c: Config, place: str, kind: str, rope: _Rope) -> Linear | Dynamic | Llama3 | Yarn | None:
    original = rope.original_max_position_embeddings or c.max_position_embeddings

    def needed(field: str) -> float:
        value = getattr(rope, field)
        if value is None:
            raise UserError(f"config.json: {place} of type {kind!r} lacks {field!r}")
        return float(value)

    match kind:
        case "linear":
            return Linear(needed("factor"), original)
        case "dynamic":
            return Dynamic(min(original, c.max_position_embeddings))
        case "llama3":
            low, high = needed("low_freq_factor"), needed("high_freq_factor")
            if low >= high:
                raise UserError(f"config.json: {place}: low_freq_factor {low} must be below high_freq_factor {high}")
            return Llama3(needed("factor"), low, high, original)
        case "yarn":
            factor = rope.factor or c.max_position_embeddings / original
            fast, slow = rope.beta_fast or 32, rope.beta_slow or 1
            return Yarn(factor, fast, slow, rope.truncate, _yarn_attention_factor(rope, factor), original)
    return None


def _yarn_attention_factor(rope: _Rope, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def max_position(c: Config, rotary: Rotary, stated: int | None = None) -> int:
    """The tokens that the model can take. `stated` is the length after scaling, if the family's configs say it.

    `max_position_embeddings` is the length before scaling by a factor where a config says nothing else, as in
    other engines; with Llama 3 scaling it is the length after it. Raises UserError if it is more than positions can count.
    """
    match rotary.scaling:
        case Dynamic(original_length=original):
            return original
        case (Yarn() | Linear()) as scaling if stated is None:
            length = max(c.max_position_embeddings, int(scaling.original_length * scaling.factor))
        case _:
            length = stated or c.max_position_embeddings
    if length > MOST_TOKENS:
        raise UserError(f"config.json: its rotary scaling gives {length} positions, but {MOST_TOKENS} is the most there can be")
    return length
