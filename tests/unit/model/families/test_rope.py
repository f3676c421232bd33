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
        {"rope_parameters": {"rope_theta": 3e4}, "rope_theta": 2.0},
        {"rope_theta": 3e4, "rope_scaling": {"type": "default"}},
        {"rope_scaling": {}, "rope_parameters": {"rope_theta": 3e4}},
        {"rope_scaling": {"rope_theta": 3e4}, "rope_parameters": {"rope_theta": 2.0}},
    ],
)
def test_base_is_read_from_either_place(rope: dict[str, Any]) -> None:
    assert rotary(**rope) == Rotary(16, 3e4)


@pytest.mark.parametrize("name", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("linear", {"factor": 2}, Linear(2.0, 128)),
        ("linear", {"factor": 2, "original_max_position_embeddings": 32}, Linear(2.0, 32)),
        ("dynamic", {"factor": 2.0}, Dynamic(128)),
        ("dynamic", {"factor": 2.0, "original_max_position_embeddings": 32}, Dynamic(32)),
        ("llama3", LLAMA3, Llama3(8.0, 1.0, 4.0, 32)),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 32}, Yarn(4.0, 32, 1, True, 1.1386294361119891, 32)),
        ("yarn", {"factor": 4.0}, Yarn(4.0, 32, 1, True, 1.1386294361119891, 128)),
        ("yarn", {"factor": 4.0, "finetuned": True}, Yarn(4.0, 32, 1, True, 1.1386294361119891, 128)),
        ("yarn", {"factor": 4.0, "mscale": 0, "mscale_all_dim": 1}, Yarn(4.0, 32, 1, True, 1.1386294361119891, 128)),
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
        ({"type": "linear", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"type": "linear", "factor": 8.0, "original_max_position_embeddings": 32}, 256),
        ({"type": "linear", "factor": 0.5}, 128),
        ({"type": "dynamic", "factor": 4.0}, 128),
        ({"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32}, 32),
        ({"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 512}, 128),
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
        ({"type": "linear", "factor": 0}, "factor 0: must be greater than or equal to 0.001"),
        ({"type": "linear", "factor": 1e308}, "factor 1e+308: must be less than or equal to 10000"),
        ({"type": "yarn", "factor": 1e20}, "factor 1e+20: must be less"),
        ({"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": -10}, "mscale_all_dim -10: must be greater"),
        ({"type": "yarn", "factor": 4.0, "beta_slow": 1e-300}, "beta_slow 1e-300: must be greater"),
        ({"type": "default", "rope_theta": 1e308}, "rope_theta 1e+308: must be less"),
        ({"type": "default", "rope_theta": 1}, "rope_theta 1: must be greater than 1"),
        ({"type": "default", "partial_rotary_factor": 2.0}, "partial_rotary_factor 2.0: must be less"),
        ({"type": "llama3", "factor": 8.0}, "lacks 'low_freq_factor'"),
        ({"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor 4.0 must be below high_freq_factor 4.0"),
        ({"factor": 2.0}, "rope_scaling has 'factor', which is not known for type 'default'; correct its rope_type"),
        ({"type": "linear", "factor": 2.0, "short_factor": [1]}, "'short_factor', which is not known for type 'linear'"),
        ({"type": "yarn", "factor": 2.0, "attn_factor": 1.0}, "'attn_factor', which is not known for type 'yarn'"),
        ({"type": "yarn", "rope_theta": -1.0}, "rope_theta -1.0"),
        ({"type": ["yarn"]}, "rope_scaling of type ['yarn']"),
    ],
)
def test_what_is_invalid_is_refused_by_name(rope: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=r"^config\.json: ") as refusal:
        rotary(rope_scaling=rope)
    assert named in str(refusal.value)


def test_more_positions_than_can_be_counted_are_refused() -> None:
    changes = {"max_position_embeddings": 2**31 - 1, "rope_scaling": {"type": "linear", "factor": 2.0}}
    with pytest.raises(UserError, match=r"^config\.json: its rotary scaling gives 4294967294 positions"):
        llama.spec(CONFIG | changes)


@pytest.mark.parametrize("rope", [{}, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}])
def test_share_that_rotates_may_not_be_more_than_all(rope: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"partial_rotary_factor 2\.0: must be less than or equal to 1"):
        rotary(partial_rotary_factor=2.0, **rope)
