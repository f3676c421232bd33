"""Rotary parameters of a config.json, in all their spellings."""

from __future__ import annotations

from typing import Any

import pytest

from tpserve.model.families import llama
from tpserve.model.spec import Dynamic, Linear, Llama3, Rotary, Yarn
from tpserve.settings import UserError

CONFIG: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def rotary(**changes: Any) -> Rotary:
    return llama.spec(CONFIG | changes).layers[0].rotary


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 3e4},
        {"rope_parameters": {"rope_theta": 3e4, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 3e4}, "rope_theta": 1.0},
        {"rope_theta": 3e4, "rope_scaling": {"type": "default"}},
    ],
)
def test_base_is_read_from_either_place(rope: dict[str, Any]) -> None:
    assert rotary(**rope) == Rotary(16, 3e4)


@pytest.mark.parametrize("name", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("linear", {"factor": 2}, Linear(2.0)),
        ("dynamic", {"factor": 2.0}, Dynamic()),
        ("llama3", LLAMA3, Llama3(8.0, 1.0, 4.0, 32)),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 32}, Yarn(4.0, 32, 1, True, 1.1386294361119891, 32)),
        ("yarn", {"factor": 4.0}, Yarn(4.0, 32, 1, True, 1.1386294361119891, 128)),
        ("yarn", {"original_max_position_embeddings": 32, "attention_factor": 2.0}, Yarn(4.0, 32, 1, True, 2.0, 32)),
        ("yarn", {"factor": 0.5, "beta_fast": 8, "beta_slow": 2, "truncate": False}, Yarn(0.5, 8, 2, False, 1.0, 128)),
    ],
)
def test_scaling_is_read_in_every_spelling(name: str, place: str, kind: str, fields: dict[str, Any], expected: Any) -> None:
    assert rotary(**{place: {name: kind, **fields}}) == Rotary(16, 10_000.0, expected)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, 512),
        ({"type": "dynamic", "factor": 4.0}, 128),
        ({"type": "llama3", **LLAMA3}, 128),
        ({"type": "yarn", "factor": 4.0}, 512),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, 128),
    ],
)
def test_most_positions_follow_from_the_scaling(rope: dict[str, Any], expected: int) -> None:
    assert llama.spec(CONFIG | {"rope_scaling": rope}).max_position == expected


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"type": "linear"}, "rope_scaling of type 'linear' lacks 'factor'"),
        ({"type": "linear", "factor": "two"}, "rope_scaling: factor 'two': must be a valid number"),
        ({"type": "linear", "factor": 0}, "factor 0: must be greater than 0"),
        ({"type": "llama3", "factor": 8.0}, "lacks 'low_freq_factor'"),
        ({"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor 4.0 must be below high_freq_factor 4.0"),
        ({"factor": 2.0}, "rope_scaling has 'factor', which type 'default' does not use"),
        ({"type": "linear", "factor": 2.0, "short_factor": [1]}, "rope_scaling has 'short_factor'"),
        ({"type": "yarn", "rope_theta": -1.0}, "rope_theta -1.0"),
        ({"type": ["yarn"]}, "rope_scaling of type ['yarn']"),
    ],
)
def test_what_is_invalid_is_refused_by_name(rope: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=r"^config\.json: ") as refusal:
        rotary(rope_scaling=rope)
    assert named in str(refusal.value)
