"""Rotary embedding: from GGUF's keys, and from the factors of its tensor rope_freqs, to config.json's `rope_parameters`."""

from __future__ import annotations

from typing import Any

import numpy as np

from tpserve.checkpoint.gguf.metadata import Metadata
from tpserve.settings import UserError

_THETA = 10_000.0  # the format's default
_NEAR = 1e-5  # relative, of factors in float32
_YARN = {"yarn_attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}


def parameters(metadata: Metadata) -> dict[str, Any]:
    """Base and scaling, if any, as transformers names them. Raises UserError for a kind that is not supported."""
    theta = metadata.number("rope.freq_base", _THETA)
    kind = metadata.of_model("rope.scaling.type", str, "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = metadata.number("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind != "yarn":
        raise UserError(f"{metadata.file}: rotary scaling of type {kind!r} is not supported; those that are: linear, yarn")
    given = {name: metadata.of_model(f"rope.scaling.{key}", float, None) for key, name in _YARN.items()}
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": metadata.size("rope.scaling.original_context_length"),
        **{name: value for name, value in given.items() if value is not None},
    }


def llama3(theta: float, factors: np.ndarray, file: str) -> dict[str, Any]:
    """The llama3 scaling that divides the frequencies by `factors` (one for each pair of dimensions).

    Llama 3.1 leaves frequencies of more than `high` turns within the original context, divides those of fewer than
    `low` turns by `factor`, and goes over linearly between: with t turns, 1 / factors = (1 - s) / factor + s, where
    s = (t - low) / (high - low). So s = 0 gives the factor, and the line through the others low and high. Of the
    context and the two limits only their ratios count; that makes low = 1, as published. Raises UserError for
    factors that are not of this kind.
    """
    factor = float(factors.max())
    if not np.isfinite(factors).all():
        raise _unknown(file)
    frequencies = theta ** (-np.arange(len(factors)) / len(factors))
    inside = (factors > 1 + _NEAR) & (factors < factor * (1 - _NEAR))
    if np.count_nonzero(inside) < 2:
        raise _unknown(file)
    smooth = (1 / factors[inside] - 1 / factor) / (1 - 1 / factor)
    slope, offset = np.polyfit(frequencies[inside] / (2 * np.pi), smooth, 1)  # slope: context / (high - low)
    context, high = (round(-slope / offset), round(1 - 1 / offset, 3)) if offset < 0 else (0, 0.0)
    if context < 1 or high <= 1:
        raise _unknown(file)
    turns = context * frequencies / (2 * np.pi)
    again = 1 / (1 / factor + (1 - 1 / factor) * np.clip((turns - 1) / (high - 1), 0, 1))
    if not np.allclose(again, factors, rtol=_NEAR):
        raise _unknown(file)
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def _unknown(file: str) -> UserError:
    return UserError(f"{file}: the factors in tensor rope_freqs.weight are not those of Llama 3.1's scaling; not supported")
