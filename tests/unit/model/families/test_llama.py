"""Config to spec, and the declared tensors against those that transformers really makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import Tiny
from tpserve.checkpoint import folder, headers
from tpserve.model import families
from tpserve.model.families import llama
from tpserve.parallel.partition import Span, partition
from tpserve.settings import UserError

CONFIG: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}


@pytest.mark.parametrize(
    "tiny",
    [
        Tiny(),
        Tiny(attention_bias=False, mlp_bias=False, tie=True),
        Tiny(attention_bias=True, mlp_bias=False, heads=4, kv_heads=1, hidden=32),
        Tiny(attention_bias=False, mlp_bias=True, heads=4, kv_heads=4, hidden=32, layers=3),
    ],
)
def test_declared_tensors_are_those_of_transformers(tiny_folder: Callable[[Tiny], Path], tiny: Tiny) -> None:
    path = tiny_folder(tiny)
    spec = llama.spec(folder.read_json(path / "config.json"))
    declared = {name: param.shape for name, param, _ in families.tensors(spec)}
    assert declared == {name: stored.shape for name, stored in headers.scan(path).items()}


def test_spec_has_the_configs_values() -> None:
    spec = llama.spec(
        CONFIG
        | {"num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "mlp_bias": True}
        | {"tie_word_embeddings": True, "max_position_embeddings": 77, "attention_bias": True}
    )
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers, spec.num_heads) == (100, 64, 2, 4)
    assert (spec.num_kv_heads, spec.head_dim, spec.intermediate_size, spec.max_position) == (2, 8, 96, 77)
    assert (spec.norm_eps, spec.rope_theta) == (1e-5, 5e5)
    assert (spec.qkv_bias, spec.attention_out_bias, spec.mlp_bias, spec.tied) == (True, True, True, True)


def test_spec_fills_in_the_defaults_of_transformers() -> None:
    spec = llama.spec(CONFIG | {"head_dim": None, "num_key_value_heads": None})
    assert (spec.num_kv_heads, spec.head_dim, spec.rope_theta, spec.norm_eps) == (4, 16, 10_000.0, 1e-6)
    assert not any((spec.qkv_bias, spec.attention_out_bias, spec.mlp_bias, spec.tied))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 3e4},
        {"rope_parameters": {"rope_theta": 3e4, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 3e4}, "rope_theta": 1.0},
        {"rope_theta": 3e4, "rope_scaling": {"type": "default"}},
    ],
)
def test_rope_theta_is_read_from_either_place(rope: dict[str, Any]) -> None:
    assert llama.spec(CONFIG | rope).rope_theta == 3e4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling of type 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling of type 'llama3'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters of type 'yarn'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
        ({"sliding_window": 32}, "sliding_window 32"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_what_is_not_built_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match="not supported yet") as refusal:
        llama.spec(CONFIG | changes)
    assert named in str(refusal.value)


def test_sliding_window_that_is_not_used_is_taken() -> None:
    assert llama.spec(CONFIG | {"sliding_window": 32, "use_sliding_window": False}) == llama.spec(CONFIG)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": "wide"}, "hidden_size 'wide': must be a valid integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0: must be greater"),
        ({"vocab_size": None}, "vocab_size None"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan"),
        ({"rope_parameters": {"rope_theta": "far"}}, "rope_theta 'far'"),
        ({"rope_parameters": 7}, "rope_parameters 7"),
        ({"num_key_value_heads": 3}, "not a multiple of 3 key-value heads"),
        ({"num_attention_heads": 5}, "hidden_size 64 is not a multiple of 5"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
    ],
)
def test_invalid_values_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=r"^config\.json: ") as refusal:
        llama.spec(CONFIG | changes)
    assert named in str(refusal.value)


@pytest.mark.parametrize("field", CONFIG)
def test_missing_size_is_refused_by_name(field: str) -> None:
    with pytest.raises(UserError, match=f"{field} is missing"):
        llama.spec({name: value for name, value in CONFIG.items() if name != field})


def test_held_parts_of_each_split_tile_the_tensor() -> None:
    spec = llama.spec(CONFIG | {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True})
    shards = partition(spec, 2)
    for name, param, layer in families.tensors(spec):
        first, second = (families.held(spec, shard, param, layer) for shard in shards)
        size = param.shape[param.dim]
        whole = Span(0, size)
        assert (first, second) == (whole, whole) if param.split is None else (first.start, second.stop) == (0, size), name
        assert param.split is None or first.stop == second.start


def test_family_is_found_by_architecture() -> None:
    assert families.for_architecture("LlamaForCausalLM") is families.family("llama")


def test_unknown_architecture_is_refused_with_those_that_work() -> None:
    with pytest.raises(UserError, match="'NoSuchLM' is not supported; supported: LlamaForCausalLM"):
        families.for_architecture("NoSuchLM")


def test_rotary_setting_that_no_type_uses_is_refused() -> None:
    with pytest.raises(UserError, match="rope_scaling has 'factor'"):
        llama.spec(CONFIG | {"rope_scaling": {"factor": 2.0}})
